"""Reductions over each of many tensors, in few ops and little memory: :class:`Blocks`. What measures of layers build on.

An op for each tensor would cost a small model more than its training step; an op over a large tensor needs as much
memory again, and FP32 sums over it lose digits. So small tensors of one length are stacked and large ones cut: every op
works on a matrix of a bounded number of elements, each row of which belongs to one tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements an op works on. On a CPU a larger sum in FP32 loses digits (8e-3 relative at 15M elements) and leaves the cache;
# a GPU sums in trees, and pays for each launch.
CPU_ELEMENTS, GPU_ELEMENTS = 2**18, 2**22


@dataclass(frozen=True)
class _Block:
    """Rows of one matrix: whole tensors of one length, or a piece of one.

    Attributes:
        owners: Positions of the tensors.
        start: First element of the piece.
        length: Number of elements of each row.
    """

    owners: tuple[int, ...]
    start: int
    length: int


class Blocks:
    """How tensors of given sizes are stacked and cut. Made once for a model, used at every step.

    Args:
        tensors: Any tensors, also empty ones, which have no rows. Only size, dtype and device are looked at.
        elements: Largest number of elements in a matrix; by default what suits the device.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics.blocks import Blocks
        >>> tensors = [torch.ones(3), torch.full((2, 2), 2.0), torch.full((3,), 3.0)]
        >>> blocks = Blocks(tensors)
        >>> blocks.sum([(matrix * matrix).sum(1, keepdim=True) for matrix in blocks.of(tensors)]).flatten().tolist()
        [3.0, 16.0, 27.0]
    """

    def __init__(self, tensors: Sequence[Tensor], elements: int | None = None) -> None:
        self.count = len(tensors)
        self._blocks: list[_Block] = []
        alike: dict[tuple[torch.device, torch.dtype, int], list[int]] = defaultdict(list)
        for position, tensor in enumerate(tensors):
            if tensor.numel():
                alike[tensor.device, tensor.dtype, tensor.numel()].append(position)
        for (device, _, length), positions in alike.items():
            limit = elements or (CPU_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS)
            if length > limit:
                for position in positions:
                    for start in range(0, length, limit):
                        self._blocks.append(_Block((position,), start, min(limit, length - start)))
                continue
            rows = max(1, limit // length)
            for first in range(0, len(positions), rows):
                self._blocks.append(_Block(tuple(positions[first : first + rows]), 0, length))
        self._owners = [owner for block in self._blocks for owner in block.owners]
        self._owner_index: dict[torch.device, Tensor] = {}
        self._row_index: dict[torch.device, Tensor] = {}
        self._all_have_rows = len(set(self._owners)) == self.count

    def __len__(self) -> int:
        """Number of matrices."""
        return len(self._blocks)

    def of(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """The matrices of tensors of these sizes, ``[rows, elements]``; not to be written to, some are views."""
        for (matrix,) in self.together(tensors):
            yield matrix

    def together(self, *lists: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Matrices of several lists, element by element of each other: parameters and what an optimizer keeps for them."""
        for block in self._blocks:
            flat = [_flat([tensors[owner] for tensors in lists]) for owner in block.owners]
            if len(flat) == 1:
                yield tuple(part[block.start : block.start + block.length].unsqueeze(0) for part in flat[0])
            else:
                yield tuple(torch.stack([parts[which] for parts in flat]) for which in range(len(lists)))

    def owners(self) -> Iterator[tuple[int, ...]]:
        """The positions of the tensors whose rows the matrices hold, in their order."""
        return (block.owners for block in self._blocks)

    def sum(self, rows: Sequence[Tensor]) -> Tensor:
        """Adds up what was found in rows, by tensor.

        Args:
            rows: For every matrix ``[rows, columns]``.

        Returns:
            ``[tensors, columns]``, FP64 where the device has it; 0 for empty tensors.
        """
        found = self._joined(rows)
        if found is None:
            return torch.zeros(self.count, 0, dtype=torch.float64)
        return found.new_zeros(self.count, found.shape[1]).index_add_(0, self._index(found.device), found)

    def max(self, rows: Sequence[Tensor], empty: float = 0.0) -> Tensor:
        """The largest of what was found in rows, by tensor; NaN counts as larger than anything.

        Args:
            rows: For every matrix ``[rows, columns]``.
            empty: For tensors without elements.

        Returns:
            ``[tensors, columns]``, FP64 where the device has it.
        """
        found = self._joined(rows)
        if found is None:
            return torch.full((self.count, 0), empty, dtype=torch.float64)
        largest = found[self._rows_of(found.device)].amax(dim=1)
        return largest if self._all_have_rows else torch.where(self._has_rows(found.device), largest, empty)

    def _joined(self, rows: Sequence[Tensor]) -> Tensor | None:
        if not rows:
            return None
        device = rows[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        return torch.cat([row.to(device, wide) for row in rows])

    def _index(self, device: torch.device) -> Tensor:
        if device not in self._owner_index:
            self._owner_index[device] = torch.tensor(self._owners, device=device)
        return self._owner_index[device]

    def _rows_of(self, device: torch.device) -> Tensor:
        """Of each tensor all its rows, ``[tensors, most rows]``, the first again where there are fewer."""
        if device not in self._row_index:
            rows: list[list[int]] = [[] for _ in range(self.count)]
            for row, owner in enumerate(self._owners):
                rows[owner].append(row)
            most = max(map(len, rows))
            padded = [[*of, *([of[0] if of else 0] * (most - len(of)))] for of in rows]
            self._row_index[device] = torch.tensor(padded, device=device)
        return self._row_index[device]

    def _has_rows(self, device: torch.device) -> Tensor:
        have = set(self._owners)
        return torch.tensor([[position in have] for position in range(self.count)], device=device)


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors of one shape as vectors, all in the same order of elements."""
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(-1) for tensor in tensors]
    if torch.ops.aten.is_non_overlapping_and_dense(first) and all(
        tensor.stride() == first.stride() for tensor in tensors
    ):
        return [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]  # in the order of memory, no copy
    return [tensor.reshape(-1) for tensor in tensors]
