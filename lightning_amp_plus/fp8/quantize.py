"""Quantization to FP8 as pure functions: scale from amax, round with an explicit clamp, and what was lost on the way.

The convention throughout: ``quantized = round(x * scale)``, ``x ~ quantized * scale_inv`` with ``scale_inv = 1 / scale``.
Quantized values stay in a wider dtype: every E4M3 and E5M2 number, subnormals included, is a BF16 number, which multiplies
exactly and needs no slow cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_amp_plus.formats import BF16, FP32, Format
from lightning_amp_plus.fp8.recipes import Granularity

STRIPS: dict[Granularity, int] = {"block_1x128": 128, "mx_32": 32}
"""How many elements of a row share a scale, where a row has several."""
_BLOCK = 128
_Function = TypeVar("_Function", bound=Callable[..., Any])
# torch.compile(dynamic=True) makes an input of the graph of every float it finds in an object, and cannot pass them into an
# autograd.Function; what comes of a function marked so it takes as it is.
_constant: Callable[[_Function], _Function] = torch.compiler.assume_constant_result


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor.

    Attributes:
        values: Numbers of ``format``, in BF16, of the original shape.
        scale_inv: FP32, broadcast against ``values``: what they are multiplied by to dequantize.
        format: E4M3 or E5M2.
    """

    values: Tensor
    scale_inv: Tensor
    format: Format

    def dequantize(self) -> Tensor:
        """The tensor again, in FP32."""
        return self.values.float() * self.scale_inv


def amax_of(x: Tensor, granularity: Granularity = "tensor") -> Tensor:
    """Largest magnitudes of the elements that share a scale, in FP32, shaped to be broadcast against ``x``.

    NaN counts as larger than anything, as in ``torch.amax``; an empty tensor has 0.

    Args:
        x: A matrix whose last dimension is contracted, or for ``tensor`` of any shape.
        granularity: ``tensor``: one number. ``row``: one a row. ``block_1x128`` and ``mx_32``: one for 128 or 32 elements
            of a row, ``block_128x128``: one a tile; the last strip or tile may be shorter.
    """
    if x.numel() == 0:
        shape = (1,) * x.ndim if granularity == "tensor" else (*x.shape[:-1], 1)
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    if granularity == "tensor":
        # The two ends without a copy: abs() would write all of it once more.
        low, high = torch.aminmax(x)
        return torch.maximum(high.float(), -low.float()).reshape((1,) * x.ndim)
    if granularity == "row":
        return x.abs().amax(dim=-1, keepdim=True).float()
    rows, columns = x.shape
    if granularity == "block_128x128":
        tiles = _padded(x, _BLOCK, _BLOCK).view(-(-rows // _BLOCK), _BLOCK, -(-columns // _BLOCK), _BLOCK)
        amax = tiles.abs().amax(dim=(1, 3)).float()
        return amax.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    length = STRIPS[granularity]
    return amax_of(as_strips(x, length), "row").squeeze(2).repeat_interleave(length, 1)[:, :columns]


def as_strips(x: Tensor, length: int) -> Tensor:
    """``[..., columns]`` as ``[..., strips, length]``, each a row of its own; the last one filled up with zeros."""
    columns = x.shape[-1]
    return torch.nn.functional.pad(x, (0, -columns % length)).reshape(*x.shape[:-1], -(-columns // length), length)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))


def scale_of(amax: Tensor, format: Format, *, margin: int = 0, power_of_two: bool = False) -> Tensor:
    """The scale that brings ``amax`` to the largest finite number of ``format``.

    ``scale = max_finite / amax / 2**margin`` (Micikevicius et al., 2022, section 3.3). An amax of 0, inf or NaN gives
    1: a zero tensor has nothing to scale, and one that is not finite must not turn the others' scale into 0. For an
    amax so small that the scale would leave FP32, the largest usable scale is taken.

    Args:
        amax: FP32, any shape.
        format: E4M3 or E5M2.
        margin: Powers of two left above the amax.
        power_of_two: Round the scale down to a power of two.

    Returns:
        FP32 of the same shape, from 2^-126 to 2^126.
    """
    usable = (amax > 0) & torch.isfinite(amax)
    scale = _top(format, margin) / torch.where(usable, amax, 1.0)
    scale = torch.where(usable, scale, 1.0).clamp(2.0**-126, 2.0**126)  # its inverse is a normal FP32 number still
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # the fraction's bits off: rounded down
    return scale


def round_fp8(x: Tensor, format: Format) -> Tensor:
    """Rounds to the nearest number of an FP8 format, ties to even, and clamps to its largest finite ones.

    Without the clamp a cast turns 480 into 448 in E4M3 and 61440 into infinity in E5M2. NaN stays NaN; infinity becomes
    the largest finite number, so whoever must know of it asks before. Zeros come out positive: no sum can tell.

    Args:
        x: FP32 or BF16.
        format: E4M3 or E5M2.

    Returns:
        BF16 of the same shape, every number one of ``format``.
    """
    return _round_in_place(x.to(torch.float32, copy=True), format)


def scale_and_round(x: Tensor, scale: Tensor, format: Format) -> Tensor:
    """``round_fp8(x * scale, format)`` with one buffer less."""
    return _round_in_place(x.float() * scale, format)


def _round_in_place(wide: Tensor, format: Format) -> Tensor:
    """Rounds an FP32 buffer that nobody else needs. Passes over memory are the whole cost, so every step is in place."""
    wide.clamp_(-_top(format), _top(format))
    # One step of the format around x is 2**(exponent - fraction_bits). A number whose own FP32 step is that one, added
    # and taken away again, leaves x rounded to it, by the processor's round-half-to-even.
    power = (wide.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=_min_normal(format))
    magic = power.mul_(_magic(format))
    return wide.add_(magic).sub_(magic).to(BF16.dtype)


@_constant
def _top(format: Format, margin: int = 0) -> float:
    return format.max_finite * 2.0**-margin


@_constant
def _min_normal(format: Format) -> float:
    return format.min_normal


@_constant
def _magic(format: Format) -> float:
    return 1.5 * 2.0 ** (FP32.fraction_bits - format.fraction_bits)


def quantize(
    x: Tensor,
    format: Format,
    granularity: Granularity = "tensor",
    *,
    scale: Tensor | None = None,
    margin: int = 0,
    power_of_two: bool = False,
) -> Quantized:
    """Quantizes a tensor.

    Args:
        x: FP32, BF16 or FP16.
        format: E4M3 or E5M2.
        granularity: Which elements share a scale; see :func:`amax_of`.
        scale: The scale, where it does not come from this tensor (delayed scaling); broadcast against ``x``.
        margin: See :func:`scale_of`.
        power_of_two: See :func:`scale_of`.
    """
    if scale is None:
        scale = scale_of(amax_of(x, granularity), format, margin=margin, power_of_two=power_of_two)
    return Quantized(scale_and_round(x, scale, format), scale.reciprocal(), format)


def saturated(x: Tensor, scale: Tensor, format: Format, *, by_row: bool = False) -> Tensor:
    """Number of elements that are clipped to the format's largest finite number, NaN not counted; FP32.

    That is, whose scaled magnitude lies above it by more than what rounding does: ``amax * (448 / amax)`` may come out as
    448.00003, which is no loss.

    Args:
        x: FP32, BF16 or FP16.
        scale: FP32, broadcast against ``x``.
        format: E4M3 or E5M2.
        by_row: Whether to count in each entry of the first dimension, or in all of ``x``.
    """
    scaled = (x.float() * scale).abs_()
    return _count(torch.gt, scaled, format.max_finite * (1.0 + 2.0**-22), by_row)


def nonzeros(x: Tensor, *, by_row: bool = False) -> Tensor:
    """Number of elements that are not zero, FP32, exact up to 2^24. Of quantized ones fewer by what underflowed.

    Args:
        x: Any floating dtype.
        by_row: Whether to count in each entry of the first dimension, or in all of ``x``.
    """
    return _count(torch.ne, x, 0.0, by_row)


def _count(compare: Callable[..., Tensor], x: Tensor, bound: float, by_row: bool) -> Tensor:
    # A comparison into a float tensor and its sum are vectorized; into a bool tensor they take several times as long.
    ones = compare(x, bound, out=torch.empty_like(x, dtype=torch.float32))
    return ones.flatten(1).sum(1) if by_row else ones.sum()


def decibels(signal: float, noise: float) -> float:
    """Signal to quantization noise ratio, ``10 log10(signal / noise)``.

    Args:
        signal: Sum of squares.
        noise: Sum of squared errors.

    Returns:
        Infinite without noise; NaN where one of both is not finite.
    """
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0.0:
        return math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """SQNR in decibels of a tensor that stands for another one; see :func:`decibels`."""
    exact = reference.double()
    return decibels(float(exact.square().sum()), float((exact - approximation.double()).square().sum()))
