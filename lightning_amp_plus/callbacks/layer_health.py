"""What a log point says of each layer: :class:`LayerHealth`, made on demand from :class:`Taken`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lightning_amp_plus.callbacks import folding
from lightning_amp_plus.callbacks.sightings import Sightings
from lightning_amp_plus.metrics.activation_health import headroom


@dataclass(frozen=True)
class TensorHealth:
    """What was found in the inputs or the outputs of a module, over a window's micro-batches and over ranks.

    Attributes:
        dtype: What they came in, on this rank (``bf16``; ``bf16+fp32`` if in several).
        amax: Largest magnitude; infinity or NaN if there is one among the elements.
        smallest: Smallest magnitude but zero; infinity if there is no finite one.
        nonfinite: Share of elements that are infinite or NaN.
        headroom: Bits that ``amax`` can grow until it passes the largest finite number of its dtype.
        elements: Number of elements.
    """

    dtype: str
    amax: float
    smallest: float
    nonfinite: float
    headroom: float
    elements: int


@dataclass(frozen=True)
class LayerHealth:
    """What is known of a layer at the last log point.

    Attributes:
        output: Of what it returned; ``None`` where that is not known, and ``note`` says why.
        input: Of what it was given.
        parameter_amax: Largest magnitude in its own parameters; ``None`` if it has none.
        note: Why something is not known; empty if everything is.
    """

    output: TensorHealth | None = None
    input: TensorHealth | None = None
    parameter_amax: float | None = None
    note: str = ""


class Taken:
    """The numbers of one log point on the host; rows are sides of modules as in :class:`Sightings`."""

    def __init__(self, numbers: Sequence[Tensor], seen: Sightings) -> None:
        self._maxima, self._sums, parameters = numbers
        self._elements = self._sums[:, folding.ELEMENTS]
        self._known: list[bool] = ((self._elements > 0) & (self._sums[:, folding.UNREAD] == 0)).tolist()
        self._columns: dict[tuple[str, int], list[float]] = {}
        self.parameters: list[float] = parameters.flatten().tolist()
        self.order, self._unreadable = list(seen.order), dict(seen.unreadable)
        self._dtypes = seen.dtypes

    @cached_property
    def dtypes(self) -> list[str]:
        """Of each side."""
        return self._dtypes()

    def column(self, name: str, side: int) -> list[float]:
        """One number of all modules, of what they were given (0) or returned (1); made when it is asked for.

        Args:
            name: An attribute of :class:`TensorHealth`; or ``not_finite``, the number of such elements, or ``began_here``,
                that of calls whose output was not finite while the inputs were.
            side: 0 or 1.
        """
        if (name, side) not in self._columns:
            self._columns[name, side] = self._make(name)[side::2].tolist()
        return self._columns[name, side]

    def _make(self, name: str) -> Tensor:
        if name == "amax":
            return self._maxima[:, folding.PEAK]
        if name == "smallest":
            return -self._maxima[:, folding.NEGATED_SMALLEST]
        if name == "headroom":
            return headroom(self._maxima[:, folding.FULLNESS].clamp(min=0.0))
        if name == "began_here":
            return self._sums[:, folding.BEGAN_HERE]
        if name == "elements":
            return self._elements
        count = self._sums[:, folding.NOT_FINITE]
        return count if name == "not_finite" else count / self._elements.clamp(min=1.0)

    def known(self, side: int) -> list[bool]:
        """Whether these numbers are those of all that was there."""
        return self._known[side::2]

    def side(self, row: int) -> TensorHealth | None:
        """What is known of one side of one module."""
        if not self._known[row]:
            return None
        amax, smallest, nonfinite, room, elements = (
            self.column(name, row % 2)[row // 2] for name in ("amax", "smallest", "nonfinite", "headroom", "elements")
        )
        return TensorHealth(self.dtypes[row], amax, smallest, nonfinite, room, int(elements))

    def note(self, module: int) -> str:
        """Why something is missing of a module."""
        notes = []
        for row, what in ((2 * module + 1, "output"), (2 * module, "input")):
            if row in self._unreadable:
                notes.append(f"{what}: {self._unreadable[row]}")
            elif not self._known[row] and self._elements[row] > 0:
                notes.append(f"{what}: not read on another rank")
        if not notes and not self._known[2 * module + 1]:
            notes.append("output: no floating-point tensor" if module in self.order else "did not run")
        return "; ".join(notes)
