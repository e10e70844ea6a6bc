"""Gradient health against FP64, element by element, and the Metric."""

from __future__ import annotations

import doctest
import importlib
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus.metrics import GradientHealth, gradient_health
from lightning_amp_plus.metrics.blocks import Blocks
from lightning_amp_plus.metrics.gradient_health import WHOLE


def spread(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * torch.exp2(-30 * torch.rand(count, generator=generator))
    return values * (torch.rand(count, generator=generator) > 0.2)


KINDS = {
    "stacked": [spread(64, seed).view(8, 8) for seed in range(50)],
    "shapes": [spread(12).view(3, 4), spread(12, 1), spread(1), spread(6).view(1, 2, 3)],
    "huge": [spread(500) * 1e25],
    "tiny": [spread(500) * 1e-25],
    "fp16": [spread(300).half(), spread(300, 1).half()],
    "bf16": [spread(300).bfloat16()],
    "fp64": [spread(300).double() * 1e-9],
    "transposed": [spread(600).view(20, 30).t()],
    "not finite": [torch.tensor([1.0, math.inf, 0.0]), torch.tensor([math.nan, 2.0, -math.inf]), torch.ones(3)],
    "zero": [torch.zeros(40), torch.zeros(0), torch.tensor([-0.0, 0.0])],
    "scalar": [torch.tensor(3.0), torch.tensor(-2.0)],
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scale", [1.0, 1024.0, 1000.0])
def test_everything_is_as_in_fp64(name: str, scale: float) -> None:
    gradients = KINDS[name]
    found = gradient_health(gradients, torch.tensor(scale), clip_value=0.25)
    for row, gradient in enumerate(gradients):
        exact = gradient.double()
        norm = exact.norm()
        assert torch.allclose(found.norm[row], norm, rtol=1e-6, atol=0.0, equal_nan=True)
        assert torch.equal(found.largest[row].isnan(), exact.isnan().any())
        if exact.numel() and not exact.isnan().any():
            assert found.largest[row] == exact.abs().amax()
        assert found.count[row] == exact.numel()
        assert found.zeros[row] == (exact == 0).sum()
        assert found.clipped[row] == (exact.abs() > 0.25).sum()
        assert found.nans[row] == exact.isnan().sum()
        assert found.nonfinite[row] == (~exact.isfinite()).sum()
        assert found.nonzero[row] == (exact != 0).sum()
        assert found.underflowed[row] == ((exact.abs() * scale <= 2.0**-25) & (exact != 0)).sum()
        assert found.histogram[row].sum() == (exact.isfinite() & (exact != 0)).sum()


def test_underflow_is_what_a_cast_to_fp16_loses() -> None:
    values = torch.cat([spread(2000), torch.tensor([2.0**-25, -(2.0**-25), math.nextafter(2.0**-25, 1)])]).float()
    values[-1] = torch.nextafter(torch.tensor(2.0**-25), torch.tensor(1.0))
    found = sum(float(gradient_health([part]).underflowed) for part in values.split(1000))
    assert found == float(((values.half() == 0) & (values != 0)).sum())


@pytest.mark.parametrize("size", [15_000_000])
def test_large_tensors_keep_their_digits_and_are_sampled_for_exponents(size: int) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 2.0**-22
    gradient[::7] = 0.0
    found = gradient_health([gradient])
    assert float(found.norm) == pytest.approx(float(gradient.double().norm()), rel=1e-5)
    assert float(found.zeros) == float((gradient == 0).sum())
    assert float(found.largest) == float(gradient.abs().amax())
    assert float(found.count) == pytest.approx(size, rel=1e-12)
    true = ((gradient != 0) & (gradient.abs() <= 2.0**-25)).double().sum() / (gradient != 0).sum()
    assert float(found.underflowed / found.nonzero) == pytest.approx(float(true), abs=2e-3)


def test_in_the_course_of_phases_every_element_is_looked_at() -> None:
    size = 16 * WHOLE
    for at in torch.randint(0, size - 15 * 64, (20,), generator=torch.Generator().manual_seed(0)).tolist():
        gradient = torch.zeros(4, size // 4)
        gradient.view(-1)[at] = 1.0
        found = [float(gradient_health([gradient], phase=phase).histogram.sum()) for phase in range(15)]
        assert sum(number > 0 for number in found) == 1


def test_stacked_and_cut_sizes_give_the_same() -> None:
    gradients = [spread(5000, seed).view(50, 100) for seed in range(4)]
    whole = gradient_health(gradients)
    for elements in (WHOLE, 1000, 5000):
        cut = gradient_health(gradients, blocks=Blocks(gradients, elements))
        assert torch.allclose(cut.norm, whole.norm, rtol=1e-6) and torch.equal(cut.zeros, whole.zeros)
        assert torch.allclose(cut.count, whole.count) and torch.equal(cut.largest, whole.largest)


def test_gradients_are_left_as_they_are_and_nothing_is_transferred() -> None:
    class Transfers(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    gradients = [tensor for name in KINDS for tensor in KINDS[name]] + [spread(100_000)]
    before = [gradient.clone() for gradient in gradients]
    with Transfers() as transfers:
        gradient_health(gradients, torch.tensor(8.0), clip_value=1.0)
    assert transfers.found == 0
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(gradients, before, strict=True))
    on_meta = [gradient.to("meta") for gradient in gradients]
    gradient_health(on_meta, torch.ones((), device="meta"), clip_value=1.0)


def test_no_gradients_and_whole_numbers() -> None:
    assert gradient_health([]).sums.shape[0] == 0
    with pytest.raises(TypeError, match=r"torch\.int64"):
        gradient_health([torch.ones(3, dtype=torch.int64)])


# ---------------------------------------------------------------- the Metric


def test_metric_adds_up_over_updates() -> None:
    metric = GradientHealth(scale=64.0)
    gradients = [spread(700, seed) for seed in range(6)]
    metric.update(gradients[:4])
    metric.update(gradients[4:])
    metric.update([])
    exact = torch.cat(gradients).double()
    found = metric.compute()
    assert float(found["norm"]) == pytest.approx(float(exact.norm()), rel=1e-6)
    assert float(found["amax"]) == float(exact.abs().amax())
    assert float(found["zero_fraction"]) == float((exact == 0).double().mean())
    lost = (exact != 0) & (exact.abs() * 64 <= 2.0**-25)
    assert float(found["underflow_fraction"]) == pytest.approx(float(lost.sum() / (exact != 0).sum()))
    assert float(pickle.loads(pickle.dumps(metric)).compute()["norm"]) == float(found["norm"])


def test_metric_counts_nan_and_inf_apart() -> None:
    metric = GradientHealth()
    metric.update([torch.tensor([math.inf, math.nan, math.nan, 1.0])])
    found = metric.compute()
    assert (float(found["nan"]), float(found["inf"]), float(found["amax"])) == (
        2.0,
        1.0,
        pytest.approx(math.nan, nan_ok=True),
    )


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"GradientHealth\(scale=.*above 0"):
        GradientHealth(scale=scale)


def test_docstring_examples_run() -> None:
    result = doctest.testmod(importlib.import_module("lightning_amp_plus.metrics.gradient_health"))
    assert result.attempted >= 9 and result.failed == 0
