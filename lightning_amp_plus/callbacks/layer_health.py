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
        maxima, sums, parameters = numbers
        elements = sums[:, folding.ELEMENTS]
        self._table = {
            "amax": maxima[:, folding.PEAK],
            "smallest": -maxima[:, folding.NEGATED_SMALLEST],
            "headroom": headroom(maxima[:, folding.FULLNESS].clamp(min=0.0)),
            "not_finite": sums[:, folding.NOT_FINITE],
            "nonfinite": sums[:, folding.NOT_FINITE] / elements.clamp(min=1.0),
            "elements": elements,
            "began_here": sums[:, folding.BEGAN_HERE],
        }
        self._known: list[bool] = ((elements > 0) & (sums[:, folding.UNREAD] == 0)).tolist()
        self._sides: dict[int, dict[str, list[float]]] = {}
        self.parameters: list[float] = parameters.flatten().tolist()
        self.order, self._unreadable = list(seen.order), dict(seen.unreadable)
        self._dtypes = seen.dtypes

    @cached_property
    def dtypes(self) -> list[str]:
        """Of each side."""
        return self._dtypes()

    def columns(self, side: int) -> dict[str, list[float]]:
        """Numbers of all modules, of what they were given (0) or returned (1)."""
        if side not in self._sides:
            self._sides[side] = {name: column[side::2].tolist() for name, column in self._table.items()}
        return self._sides[side]

    def known(self, side: int) -> list[bool]:
        """Whether these numbers are those of all that was there."""
        return self._known[side::2]

    def side(self, row: int) -> TensorHealth | None:
        """What is known of one side of one module."""
        if not self._known[row]:
            return None
        found = {name: column[row // 2] for name, column in self.columns(row % 2).items()}
        return TensorHealth(
            self.dtypes[row],
            found["amax"],
            found["smallest"],
            found["nonfinite"],
            found["headroom"],
            int(found["elements"]),
        )

    def note(self, module: int) -> str:
        """Why something is missing of a module."""
        notes = []
        for row, what in ((2 * module + 1, "output"), (2 * module, "input")):
            if row in self._unreadable:
                notes.append(f"{what}: {self._unreadable[row]}")
            elif not self._known[row] and self._table["elements"][row] > 0:
                notes.append(f"{what}: not read on another rank")
        if not notes and not self._known[2 * module + 1]:
            notes.append("output: no floating-point tensor" if module in self.order else "did not run")
        return "; ".join(notes)
