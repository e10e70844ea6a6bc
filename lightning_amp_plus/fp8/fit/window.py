"""From samples of single tensors to the numbers of a window: :class:`FitWindow`. Used by ``watch``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_amp_plus.fp8.delayed import OPERANDS, AmaxHistory
from lightning_amp_plus.fp8.fit.measure import Batch, by_tiles, combined, label_of, nothing, sample_of
from lightning_amp_plus.fp8.quantize import amax_of
from lightning_amp_plus.fp8.recipes import DelayedScaling, Operand, Recipe

_BATCH = 2**18  # elements of samples that are measured together


@dataclass
class _Waiting:
    """Samples of one operand, size and recipe, to be measured together.

    Attributes:
        layers: Number of the layer of each.
        samples: From ``sample_of``.
        amax: Of each whole tensor.
        held: Scale that delayed scaling holds for each, 0 where it has none yet; empty for other recipes.
    """

    layers: list[int] = field(default_factory=list)
    samples: list[Tensor] = field(default_factory=list)
    amax: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)


# Operand; whether samples are tiles; the layers' recipe, if it goes by such; whether scales are held; what samples are.
_Key = tuple[Operand, bool, Recipe | None, bool, torch.Size, torch.dtype, torch.device]


class FitWindow:
    """What was measured in a window, by recipe, layer and operand.

    Row ``(recipe * layers + layer) * 3 + operand``; recipe 0 is each layer's own, behind it come those that are tried.

    Args:
        names: Names of the layers.
        device: Where results are kept.
        what_if: Recipes to try.
        most: Elements of each tensor to look at, about.

    Raises:
        ValueError: If a recipe is to be tried twice.

    Attributes:
        histories: For each recipe that is tried its own amax histories, if it needs some.
        labels: Names of the recipes that are tried.
    """

    def __init__(self, names: Sequence[str], device: torch.device, what_if: Sequence[Recipe], most: int) -> None:
        self.labels = [label_of(recipe) for recipe in what_if]
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"what_if has a recipe twice: {', '.join(self.labels)}. Name each once.")
        self._count, self._device, self._what_if, self._most = len(names), device, list(what_if), most
        self.histories = [
            AmaxHistory(recipe, names, device) if isinstance(recipe, DelayedScaling) and names else None
            for recipe in what_if
        ]
        self.forget()

    def forget(self) -> None:
        """Begins anew; what histories have noted stays."""
        self._waiting: dict[_Key, _Waiting] = {}
        self._rows = nothing((1 + len(self._what_if)) * self._count * len(OPERANDS), self._device)

    def add(self, layer: int, operand: Operand, x: Tensor, recipe: Recipe, held: Tensor | None) -> None:
        """Takes a sample of a tensor, which may be written to afterwards.

        Args:
            layer: Number of the layer.
            operand: What it is.
            x: ``[rows, contracted]``, not empty.
            recipe: The layer's own.
            held: The scale that delayed scaling holds for it, 0-dim on its device; 0 where that has none yet.
        """
        amax = amax_of(x)
        for tiles in sorted({by_tiles(kind, operand) for kind in (recipe, *self._what_if)}):
            sample = sample_of(x, tiles, self._most)
            own = recipe if by_tiles(recipe, operand) == tiles else None
            key = (operand, tiles, own, held is not None, sample.shape, sample.dtype, sample.device)
            if key in self._waiting and layer in self._waiting[key].layers:
                self._measure(key)  # two rows of one place cannot be written at once
            waiting = self._waiting.setdefault(key, _Waiting())
            waiting.layers.append(layer)
            waiting.samples.append(sample)
            waiting.amax.append(amax)
            if held is not None:
                waiting.held.append(held)
            if len(waiting.samples) * sample.numel() >= _BATCH:
                self._measure(key)

    def _measure(self, key: _Key) -> None:
        operand, tiles, own, *_ = key
        waiting = self._waiting.pop(key)
        batch = Batch(waiting.samples, waiting.amax, operand)
        if own is not None:
            held = torch.stack(waiting.held) if waiting.held else None
            self._put(0, waiting.layers, operand, batch.measured(own, held))
        for turn, (recipe, history) in enumerate(zip(self._what_if, self.histories, strict=True), start=1):
            if by_tiles(recipe, operand) == tiles:
                held = None if history is None else _noted(history, waiting.layers, operand, batch.amax)
                self._put(turn, waiting.layers, operand, batch.measured(recipe, held))

    def _put(self, turn: int, layers: Sequence[int], operand: Operand, rows: Tensor) -> None:
        first, column = turn * self._count, OPERANDS.index(operand)
        numbers = [(first + layer) * len(OPERANDS) + column for layer in layers]
        places = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        together = combined(self._rows.index_select(0, places), rows.to(self._device))
        self._rows.index_copy_(0, places, together)

    def totals(self) -> Tensor:
        """What was measured so far, ``[rows, FIT_COLUMNS]``."""
        for key in list(self._waiting):
            self._measure(key)
        return self._rows

    def end_window(self, applied: Tensor | bool, reduce_max: Callable[[Tensor], None] | None) -> None:
        """Advances the histories of recipes that are tried; see :meth:`AmaxHistory.end_window`."""
        self.totals()
        for history in self.histories:
            if history is not None:
                history.end_window(applied, reduce_max)


def _noted(history: AmaxHistory, layers: Sequence[int], operand: Operand, amax: Tensor) -> Tensor:
    """Notes amax values, and gives the scales held, ``[layers]``."""
    for layer, own in zip(layers, amax.unbind(), strict=True):
        history.note(layer, operand, own)
    return torch.stack([history.in_force(layer, operand) for layer in layers]).to(amax.device)
