"""How much of its format a tensor uses: largest and smallest magnitude, what is not finite, and the room left above.

Everything is read off the bits. The patterns of positive IEEE numbers are ordered as whole numbers, zero first, infinity
and NaN last, so that the largest pattern without its sign is the largest magnitude and tells of infinity and NaN too.
On a CPU a pass over 16-bit patterns is two to sixty times faster than the same pass over 16-bit floats, ``isfinite``
the slowest of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_amp_plus.formats import FORMATS
from lightning_amp_plus.metrics.blocks import Blocks
from lightning_amp_plus.wide import wide_dtype

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LARGEST = {**{format.dtype: format.max_finite for format in FORMATS}, torch.float64: torch.finfo(torch.float64).max}
"""Largest finite number of each dtype whose tensors can be looked at."""
# The smallest pattern that is not a finite number: infinity, or in E4M3, which has none, NaN.
_NOT_FINITE = {
    **{f.dtype: (((1 << f.exponent_bits) - 1) << f.fraction_bits) if f.has_inf else 0x7F for f in FORMATS},
    torch.float64: 0x7FF << 52,
}

_FIRST_NOT_FINITE = {
    dtype: torch.tensor(bits, dtype=_INTEGERS[dtype.itemsize], device="cpu") for dtype, bits in _NOT_FINITE.items()
}
# Bits but the sign's. As tensors, since of a number every op makes a tensor first: three ops more, all told.
_MAGNITUDE = {size: torch.tensor(torch.iinfo(t).max, dtype=t, device="cpu") for size, t in _INTEGERS.items()}


class Bits(NamedTuple):
    """What :func:`health_bits` finds in each row of a matrix, ``[rows]`` each.

    Attributes:
        largest: Bit pattern of the largest magnitude.
        smallest: Bit pattern of the smallest magnitude but zero; 0 if there is none.
        not_finite: Number of elements that are infinite or NaN.
    """

    largest: Tensor
    smallest: Tensor
    not_finite: Tensor


class Scratch:
    """Memory for what :func:`health_bits` computes in between, used again for one matrix after another.

    On a CPU an allocator hands large blocks back to the system, and fetching them again costs more than the passes over
    them. Allocators of other devices keep theirs.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: dict[tuple[torch.dtype, torch.Size], Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor of one's size and dtype."""
        if tensor.device.type != "cpu":
            return torch.empty_like(tensor)
        kind = (tensor.dtype, tensor.shape)
        view = self._views.get(kind)
        if view is None:
            size = tensor.numel() * tensor.dtype.itemsize
            if self._memory.numel() < size or len(self._views) > 1000:
                self._memory = torch.empty(max(size, self._memory.numel()), dtype=torch.uint8, device="cpu")
                self._views.clear()
            view = self._views[kind] = self._memory[:size].view(tensor.dtype).view(tensor.shape)
        return view


def health_bits(matrix: Tensor, scratch: Scratch) -> Bits:
    """Looks at each row of a matrix, in up to six passes over whole numbers; nothing is converted yet.

    Args:
        matrix: ``[rows, elements]`` of a dtype in ``LARGEST``, at least one element a row.
        scratch: Where to compute.
    """
    integer = _INTEGERS[matrix.dtype.itemsize]
    mask, not_finite = torch.iinfo(integer).max, _NOT_FINITE[matrix.dtype]
    patterns = matrix.view(integer)
    bits = torch.bitwise_and(patterns, _MAGNITUDE[matrix.dtype.itemsize], out=scratch.like(patterns))
    on_host = bits.device.type == "cpu"  # there numbers can be asked without a transfer, and most passes left out
    if on_host and len(bits) == 1:
        smallest, largest = (end.view(1) for end in torch.aminmax(bits))
    else:
        largest, smallest = bits.amax(1), bits.amin(1) if on_host else bits.new_zeros(1)
    if on_host and max(largest.numpy()) < not_finite:
        count = torch.zeros_like(largest)
    else:
        count = _count(torch.ge(bits, _FIRST_NOT_FINITE[matrix.dtype], out=torch.empty_like(bits)))
    if not on_host or not all(smallest.numpy()):
        # Turned over: 1 becomes the lowest whole number, and zero the highest, out of the way of the minimum.
        smallest = bits.add_(mask).amin(1).sub_(mask)
    return Bits(largest, smallest, count)


def magnitude_bits(tensor: Tensor) -> Tensor:
    """Bit patterns of magnitudes, as whole numbers ordered like these; a new tensor, of a dtype in ``LARGEST``."""
    integer = _INTEGERS[tensor.dtype.itemsize]
    return torch.bitwise_and(tensor.view(integer), _MAGNITUDE[tensor.dtype.itemsize])


def _count(ones: Tensor) -> Tensor:
    """Sums of rows of ones and zeros. In their own dtype that is up to seven times faster, where they cannot overflow."""
    rows, length = ones.shape
    if length <= torch.iinfo(ones.dtype).max:
        return ones.sum(1, dtype=ones.dtype)
    piece = min(length & -length, (torch.iinfo(ones.dtype).max + 1) // 2)  # a power of two that divides the length
    if piece < 32:
        return ones.sum(1, dtype=torch.int64)
    return ones.reshape(-1, piece).sum(1, dtype=ones.dtype).view(rows, -1).sum(1)


def from_bits(bits: Bits, dtype: torch.dtype) -> Tensor:
    """What bit patterns found in tensors of a dtype mean, in numbers.

    Returns:
        ``[rows, 3]``, FP64 where the device has it: the largest magnitude, NaN where there is one; the smallest but zero,
        infinity if there is no finite one; and the number of elements that are not finite.
    """
    wide = wide_dtype(bits.largest.device)
    smallest = bits.smallest.view(dtype).to(wide)
    smallest = torch.where(smallest > 0, smallest, math.inf)
    return torch.stack([bits.largest.view(dtype).to(wide), smallest, bits.not_finite.to(wide)], dim=1)


class Health(NamedTuple):
    """What :func:`activation_health` returns, each an FP64 scalar on the tensor's device.

    Attributes:
        amax: Largest magnitude; infinity or NaN if there is one among the elements.
        smallest: Smallest magnitude but zero; infinity if there is no finite one.
        nonfinite: Share of elements that are infinite or NaN.
        headroom: How often ``amax`` can double until it passes the largest finite number of the format, in bits:
            ``log2(largest / amax)``. Infinity for zeros, NaN or minus infinity where ``amax`` is not finite.
    """

    amax: Tensor
    smallest: Tensor
    nonfinite: Tensor
    headroom: Tensor


@torch.no_grad()
def activation_health(values: Tensor) -> Health:
    """How much of its format a tensor uses.

    Args:
        values: Any shape, in FP64, FP32, BF16, FP16, E4M3 or E5M2; not empty.

    Raises:
        TypeError: If its dtype is another.
        ValueError: If it has no elements.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import activation_health
        >>> health = activation_health(torch.tensor([0.0, 0.5, -16384.0], dtype=torch.float16))
        >>> float(health.amax), float(health.smallest), round(float(health.headroom), 2)
        (16384.0, 0.5, 2.0)
    """
    _refuse(values, "activation_health()")
    found = _look(values)
    amax, smallest, count = found.unbind()
    return Health(amax, smallest, count / values.numel(), headroom(amax / LARGEST[values.dtype]))


def headroom(fullness: Tensor) -> Tensor:
    """Bits left above a magnitude that is ``fullness`` times the largest finite number of its format."""
    return -torch.log2(fullness)


def _look(values: Tensor) -> Tensor:
    """Largest, smallest and count of a whole tensor, ``[3]``."""
    blocks, scratch = Blocks([values]), Scratch()
    found = torch.cat([from_bits(health_bits(matrix, scratch), values.dtype) for matrix in blocks.of([values])])
    return torch.stack([found[:, 0].amax(), found[:, 1].amin(), found[:, 2].sum()])


def _refuse(values: Tensor, where: str) -> None:
    if values.dtype not in LARGEST:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in LARGEST)
        raise TypeError(f"{where} looks at floating-point tensors ({known}); this one is {values.dtype}.")
    if not values.numel():
        raise ValueError(f"{where} needs at least one element; this tensor has shape {tuple(values.shape)}.")


class ActivationHealth(Metric):
    """The health of one activation over all updates and all ranks: ``amax`` the largest, ``smallest`` the smallest.

    Shares are those of all elements together. ``compute`` returns a dict of FP64 scalars under the names of
    :class:`Health`; before the first update ``amax`` and the share are 0, the others infinity.

    Raises:
        TypeError: In ``update``, if the dtype is not a floating-point format.
        ValueError: In ``update``, if the tensor is empty.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import ActivationHealth
        >>> metric = ActivationHealth()
        >>> metric.update(torch.tensor([1.0, float("inf")], dtype=torch.bfloat16))
        >>> metric.update(torch.tensor([1.0, -3.0], dtype=torch.bfloat16))
        >>> {name: float(value) for name, value in metric.compute().items()}
        {'amax': inf, 'smallest': 1.0, 'nonfinite': 0.25, 'headroom': -inf}
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    amax: Tensor
    smallest: Tensor
    not_finite: Tensor
    elements: Tensor
    fullness: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        double = torch.float64
        self.add_state("amax", torch.tensor(0.0, dtype=double), dist_reduce_fx="max")
        self.add_state("smallest", torch.tensor(math.inf, dtype=double), dist_reduce_fx="min")
        self.add_state("not_finite", torch.tensor(0.0, dtype=double), dist_reduce_fx="sum")
        self.add_state("elements", torch.tensor(0.0, dtype=double), dist_reduce_fx="sum")
        self.add_state("fullness", torch.tensor(0.0, dtype=double), dist_reduce_fx="max")

    @override
    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Takes one tensor; see :func:`activation_health` for its dtypes."""
        _refuse(values, "ActivationHealth.update()")
        largest, smallest, count = _look(values).unbind()
        self.amax = torch.maximum(self.amax, largest)
        self.smallest = torch.minimum(self.smallest, smallest)
        self.not_finite += count
        self.elements += values.numel()
        self.fullness = torch.maximum(self.fullness, largest / LARGEST[values.dtype])

    @override
    def compute(self) -> dict[str, Tensor]:
        """See the class."""
        return Health(
            self.amax, self.smallest, self.not_finite / self.elements.clamp(min=1), headroom(self.fullness)
        )._asdict()
