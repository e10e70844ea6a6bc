"""Health of gradients, tensor by tensor: norm, largest magnitude, zeros, underflow in FP16, non-finite elements, exponents.

Norm, largest magnitude and zeros are taken over all elements, in half a nanosecond each on one CPU thread. Exponents cost
three times as much, as no op of torch counts them any faster; of a large tensor they are taken from a sample. All without
waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_amp_plus.formats import FP16
from lightning_amp_plus.metrics.blocks import Blocks
from lightning_amp_plus.metrics.exponents import BINADES, count_exponents, magnitudes
from lightning_amp_plus.wide import wide_dtype

_SQUARES, _ZEROS, _CLIPPED, _BELOW, _NANS, _SAMPLED_ZEROS = range(6)
_HISTOGRAM = slice(_SAMPLED_ZEROS + 1, _SAMPLED_ZEROS + 1 + BINADES)
_NONFINITE = _HISTOGRAM.stop
COLUMNS = _NONFINITE + 1

# Of larger tensors the exponents are counted in a sample: a third, of large ones down to a sixteenth, in runs of
# neighbors, which are read as fast as they come. One run of an odd number is taken, so that the sample falls into step
# with no structure of a power of two, such as the heads of an attention.
WHOLE = 2**11
_ONE_OF, _RUN = 15, 64
_BATCH = 2**18  # elements of samples that are counted together


@dataclass(frozen=True)
class GradientSums:
    """What was counted in gradients, a row for each; rows of several tensors or ranks add up.

    Attributes:
        sums: ``[rows, COLUMNS]``.
        largest: Largest magnitude, ``[rows]``; NaN if there is a NaN, 0 without elements. Of several rows the maximum.
    """

    sums: Tensor
    largest: Tensor

    @property
    def square_sum(self) -> Tensor:
        """Square of the L2 norm, ``[rows]``."""
        return self.sums[:, _SQUARES]

    @property
    def norm(self) -> Tensor:
        """L2 norm, ``[rows]``."""
        return self.square_sum.sqrt()

    @property
    def count(self) -> Tensor:
        """Number of elements, ``[rows]``."""
        return self.sums[:, _SAMPLED_ZEROS:].sum(1)

    @property
    def zeros(self) -> Tensor:
        """Number of zeros, ``[rows]``."""
        return self.sums[:, _ZEROS]

    @property
    def clipped(self) -> Tensor:
        """Number of elements above the clip value given, ``[rows]``; 0 where none was."""
        return self.sums[:, _CLIPPED]

    @property
    def underflowed(self) -> Tensor:
        """Number of non-zero elements that FP16 would round to zero at the loss scale given, ``[rows]``; from a sample.

        FP32 subnormal numbers (below 2^-126) count as zeros here.
        """
        return self.sums[:, _BELOW] - self.sums[:, _SAMPLED_ZEROS]

    @property
    def nonzero(self) -> Tensor:
        """Number of non-zero elements, finite or not, ``[rows]``; from a sample, to relate others from it to."""
        return self.sums[:, _HISTOGRAM.start :].sum(1)

    @property
    def histogram(self) -> Tensor:
        """Exponents of the finite non-zero elements, ``[rows, BINADES]``, from a sample; see ``metrics.exponents``."""
        return self.sums[:, _HISTOGRAM]

    @property
    def nonfinite(self) -> Tensor:
        """Number of infinite and NaN elements, ``[rows]``; from a sample, ``largest`` is not finite if there is any."""
        return self.sums[:, _NONFINITE]

    @property
    def nans(self) -> Tensor:
        """Number of NaN, ``[rows]``; from a sample."""
        return self.sums[:, _NANS]


class Scratch:
    """A buffer for all matrices: on a CPU, memory asked for anew costs more than what is computed in it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._views: dict[tuple[torch.device, torch.dtype, torch.Size], tuple[Tensor, Tensor]] = {}

    def like(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors of the shape of ``matrix``, FP64 for FP64, else FP32; whatever was in them."""
        dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
        key = (matrix.device, dtype, matrix.shape)
        views = self._views.get(key)
        if views is None:
            both = self._buffers.get(key[:2])
            if both is None or both.shape[1] < matrix.numel() or len(self._views) > 256:
                self._views.clear()
                both = torch.empty(2, matrix.numel(), dtype=dtype, device=matrix.device)
                self._buffers[key[:2]] = both
            first, second = both[:, : matrix.numel()].view(2, *matrix.shape).unbind()
            views = self._views[key] = (first, second)
        return views


@torch.no_grad()
def gradient_health(
    gradients: Sequence[Tensor],
    scale: float | Tensor = 1.0,
    clip_value: float | None = None,
    blocks: Blocks | None = None,
    scratch: Scratch | None = None,
    phase: int = 0,
) -> GradientSums:
    """Looks at unscaled gradients. An element ``g`` underflows if ``|g| * scale <= 2**-25``, which FP16 rounds to zero.

    The squares of the norm are taken of gradients divided by their largest magnitude, so that neither those of 1e25
    overflow nor those of 1e-25 vanish in FP32, and added up in FP64 over pieces of a bounded number of elements. Source
    of the idea: J. L. Blue, A portable Fortran program to find the Euclidean norm of a vector (1978).

    Args:
        gradients: Plain tensors of any shapes, floating dtypes and devices; not changed.
        scale: The loss scale that they were divided by; a number or a 0-dim tensor.
        clip_value: Count the elements whose magnitude is above this.
        blocks: How tensors of these sizes are stacked, where the caller keeps that over steps.
        scratch: Memory to work in, where the caller keeps that.
        phase: Which sample to take of tensors of more than ``WHOLE`` elements; after as many numbers as samples all
            elements were in one.

    Returns:
        On the device of the first gradient; FP64 where it has that.

    Raises:
        TypeError: If a gradient is no floating-point tensor.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import gradient_health
        >>> found = gradient_health([torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0**-27])], scale=2.0)
        >>> found.norm
        tensor([5.0000e+00, 7.4506e-09], dtype=torch.float64)
        >>> found.zeros, found.underflowed
        (tensor([0., 1.], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
    """
    for gradient in gradients if blocks is None else ():
        if not gradient.dtype.is_floating_point:
            raise TypeError(f"gradient_health looks at floating-point tensors; one is {gradient.dtype}")
    blocks = Blocks(gradients) if blocks is None else blocks
    threshold = FP16.underflow_threshold / scale
    scratch = Scratch() if scratch is None else scratch
    exact: list[tuple[Tensor, ...]] = []
    samples = _Samples(threshold, scratch)
    for matrix in blocks.of(gradients):
        exact.append(_exact(matrix, clip_value, scratch))
        samples.add(matrix, phase)
    device = gradients[0].device if gradients else torch.device("cpu")
    if not exact:
        empty = torch.zeros(len(gradients), COLUMNS, dtype=wide_dtype(device), device=device)
        return GradientSums(empty, empty[:, 0])
    largest, norm, zeros, *above = (_joined(column) for column in zip(*exact, strict=True))
    clipped = above[0] if above else torch.zeros_like(zeros)
    # In FP64 the square of any FP32 number fits.
    squares = (norm * _unit(largest)).square_()
    rows = torch.cat([squares, zeros, clipped, _joined(samples.counted())], dim=1)
    return GradientSums(blocks.sum([rows]), blocks.max([largest])[:, 0])


def _exact(matrix: Tensor, clip_value: float | None, scratch: Scratch) -> tuple[Tensor, ...]:
    """Of each row, over all elements: largest magnitude, norm in units of it, zeros; elements above the clip value."""
    plain, work = scratch.like(matrix)
    if matrix.dtype != work.dtype:
        matrix = plain.copy_(matrix)  # sums of 16-bit numbers would be rounded to 16 bits
    if matrix.shape[0] == 1:
        # Along a dimension it would take 20 times as long.
        smallest, largest = (end.view(1, 1) for end in torch.aminmax(matrix))
    else:
        smallest, largest = matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True)
    largest = torch.maximum(largest, smallest.neg_())
    torch.div(matrix, _unit(largest), out=work)
    norm = torch.linalg.vector_norm(work, dim=1, keepdim=True)
    # Comparisons into a float tensor are vectorized, those into a bool tensor cost six times as much.
    zeros = work.eq_(0.0).sum(1, keepdim=True)
    if clip_value is None:
        return largest, norm, zeros
    above = torch.gt(matrix, clip_value, out=work).sum(1, keepdim=True)
    return largest, norm, zeros, above + torch.lt(matrix, -clip_value, out=work).sum(1, keepdim=True)


def _unit(largest: Tensor) -> Tensor:
    """What rows are divided by before they are squared, so that neither squares nor elements overflow or vanish."""
    return torch.nan_to_num(largest, nan=1.0, posinf=1.0).clamp_(min=torch.finfo(torch.float32).tiny)


class _Samples:
    """Samples of matrices, counted together where they are alike: large tensors are many, and ops cost time."""

    def __init__(self, threshold: float | Tensor, scratch: Scratch) -> None:
        self._threshold = threshold
        self._scratch = scratch
        self._counted: dict[int, Tensor] = {}
        self._added = 0
        self._waiting: dict[Any, list[tuple[int, Tensor]]] = {}

    def add(self, matrix: Tensor, phase: int) -> None:
        """Takes a sample of every row, or all of short ones."""
        number, length = self._added, matrix.shape[1]
        self._added += 1
        if length <= WHOLE:
            self._count([(number, matrix)], 1.0)
            return
        apart = min(_ONE_OF, max(3, length // WHOLE // 2 * 2 + 1))
        runs = length // (_RUN * apart)
        kept = matrix[:, : runs * apart * _RUN].view(-1, runs, apart, _RUN)[:, :, phase % apart]
        sample = kept.reshape(matrix.shape[0], runs * _RUN)  # a copy, so that the matrix need not be kept
        key = (sample.device, sample.dtype, sample.shape[1], length / sample.shape[1])
        waiting = self._waiting.setdefault(key, [])
        waiting.append((number, sample))
        if sum(other.numel() for _, other in waiting) >= _BATCH:
            self._count(self._waiting.pop(key), key[-1])

    def counted(self) -> list[Tensor]:
        """For every matrix ``[rows, 2 + 1 + BINADES + 1]``: below the threshold, NaN, and ``count_exponents``."""
        for key, waiting in self._waiting.items():
            self._count(waiting, key[-1])
        self._waiting.clear()
        return [self._counted[number] for number in range(self._added)]

    def _count(self, samples: list[tuple[int, Tensor]], factor: float) -> None:
        together = samples[0][1] if len(samples) == 1 else torch.cat([sample for _, sample in samples])
        threshold = self._threshold
        if isinstance(threshold, Tensor):
            threshold = threshold.to(together.device)
        found, work = self._scratch.like(together)
        magnitudes(together, out=found)
        below = torch.le(found, threshold, out=work).sum(1, keepdim=True)
        nans = torch.ne(found, found, out=work).sum(1, keepdim=True)
        counts = torch.cat([below, nans, count_exponents(found)], dim=1).to(wide_dtype(found.device))
        if factor != 1.0:
            counts *= factor
        parts = counts.split([sample.shape[0] for _, sample in samples])  # type: ignore[no-untyped-call]
        for (number, _), part in zip(samples, parts, strict=True):
            self._counted[number] = part


def _joined(parts: Sequence[Tensor]) -> Tensor:
    device = parts[0].device
    return torch.cat([part.to(device) for part in parts]).to(wide_dtype(device))


class GradientHealth(Metric):
    """Health of all gradients given, over all updates and ranks.

    Give every rank gradients of its own: those that several ranks hold alike count once for each.

    Args:
        scale: The loss scale that the gradients were divided by.
        **kwargs: Of ``torchmetrics.Metric``.

    Raises:
        ValueError: If the scale is not above 0.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import GradientHealth
        >>> metric = GradientHealth(scale=1024.0)
        >>> metric.update([torch.tensor([3.0, 0.0]), torch.tensor([4.0])])
        >>> {name: round(float(value), 4) for name, value in metric.compute().items()}
        {'norm': 5.0, 'amax': 4.0, 'zero_fraction': 0.3333, 'underflow_fraction': 0.0, 'nan': 0.0, 'inf': 0.0}
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    sums: Tensor
    largest: Tensor

    def __init__(self, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not scale > 0:
            raise ValueError(f"GradientHealth(scale={scale!r}): expected a loss scale above 0.")
        self.scale = scale
        self.add_state("sums", torch.zeros(1, COLUMNS, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("largest", torch.zeros(1, dtype=torch.float64), dist_reduce_fx="max")

    @override
    def update(self, gradients: Sequence[Tensor]) -> None:
        """Adds gradients, plain tensors of any shapes and floating dtypes."""
        found = gradient_health(gradients, self.scale)
        if found.sums.shape[0]:
            self.sums = self.sums + found.sums.sum(0, keepdim=True)
            self.largest = torch.maximum(self.largest, found.largest.amax(0, keepdim=True))

    @override
    def compute(self) -> dict[str, Tensor]:
        """FP64 scalars: ``norm``, ``amax``, ``zero_fraction``, ``underflow_fraction`` of the others, ``nan``, ``inf``."""
        found = GradientSums(self.sums, self.largest)
        values = {
            "norm": found.norm,
            "amax": found.largest,
            "zero_fraction": found.zeros / found.count.clamp(min=1),
            "underflow_fraction": found.underflowed / found.nonzero.clamp(min=1),
            "nan": found.nans,
            "inf": found.nonfinite - found.nans,
        }
        return {name: value[0] for name, value in values.items()}
