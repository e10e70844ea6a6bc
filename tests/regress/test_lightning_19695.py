"""Lightning#19695: under FP16 a gradient of ``loss.backward()`` is divided by a scale it never was multiplied by."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision
from tests.support.models import TinyRegressor, adamw, fused_adamw, sgd
from tests.support.training import amp_fp16, fit, regression_batches, same, stock_fp16, weights


class RawBackward(TinyRegressor):
    """Calls ``backward`` itself in the micro-batches listed."""

    def __init__(self, make_optimizer: Any, raw: set[int], accumulate: int = 1) -> None:
        super().__init__(make_optimizer, manual=True, accumulate=accumulate)
        self.raw = raw
        self.before_step: dict[str, Tensor] = {}

    def optimize(self, loss: Tensor) -> None:
        optimizer = self.optimizers()
        loss = loss / self.accumulate
        if self.seen - 1 in self.raw:
            loss.backward()
        else:
            self.manual_backward(loss)
        if self.seen % self.accumulate == 0:
            self.before_step = weights(self)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("make_optimizer", [sgd, adamw, fused_adamw])
@pytest.mark.parametrize("raw", [{0}, {1}, {0, 1}], ids=["first step", "a later step", "every step"])
def test_raw_backward_is_an_error_that_names_manual_backward_and_leaves_the_weights(
    make_optimizer: Any, raw: set[int]
) -> None:
    model = RawBackward(make_optimizer, raw)
    with pytest.raises(RuntimeError, match="manual_backward"):
        fit(model, amp_fp16(), regression_batches(3))
    assert model.seen - 1 == min(raw)
    assert same(weights(model), model.before_step)


@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw])
@pytest.mark.parametrize("raw", [{0, 1}, {0}, {1}], ids=["both", "the first", "the second"])
def test_raw_backward_in_an_accumulated_window_is_an_error(make_optimizer: Any, raw: set[int]) -> None:
    model = RawBackward(make_optimizer, raw, accumulate=2)
    with pytest.raises(RuntimeError, match="manual_backward"):
        fit(model, amp_fp16(), regression_batches(2))
    assert same(weights(model), model.before_step)


def test_raw_backward_of_one_of_two_optimizers_is_an_error() -> None:
    class TwoOptimizers(TinyRegressor):
        def optimize(self, loss: Tensor) -> None:
            first, second = self.optimizers()
            for optimizer, raw in ((first, False), (second, True)):
                self.toggle_optimizer(optimizer)
                half = self.loss(self.batch)
                if raw:
                    half.backward()
                else:
                    self.manual_backward(half)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.batch = batch
            self.optimize(self.loss(batch))

        def configure_optimizers(self) -> Any:
            return sgd(self.first.parameters()), sgd(self.second.parameters())

    model = TwoOptimizers(manual=True)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"second\.(weight|bias).*manual_backward"):
        fit(model, amp_fp16(), regression_batches(1))
    assert not torch.equal(model.first.weight, before["first.weight"])
    assert torch.equal(model.second.weight, before["second.weight"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_raw_backward_is_fine_without_a_loss_scale(precision: str) -> None:
    raw, proper = RawBackward(sgd, {0, 1, 2}), RawBackward(sgd, set())
    plugin = AmpPrecision(precision)
    fit(raw, plugin, regression_batches(3))
    fit(proper, AmpPrecision(precision), regression_batches(3))
    assert torch.allclose(raw.first.weight, proper.first.weight, atol=2e-3)
    assert not torch.equal(raw.first.weight, TinyRegressor().first.weight)
    assert plugin.applied_steps == 3


def test_stock_trains_on_with_gradients_divided_by_the_scale() -> None:
    """Why the error: from the second step on, stock Lightning unscales what nobody scaled."""
    with pytest.raises(AssertionError, match="_scale is None"):
        fit(RawBackward(sgd, {0}), stock_fp16(), regression_batches(2))
    model, reference = RawBackward(sgd, {1}), RawBackward(sgd, set())
    fit(model, stock_fp16(), regression_batches(2))
    fit(reference, stock_fp16(), regression_batches(2))
    moved = (model.second.bias - model.before_step["second.bias"]).abs()
    expected = (reference.second.bias - reference.before_step["second.bias"]).abs()
    assert moved < expected / 500
