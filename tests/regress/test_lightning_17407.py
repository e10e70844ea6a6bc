"""Lightning#17407: ``training_step`` returns None on the micro-batch that closes the window."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision
from tests.support.models import ExactLinear
from tests.support.training import amp_fp16, fit, outcomes, reports_of, stock_fp16

BATCHES = [torch.tensor([1.0, 2.0, 4.0, 8.0]) * (i + 1) for i in range(6)]


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


class Skipping(ExactLinear):
    """Returns None for the micro-batches listed."""

    def __init__(self, none_at: set[int], make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer=make_optimizer)
        self.none_at = none_at
        self.hooks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx in self.none_at else self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append(self.trainer.global_step)


NONE_AT = {
    "closing one": {1},
    "first one": {0},
    "both": {0, 1},
    "closing one of the last window": {5},
    "several": {1, 2},
    "first of every window": {0, 2, 4},
    "closing one of every window": {1, 3, 5},
}


@pytest.mark.parametrize("clip", [None, 3.0])
@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("none_at", NONE_AT.values(), ids=NONE_AT.keys())
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_the_result_is_that_of_stock_fp32(
    precision: str, none_at: set[int], make_optimizer: Any, clip: float | None
) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model, reference = Skipping(none_at, make_optimizer), Skipping(none_at)
    fit(model, plugin, BATCHES, accumulate_grad_batches=2, gradient_clip_val=clip)
    fit(reference, None, BATCHES, accumulate_grad_batches=2, gradient_clip_val=clip)
    torch.testing.assert_close(model.moved(), reference.moved(), rtol=1e-6, atol=0)
    assert reference.moved().abs().sum() > 0
    assert model.hooks == reference.hooks


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_a_window_of_none_only_is_reported_as_such_and_leaves_the_scale(precision: str) -> None:
    plugin = amp_fp16(growth_interval=1) if precision == "16-mixed" else AmpPrecision(precision)
    reports = reports_of(plugin)
    fit(Skipping({2, 3}), plugin, BATCHES, accumulate_grad_batches=2)
    assert outcomes(reports) == ["applied", "skipped_no_backward", "applied"]
    assert reports[1].scale == reports[1].next_scale == reports[0].next_scale
    assert plugin.applied_steps == 2


@pytest.mark.parametrize("make_optimizer", [None, fused])
def test_momentum_does_not_move_weights_in_a_window_without_backward_differently_from_fp32(make_optimizer: Any) -> None:
    """FP32 steps with no gradient at all then, which moves nothing; so do we, momentum or not."""

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5, fused=make_optimizer is not None)

    model, reference = Skipping({2, 3}, momentum), Skipping({2, 3}, momentum)
    fit(model, amp_fp16(), BATCHES, accumulate_grad_batches=2)
    fit(reference, None, BATCHES, accumulate_grad_batches=2)
    assert torch.equal(model.moved(), reference.moved())


def test_an_overflow_in_the_window_that_none_closes_is_found() -> None:
    plugin = amp_fp16()
    reports = reports_of(plugin)
    model = Skipping({1})
    fit(model, plugin, [BATCHES[0] * float("inf"), BATCHES[1]], accumulate_grad_batches=2)
    assert outcomes(reports) == ["skipped_overflow"]
    assert torch.equal(model.moved(), torch.zeros(4))


def test_stock_fp16_drops_the_window() -> None:
    model = Skipping({1})
    fit(model, stock_fp16(), BATCHES[:2], accumulate_grad_batches=2)
    assert torch.equal(model.moved(), torch.zeros(4))
