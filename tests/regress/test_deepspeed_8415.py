"""DeepSpeed#8415: BF16 runs overflow too; there is no loss scale to speak of then."""

import warnings
from typing import Any

import pytest

from lightning_amp_plus import AmpPrecision, SkipLimitError
from tests.support.faults import INF, KINDS, Fault
from tests.support.models import TinyRegressor, adamw, fused_adamw
from tests.support.training import WeightTrace, fit, regression_batches, reports_of, same, stock_bf16, weights


@pytest.mark.parametrize("fault", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_the_step_is_skipped_counted_and_said_without_a_word_on_loss_scales(
    precision: str, make_optimizer: Any, fault: Fault
) -> None:
    plugin, trace = AmpPrecision(precision), WeightTrace()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            TinyRegressor(make_optimizer, faults={1: fault, 3: fault}), plugin, regression_batches(5), callbacks=[trace]
        )
        history = plugin.history
    assert trace.moved() == [True, False, True, False, True]
    assert (history.skipped, history.applied, history.skip_rate) == (2, 3, 0.4)
    assert (history.growths, history.backoffs) == (0, 0)
    said = [str(w.message) for w in caught if "skipped" in str(w.message)]
    assert len(said) == 1 and said[0].startswith("Step 1 was skipped")
    assert "scale" not in said[0].lower()


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_the_printed_report_names_no_scale_where_there_is_none(precision: str) -> None:
    plugin = AmpPrecision(precision)
    reports = reports_of(plugin)
    fit(TinyRegressor(faults={1: INF}), plugin, regression_batches(2))
    assert "skipped_overflow" in str(reports[1])
    assert "scale" not in str(reports[1])


def test_the_error_after_too_many_of_them_speaks_of_data_and_learning_rate() -> None:
    model = TinyRegressor(faults=dict.fromkeys(range(20), INF))
    with pytest.raises(SkipLimitError, match="learning rate") as error:
        fit(model, AmpPrecision("bf16-mixed"), regression_batches(20))
    assert "loss scale" not in str(error.value)
    assert same(weights(model), weights(TinyRegressor()))


def test_the_check_can_be_turned_off_which_is_stock() -> None:
    ours, stock = TinyRegressor(faults={1: INF}), TinyRegressor(faults={1: INF})
    plugin = AmpPrecision("bf16-mixed", check_finite=False)
    fit(ours, plugin, regression_batches(3))
    fit(stock, stock_bf16(), regression_batches(3))
    for model in (ours, stock):
        assert not model.first.weight.isfinite().all()
    assert plugin.history.skipped == 0
