"""DeepSpeed#697: an overflow of the loss itself is not one that a smaller loss scale could mend."""

from typing import Any

import pytest

from lightning_amp_plus import AmpPrecision, LossScale
from tests.support.faults import INF, INF_LOSS, KINDS, Fault
from tests.support.models import TinyRegressor, adamw, fused_adamw
from tests.support.training import fit, regression_batches, reports_of, stock_fp16


def run(
    fault: Fault, make_optimizer: Any, manual: bool, precision: str = "16-mixed", backoff: bool = True, **trainer: Any
) -> tuple[AmpPrecision, list[Any]]:
    scale = LossScale(init=1024.0, backoff_on_forward_overflow=backoff) if precision == "16-mixed" else "auto"
    plugin = AmpPrecision(precision, loss_scale=scale)
    reports = reports_of(plugin)
    accumulate = trainer.get("accumulate_grad_batches", 1)
    model = TinyRegressor(make_optimizer, faults={2: fault}, manual=manual, accumulate=accumulate)
    fit(model, plugin, regression_batches(8), **({} if manual else trainer))
    return plugin, reports


@pytest.mark.parametrize("fault", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_origin_tells_the_loss_from_the_gradients(
    accumulate: int, precision: str, manual: bool, make_optimizer: Any, fault: Fault
) -> None:
    _, reports = run(fault, make_optimizer, manual, precision, accumulate_grad_batches=accumulate)
    bad = 2 // accumulate
    assert [r.overflow_origin for r in reports] == [fault.where if i == bad else None for i in range(8 // accumulate)]


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("manual", [False, True])
def test_a_forward_overflow_keeps_the_scale_when_configured_so_and_a_backward_one_lowers_it(
    manual: bool, make_optimizer: Any
) -> None:
    plugin, reports = run(INF_LOSS, make_optimizer, manual, backoff=False)
    assert reports[2].outcome == "skipped_overflow"
    assert plugin.history.scales == [1024] * 8
    assert plugin.history.backoffs == 0
    plugin, _ = run(INF, make_optimizer, manual, backoff=False)
    assert plugin.history.scales == [1024] * 2 + [512] * 6


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_by_default_both_lower_it_as_torch_does(make_optimizer: Any) -> None:
    for fault in (INF_LOSS, INF):
        assert run(fault, make_optimizer, False)[0].history.scales == [1024] * 2 + [512] * 6


def test_a_kept_scale_still_starts_its_growth_anew() -> None:
    """The skipped window is not an applied one, so the run of applied windows is broken."""
    plugin = AmpPrecision(
        "16-mixed", loss_scale=LossScale(init=64.0, growth_interval=3, backoff_on_forward_overflow=False)
    )
    fit(TinyRegressor(faults={2: INF_LOSS}), plugin, regression_batches(6))
    assert plugin.history.scales == [64] * 5 + [128]


def test_stock_lowers_the_scale_for_a_bad_loss() -> None:
    plugin = stock_fp16()
    fit(TinyRegressor(faults={2: INF_LOSS}), plugin, regression_batches(8))
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 512
