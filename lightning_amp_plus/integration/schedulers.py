"""The gate on per-step learning-rate schedulers: a skipped window advances none. Installed in ``connect``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig

# Lightning steps a scheduler when `batch number % frequency == 0`; no run has this many batches.
_NEVER = 2**62


def _never_skipped() -> bool:
    return False


@dataclasses.dataclass
class GatedSchedulerConfig(LRSchedulerConfig):
    """A scheduler configuration whose ``frequency`` no batch meets right after a skipped window.

    ``interval`` keeps its value, since LearningRateMonitor selects by it, and the scheduler object itself is not
    touched, since an attribute put on it would end up in its ``state_dict()``.
    """

    skipped: Callable[[], bool] = dataclasses.field(default=_never_skipped, repr=False, compare=False)

    @property  # type: ignore[misc]
    def frequency(self) -> int:
        """The user's frequency, in batches, or a number no batch index is a multiple of."""
        return _NEVER if self.skipped() else self._frequency

    @frequency.setter
    def frequency(self, value: int) -> None:
        self._frequency = value


def gate_schedulers(configs: list[Any], skipped: Callable[[], bool]) -> tuple[list[Any], bool]:
    """Puts the gate on every scheduler with ``interval="step"``.

    Args:
        configs: Lightning's scheduler configurations.
        skipped: Whether the window that just closed was skipped.

    Returns:
        The configurations to use, and whether any is gated.
    """
    gated, any_gated = [], False
    for config in configs:
        if isinstance(config, LRSchedulerConfig) and config.interval == "step":
            fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(LRSchedulerConfig)}
            if isinstance(config, GatedSchedulerConfig):
                fields["frequency"] = config._frequency
            config = GatedSchedulerConfig(**fields, skipped=skipped)
            any_gated = True
        gated.append(config)
    return gated, any_gated
