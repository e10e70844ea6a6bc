"""Accelerate#2828: the scheduler counts applied windows, not micro-batches and not skipped windows."""

from typing import Any

import pytest
import torch

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF, NAN_LOSS
from tests.support.models import TinyRegressor, adamw, fused_adamw
from tests.support.training import amp_fp16, fit, regression_batches, stock_fp16


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def position(trainer: Any) -> int:
    return int(trainer.lr_scheduler_configs[0].scheduler.last_epoch)


@pytest.mark.parametrize("fault", [INF, NAN_LOSS])
@pytest.mark.parametrize("bad_micro_batch", range(8))
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_with_accumulation_the_scheduler_counts_applied_windows(
    precision: str, make_optimizer: Any, bad_micro_batch: int, fault: Any
) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model = TinyRegressor(make_optimizer, decay, faults={bad_micro_batch: fault})
    trainer = fit(model, plugin, regression_batches(8), accumulate_grad_batches=2)
    assert plugin.applied_steps == 3
    assert position(trainer) == plugin.applied_steps
    assert trainer.global_step == 4


@pytest.mark.parametrize("skipped", [True, False])
def test_a_partial_last_window_counts_like_any_other(skipped: bool) -> None:
    plugin = amp_fp16()
    model = TinyRegressor(adamw, decay, faults={4: INF} if skipped else {})
    trainer = fit(model, plugin, regression_batches(5), accumulate_grad_batches=2)
    assert position(trainer) == plugin.applied_steps == (2 if skipped else 3)


def test_stock_counts_the_skipped_window() -> None:
    trainer = fit(
        TinyRegressor(adamw, decay, faults={1: INF}), stock_fp16(), regression_batches(8), accumulate_grad_batches=2
    )
    assert position(trainer) == 4
