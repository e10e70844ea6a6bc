"""What GradientMonitor saw at a log point, for people, and its warnings. Used by ``gradient``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_amp_plus.formats import ScaleWindow


@dataclass(frozen=True)
class GradientReading:
    """What :class:`GradientMonitor` saw last. Dicts are by layer and hold those that had a gradient.

    Attributes:
        step: As loggers count.
        scale: The loss scale that the gradients had been multiplied by; 1 where there is none.
        norm: Global L2 norm.
        norms: L2 norm of each layer.
        largest: Largest magnitude of each layer.
        zeros: Share of zeros of each layer.
        underflow: Share of each layer's non-zero elements that FP16 would round to zero at ``scale``.
        flushed: Share of its non-zero elements that are below FP16's normal numbers at ``scale``, which hardware that
            flushes subnormal numbers would turn into zero.
        lost: Estimated share of each layer's elements that FP16 has turned into zero already; see ``cut_off``.
        nans: Number of NaN of each layer that has any.
        infs: Number of infinite elements of each layer that has any.
        window: The loss scales that fit the gradients of all layers together; ``None`` where they are not finite or zero.
        unfit: Layers that no loss scale fits at which most others do.
        histogram: Exponents of all gradients; see ``metrics.exponents`` for the columns.
        histograms: The same by layer, ``[layers, BINADES]``, in the order of ``norms``.
    """

    step: int
    scale: float
    norm: float
    norms: Mapping[str, float]
    largest: Mapping[str, float]
    zeros: Mapping[str, float]
    underflow: Mapping[str, float]
    flushed: Mapping[str, float]
    lost: Mapping[str, float]
    nans: Mapping[str, float]
    infs: Mapping[str, float]
    window: ScaleWindow | None
    unfit: tuple[str, ...]
    histogram: Tensor = field(repr=False)
    histograms: Tensor = field(repr=False)


def underflow(reading: GradientReading, lost: Mapping[str, float], unscaled_in_fp16: bool) -> str:
    """The warning of gradients that FP16 turned into zero: how many of which layers, and what to do.

    Args:
        reading: What was seen.
        lost: Share that was lost, by layer.
        unscaled_in_fp16: Whether gradients are divided by the loss scale in FP16 itself.
    """
    worst, share = max(lost.items(), key=lambda item: item[1])
    window = reading.window
    room = 0.0 if window is None else window.high / reading.scale
    if unscaled_in_fp16:
        remedy = (
            "Gradients are divided by the loss scale in FP16 here, so that no scale helps: use 16-mixed, or "
            "PrecisionPolicy('fp16', params='fp16', master_weights=True)."
        )
    elif room >= 2:
        assert window is not None
        remedy = (
            f"The largest gradient leaves room for a loss scale of up to {window.high:.4g}: raise LossScale(init=...), or "
            "shorten growth_interval, so that the scale gets there."
        )
    else:
        remedy = (
            "A larger loss scale would overflow at the largest gradient: use bf16 for these layers, "
            f"Rule({worst!r}, compute='bf16')."
        )
    beside = [name for name, share in reading.zeros.items() if share == 1.0]
    also = f" All gradients are zero in {_some(beside)}, perhaps for the same reason." if beside else ""
    return (
        f"Gradients underflow in FP16 at step {reading.step}, with a loss scale of {reading.scale:g}: about {share:.0%} of "
        f"the elements of {worst!r} became zero ({reading.zeros[worst]:.0%} of them are zero), since the histogram of its "
        f"exponents breaks off at FP16's smallest step. So in {len(lost)} of {len(reading.norms)} layers: "
        f"{_some(sorted(lost, key=lambda name: -lost[name]))}.{also} {remedy} Said once."
    )


def no_scale(reading: GradientReading, unfit: Sequence[str], outliers: float) -> str:
    """The warning of layers that no loss scale fits together with the others."""
    first = unfit[0]
    return (
        f"No loss scale exists that keeps the gradients of all layers in FP16 at step {reading.step}, with {outliers:.2%} "
        f"of the smallest ones left out: use bf16 for these layers, {_some(unfit)} (for example Rule({first!r}, "
        f"compute='bf16')); the largest gradient of {first!r} is {reading.largest[first]:.3g}. Said once."
    )


def _some(names: Sequence[str], most: int = 5) -> str:
    listed = ", ".join(repr(name) for name in names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
