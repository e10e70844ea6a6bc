"""From tensors looked at to numbers of modules: :class:`MicroBatch` says who saw what, :class:`Layout` adds up.

Used by ``sightings``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_amp_plus.callbacks.readout import Over
from lightning_amp_plus.metrics.activation_health import Bits, from_bits
from lightning_amp_plus.metrics.blocks import Rows
from lightning_amp_plus.wide import wide_dtype

# Columns of what is folded: those of which the largest counts, and those that are added up.
PEAK, FULLNESS, NEGATED_SMALLEST = range(3)
NOT_FINITE, ELEMENTS, UNREAD, BEGAN_HERE = range(4)
MAXIMA: tuple[Over, ...] = ("max",) * 3
SUMS: tuple[Over, ...] = ("sum",) * 4


@dataclass
class MicroBatch:
    """What was seen in one micro-batch. Each tensor that was seen has a number.

    Attributes:
        calls: Number of calls of modules.
        pairs: Call, side and tensor, for each tensor that a module took or returned.
        elements: Number of elements of each tensor.
        largest: Largest finite number of its dtype.
        unread: Tensors that could not be looked at.
        found: By dtype what was found in rows, in the order of looking.
        rows: By dtype the tensor of each row.
    """

    calls: int = 0
    pairs: list[tuple[int, int, int]] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    found: dict[torch.dtype, list[Bits]] = field(default_factory=dict)
    rows: dict[torch.dtype, list[int]] = field(default_factory=dict)

    def layout(self) -> tuple[Any, ...]:
        """All of it but the numbers found."""
        return self.pairs, self.rows, self.elements, self.largest, self.unread, self.calls


class Layout:
    """Which rows of what was found belong to which call and side. The same in every step of most models."""

    def __init__(self, of: MicroBatch, sides: int, device: torch.device) -> None:
        self._device = device
        self._wide = wide_dtype(device)
        self._of = of.layout()
        self._dtypes = list(of.rows)
        owners = [sighting for dtype in self._dtypes for sighting in of.rows[dtype]]
        rows: list[list[int]] = [[] for _ in of.elements]
        for row, owner in enumerate(owners):
            rows[owner].append(row)
        unread = len(owners)  # one row more, for what could not be looked at
        for sighting in of.unread:
            rows[sighting] = [unread]
        first = {of_one[0] for of_one in rows if of_one}
        elements = [of.elements[owner] if row in first else 0 for row, owner in enumerate(owners)]
        self._elements = torch.tensor([[n, 0.0] for n in [*elements, 0]], dtype=self._wide, device=device)
        self._elements[unread, 1] = 1.0
        self._largest = torch.tensor([of.largest[owner] for owner in owners], dtype=self._wide, device=device)
        source, side_of, call_of = [], [], []
        for call, side, sighting in of.pairs:
            for row in rows[sighting]:
                source.append(row)
                side_of.append(side)
                call_of.append(2 * call + side % 2)
        self._source = torch.tensor(source, dtype=torch.long, device=device)
        self._by_side = Rows(side_of, sides)
        self._by_call = Rows(call_of, 2 * of.calls)
        outputs = dict.fromkeys(range(of.calls), 0)
        outputs.update({call: side | 1 for call, side, _ in of.pairs})
        self._output_side = Rows(list(outputs.values()), sides)
        self._nothing = torch.tensor([[-torch.inf] * 3 + [0.0]], dtype=self._wide, device=device)

    def fits(self, of: MicroBatch) -> bool:
        """Whether what was seen is laid out like this."""
        return self._of == of.layout()

    def fold(self, found: dict[torch.dtype, list[Bits]]) -> tuple[Tensor, Tensor]:
        """Reduces what was found to the sides of modules; see :meth:`Sightings.totals`, whose columns these are."""
        numbers = [self._numbers(found[dtype], dtype) for dtype in self._dtypes]
        if numbers:
            peak, smallest, count = torch.cat(numbers).to(self._device).unbind(1)
            known = torch.stack([peak, peak / self._largest, -smallest, count], dim=1)
            rows = torch.cat([torch.cat([known, self._nothing]), self._elements], dim=1)
        else:
            rows = torch.cat([self._nothing, self._elements], dim=1)
        rows = rows[self._source]
        maxima, added = self._by_side.max(rows[:, :3], -torch.inf), rows[:, 3:]
        by_call = self._by_call.sum(added).view(-1, 2, 3)
        troubled = by_call[:, 0, NOT_FINITE] + by_call[:, 0, UNREAD]
        began = ((by_call[:, 1, NOT_FINITE] > 0) & (troubled == 0)).to(self._wide).unsqueeze(1)
        return maxima, torch.cat([self._by_side.sum(added), self._output_side.sum(began)], dim=1)

    @staticmethod
    def _numbers(found: list[Bits], dtype: torch.dtype) -> Tensor:
        if len({bits.largest.device for bits in found}) > 1:  # a model over several devices
            device = found[0].largest.device
            return torch.cat([from_bits(bits, dtype).to(device) for bits in found])
        joined = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
        return from_bits(Bits(*joined), dtype)
