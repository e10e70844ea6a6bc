"""The run so far in numbers: :class:`History`, kept by the step sequence and saved in the checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, overload

from lightning_amp_plus.metrics.skip_rate import skip_rate
from lightning_amp_plus.step_report import StepReport

_MAX_RUNS = 4096


class RunLengths(Sequence[float]):
    """A read-only sequence of floats, stored as (value, count) runs; the oldest runs are dropped beyond a bound.

    A loss scale changes every few thousand windows, so millions of windows take a few hundred runs.
    """

    def __init__(self, runs: Sequence[tuple[float, int]] = (), max_runs: int = _MAX_RUNS) -> None:
        self._runs: deque[tuple[float, int]] = deque(((float(v), int(n)) for v, n in runs), maxlen=max_runs)

    @property
    def runs(self) -> list[tuple[float, int]]:
        """The runs themselves, oldest first."""
        return list(self._runs)

    def _append(self, value: float) -> None:
        if self._runs and self._runs[-1][0] == value:
            self._runs[-1] = (value, self._runs[-1][1] + 1)
        else:
            self._runs.append((value, 1))

    def __len__(self) -> int:
        return sum(count for _, count in self._runs)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> list[float]: ...
    def __getitem__(self, index: int | slice) -> float | list[float]:
        if isinstance(index, slice):
            return list(self)[index]
        position = index + len(self) if index < 0 else index
        if position < 0:
            raise IndexError(index)
        for value, count in self._runs:
            if position < count:
                return value
            position -= count
        raise IndexError(index)

    def __iter__(self) -> Iterator[float]:
        for value, count in self._runs:
            for _ in range(count):
                yield value

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (RunLengths, list, tuple)):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            " ".join(f"{value:g}" if count == 1 else f"{value:g}*{count}" for value, count in self._runs) or "(empty)"
        )


class History:
    """Counts over all windows with a verdict, and the scale after each.

    Attributes:
        scales: ``next_scale`` of each window, oldest first, run-length encoded and bounded.
        applied: Windows whose step was applied.
        skipped: Windows skipped because a gradient was not finite.
        growths: How often the scale grew.
        backoffs: How often it was lowered.
        consecutive_skips: Length of the present run of skips.
    """

    def __init__(self) -> None:
        self.scales = RunLengths()
        self.applied = 0
        self.skipped = 0
        self.growths = 0
        self.backoffs = 0
        self.consecutive_skips = 0

    @property
    def skip_rate(self) -> float:
        """Share of windows skipped for an overflow since the start; 0.0 before the first window."""
        return skip_rate(self.skipped, self.applied + self.skipped)

    def absorb(self, report: StepReport) -> None:
        """Counts one report; those without a verdict (no backward, no gradients) count nowhere."""
        outcome = report.outcome
        if outcome == "applied":
            self.applied += 1
            self.consecutive_skips = 0
        elif outcome == "skipped_overflow":
            self.skipped += 1
            self.consecutive_skips += 1
        else:
            return
        before, after = report.scale, report.next_scale
        self.growths += after > before
        self.backoffs += after < before
        self.scales._append(after)

    def state_dict(self) -> dict[str, Any]:
        """Plain types for the checkpoint."""
        return {
            "scales": [[value, count] for value, count in self.scales.runs],
            "applied": self.applied,
            "skipped": self.skipped,
            "growths": self.growths,
            "backoffs": self.backoffs,
            "consecutive_skips": self.consecutive_skips,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``."""
        self.scales = RunLengths(state["scales"])
        for name in ("applied", "skipped", "growths", "backoffs", "consecutive_skips"):
            setattr(self, name, int(state[name]))

    def __repr__(self) -> str:
        return (
            f"History(applied={self.applied}, skipped={self.skipped}, skip_rate={self.skip_rate:.2%}, "
            f"growths={self.growths}, backoffs={self.backoffs}, scales={self.scales!r})"
        )
