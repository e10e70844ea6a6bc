"""The loss scale: its configuration (:class:`LossScale`) and its rule (:func:`advance`); the state is in ``scaler``.

The rule is that of dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2): multiply
the loss by S, lower S after an overflow, raise it after a run of clean windows. Used by ``scaler`` and ``precision``.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

_Number = TypeVar("_Number", float, Tensor)

_MAX_INTERVAL = 2**24  # the growth tracker is an FP32 scalar on the device, exact up to here


@dataclass(frozen=True)
class LossScale:
    """Configuration of a dynamic loss scale.

    Args:
        init: Scale of the first window.
        growth_factor: What the scale is multiplied by after ``growth_interval`` applied windows in a row. Above 1.
        backoff_factor: What the scale is multiplied by after an overflow. Between 0 and 1.
        growth_interval: Number of applied windows in a row before the scale grows.
        min: Floor; an overflow at the floor leaves the scale there, so it never reaches zero.
        max: Cap of the growth.
        hysteresis: Number of overflows that it takes before the scale is lowered. Refilled when the scale grows.
        backoff_on_forward_overflow: Whether a window whose *loss* was already non-finite lowers the scale. The loss
            scale acts on the backward pass only, so lowering it cannot help there; ``True`` is what
            ``torch.amp.GradScaler`` does.

    Raises:
        ValueError: If a value is out of range or the values contradict each other.
    """

    init: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min: float = 2.0**-14
    max: float = 2.0**24
    hysteresis: int = 1
    backoff_on_forward_overflow: bool = True

    def __post_init__(self) -> None:
        for name in ("init", "growth_factor", "backoff_factor", "min", "max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not usable(value):
                raise ValueError(f"LossScale({name}={value!r}): expected a finite number above 0 that FP32 can hold.")
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INTERVAL:
                raise ValueError(f"LossScale({name}={value!r}): expected a whole number from 1 to {_MAX_INTERVAL}.")
        if self.growth_factor <= 1:
            raise ValueError(
                f"LossScale(growth_factor={self.growth_factor}): expected a number above 1. "
                "For a scale that never changes pass a number, loss_scale=1024.0, instead of a LossScale."
            )
        if self.backoff_factor >= 1:
            raise ValueError(f"LossScale(backoff_factor={self.backoff_factor}): expected a number between 0 and 1.")
        if not self.min <= self.init <= self.max:
            raise ValueError(
                f"LossScale(init={self.init}, min={self.min}, max={self.max}): the first scale lies outside [min, max]."
            )

    def describe(self) -> dict[str, Any]:
        """The configuration as plain types, for the checkpoint and for printing."""
        return asdict(self)


def advance(
    config: LossScale,
    scale: _Number,
    tracker: _Number,
    hysteresis: _Number,
    found_inf: _Number,
    backoff: _Number,
    *,
    may_grow: bool,
    overdue: bool,
) -> tuple[_Number, _Number, _Number]:
    """One update of the dynamic rule, the same for Python floats (verdict known on the host) and 0-dim FP32 tensors.

    Written with arithmetic only, so that the device path needs no transfer and both paths share every line.

    Args:
        config: Factors and limits.
        scale: Scale ``S`` of the window that just ended.
        tracker: Applied windows since the last growth or overflow.
        hysteresis: Overflows left before the scale is lowered.
        found_inf: 1 if the window was skipped for an overflow, else 0.
        backoff: 1 if that overflow counts against the scale, else 0. Equals ``found_inf`` unless forward overflows are
            exempt.
        may_grow: ``False`` while another optimizer holds gradients of the present scale; growth then waits, counting
            on.
        overdue: ``True`` where held gradients are rescaled with the scale, so that a growth that has waited for a whole
            further interval is taken at last instead of being put off for ever by gradients that nobody consumes.

    Returns:
        The new ``(scale, tracker, hysteresis)``.
    """
    clean = 1.0 - found_inf
    keep = clean if backoff is found_inf else 1.0 - backoff
    tracker = (tracker + 1.0) * clean
    if config.hysteresis > 1:
        hysteresis = hysteresis - backoff
        backoff = backoff * (hysteresis <= 0)
        keep = 1.0 - backoff
    if may_grow or overdue:
        due = config.growth_interval if may_grow else 2 * config.growth_interval
        grow = tracker >= due
        keep = keep * (grow * (config.growth_factor - 1.0) + 1.0)  # a window that grows the scale did not overflow
        if config.hysteresis > 1:
            hysteresis = hysteresis + grow * (config.hysteresis - hysteresis)
        tracker = tracker * (tracker < due)
    # Chosen, not added up: 1 + (factor - 1) would lose a small backoff factor in FP32.
    scale = scale * (backoff * config.backoff_factor + keep)
    if isinstance(scale, Tensor):
        return scale.clamp(config.min, config.max), tracker, hysteresis
    return to_fp32(max(config.min, min(config.max, scale))), tracker, hysteresis


def usable(value: float) -> bool:
    """Whether ``value`` is a scale, or a factor of one, that training can go on with: normal and positive in FP32."""
    limits = torch.finfo(torch.float32)
    return math.isfinite(value) and limits.tiny <= to_fp32(value) <= limits.max


def to_fp32(value: float) -> float:
    """``value`` rounded to FP32: the host's copy of the scale must be the number the device holds."""
    return ctypes.c_float(value).value
