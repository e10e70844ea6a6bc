"""How well scales fit the tensors they quantize: saturation, underflow and SQNR, as pure functions. Used by ``watch``.

Of each tensor the amax is taken over all of it. The rest is estimated from a sample of whole rows, since on a CPU some
twenty passes over every operand would cost more than the GEMMs they serve. Nothing here waits for the device. SQNR is what
number formats are commonly judged by; see Micikevicius et al., "FP8 Formats for Deep Learning" (2022) for scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_amp_plus.fp8.delayed import OPERANDS
from lightning_amp_plus.fp8.quantize import (
    STRIPS,
    amax_of,
    as_strips,
    decibels,
    nonzeros,
    quantize,
    saturated,
    scale_of,
)
from lightning_amp_plus.fp8.recipes import DelayedScaling, Granularity, Operand, Recipe
from lightning_amp_plus.wide import wide_dtype

FIT_COLUMNS = ("amax", "scale", "saturated", "underflowed", "nonzero", "elements", "signal", "noise")
"""What :func:`measured` finds of a tensor."""
OVER_RANKS: tuple[Literal["max", "min", "sum"], ...] = ("max", "min", *("sum",) * 6, "max")
"""What is taken over ranks of each of ``FIT_COLUMNS`` and, behind them, of the number of scale updates."""
SAMPLE = 2**14
"""Elements of a tensor that are looked at, about. Of numbers of one distribution SQNR is then off by a few hundredths of a
decibel; where a few rows hold the large ones, by several decibels, as the sample has them or not."""
_LEAST_ROWS, _TILE = 4, 128
_GOLDEN = (5**0.5 - 1) / 2


def sample_of(x: Tensor, tiles: bool = False, most: int = SAMPLE) -> Tensor:
    """A copy of rows evenly spread over a matrix, of about ``most`` elements; all of them if it has no more.

    Args:
        x: ``[rows, columns]``, not empty.
        tiles: Whether to take rows by 128 as they lie in tiles; one such at least, of single rows four.
        most: Number of elements.

    Returns:
        ``[some rows, columns]``, contiguous, of the dtype of ``x``.
    """
    count, length = x.shape
    if x.numel() <= most:
        return x.clone(memory_format=torch.contiguous_format)
    return x.index_select(0, _chosen_rows(count, max(_LEAST_ROWS, most // length), tiles, x.device))


@lru_cache(maxsize=256)  # on a GPU each is sent there, once
def _chosen_rows(count: int, wanted: int, tiles: bool, device: torch.device) -> Tensor:
    if tiles:
        firsts = range(0, count, _TILE)
        chosen = [firsts[i] for i in _spread(len(firsts), max(1, wanted // _TILE))]
        rows = [row for first in chosen for row in range(first, min(first + _TILE, count))]
    else:
        rows = _spread(count, wanted)
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _spread(count: int, wanted: int) -> list[int]:
    """One number of every ``wanted``-th part of ``range(count)``.

    At another place in each part: the first tokens of all sequences would be no sample of them.
    """
    wanted = min(count, wanted)
    bounds = [part * count // wanted for part in range(wanted + 1)]
    return [low + int((high - low) * (part * _GOLDEN % 1.0)) for part, (low, high) in enumerate(pairwise(bounds))]


class Batch:
    """Samples of tensors of one operand and one size, measured together: on samples this small an op costs its call.

    What recipes have in common is computed once, so each further one costs little more than its quantization.

    Args:
        samples: From :func:`sample_of`, all of one shape and dtype. FP32, BF16 or FP16.
        amax: Largest magnitude of each whole tensor as it was sampled, FP32 ``[1, 1]`` each.
        operand: What they are. Inputs and gradients are quantized from BF16, weights from the dtype they are stored in.

    Attributes:
        amax: Largest magnitudes of what is quantized, FP32 ``[samples]``.
    """

    def __init__(self, samples: Sequence[Tensor], amax: Sequence[Tensor], operand: Operand) -> None:
        self._operand = operand
        rows, amaxes = torch.stack(list(samples)), torch.cat(list(amax)).flatten()
        if operand != "weight":
            rows, amaxes = rows.bfloat16(), amaxes.bfloat16().float()  # rounding keeps the order of numbers
        self._rows, self.amax = rows.float(), amaxes
        self._nonzero, self._signal = nonzeros(self._rows, by_row=True), self._square_sum(self._rows)

    def _square_sum(self, x: Tensor) -> Tensor:
        """Of each sample, in FP64, where the squares of all FP32 numbers fit."""
        norm: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=wide_dtype(x.device))
        return norm.square_()

    def measured(self, recipe: Recipe, held: Tensor | None = None) -> Tensor:
        """What becomes of the tensors under a recipe, ``[samples, FIT_COLUMNS]``; see :func:`measured`.

        Args:
            recipe: How scales are chosen.
            held: The one scale of each tensor, FP32 ``[samples]``; 0, or nothing, where it is chosen by the tensor itself.
        """
        format, granularity = recipe.format_of(self._operand), recipe.granularity_of(self._operand)
        margin = recipe.margin if isinstance(recipe, DelayedScaling) else 0
        # The smallest of all scales belongs to the largest of all magnitudes, whether or not that is in the sample.
        smallest = scale_of(self.amax, format, margin=margin, power_of_two=recipe.power_of_two_scales)
        rows = self._rows
        if granularity == "tensor":
            smallest = smallest if held is None else torch.where(held > 0, held, smallest)
            scale = smallest.view(-1, 1, 1)
        else:
            if granularity in STRIPS:
                rows = as_strips(rows, STRIPS[granularity])  # zeros that fill one up count nowhere
            scale = scale_of(self._amax_by(granularity, rows), format, power_of_two=recipe.power_of_two_scales)
        quantized = quantize(rows, format, scale=scale)
        # inf - inf and nan - nan are NaN, anything else gives 0: what is not finite may be outside of the sample.
        noise = self._square_sum(quantized.dequantize().sub_(rows)) + (self.amax - self.amax)
        # A tensor's own scale brings its amax to the largest finite number at most, unless room below it was asked for.
        clips = (granularity == "tensor" and held is not None) or margin < 0
        clipped = saturated(rows, scale, format, by_row=True) if clips else torch.zeros_like(smallest)
        underflowed = self._nonzero - nonzeros(quantized.values, by_row=True)
        elements = torch.full_like(self._signal, self._rows[0].numel())
        narrow = torch.stack([self.amax, smallest, clipped, underflowed, self._nonzero], dim=1)
        return torch.cat([narrow.to(noise.dtype), torch.stack([elements, self._signal, noise], dim=1)], dim=1)

    def _amax_by(self, granularity: Granularity, rows: Tensor) -> Tensor:
        if granularity != "block_128x128":
            return amax_of(rows, "row")
        count, height, length = rows.shape
        if height % _TILE:  # else a tile would reach into the next sample
            return torch.stack([amax_of(sample, granularity) for sample in rows])
        return amax_of(rows.view(count * height, length), granularity).view(rows.shape)


@torch.no_grad()
def measured(x: Tensor, operand: Operand, recipe: Recipe, scale: Tensor | None = None, most: int = SAMPLE) -> Tensor:
    """What becomes of a tensor that is quantized by a recipe; without a transfer.

    All but amax and scale is of a sample: of whole rows, where tiles share a scale of whole tiles of 128 rows.

    Args:
        x: ``[rows, contracted]`` as fprop contracts inputs and weights and dgrad gradients of outputs: ``[tokens, in]``,
            ``[out, in]``, ``[tokens, out]``. FP32, BF16 or FP16; not changed.
        operand: What it is. Inputs and gradients are quantized from BF16, weights from the dtype they are stored in.
        recipe: How scales are chosen.
        scale: The one scale of the tensor, where it is not chosen by the tensor itself (delayed scaling); FP32.
        most: Elements to look at, about.

    Returns:
        ``FIT_COLUMNS``, 1-dim on the tensor's device, FP64 where that has it; zeros for an empty tensor. ``amax``: largest
        magnitude. ``scale``: what values are multiplied by, of several scales the smallest. ``saturated``: number of
        elements clipped to the format's largest finite number, 0 by a tensor's own scale. ``underflowed``: number of
        elements that become zero without being it. ``nonzero``, ``elements``: how many there are. ``signal``, ``noise``:
        sum of squares, and of squared errors after dequantization; the noise is NaN if anything in the tensor is not
        finite.
    """
    if not x.numel():
        return torch.zeros(len(FIT_COLUMNS), dtype=wide_dtype(x.device), device=x.device)
    batch = Batch([sample_of(x, by_tiles(recipe, operand), most)], [amax_of(x)], operand)
    return batch.measured(recipe, None if scale is None else scale.reshape(1))[0]


def by_tiles(recipe: Recipe, operand: Operand) -> bool:
    """Whether rows share scales with their neighbors, so that samples have to be of whole tiles."""
    return recipe.granularity_of(operand) == "block_128x128"


def nothing(rows: int, device: torch.device) -> Tensor:
    """What was measured of nothing, ``[rows, FIT_COLUMNS]``: anything :func:`combined` with it stays what it is."""
    empty = torch.zeros(rows, len(FIT_COLUMNS), dtype=wide_dtype(device), device=device)
    empty[:, 1] = torch.inf
    return empty


def combined(first: Tensor, second: Tensor) -> Tensor:
    """``[rows, FIT_COLUMNS]`` of two tensors each, neither empty, as of one; what :data:`OVER_RANKS` says."""
    amax, scale = torch.maximum(first[:, :1], second[:, :1]), torch.minimum(first[:, 1:2], second[:, 1:2])
    return torch.cat([amax, scale, first[:, 2:] + second[:, 2:]], dim=1)


@dataclass(frozen=True)
class Fit:
    """How well the scales of one operand of a layer fitted.

    Attributes:
        amax: Largest magnitude.
        scale: What values were multiplied by; of several scales the smallest.
        saturation: Share of elements clipped to the format's largest finite number.
        underflow: Share of the elements that are not zero that were quantized to zero.
        sqnr: Signal to quantization noise ratio in decibels: infinite where quantization was exact, NaN where something
            was not finite.
        updates: How often the scale changed since it was asked before; ``None`` where each tensor is scaled anew, or
            where Transformer Engine keeps the scale.
    """

    amax: float
    scale: float
    saturation: float
    underflow: float
    sqnr: float
    updates: int | None

    @classmethod
    def of(cls, row: Sequence[float]) -> Fit | None:
        """The fit behind ``FIT_COLUMNS`` and a number of updates (below 0: none); ``None`` where nothing was measured."""
        amax, scale, clipped, underflowed, nonzero, elements, signal, noise, updates = row
        if not elements:
            return None
        underflow = underflowed / nonzero if nonzero else 0.0
        sqnr = decibels(signal, noise)
        return cls(amax, scale, clipped / elements, underflow, sqnr, int(updates) if updates >= 0 else None)


class Fits(NamedTuple):
    """Fits by layer and operand; an operand of which nothing was measured is missing, and so is a layer without any.

    Attributes:
        own: Of each layer's own recipe.
        what_if: By the label of a recipe, as if layers had been quantized by it.
    """

    own: dict[str, dict[Operand, Fit]]
    what_if: dict[str, dict[str, dict[Operand, Fit]]]


def fits_of(numbers: Tensor, layers: Sequence[str], labels: Sequence[str] = ()) -> Fits:
    """Fits from numbers over all ranks.

    Args:
        numbers: On the CPU, ``[(1 + labels) * layers * 3, FIT_COLUMNS and updates]``, as ``FitWatch.numbers`` gives them.
        layers: Names of layers.
        labels: Labels of the recipes tried on them.
    """
    rows = iter(numbers.tolist())
    found: list[dict[str, dict[Operand, Fit]]] = []
    for _ in range(1 + len(labels)):
        by_layer = {layer: {operand: Fit.of(next(rows)) for operand in OPERANDS} for layer in layers}
        known = {
            layer: {operand: fit for operand, fit in by_operand.items() if fit is not None}
            for layer, by_operand in by_layer.items()
        }
        found.append({layer: by_operand for layer, by_operand in known.items() if by_operand})
    return Fits(found[0], dict(zip(labels, found[1:], strict=True)))


def label_of(recipe: Recipe) -> str:
    """A recipe's name and those of its settings that are not the default: ``delayed(history=16)``. No two share one."""
    settings = [
        f"{field.name}={value}" for field in fields(recipe) if (value := getattr(recipe, field.name)) != field.default
    ]
    return recipe.name + (f"({','.join(settings)})" if settings else "")
