"""Lightning#5108: the scale must not change between a backward and the step that consumes its gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import ExactLinear
from tests.support.training import amp_fp16, fit, outcomes, reports_of, stock_fp16

BATCH = torch.tensor([1.0, 2.0, 4.0, 8.0])


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


class TwoBackwardsThenTwoSteps(ExactLinear):
    """The gradients of the two optimizers are the batch and three times the batch."""

    def __init__(self, makers: tuple[Any, Any] = (plain, plain), overflow_at: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(self.other.weight)
        self.makers, self.overflow_at = makers, overflow_at
        self.applied: list[list[list[float]]] = [[], []]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        losses = [self.layer(batch).float().sum(), self.other(3 * batch).float().sum()]
        if self.overflow_at is not None and self.overflow_at[0] == batch_idx:
            losses[self.overflow_at[1]] = losses[self.overflow_at[1]] * float("inf")
        for loss in losses:
            self.manual_backward(loss)
        for i, (optimizer, layer) in enumerate(zip(self.optimizers(), (self.layer, self.other), strict=True)):
            before = layer.weight.detach().clone()
            optimizer.step()
            self.applied[i].append((before - layer.weight.detach())[0].tolist())
        for optimizer in self.optimizers():
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return self.makers[0](self.layer.parameters()), self.makers[1](self.other.parameters())


ONE, THREE, NONE = [1.0, 2.0, 4.0, 8.0], [3.0, 6.0, 12.0, 24.0], [0.0] * 4
MAKERS = [(plain, plain), (fused, fused), (plain, fused), (fused, plain)]


@pytest.mark.parametrize("makers", MAKERS)
@pytest.mark.parametrize("growth_interval", [1, 2, 3])
def test_both_gradients_are_exact_while_the_scale_grows(growth_interval: int, makers: Any) -> None:
    plugin = amp_fp16(64.0, growth_interval=growth_interval)
    model = TwoBackwardsThenTwoSteps(makers)
    fit(model, plugin, [BATCH] * 4)
    assert model.applied == [[ONE] * 4, [THREE] * 4]
    assert plugin.history.growths > 0


@pytest.mark.parametrize("makers", MAKERS)
@pytest.mark.parametrize("overflowing", [0, 1])
def test_the_other_optimizer_steps_exactly_when_one_overflows(overflowing: int, makers: Any) -> None:
    plugin = amp_fp16(64.0, growth_interval=1)
    reports = reports_of(plugin)
    model = TwoBackwardsThenTwoSteps(makers, overflow_at=(1, overflowing))
    fit(model, plugin, [BATCH] * 4)
    expected = [[ONE] * 4, [THREE] * 4]
    expected[overflowing] = [expected[overflowing][0], NONE, *expected[overflowing][2:]]
    assert model.applied == expected
    assert [r.outcome for r in reports if r.optimizer == overflowing] == [
        "applied",
        "skipped_overflow",
        "applied",
        "applied",
    ]
    assert outcomes([r for r in reports if r.optimizer != overflowing]) == ["applied"] * 4


@pytest.mark.parametrize("makers", MAKERS)
def test_an_overflow_of_the_first_lowers_the_scale_and_the_waiting_gradient_with_it(makers: Any) -> None:
    """Backoff does not wait; the gradient still held is brought to the new scale."""
    plugin = amp_fp16(64.0)
    reports = reports_of(plugin)
    model = TwoBackwardsThenTwoSteps(makers, overflow_at=(0, 0))
    fit(model, plugin, [BATCH])
    assert (reports[0].scale, reports[0].next_scale) == (64, 32)
    assert model.applied[1] == [THREE]


@pytest.mark.parametrize("makers", MAKERS)
def test_one_optimizer_may_accumulate_over_batches_while_the_other_steps_in_each(makers: Any) -> None:
    class Slow(TwoBackwardsThenTwoSteps):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            fast, slow = self.optimizers()
            self.manual_backward(self.layer(batch).float().sum())
            self.manual_backward(self.other(3 * batch).float().sum())
            fast.step()
            fast.zero_grad()
            if batch_idx % 4 == 3:
                slow.step()
                slow.zero_grad()

    plugin = amp_fp16(16.0, growth_interval=1)
    model = Slow(makers)
    fit(model, plugin, [BATCH] * 8)
    assert (-model.layer.weight.detach()[0]).tolist() == [8 * g for g in ONE]
    assert (-model.other.weight.detach()[0]).tolist() == [8 * g for g in THREE]


@pytest.mark.parametrize("maker", [plain, fused])
def test_two_optimizers_of_shared_parameters_each_see_the_true_gradient(maker: Any) -> None:
    """Unscaled once, although both optimizers hold it."""

    class Shared(TwoBackwardsThenTwoSteps):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.layer(batch).float().sum())
            for optimizer in self.optimizers():
                optimizer.step()
            for optimizer in self.optimizers():
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return maker(self.layer.parameters()), maker(self.layer.parameters())

    model = Shared()
    fit(model, amp_fp16(64.0, growth_interval=1), [BATCH] * 2)
    assert (-model.layer.weight.detach()[0]).tolist() == [4 * g for g in ONE]


def test_stock_unscales_the_second_optimizer_by_the_scale_of_the_next_window() -> None:
    model = TwoBackwardsThenTwoSteps()
    fit(model, stock_fp16(64.0, growth_interval=1), [BATCH])
    assert model.applied == [[ONE], [[g / 2 for g in THREE]]]
