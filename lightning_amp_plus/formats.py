"""Number formats as values: what a floating-point format can hold, how it rounds, which loss scales it leaves room for.

Used by ``integration.checks`` and, to come, by the FP8 recipes and the ``formats`` command. Knows nothing but torch.

A format is described by two bit counts; all other figures follow from them by the rules of IEEE 754-2019, sections 3.3
and 3.4: with ``e`` exponent bits and ``f`` fraction bits, ``bias = 2**(e - 1) - 1``, a normal number is
``±1.fraction * 2**(exponent - bias)`` and a subnormal number is ``±0.fraction * 2**(1 - bias)``. E4M3 departs from that
in one point (the "FN" flavor of the OCP 8-bit floating point specification, revision 1.0): it has no infinity, and
spends one bit pattern per sign on NaN instead of a whole exponent.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import overload

import torch
from torch import Tensor

# Everything here is computed in float64: 1 sign bit, 11 exponent bits, 52 fraction bits.
_FLOAT64_FRACTION_BITS = 52
_FLOAT64_BIAS = 1023
_FLOAT64_EXPONENT_MASK = 0x7FF


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    All magnitudes below are exact Python floats, without a unit.

    Args:
        name: What people call it, for example ``"FP16"``.
        exponent_bits: Width of the exponent field, 2 to 8.
        fraction_bits: Width of the stored fraction, 1 to 23, without the implied leading bit.
        has_inf: Whether the top exponent is set aside for infinity and NaN, as in IEEE 754. ``False`` means the FN
            flavor: no infinity, and only the all-ones pattern of each sign is NaN.
        dtype: The torch dtype that stores this format.

    Raises:
        ValueError: If a bit count is out of range. Up to 8 and 23 bits, all figures and roundings are exact in float64.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    has_inf: bool
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not 2 <= self.exponent_bits <= 8:
            raise ValueError(f"format {self.name}: exponent_bits is {self.exponent_bits}, expected 2 to 8")
        if not 1 <= self.fraction_bits <= 23:
            raise ValueError(f"format {self.name}: fraction_bits is {self.fraction_bits}, expected 1 to 23")

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def of(which: torch.dtype | str) -> Format:
        """Look up one of the five formats of this module.

        Args:
            which: A torch dtype, or a name in any case: ``"fp16"``, or the dtype's own name, ``"float16"`` or
                ``"torch.float16"``.

        Raises:
            ValueError: If there is no such format. The message lists those that exist.
        """
        wanted = str(which).lower().removeprefix("torch.")
        for candidate in FORMATS:
            if wanted in (candidate.name.lower(), str(candidate.dtype).removeprefix("torch.")):
                return candidate
        known = ", ".join(f"{candidate.name} ({candidate.dtype})" for candidate in FORMATS)
        raise ValueError(f"no number format {which!r}; the formats are {known}")

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def min_exponent(self) -> int:
        """Power of two of the smallest normal number, and the exponent that all subnormal numbers share."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Power of two of the largest finite number."""
        largest_stored = (1 << self.exponent_bits) - (2 if self.has_inf else 1)
        return largest_stored - self.bias

    @property
    def max_finite(self) -> float:
        """The largest finite number."""
        # The FN flavor gives the all-ones fraction of the top exponent to NaN: its largest one is a step lower.
        missing_steps = 1 if self.has_inf else 2
        return (2.0 - missing_steps * self.epsilon) * 2.0**self.max_exponent

    @property
    def min_normal(self) -> float:
        """The smallest positive number with full precision."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (self.min_exponent - self.fraction_bits)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number."""
        return 2.0**-self.fraction_bits

    @property
    def unit_roundoff(self) -> float:
        """Half of ``epsilon``: see `relative_error_bound`."""
        return self.epsilon / 2

    @property
    def underflow_threshold(self) -> float:
        """The largest magnitude that rounds to zero: every larger one rounds to a non-zero number.

        It is half of ``min_subnormal``, a tie that goes to its even neighbor, zero.
        """
        return self.min_subnormal / 2

    @property
    def overflow_threshold(self) -> float:
        """The magnitude halfway between ``max_finite`` and the number that would follow it if exponents went on.

        In a format with infinity it is the smallest magnitude that rounds to infinity (65520 in FP16): the fraction of
        ``max_finite`` is odd, so the tie goes up. In E4M3 that fraction is even and the tie stays: 464 is the largest
        magnitude that rounds to ``max_finite`` by itself, and only larger ones need saturation.
        """
        return self.max_finite + 2.0 ** (self.max_exponent - self.fraction_bits - 1)


FP32 = Format("FP32", exponent_bits=8, fraction_bits=23, has_inf=True, dtype=torch.float32)
BF16 = Format("BF16", exponent_bits=8, fraction_bits=7, has_inf=True, dtype=torch.bfloat16)
FP16 = Format("FP16", exponent_bits=5, fraction_bits=10, has_inf=True, dtype=torch.float16)
E4M3 = Format("E4M3", exponent_bits=4, fraction_bits=3, has_inf=False, dtype=torch.float8_e4m3fn)
E5M2 = Format("E5M2", exponent_bits=5, fraction_bits=2, has_inf=True, dtype=torch.float8_e5m2)

FORMATS = (FP32, BF16, FP16, E4M3, E5M2)
"""Every format of this module, widest first."""


@overload
def round_to(x: float, format: Format, *, saturate: bool = False) -> float: ...
@overload
def round_to(x: Tensor, format: Format, *, saturate: bool = False) -> Tensor: ...
def round_to(x: float | Tensor, format: Format, *, saturate: bool = False) -> float | Tensor:
    """Round to the nearest number of a format, ties to the even neighbor, subnormal numbers included.

    Rounds once, straight from the exact value of ``x``. A torch cast from float64 to a narrower format goes through
    FP32 and rounds twice: ``1 + 2**-8 + 2**-26`` becomes 1.0 in BF16 that way, but 1.0078125 here.

    Zeros keep their sign, also those that a small number becomes, and NaN stays NaN. A magnitude that rounds past
    ``format.max_finite``, or an infinite one, becomes infinity of the same sign in a format that has it, and
    ``±max_finite`` in one that does not (E4M3), which is also what torch's cast does on CPU. With ``saturate`` it
    becomes ``±max_finite`` in every format, infinite inputs included.

    Args:
        x: A Python number, or a tensor of any shape and any real floating-point dtype, on a device with float64.
        format: The format to round to.
        saturate: Whether overflow is clamped to ``max_finite`` in the formats with infinity too.

    Returns:
        For a number, a float. For a tensor, a new one of the same shape on the same device with the rounded values and
        no gradient: float64 if ``x`` is, else float32, which holds every number of these formats exactly.

    Raises:
        TypeError: If ``x`` is an integer, boolean or complex tensor.
    """
    if not isinstance(x, Tensor):
        rounded = _round_float64(torch.tensor(x, dtype=torch.float64, device="cpu"), format, saturate)
        return float(rounded.item())
    if not x.dtype.is_floating_point:
        raise TypeError(f"round_to rounds floating-point tensors; this one is {x.dtype}: convert it first")
    rounded = _round_float64(x.detach().to(torch.float64), format, saturate)
    return rounded if x.dtype == torch.float64 else rounded.to(torch.float32)


def _round_float64(x: Tensor, format: Format, saturate: bool) -> Tensor:
    # The exponent is read off, and the power of two put together, as bits: log2 and exp2 need not be exact.
    exponent = ((x.view(torch.int64) >> _FLOAT64_FRACTION_BITS) & _FLOAT64_EXPONENT_MASK) - _FLOAT64_BIAS
    # One step of the format at this magnitude is 2**step; below min_normal the step stops shrinking. step and -step
    # both stay within float64's normal exponents, so the two multiplications only move the binary point; torch.round
    # is half-to-even. Infinity and NaN pass through unchanged.
    step = exponent.clamp(min=format.min_exponent) - format.fraction_bits
    rounded = torch.round(x * _power_of_two(-step)) * _power_of_two(step)
    if saturate or not format.has_inf:
        return rounded.clamp(-format.max_finite, format.max_finite)
    overflowed = rounded.abs() > format.max_finite
    return torch.where(overflowed, torch.copysign(torch.full_like(rounded, math.inf), rounded), rounded)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + _FLOAT64_BIAS) << _FLOAT64_FRACTION_BITS).view(torch.float64)


def relative_error_bound(format: Format) -> float:
    """Largest relative error of one rounding, ``|round_to(x) - x| / |x|``: the unit roundoff.

    Holds for magnitudes from ``format.min_normal`` to ``format.max_finite``. It says nothing about subnormal results,
    whose error is bounded in absolute terms only, by half of ``format.min_subnormal``.

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, theorem 2.2.
    """
    return format.unit_roundoff


@dataclass(frozen=True)
class ScaleWindow:
    """The loss scales that keep gradients of known magnitudes inside a format; made by `scale_window`.

    ``str()`` of it is a sentence for people.

    Args:
        g_min: Smallest non-zero gradient magnitude, unscaled.
        g_max: Largest gradient magnitude, unscaled.
        format: The format that the scaled gradients are written to.
        low: Lower end of the interval of scales.
        low_inclusive: Whether ``low`` itself is one of them.
        high: Upper end, always inclusive.
    """

    g_min: float
    g_max: float
    format: Format
    low: float
    low_inclusive: bool
    high: float

    @property
    def exists(self) -> bool:
        """Whether any scale keeps both ends of the range."""
        return self.low <= self.high if self.low_inclusive else self.low < self.high

    def __contains__(self, scale: float) -> bool:
        above = scale >= self.low if self.low_inclusive else scale > self.low
        return above and scale <= self.high

    @property
    def largest_power_of_two(self) -> float | None:
        """The largest power of two among the scales, or ``None``.

        Powers of two are the scales to use: multiplying by one changes no fraction bit.
        """
        candidate = math.ldexp(0.5, math.frexp(self.high)[1])
        return candidate if candidate in self else None

    def __str__(self) -> str:
        name = self.format.name
        if not self.exists:
            goal = "stay normal numbers" if self.low_inclusive else "not round to zero"
            need = "at least" if self.low_inclusive else "more than"
            return (
                f"no scale exists: in {name}, gradients of {self.g_min:g} need a scale of {need} {self.low:.9g} "
                f"to {goal}, but gradients of {self.g_max:g} need at most {self.high:.9g} to stay finite; "
                "use a format with more exponent bits, or narrow the range of the gradients"
            )
        power = self.largest_power_of_two
        inside = "no power of two inside" if power is None else f"largest power of two inside: {power:.9g}"
        opening = "[" if self.low_inclusive else "("
        return (
            f"gradients from {self.g_min:g} to {self.g_max:g} fit {name} with a scale in "
            f"{opening}{self.low:.9g}, {self.high:.9g}]; {inside}"
        )


def scale_window(g_min: float, g_max: float, format: Format, flush_subnormals: bool = False) -> ScaleWindow:
    """Find the loss scales ``S`` with which gradients keep their information in a format.

    The smallest gradient must not round to zero, ``S * g_min > format.underflow_threshold``; where the hardware flushes
    subnormal numbers it must be normal, ``S * g_min >= format.min_normal``. The largest one must stay finite, on the
    safe side of the rounding edge: ``S * g_max <= format.max_finite``. The reason to scale at all: P. Micikevicius et
    al., Mixed Precision Training (2018), section 3.2.

    The quotients are rounded such that a float lies inside the interval if and only if it meets both conditions in
    exact arithmetic.

    Args:
        g_min: Smallest non-zero gradient magnitude, unscaled; positive and finite.
        g_max: Largest gradient magnitude, unscaled; finite, and not less than ``g_min``.
        format: The format that the scaled gradients are written to.
        flush_subnormals: Whether subnormal numbers are turned into zero.

    Raises:
        ValueError: If a magnitude is not positive and finite (NaN included), or ``g_min`` exceeds ``g_max``.
    """
    for what, value in (("g_min", g_min), ("g_max", g_max)):
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{what} is {value}; expected a positive, finite gradient magnitude (zeros need no scale)")
    if g_min > g_max:
        raise ValueError(f"g_min {g_min} exceeds g_max {g_max}; expected the smallest magnitude first")
    low = Fraction(format.min_normal if flush_subnormals else format.underflow_threshold) / Fraction(g_min)
    high = Fraction(format.max_finite) / Fraction(g_max)
    return ScaleWindow(
        g_min=g_min,
        g_max=g_max,
        format=format,
        # S > low and S > (low rounded down) hold for the same floats S: none lies between the two.
        low=_round_up(low) if flush_subnormals else _round_down(low),
        low_inclusive=flush_subnormals,
        high=_round_down(high),
    )


def _round_down(value: Fraction) -> float:
    """Largest float that is not above a positive ``value``."""
    if value > Fraction(sys.float_info.max):
        return sys.float_info.max
    nearest = float(value)
    return math.nextafter(nearest, -math.inf) if Fraction(nearest) > value else nearest


def _round_up(value: Fraction) -> float:
    """Smallest float that is not below a positive ``value``; infinity beyond the largest one."""
    down = _round_down(value)
    return down if Fraction(down) == value else math.nextafter(down, math.inf)
