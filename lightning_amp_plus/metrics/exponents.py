"""Histograms of binary exponents, and what they say about a format's range. Used by ``gradient_health`` and callbacks.

A histogram has :data:`BINADES` columns. Column ``j`` counts magnitudes from ``2**(LOWEST + j)`` up to, not including,
twice that; the first column takes whatever is smaller too, the last whatever is larger and finite. Zeros, infinities and
NaN are in no column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_amp_plus.formats import FP16, Format, ScaleWindow, scale_window
from lightning_amp_plus.metrics.blocks import Blocks

# FP16 with loss scales from 2^-14 to 2^24 keeps magnitudes from 2^-49 on; what is above 2^8 is rare, and the largest
# magnitude is taken exactly beside a histogram anyway.
LOWEST, BINADES = -56, 64
_FIELDS = 256  # values of FP32's exponent field: 0 for zero and subnormal numbers, 255 for infinity and NaN
_FIRST = LOWEST + 127
_LAST = _FIRST + BINADES - 1

# Elements that count into one bin one after another have to wait for each other on a GPU.
_LANE, _MOST_LANES = 4096, 32


def exponent_histogram(values: Tensor) -> Tensor:
    """How many elements lie in each binade; see the module for the columns.

    Args:
        values: Of any shape, any floating dtype and device. FP32 subnormal numbers (below 2^-126) count as zero.

    Returns:
        Counts, ``[BINADES]``, on the device of ``values``; FP64 where it has that.

    Raises:
        TypeError: If ``values`` is no floating tensor.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics.exponents import LOWEST, exponent_histogram
        >>> counts = exponent_histogram(torch.tensor([0.0, 1.0, -1.5, 2.0]))
        >>> counts[0 - LOWEST].item(), counts[1 - LOWEST].item(), counts.sum().item()
        (2.0, 1.0, 3.0)
    """
    if not values.dtype.is_floating_point:
        raise TypeError(
            f"exponent_histogram counts floating-point tensors; this one is {values.dtype}: convert it first"
        )
    blocks = Blocks([values.detach()])
    found = blocks.sum([count_exponents(magnitudes(matrix)) for matrix in blocks.of([values.detach()])])
    return found[0, 1:-1] if len(blocks) else torch.zeros(BINADES, dtype=found.dtype, device=values.device)


class ExponentHistogram(Metric):
    """The histogram of binary exponents of everything it was given, over all ranks.

    Raises:
        TypeError: In ``update``, if the values are no floating tensor.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import ExponentHistogram
        >>> metric = ExponentHistogram()
        >>> metric.update(torch.tensor([0.5, 0.75]))
        >>> metric.update(torch.tensor([0.5, 0.0]))
        >>> metric.compute().sum()
        tensor(3., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    counts: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("counts", torch.zeros(BINADES, dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, values: Tensor) -> None:
        """Counts the elements of ``values``, a tensor of any shape and floating dtype."""
        self.counts = self.counts + exponent_histogram(values)

    @override
    def compute(self) -> Tensor:
        """Counts, ``[BINADES]``, FP64."""
        return self.counts


# ---------------------------------------------------------------- counting, on the device


def magnitudes(matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """``|matrix|`` as a tensor of its own: FP64 of FP64, else FP32, which holds every 16-bit number exactly.

    Args:
        matrix: Of any floating dtype.
        out: What to write to, of the dtype and shape of the result.
    """
    if matrix.dtype in (torch.float32, torch.float64):
        return torch.abs(matrix, out=out)
    return (matrix.to(torch.float32) if out is None else out.copy_(matrix)).abs_()


def count_exponents(matrix: Tensor) -> Tensor:
    """Counts the exponents in each row of magnitudes, which are overwritten.

    Args:
        matrix: ``[rows, elements]``, FP32 or FP64, no negative element.

    Returns:
        ``[rows, 1 + BINADES + 1]``: zeros, the histogram, non-finite elements; whole numbers.
    """
    fields = _fields(matrix)
    counts = _bins_of(fields) if fields.device.type == "cpu" else _bins_without_waiting(fields)
    return torch.cat(
        [
            counts[:, :1],
            counts[:, 1 : _FIRST + 1].sum(1, keepdim=True),
            counts[:, _FIRST + 1 : _LAST],
            counts[:, _LAST : _FIELDS - 1].sum(1, keepdim=True),
            counts[:, _FIELDS - 1 :],
        ],
        dim=1,
    )


def _fields(matrix: Tensor) -> Tensor:
    if matrix.dtype == torch.float64:
        fields = matrix.view(torch.int64) >> 52
        finite = (fields - (1023 - 127)).clamp_(0, _FIELDS - 2)
        return torch.where(fields == 2047, _FIELDS - 1, finite).to(torch.int32)
    return matrix.view(torch.int32).bitwise_right_shift_(23)


def _bins_of(fields: Tensor) -> Tensor:
    """On a CPU: 0.7 ns an element, where comparing with as few as 16 thresholds costs 2.5 and histc 10."""
    rows = fields.shape[0]
    if rows > 1:
        fields += torch.arange(0, rows * _FIELDS, _FIELDS, dtype=fields.dtype).unsqueeze(1)
    return torch.bincount(fields.view(-1), minlength=rows * _FIELDS).view(rows, _FIELDS)


def _bins_without_waiting(fields: Tensor) -> Tensor:
    """Elsewhere: bincount would ask the device for the largest value, a transfer."""
    rows, length = fields.shape
    lanes = max(1, min(_MOST_LANES, length // _LANE))
    table = torch.arange(rows, dtype=torch.int64, device=fields.device).unsqueeze(1) * lanes
    if lanes > 1:
        table = table + torch.arange(length, device=fields.device) % lanes
    bins = (table * _FIELDS + fields).view(-1)
    counts = torch.zeros(rows * lanes * _FIELDS, dtype=torch.int32, device=fields.device)
    counts.scatter_add_(0, bins, torch.ones((), dtype=torch.int32, device=fields.device).expand(bins.shape))
    return counts.view(rows, lanes, _FIELDS).sum(1)


# ---------------------------------------------------------------- what histograms say


def smallest_kept(histograms: Tensor, outliers: float) -> Tensor:
    """Lower edge of the binade in which the smallest magnitudes lie that are not left out as outliers.

    Args:
        histograms: ``[..., BINADES]``, none of them empty.
        outliers: Share of the elements that may be left out, the smallest ones.

    Returns:
        Powers of two, ``[...]``, FP64.
    """
    counted = histograms.double().cumsum(-1)
    kept = counted > outliers * counted[..., -1:]
    return torch.exp2(LOWEST + kept.int().argmax(-1).double())


def fitting_scales(
    histogram: Tensor, largest: float, outliers: float = 0.0, format: Format = FP16, flush_subnormals: bool = False
) -> ScaleWindow | None:
    """The loss scales that keep gradients in a format.

    The largest magnitude must stay finite, since one overflow costs a whole step: no outlier is left out at that end.
    The smallest one that is not an outlier is known up to its binade, whose lower edge counts.

    Args:
        histogram: ``[BINADES]``, of unscaled gradients.
        largest: Their largest magnitude.
        outliers: Share of the non-zero elements that may become zero, the smallest ones.
        format: What scaled gradients are written to.
        flush_subnormals: Whether subnormal numbers are turned into zero there.

    Returns:
        See `lightning_amp_plus.formats.scale_window`; its ``exists`` may be false. ``None`` if there is no non-zero
        element, or one that is not finite.

    Raises:
        ValueError: If ``outliers`` is no share below 1.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics.exponents import exponent_histogram, fitting_scales
        >>> gradients = torch.tensor([2.0**-30, 0.5, 1.0])
        >>> print(fitting_scales(exponent_histogram(gradients), 1.0))
        gradients from 9.31323e-10 to 1 fit FP16 with a scale in (32, 65504]; largest power of two inside: 32768
    """
    if not 0 <= outliers < 1:
        raise ValueError(f"outliers={outliers!r}: expected a share of at least 0 and below 1.")
    if not (0 < largest < math.inf) or not float(histogram.sum()):
        return None
    smallest = min(float(smallest_kept(histogram, outliers)), largest)
    return scale_window(smallest, largest, format, flush_subnormals)


class CutOff(NamedTuple):
    """Where histograms break off, and what must have been below; each ``[...]``, FP64.

    Attributes:
        lowest: Exponent of the lowest binade that holds anything.
        lost: Estimated share of the elements that became zero; 0 where zeros have another reason. Where the histogram
            still rises towards its end it is a lower bound, one half.
    """

    lowest: Tensor
    lost: Tensor


def cut_off(histograms: Tensor, zeros: Tensor) -> CutOff:
    """Tells zeros that underflowed from zeros that were zeros, by the numbers just above zero.

    Zeros alone prove nothing: rows of an embedding that no token of the batch used, units whose ReLU was off, pruned and
    masked weights have zero gradients, in whole rows or scattered. But they leave the exponents of all other elements
    as they were, and those thin out downwards, each binade holding about half of the one above. Underflow instead cuts
    the histogram off. How much is missing follows from the two lowest binades: with counts ``a`` and ``b`` and
    ``r = a / b`` below 1 a geometric tail ``a r / (1 - r)`` would have gone on below; from 1 on the bulk lies there, as
    much again at least as what is left. No more can have been lost than there are zeros. So the estimate depends
    neither on where the zeros are nor on how many more there are for another reason.

    It cannot see a tensor that is all zero, what was lost inside a sum whose result is not zero, and fewer than eight
    elements in the lowest binade. A histogram that breaks off far above a format's end (counts, signs) is not for this
    function to judge: the caller compares ``lowest`` with the smallest step of the format.

    Args:
        histograms: ``[..., BINADES]``.
        zeros: Numbers of zeros, ``[...]``.
    """
    histograms, zeros = histograms.double(), zeros.double()
    lowest = (histograms > 0).int().argmax(-1, keepdim=True)
    end = histograms.gather(-1, lowest).squeeze(-1)
    above = histograms.gather(-1, (lowest + 1).clamp(max=BINADES - 1)).squeeze(-1)
    left = histograms.sum(-1)
    tail = torch.where(end < above, end * end / (above - end).clamp(min=1e-9), left)
    lost = torch.minimum(zeros, tail)
    share = torch.where(end >= 8, lost / (left + lost).clamp(min=1e-9), 0.0)
    return CutOff(lowest.squeeze(-1).double() + LOWEST, share)


def shares_below(histograms: Tensor, exponent: float) -> Tensor:
    """Share of the elements below ``2**exponent``, ``[...]``: exact at whole exponents, else interpolated in a binade."""
    position = min(max(exponent - LOWEST, 0.0), float(BINADES))
    whole = int(position)
    below = histograms[..., :whole].sum(-1)
    if whole < BINADES:
        below = below + (2.0 ** (position - whole) - 1.0) * histograms[..., whole]
    return below / histograms.sum(-1).clamp(min=1e-9)


def best_power_of_two(smallest: Tensor, largest: Tensor, exponents: Sequence[int]) -> tuple[int, Tensor]:
    """The loss scale, a power of two, with which most layers fit FP16, the largest of several; and which ones fit.

    Args:
        smallest: Smallest magnitude of each layer that must not become zero, ``[layers]``.
        largest: Largest magnitude of each layer, ``[layers]``.
        exponents: The scales to try, in ascending order.

    Returns:
        Its exponent, and for each layer whether that scale keeps its gradients, ``[layers]``.
    """
    scales = torch.exp2(torch.tensor(exponents, dtype=torch.float64)).unsqueeze(1)
    fits = (scales * smallest > FP16.underflow_threshold) & (scales * largest <= FP16.max_finite)
    counts = fits.sum(1)
    best = int(len(exponents) - 1 - counts.flip(0).argmax())
    return exponents[best], fits[best]
