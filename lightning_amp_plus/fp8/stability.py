"""Whether training has become quiet enough for FP8: :class:`Stability`, the definition behind ``fp8_when_stable``.

Pure numbers in, a verdict out, and a state of plain numbers. It knows neither tensors nor ranks; ``integration.fp8_start``
brings it one gradient norm and one loss for each applied step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median, quantiles, variance
from typing import Any

# Applied steps that are looked at. Two of Lightning's default log intervals, at which the question is asked; with fewer,
# a mean over half of them is mostly the noise of single batches.
WINDOW = 100
HALF = WINDOW // 2

# A gradient norm above this many medians is a spike; those that matter are of an order of magnitude. The largest of 100
# absolute values of a normal variable, the norms of a batch of one sample, is about 4 medians.
SPIKE_OF_NORM = 5.0

# A loss this many standard deviations above the rest is a spike, as in the spike score of OLMo 2 (arXiv 2501.00656).
SPIKE_OF_LOSS = 7.0

# From the first to the last decile a normal variable has 2.563 standard deviations. Deciles, since a spike would widen a
# standard deviation that it is measured by; and not the median deviation, which is 0 where most losses of BF16 are equal.
_DECILES = 2.563

# The least standard deviation of a loss, as a share of it: where BF16 rounds to one neighbor or the other is no spike.
_ROUNDING = 2.0**-9

# A difference between two means counts from this many of its standard errors on: three, since the question is asked again
# and again, and level losses should not wait for a lucky draw.
NOISE = 3.0

# The early, fast phase is over once the loss falls, from one half of the window to the other, by at most this share of
# all that it has fallen so far. Unlike a share of the loss itself that means the same near zero, below it, and for losses
# in any unit. Where the loss falls evenly it takes about ten halves of a window.
CALM = 0.1


class Stability:
    """The last applied steps of one optimizer, and whether they were quiet.

    They were if, over the last :data:`WINDOW` applied steps,

    - none in between was skipped, and no norm or loss was infinite or NaN;
    - no gradient norm was above :data:`SPIKE_OF_NORM` times their median;
    - no loss was :data:`SPIKE_OF_LOSS` standard deviations above their median, the deviation taken from the deciles;
    - the loss did not rise: the mean of the newer half is not above that of the older by more than :data:`NOISE` standard
      errors of the difference;
    - the loss fell, if by more than that, by at most :data:`CALM` of all it has fallen since its highest level, the largest
      median of any :data:`HALF` steps in a row.

    So the unit of the loss does not matter, nor whether it is near zero or below. Where a step has no loss, norms decide
    alone.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._losses: deque[float | None] = deque(maxlen=WINDOW)
        self._peak: float | None = None

    def observe(self, norm: float, loss: float | None) -> None:
        """Takes one applied step.

        Args:
            norm: Norm of its gradients, before clipping.
            loss: Mean loss of its window, or ``None`` if it is not known.
        """
        if not math.isfinite(norm) or (loss is not None and not math.isfinite(loss)):
            self.interrupt()
            return
        self._norms.append(norm)
        self._losses.append(loss)
        newest = _known(list(self._losses)[-HALF:])
        if newest is not None and len(newest) == HALF:
            level = median(newest)
            self._peak = level if self._peak is None else max(self._peak, level)

    def interrupt(self) -> None:
        """A step was skipped, or not finite: the steps before it count no more, but how high the loss has been does."""
        self._norms.clear()
        self._losses.clear()

    def unrest(self) -> str | None:
        """What speaks against quiet, in words, or ``None`` if nothing does."""
        if len(self._norms) < WINDOW:
            return f"{len(self._norms)} of {WINDOW} applied steps in a row are known"
        middle, largest = median(self._norms), max(self._norms)
        if largest > SPIKE_OF_NORM * middle:
            return (
                f"the gradient norm went up to {largest:.3g}, and its median is {middle:.3g} (the largest may be "
                f"{SPIKE_OF_NORM:g} times that)"
            )
        losses = _known(self._losses)
        return None if losses is None else self._unrest_of(losses)

    def _unrest_of(self, losses: list[float]) -> str | None:
        middle, largest = median(losses), max(losses)
        deciles = quantiles(losses, n=10)
        deviation = max((deciles[-1] - deciles[0]) / _DECILES, _ROUNDING * abs(middle))
        if largest - middle > SPIKE_OF_LOSS * deviation:
            return (
                f"the loss went up to {largest:.3g}, and its median is {middle:.3g} with a standard deviation of "
                f"{deviation:.2g} (the largest may be {SPIKE_OF_LOSS:g} of them above)"
            )
        older, newer = losses[:HALF], losses[HALF:]
        before, now = fmean(older), fmean(newer)
        noise = NOISE * math.sqrt((variance(older) + variance(newer)) / HALF)
        if now - before > noise:
            return f"the loss is rising: from {before:.4g} to {now:.4g} on average"
        assert self._peak is not None  # a full window of losses has been through a half of one
        if before - now > noise and before - now > CALM * (self._peak - now):
            return (
                f"the loss is still falling fast: from {before:.4g} to {now:.4g} on average, of {self._peak:.4g} at its "
                "highest"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Plain, finite numbers."""
        return {"norms": list(self._norms), "losses": list(self._losses), "peak": self._peak}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`state_dict`."""
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._peak = state["peak"]


def _known(losses: Sequence[float | None] | deque[float | None]) -> list[float] | None:
    """The losses, if none is missing."""
    known = [loss for loss in losses if loss is not None]
    return known if len(known) == len(losses) else None
