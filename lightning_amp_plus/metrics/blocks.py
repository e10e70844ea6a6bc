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

from lightning_amp_plus.wide import wide_dtype

# Elements an op works on. On a CPU a larger sum in FP32 loses digits (8e-3 relative at 15M elements) and leaves the cache;
# a GPU sums in trees, and pays for each launch.
CPU_ELEMENTS, GPU_ELEMENTS = 2**18, 2**22


# Of tensors with fewer elements no share is taken: looking at them whole costs less than picking.
_SMALLEST_SHARED = 2**16
# Elements that a share takes in one run: long ones are read at the speed of memory, many ones are a better sample.
_LONGEST_RUN, _LEAST_RUNS = 2**13, 16


@dataclass(frozen=True)
class _Block:
    """Rows of one matrix: whole tensors of one shape, or pieces of one tensor.

    Attributes:
        owners: Position of the tensor that each row belongs to.
        whole: Whether a row is a tensor.
        start: First element of the first piece.
        length: Number of elements of each row.
        stride: Number of elements from the start of a piece to that of the next.
    """

    owners: tuple[int, ...]
    whole: bool
    start: int
    length: int
    stride: int = 0


class Scratch:
    """Matrices to write to, used again for the next block, and on a CPU at the next step.

    A CPU's memory that is asked for and given back block by block comes from the system anew each time, page by page.
    """

    def __init__(self) -> None:
        self._matrices: dict[tuple[int, torch.Size, torch.dtype, torch.device], Tensor] = {}

    def like(self, slot: int, shape: torch.Size, of: Tensor) -> Tensor:
        """A tensor of a shape, in the dtype and on the device of another, with any content.

        Args:
            slot: Which; tensors of one shape that are in use at the same time have different ones.
            shape: Its shape.
            of: The other tensor.
        """
        key = (slot, shape, of.dtype, of.device)
        found = self._matrices.get(key)
        if found is None:
            found = self._matrices[key] = torch.empty(shape, dtype=of.dtype, device=of.device)
        return found

    def release(self) -> None:
        """Gives back what is not a CPU's: a GPU's memory comes from torch's own store, at no cost."""
        self._matrices = {key: matrix for key, matrix in self._matrices.items() if matrix.device.type == "cpu"}


class Blocks:
    """How tensors of given shapes are stacked and cut. Made once for a model, used at every step.

    Args:
        tensors: Any tensors, also empty ones, which have no rows. Only shape, dtype and device are looked at.
        elements: Largest number of elements in a matrix; by default what suits the device.
        one_in: Of a tensor of 65536 elements or more, take only one element in so many: runs of neighbors, at places
            that are always the same and meet all columns of a weight. ``scales`` says what sums are multiplied by.
        longest: Cut large tensors into rows of this length rather than into one row a matrix, the rest left over being
            a row of its own; for kernels that reduce rows without losing digits only up to some length. Tensors of
            which four fit into a matrix stay whole.
        stacked: Largest number of elements in a matrix made of several tensors, if not ``elements``.

    Attributes:
        count: Number of tensors.
        sizes: For each tensor its number of elements.
        scales: For each tensor its number of elements over the number of those taken.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics.blocks import Blocks
        >>> tensors = [torch.ones(3), torch.full((2, 2), 2.0), torch.full((3,), 3.0)]
        >>> blocks = Blocks(tensors)
        >>> blocks.sum([(matrix * matrix).sum(1, keepdim=True) for matrix in blocks.of(tensors)]).flatten().tolist()
        [3.0, 16.0, 27.0]
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        elements: int | None = None,
        one_in: int = 1,
        longest: int | None = None,
        stacked: int | None = None,
    ) -> None:
        self.count = len(tensors)
        self.sizes = [tensor.numel() for tensor in tensors]
        self.scales = [1.0] * self.count
        self._blocks: list[_Block] = []
        alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[int]] = defaultdict(list)
        for position, tensor in enumerate(tensors):
            if tensor.numel():
                alike[tensor.device, tensor.dtype, tensor.shape].append(position)
        for (device, _, shape), positions in alike.items():
            length = shape.numel()
            limit = elements or (CPU_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS)
            if one_in > 1 and length >= _SMALLEST_SHARED:
                for position in positions:
                    self._add_share(position, length, one_in, limit)
                continue
            small = stacked or limit
            if longest is not None and length > max(longest, small // 4):
                for position in positions:
                    runs = length // longest
                    self._add_runs(position, longest, longest, runs, limit)
                    if length % longest:
                        self._blocks.append(_Block((position,), False, runs * longest, length % longest))
                continue
            if length > limit:
                for position in positions:
                    for start in range(0, length, limit):
                        self._blocks.append(_Block((position,), False, start, min(limit, length - start)))
                continue
            rows = max(1, small // length)
            for first in range(0, len(positions), rows):
                self._blocks.append(_Block(tuple(positions[first : first + rows]), True, 0, length))
        self._rows = Rows([owner for block in self._blocks for owner in block.owners], self.count)

    def _add_share(self, position: int, length: int, one_in: int, limit: int) -> None:
        wanted = max(_LEAST_RUNS, length // one_in)
        run = min(_LONGEST_RUN, wanted // _LEAST_RUNS, limit)
        runs = wanted // run
        # An odd number of vectors of 16 from run to run: a multiple of a weight's row would meet the same columns only.
        stride = max(run, length // runs // 16 * 16)
        if stride // 16 % 2 == 0 and stride - 16 >= run:
            stride -= 16
        self.scales[position] = length / (runs * run)
        outside = length - (runs - 1) * stride - run
        self._add_runs(position, run, stride, runs, limit, outside // 2 // 16 * 16)  # as much before as behind

    def _add_runs(self, position: int, run: int, stride: int, runs: int, limit: int, start: int = 0) -> None:
        rows = max(1, limit // run)
        for first in range(0, runs, rows):
            owners = (position,) * min(rows, runs - first)
            self._blocks.append(_Block(owners, False, start + first * stride, run, stride))

    def __len__(self) -> int:
        """Number of matrices."""
        return len(self._blocks)

    def of(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """The matrices of tensors of these sizes, ``[rows, elements]``; not to be written to, some are views."""
        for (matrix,) in self.together(tensors):
            yield matrix

    def together(self, *lists: Sequence[Tensor], scratch: Scratch | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Matrices of several lists, element by element of each other: parameters and what an optimizer keeps for them.

        Tensors at one position have the same shape in every list. With ``scratch``, matrices are valid until the next
        ones are asked for.
        """
        cut, flat = -1, []
        for block in self._blocks:
            if block.whole and len(block.owners) > 1:
                rows, owned = len(block.owners), [[tensors[o] for o in block.owners] for tensors in lists]
                if scratch is None:
                    yield tuple(torch.stack(of_list).view(rows, -1) for of_list in owned)
                    continue
                shape = torch.Size((rows, *owned[0][0].shape))
                into = [scratch.like(slot, shape, of_list[0]) for slot, of_list in enumerate(owned)]
                stacks = (torch.stack(of_list, out=out) for of_list, out in zip(owned, into, strict=True))
                yield tuple(stack.view(rows, -1) for stack in stacks)
                continue
            if block.owners[0] != cut:
                cut = block.owners[0]
                flat = _flat([tensors[cut] for tensors in lists])
            size, strides = (len(block.owners), block.length), (block.stride or block.length, 1)
            yield tuple(part.as_strided(size, strides, part.storage_offset() + block.start) for part in flat)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The matrices, sharing no memory with the tensors."""
        stacked = (block.whole and len(block.owners) > 1 for block in self._blocks)
        return [m if own else m.clone() for own, m in zip(stacked, self.of(tensors), strict=True)]

    def owners(self) -> Iterator[tuple[int, ...]]:
        """The positions of the tensors whose rows the matrices hold, in their order."""
        return (block.owners for block in self._blocks)

    def spread(self, values: Tensor) -> Sequence[Tensor]:
        """What is known of each tensor, where its rows are.

        Args:
            values: ``[tensors, columns]``.

        Returns:
            For every matrix ``[rows, columns]``.
        """
        if not self._blocks:
            return ()
        rows = values.index_select(0, self._rows.index(values.device))
        return torch.split_with_sizes(rows, [len(block.owners) for block in self._blocks])

    def sum(self, rows: Sequence[Tensor]) -> Tensor:
        """Adds up what was found in rows, by tensor.

        Args:
            rows: For every matrix ``[rows, columns]``.

        Returns:
            ``[tensors, columns]``, FP64 where the device has it; 0 for empty tensors.
        """
        found = _joined(rows)
        if found is None:
            return torch.zeros(self.count, 0, dtype=torch.float64)
        return self._rows.sum(found)

    def max(self, rows: Sequence[Tensor], empty: float = 0.0) -> Tensor:
        """The largest of what was found in rows, by tensor; NaN counts as larger than anything.

        Args:
            rows: For every matrix ``[rows, columns]``.
            empty: For tensors without elements.

        Returns:
            ``[tensors, columns]``, FP64 where the device has it.
        """
        found = _joined(rows)
        if found is None:
            return torch.full((self.count, 0), empty, dtype=torch.float64)
        return self._rows.max(found, empty)


class Rows:
    """Reduces rows of numbers by whom they belong to, alike from run to run on every device. Made once, used often.

    Args:
        owners: To whom each row belongs, from 0.
        count: Number of owners, also of those without rows.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics.blocks import Rows
        >>> rows = Rows([0, 2, 0], count=3)
        >>> rows.max(torch.tensor([[1.0], [5.0], [4.0]]), empty=-1.0).flatten().tolist()
        [4.0, -1.0, 5.0]
    """

    def __init__(self, owners: Sequence[int], count: int) -> None:
        self._owners, self._count = owners, count
        self._owner_index: dict[torch.device, Tensor] = {}
        self._row_index: dict[torch.device, Tensor] = {}
        self._filled: dict[torch.device, Tensor] = {}
        self._all_have_rows = len(set(owners)) == count

    def __len__(self) -> int:
        """Number of owners."""
        return self._count

    def sum(self, found: Tensor) -> Tensor:
        """Of ``[rows, columns]`` the sums by owner, ``[owners, columns]``; 0 where there are no rows."""
        return found.new_zeros(self._count, found.shape[1]).index_add_(0, self.index(found.device), found)

    def max(self, found: Tensor, empty: float) -> Tensor:
        """Of ``[rows, columns]`` the largest by owner, ``[owners, columns]``; ``empty`` where there are no rows."""
        if not self._owners:
            return found.new_full((self._count, found.shape[1]), empty)
        largest = found[self._rows_of(found.device)].amax(dim=1)
        return largest if self._all_have_rows else torch.where(self._has_rows(found.device), largest, empty)

    def index(self, device: torch.device) -> Tensor:
        """Owner of each row."""
        if device not in self._owner_index:
            self._owner_index[device] = torch.tensor(self._owners, dtype=torch.long, device=device)
        return self._owner_index[device]

    def _rows_of(self, device: torch.device) -> Tensor:
        """Of each owner all its rows, ``[owners, most rows]``, the first again where there are fewer."""
        if device not in self._row_index:
            rows: list[list[int]] = [[] for _ in range(self._count)]
            for row, owner in enumerate(self._owners):
                rows[owner].append(row)
            most = max(map(len, rows))
            padded = [[*of, *([of[0] if of else 0] * (most - len(of)))] for of in rows]
            self._row_index[device] = torch.tensor(padded, device=device)
        return self._row_index[device]

    def _has_rows(self, device: torch.device) -> Tensor:
        if device not in self._filled:
            have = set(self._owners)
            self._filled[device] = torch.tensor([[owner in have] for owner in range(self._count)], device=device)
        return self._filled[device]


def _joined(rows: Sequence[Tensor]) -> Tensor | None:
    if not rows:
        return None
    device = rows[0].device
    wide = wide_dtype(device)
    return torch.cat([row.to(device, wide) for row in rows])


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
