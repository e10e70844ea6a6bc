"""Clipping by norm and by value, of scaled and of unscaled gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_amp_plus.scaling.clipping import clip_by_norm, clip_by_value

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = [FP32, BF16, FP16, FP64]


def norm_of(gradients: list[Tensor]) -> Tensor:
    return torch.cat([g.double().reshape(-1) for g in gradients]).norm()


def some(dtype: torch.dtype = FP32) -> list[Tensor]:
    """Gradients of norm 4: an empty one, a 0-dim one, a strided one, a transposed one."""
    whole = torch.zeros(4, 4, dtype=dtype)
    whole[::2] = 1.0
    return [
        torch.empty(0, dtype=dtype),
        torch.tensor(-2.0, dtype=dtype),
        whole[::2],
        torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=dtype).t(),
    ]


# ---------------------------------------------------------------- by norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_dtype", [FP32, FP64])
def test_a_norm_above_the_threshold_is_brought_down_to_it(dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    gradients = some(dtype)
    clip_by_norm(gradients, norm_of(gradients).to(norm_dtype), 1.0)
    assert norm_of(gradients).item() == pytest.approx(1.0, rel=1e-5 if dtype in (FP32, FP64) else 1e-2)
    assert [g.dtype for g in gradients] == [dtype] * 4
    assert gradients[1].item() == pytest.approx(-0.5, rel=1e-3)


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("max_norm", [0.5, 3.8, 3.999999, 4.0, 4.000001, 4.1, 100.0])
@pytest.mark.parametrize("known", [True, False])
def test_the_result_is_that_of_torch(dtype: torch.dtype, max_norm: float, known: bool) -> None:
    ours, reference = some(dtype), [torch.nn.Parameter(torch.zeros_like(g)) for g in some(dtype)]
    for p, gradient in zip(reference, some(dtype), strict=True):
        p.grad = gradient
    torch.nn.utils.clip_grad_norm_(reference, max_norm)
    norm = norm_of(ours).to(dtype)
    clip_by_norm(ours, norm, max_norm, norm.item() if known else None)
    for gradient, p in zip(ours, reference, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(gradient, p.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("known", [4.0, None])
def test_a_norm_below_the_threshold_changes_no_bit(known: float | None) -> None:
    gradients = some()
    clip_by_norm(gradients, norm_of(gradients), 5.0, known)
    assert all(torch.equal(a, b) for a, b in zip(gradients, some(), strict=True))


def test_a_known_norm_below_the_threshold_saves_the_pass() -> None:
    gradient = torch.ones(4)
    before = gradient._version
    clip_by_norm([gradient], torch.tensor(2.0), 3.0, known_norm=2.0)
    assert gradient._version == before
    clip_by_norm([gradient], torch.tensor(2.0), 1.0, known_norm=2.0)
    assert gradient.tolist() == pytest.approx([0.5] * 4, rel=1e-5)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
def test_elements_of_1e25_are_clipped_to_the_threshold(dtype: torch.dtype) -> None:
    gradients = [torch.full((4,), 1e25, dtype=dtype), torch.full((4,), -1e25, dtype=dtype)]
    clip_by_norm(gradients, norm_of(gradients), 1.0)
    assert gradients[0].tolist() == pytest.approx([8**-0.5] * 4, rel=1e-2)
    assert gradients[1].tolist() == pytest.approx([-(8**-0.5)] * 4, rel=1e-2)


def test_the_factor_of_fp16_gradients_does_not_vanish_in_fp16() -> None:
    gradients = [torch.full((300,), 60000.0, dtype=FP16)]
    clip_by_norm(gradients, norm_of(gradients), 0.01)  # a factor of 1e-8
    assert gradients[0][0].item() == pytest.approx(0.01 / math.sqrt(300), rel=1e-2)


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 100.0])
def test_scaled_gradients_clipped_by_norm_and_unscaled_later_equal_unscaled_ones_clipped(max_norm: float) -> None:
    scale = 1024.0
    unscaled, scaled = some(), [g * scale for g in some()]
    norm = norm_of(unscaled)
    clip_by_norm(unscaled, norm, max_norm)
    clip_by_norm(scaled, norm, max_norm)
    assert all(torch.equal(a, b / scale) for a, b in zip(unscaled, scaled, strict=True))


def test_a_norm_of_4_at_scale_1024_is_clipped_to_1_not_to_one_1024th() -> None:
    scaled = [torch.full((4,), 2.0 * 1024)]
    clip_by_norm(scaled, torch.tensor(4.0), 1.0)
    assert norm_of(scaled).item() / 1024 == pytest.approx(1.0, rel=1e-5)


def test_clipping_by_norm_transfers_nothing() -> None:
    gradients = [torch.ones(3, dtype=dtype, device="meta") for dtype in DTYPES]
    clip_by_norm(gradients, torch.ones((), dtype=FP64, device="meta"), 1.0)
    assert all(g.device.type == "meta" for g in gradients)


# ---------------------------------------------------------------- by value


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_beyond_the_threshold_are_clamped_and_others_keep_their_bits(dtype: torch.dtype) -> None:
    whole = torch.tensor([[-3.0, 9.0], [0.5, 9.0], [2.0, 9.0]], dtype=dtype)
    gradients = [whole[:, 0], torch.tensor(-7.0, dtype=dtype), torch.empty(0, dtype=dtype)]
    clip_by_value(gradients, 1.5)
    assert whole.tolist() == [[-1.5, 9.0], [0.5, 9.0], [1.5, 9.0]]
    assert gradients[1].item() == -1.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_value", [0.25, 1.5, 100.0])
def test_scaled_gradients_clipped_by_value_and_unscaled_later_equal_unscaled_ones_clipped(
    dtype: torch.dtype, max_value: float
) -> None:
    scale = torch.tensor(64.0)
    unscaled, scaled = some(dtype), [g * 64 for g in some(dtype)]
    clip_by_value(unscaled, max_value)
    clip_by_value(scaled, max_value, scale)
    assert [g.dtype for g in scaled] == [dtype] * 4
    assert all(torch.equal(a, b / 64) for a, b in zip(unscaled, scaled, strict=True))


def test_several_dtypes_are_clipped_at_once() -> None:
    for scale in (None, torch.tensor(2.0)):
        gradients = [torch.full((2,), 8.0, dtype=dtype) for dtype in DTYPES]
        clip_by_value(gradients, 1.0, scale)
        assert [g.tolist() for g in gradients] == [[1.0 if scale is None else 2.0] * 2] * 4


@pytest.mark.parametrize("scale", [None, 2.0**16])
def test_a_threshold_beyond_the_range_of_fp16_clips_nothing(scale: float | None) -> None:
    gradients = [torch.tensor([-60000.0, 1.0], dtype=FP16)]
    clip_by_value(gradients, 1e6, None if scale is None else torch.tensor(scale))
    assert gradients[0].tolist() == [-60000.0, 1.0]


@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_nan_stays_a_nan(scale: float | None) -> None:
    gradient = torch.tensor([math.nan, 1.0])
    clip_by_value([gradient], 0.5, None if scale is None else torch.tensor(scale))
    assert math.isnan(gradient[0].item())


@pytest.mark.parametrize("scaled", [True, False])
def test_clipping_by_value_transfers_nothing(scaled: bool) -> None:
    gradients = [torch.ones(3, dtype=dtype, device="meta") for dtype in DTYPES]
    clip_by_value(gradients, 1.0, torch.ones((), device="meta") if scaled else None)
    assert all(g.device.type == "meta" for g in gradients)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_clipping_nothing_is_harmless(by: str) -> None:
    if by == "norm":
        clip_by_norm([], torch.zeros(()), 1.0)
    else:
        clip_by_value([], 1.0, torch.ones(()))
