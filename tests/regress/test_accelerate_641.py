"""Accelerate#641, espnet PR#3283: a window equals the big batch, and one bad micro-batch drops all of it."""

from typing import Any

import pytest
import torch

from lightning_amp_plus import AmpPrecision
from tests.support.faults import KINDS, Fault
from tests.support.models import ExactLinear, TinyRegressor, adamw, fused_adamw
from tests.support.training import (
    WeightTrace,
    amp_fp16,
    fit,
    outcomes,
    regression_batches,
    reports_of,
    same,
    stock_bf16,
    weights,
)

PRECISIONS = ["16-mixed", "bf16-mixed", "32-true"]
MICRO = [torch.tensor([[float(i), 4.0, 8.0 - i, 12.0]]) for i in range(4)]


def plugin_for(precision: str) -> AmpPrecision:
    return amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


class Mean(ExactLinear):
    """The loss is the mean over the batch."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).float().mean()


class MeanByHand(Mean):
    def __init__(self, make_optimizer: Any, accumulate: int) -> None:
        super().__init__(make_optimizer=make_optimizer)
        self.automatic_optimization, self.accumulate = False, accumulate

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_four_micro_batches_equal_the_big_batch(precision: str, manual: bool, make_optimizer: Any) -> None:
    big, micro = Mean(make_optimizer=make_optimizer), Mean(make_optimizer=make_optimizer)
    plugin = plugin_for(precision)
    fit(big, plugin_for(precision), [torch.cat(MICRO)])
    if manual:
        micro = MeanByHand(make_optimizer, 4)
        fit(micro, plugin, MICRO)
    else:
        fit(micro, plugin, MICRO, accumulate_grad_batches=4)
    assert torch.equal(micro.moved(), big.moved())
    assert micro.moved().tolist() == [1.5, 4.0, 6.5, 12.0]
    assert plugin.applied_steps == 1


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("fault", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_bad_micro_batch_drops_the_window_once_and_the_next_starts_clean(
    precision: str, manual: bool, fault: Fault, make_optimizer: Any
) -> None:
    plugin, trace = plugin_for(precision), WeightTrace()
    reports = reports_of(plugin)
    batches = regression_batches(8)
    model = TinyRegressor(make_optimizer, faults={1: fault}, manual=manual, accumulate=4)
    accumulation = {} if manual else {"accumulate_grad_batches": 4}
    fit(model, plugin, batches, callbacks=[trace], **accumulation)

    assert outcomes(reports) == ["skipped_overflow", "applied"]
    assert plugin.history.skipped == 1
    assert trace.moved() == [False] * 7 + [True]

    # The second window is what it would be without the first: no gradient of the dropped one is left over.
    alone = TinyRegressor(make_optimizer, manual=manual, accumulate=4)
    plugin = amp_fp16(512.0) if precision == "16-mixed" else AmpPrecision(precision)
    fit(alone, plugin, batches[4:], **accumulation)
    assert same(weights(model), weights(alone))


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_every_position_in_the_window_counts(position: int, make_optimizer: Any) -> None:
    plugin = amp_fp16()
    reports = reports_of(plugin)
    model = TinyRegressor(make_optimizer, faults={position: KINDS["nan gradient"]})
    fit(model, plugin, regression_batches(4), accumulate_grad_batches=4)
    assert outcomes(reports) == ["skipped_overflow"]
    assert same(weights(model), weights(TinyRegressor()))


@pytest.mark.parametrize("manual", [False, True])
def test_gradients_of_a_dropped_window_are_gone_even_if_nobody_zeroes_them(manual: bool) -> None:
    class NeverZeroes(TinyRegressor):
        def optimizer_zero_grad(self, *_: Any, **__: Any) -> None:
            pass

        def optimize(self, loss: torch.Tensor) -> None:
            self.manual_backward(loss)
            self.optimizers().step()

    model = NeverZeroes(faults={0: KINDS["inf gradient"]}, manual=manual)
    reports = reports_of(plugin := amp_fp16())
    fit(model, plugin, regression_batches(2))
    assert outcomes(reports) == ["skipped_overflow", "applied"]


def test_stock_bf16_steps_with_the_bad_window() -> None:
    model = TinyRegressor(adamw, faults={1: KINDS["inf gradient"]})
    fit(model, stock_bf16(), regression_batches(4), accumulate_grad_batches=4)
    assert not model.first.weight.isfinite().all()
