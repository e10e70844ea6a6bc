"""transformers#24449: clipping on an inner micro-batch of an accumulation window under FP16."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import AmpPrecision
from tests.support.models import ExactLinear
from tests.support.training import amp_fp16, fit, stock_fp16

# Norms 6.7 and, with what clipping leaves of the first, about 4.
BATCHES = [torch.tensor([2.0, 4.0, 4.0, 3.0]), torch.tensor([1.0, 0.0, 2.0, 3.0])]


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


class ClipsInside(ExactLinear):
    """Clips after each of two micro-batches, then steps."""

    def __init__(self, algorithm: Literal["norm", "value"], make_optimizer: Any = None, threshold: float = 2.5) -> None:
        super().__init__(make_optimizer=make_optimizer)
        self.automatic_optimization = False
        self.algorithm, self.threshold = algorithm, threshold

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, self.threshold, self.algorithm)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class CountsUnscaling(TorchDispatchMode):
    """Factors by which gradients were multiplied in the check-and-unscale kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "non_finite_check_and_unscale" in func.__name__:
            self.factors.append(float(args[2]))
        return func(*args, **(kwargs or {}))


def reference(algorithm: Literal["norm", "value"]) -> Tensor:
    model = ClipsInside(algorithm)
    fit(model, None, BATCHES)
    return model.at_step[0]


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_gradients_clipped_in_mid_window_equal_the_fp32_reference(
    precision: str, algorithm: Any, make_optimizer: Any
) -> None:
    model = ClipsInside(algorithm, make_optimizer)
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    fit(model, plugin, BATCHES)
    torch.testing.assert_close(model.at_step[0], reference(algorithm), rtol=1e-6, atol=0)
    torch.testing.assert_close(model.moved(), reference(algorithm), rtol=1e-6, atol=0)


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_unscaled_once_in_the_window(algorithm: Any, make_optimizer: Any) -> None:
    with CountsUnscaling() as counted:
        fit(ClipsInside(algorithm, make_optimizer), amp_fp16(), BATCHES)
    assert [factor for factor in counted.factors if factor != 1.0] == [1 / 1024]


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_clipping_in_mid_window_hides_no_overflow(
    precision: str, algorithm: Any, bad: float, make_optimizer: Any
) -> None:
    model = ClipsInside(algorithm, make_optimizer)
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    fit(model, plugin, [BATCHES[0], BATCHES[0] * bad, *BATCHES])
    assert plugin.history.skipped == 1
    torch.testing.assert_close(model.moved(), reference(algorithm), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_an_overflow_of_the_first_micro_batch_survives_clipping_too(precision: str, algorithm: Any, bad: float) -> None:
    model = ClipsInside(algorithm)
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    fit(model, plugin, [BATCHES[0] * bad, BATCHES[1]])
    assert plugin.history.skipped == 1
    assert torch.equal(model.moved(), torch.zeros(4))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_stock_clips_gradients_that_are_still_scaled(algorithm: Any) -> None:
    model = ClipsInside(algorithm)
    fit(model, stock_fp16(), BATCHES)
    assert model.moved().abs().max() < 1e-2 < reference(algorithm).abs().max()
