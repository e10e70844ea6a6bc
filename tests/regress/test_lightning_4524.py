"""Lightning#4524, transformers#24003: an optimizer whose parameters got no gradient in this window."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision
from tests.support.models import TinyRegressor, fused_sgd, sgd
from tests.support.training import amp_fp16, fit, outcomes, regression_batches, reports_of, stock_fp16


class OneIdleOptimizer(TinyRegressor):
    """Two optimizers step in every batch; the second one's layer takes no part in the loss."""

    def __init__(self, make_optimizer: Any = sgd, idle_first: bool = False) -> None:
        super().__init__(make_optimizer, manual=True)
        self.idle = torch.nn.Linear(4, 4)
        self.idle_start = self.idle.weight.detach().clone()
        self.idle_first = idle_first

    def optimize(self, loss: Tensor) -> None:
        busy, idle = self.optimizers()
        self.manual_backward(loss)
        for optimizer in (idle, busy) if self.idle_first else (busy, idle):
            optimizer.step()
        busy.zero_grad()
        idle.zero_grad()

    def configure_optimizers(self) -> Any:
        busy = [*self.first.parameters(), *self.second.parameters()]
        return self.make_optimizer(busy), self.make_optimizer(self.idle.parameters())


@pytest.mark.parametrize("make_optimizer", [sgd, fused_sgd])
@pytest.mark.parametrize("idle_first", [False, True])
def test_the_idle_optimizer_is_reported_the_other_steps_and_the_scale_is_unaffected(
    make_optimizer: Any, idle_first: bool
) -> None:
    plugin = amp_fp16(growth_interval=2)
    reports = reports_of(plugin)
    model = OneIdleOptimizer(make_optimizer, idle_first)
    reference = TinyRegressor(make_optimizer, manual=True)
    fit(model, plugin, regression_batches(4))
    fit(reference, amp_fp16(growth_interval=2), regression_batches(4))

    busy = [r for r in reports if r.optimizer == 0]
    idle = [r for r in reports if r.optimizer == 1]
    assert outcomes(idle) == ["skipped_no_grads"] * 4
    assert outcomes(busy) == ["applied"] * 4
    assert [r.next_scale for r in busy] == [1024, 2048, 2048, 4096]
    assert all(r.scale == r.next_scale for r in idle)
    assert plugin.applied_steps == 4
    assert torch.equal(model.first.weight, reference.first.weight)
    assert torch.equal(model.idle.weight, model.idle_start)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_the_report_is_the_same_without_a_loss_scale(precision: str) -> None:
    plugin = AmpPrecision(precision)
    reports = reports_of(plugin)
    fit(OneIdleOptimizer(), plugin, regression_batches(2))
    assert outcomes(reports) == ["applied", "skipped_no_grads"] * 2


@pytest.mark.parametrize("make_optimizer", [sgd, fused_sgd])
def test_an_overflow_of_the_other_optimizer_is_not_charged_to_the_idle_one(make_optimizer: Any) -> None:
    class Overflowing(OneIdleOptimizer):
        def optimize(self, loss: Tensor) -> None:
            super().optimize(loss * float("inf"))

    plugin = amp_fp16()
    reports = reports_of(plugin)
    fit(Overflowing(make_optimizer), plugin, regression_batches(2))
    assert outcomes(reports) == ["skipped_overflow", "skipped_no_grads"] * 2
    assert plugin.history.scales == [512, 256]


@pytest.mark.parametrize("make_optimizer", [sgd, fused_sgd])
def test_in_automatic_optimization_a_loss_beside_the_optimizer_is_reported(make_optimizer: Any) -> None:
    class Beside(TinyRegressor):
        def __init__(self) -> None:
            super().__init__(make_optimizer)
            self.other = torch.nn.Linear(4, 4)

        def configure_optimizers(self) -> Any:
            return self.make_optimizer(self.other.parameters())

    plugin = amp_fp16(growth_interval=1)
    reports = reports_of(plugin)
    fit(Beside(), plugin, regression_batches(3))
    assert outcomes(reports) == ["skipped_no_grads"] * 3
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 1024
    assert plugin.applied_steps == 0


def test_stock_stops_the_run() -> None:
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        fit(OneIdleOptimizer(), stock_fp16(), regression_batches(1))
