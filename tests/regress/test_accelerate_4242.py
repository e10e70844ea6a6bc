"""Accelerate#4242: a fused optimizer skips on the device, and the host must hear of it."""

from typing import Any

import pytest
import torch

from lightning_amp_plus import AmpPrecision
from tests.support.faults import KINDS, Fault
from tests.support.models import TinyRegressor, fused_adamw, fused_sgd, fused_sgd_momentum
from tests.support.training import WeightTrace, amp_fp16, fit, outcomes, regression_batches, reports_of, stock_fp16


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("fault", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("make_optimizer", [fused_adamw, fused_sgd, fused_sgd_momentum])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_fused_step_with_an_overflow_is_reported_and_the_scheduler_not_stepped(
    clip: float | None, precision: str, make_optimizer: Any, fault: Fault
) -> None:
    plugin, trace = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision), WeightTrace()
    reports = reports_of(plugin)
    model = TinyRegressor(make_optimizer, decay, faults={0: fault, 2: fault})
    trainer = fit(model, plugin, regression_batches(4), callbacks=[trace], gradient_clip_val=clip)
    assert outcomes(reports) == ["skipped_overflow", "applied", "skipped_overflow", "applied"]
    assert trace.moved() == [False, True, False, True]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
    assert trainer.global_step == 4
    assert plugin.applied_steps == 2


def test_stock_steps_the_scheduler_for_a_step_that_the_kernel_skipped() -> None:
    trace = WeightTrace()
    model = TinyRegressor(fused_adamw, decay, faults={0: KINDS["inf gradient"]})
    trainer = fit(model, stock_fp16(), regression_batches(1), callbacks=[trace])
    assert trace.moved() == [False]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1
