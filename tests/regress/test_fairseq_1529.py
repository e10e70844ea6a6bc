"""fairseq#1529, apex#777, insightface#2262: a run in which every step overflows."""

from typing import Any

import pytest
import torch

from lightning_amp_plus import AmpPrecision, LossScale, ScaleCollapseError, SkipLimitError
from tests.support.faults import INF, KINDS, Fault
from tests.support.models import TinyRegressor, adamw, fused_adamw, sgd
from tests.support.training import fit, regression_batches, same, stock_fp16, weights

OVERFLOWS = 400


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_after_400_overflows_the_scale_stands_at_its_floor_and_the_next_finite_step_is_good(
    make_optimizer: Any, manual: bool
) -> None:
    plugin = AmpPrecision("16-mixed", max_consecutive_skips=1000)
    model = TinyRegressor(make_optimizer, faults=dict.fromkeys(range(OVERFLOWS), INF), manual=manual)
    fit(model, plugin, regression_batches(OVERFLOWS + 1, size=1))
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 2.0**-14
    assert min(plugin.history.scales) == 2.0**-14
    assert (plugin.history.skipped, plugin.applied_steps) == (OVERFLOWS, 1)
    assert all(value.isfinite().all() for value in weights(model).values())
    assert not same(weights(model), weights(TinyRegressor()))


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_the_floor_can_be_set(make_optimizer: Any) -> None:
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=64.0, min=4.0), max_consecutive_skips=100)
    model = TinyRegressor(make_optimizer, faults=dict.fromkeys(range(10), INF))
    fit(model, plugin, regression_batches(10))
    assert plugin.history.scales == [32, 16, 8] + [4] * 7


@pytest.mark.parametrize("fault", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("limit", [5, 12])
def test_the_collapse_is_an_error_with_history_layer_and_remedy(limit: int, manual: bool, fault: Fault) -> None:
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=64.0, min=16.0), max_consecutive_skips=limit)
    model = TinyRegressor(sgd, faults=dict.fromkeys(range(20), fault), manual=manual)
    with pytest.raises(ScaleCollapseError) as error:
        fit(model, plugin, regression_batches(20))
    message = str(error.value)
    assert model.seen == limit
    assert f"{limit} windows in a row" in message
    assert fault.where in message
    assert f"32*1 16*{limit - 1}" in message
    # A gradient that dies below the hidden layer leaves the layer above alone; a bad loss reaches all of them.
    assert ("'first.bias'" if fault.where == "backward" else "'second.bias'") in message
    assert "bf16-mixed" in message and "max_consecutive_skips" in message
    assert same(weights(model), weights(TinyRegressor()))


def test_with_a_fused_optimizer_the_collapse_is_noticed_at_the_next_log_point() -> None:
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=64.0, min=16.0), max_consecutive_skips=5)
    model = TinyRegressor(fused_adamw, faults=dict.fromkeys(range(40), INF))
    with pytest.raises(ScaleCollapseError, match=r"first\.(weight|bias)"):
        fit(model, plugin, regression_batches(40), log_every_n_steps=8)
    assert model.seen == 8
    assert same(weights(model), weights(TinyRegressor()))


def test_the_run_of_skips_must_be_unbroken() -> None:
    plugin = AmpPrecision("16-mixed", max_consecutive_skips=3)
    model = TinyRegressor(faults={i: INF for i in range(20) if i % 3})
    fit(model, plugin, regression_batches(20))
    assert plugin.history.skipped == 13


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("manual", [False, True])
def test_without_a_scale_the_run_stops_after_ten_skips_and_does_not_speak_of_a_collapse(
    manual: bool, precision: str
) -> None:
    model = TinyRegressor(faults=dict.fromkeys(range(20), INF), manual=manual)
    with pytest.raises(SkipLimitError, match=r"10 windows in a row.*first\.bias") as error:
        fit(model, AmpPrecision(precision), regression_batches(20))
    assert not isinstance(error.value, ScaleCollapseError)
    assert model.seen == 10


def test_a_static_scale_has_nothing_to_lower_and_stops_after_ten() -> None:
    model = TinyRegressor(faults=dict.fromkeys(range(20), INF))
    with pytest.raises(SkipLimitError, match="10 windows in a row"):
        fit(model, AmpPrecision("16-mixed", loss_scale=1024.0), regression_batches(20))
    assert model.seen == 10


def test_stock_goes_to_scale_zero_and_then_writes_nan() -> None:
    plugin = stock_fp16(65536.0)
    model = TinyRegressor(faults=dict.fromkeys(range(200), INF))
    fit(model, plugin, regression_batches(201, size=1))
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 0.0
    assert torch.isnan(model.first.weight).any()
