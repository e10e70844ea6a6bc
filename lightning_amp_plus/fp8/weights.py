"""Quantized weights kept for an accumulation window, whose micro-batches all multiply the same ones. Knows no Trainer.

Whoever knows when a window begins and ends tells :class:`WindowWeights`; where nobody does, nothing is kept. Within a
window a weight that was replaced or edited is quantized anew; over its end nothing is kept at all, since an optimizer may
write through ``.data``, and FSDP2 gathers new weights into the same storage, both without a trace in the tensor's version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

KEPT = "_amp_kept_weight"  # a layer's KeptWeight; a plain attribute, so no state_dict knows of it


class WindowWeights:
    """The quantized weights of a model's layers, and whether a window is open that is worth keeping them for.

    A window of one micro-batch is not: a weight would stay in memory beyond its backward and serve nobody.
    """

    def __init__(self) -> None:
        self.open = False
        self.stamp = 0  # another number whenever what was kept is to be used no more, also by a backward still to come
        self._layers: list[KeptWeight] = []

    def attach(self, layers: Iterable[nn.Module]) -> None:
        """Takes the layers whose weights are to be kept from now on; forgets what was kept of others.

        Left out are weights that no optimizer's window fixes (parametrized ones are made anew in every forward), and
        sharded ones: one that FSDP2 gathers for a layer's turn would stay on every rank in whole.
        """
        for kept in self._layers:
            kept.entries.clear()
        self._layers = []
        self.stamp += 1
        for layer in layers:
            forget_weight(layer)
            if type(layer._parameters.get("weight")) is nn.Parameter:
                kept = KeptWeight(self)
                vars(layer)[KEPT] = kept
                self._layers.append(kept)

    def begin(self, several: bool) -> None:
        """A window begins.

        Args:
            several: Whether more than one micro-batch is to come.
        """
        self.end()
        self.open = several

    def end(self) -> None:
        """The window is over, or its last micro-batch is, or nobody knows how it goes on: releases everything."""
        self.open = False
        self.release()

    def release(self) -> None:
        """Has weights quantized anew, in the open window too."""
        self.stamp += 1
        for kept in self._layers:
            kept.entries.clear()


class KeptWeight:
    """One layer's place for its quantized weight, by what it is quantized for.

    Args:
        window: The open window; without one nothing is kept.
    """

    def __init__(self, window: WindowWeights | None = None) -> None:
        self.window = window
        self.entries: dict[str, tuple[WeightNow, Any]] = {}

    def now(self, weight: Tensor) -> WeightNow | None:
        """The weight as it is now, to keep or to find what is made of it; ``None`` where nothing may be kept."""
        window = self.window
        if window is None or not window.open or type(weight) is not nn.Parameter:
            return None
        # Tensors of inference mode have no version and cannot be saved for a backward. A dispatch mode may replay the
        # ops of this forward one by one (selective checkpointing), or make tensors that are none (fake ones).
        if torch.is_inference_mode_enabled() or weight.is_inference() or is_in_torch_dispatch_mode():
            return None
        return WeightNow(self, weight, weight._version, weight.data_ptr(), window.stamp)

    def __reduce__(self) -> Any:
        return KeptWeight, ()  # a copy of the layer is in no window


@dataclass(frozen=True, eq=False)
class WeightNow:
    """A weight at a moment of a window.

    Attributes:
        kept: Where what is made of it is kept.
        weight: The weight itself: an id may be reused within the window.
        version: Counts its edits in place.
        address: Of its data, which assigning ``.data`` changes.
        stamp: The window's.
    """

    kept: KeptWeight
    weight: Tensor
    version: int
    address: int
    stamp: int

    def _is(self, other: WeightNow) -> bool:
        same = self.version == other.version and self.address == other.address and self.stamp == other.stamp
        return same and self.weight is other.weight

    def once(self, purpose: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made once for this moment and purpose."""
        window = self.kept.window
        if window is None or not window.open or window.stamp != self.stamp:  # a backward after the window's end
            return make()
        then, made = self.kept.entries.get(purpose, (None, None))
        if then is None or not self._is(then):
            made = make()
            self.kept.entries[purpose] = self, made
        return made


def kept_weight_of(layer: nn.Module) -> KeptWeight | None:
    """The layer's place for its quantized weight in an open window; in evaluation and under ``torch.compile`` none."""
    if torch.compiler.is_compiling():  # a graph would hold on to the weight of the window that it was traced in
        return None
    kept: KeptWeight | None = vars(layer).get(KEPT)
    return kept if kept is not None and layer.training else None


def forget_weight(layer: nn.Module) -> None:
    """Takes away a layer's place and what is in it."""
    kept: KeptWeight | None = vars(layer).pop(KEPT, None)
    if kept is not None:
        kept.entries.clear()
        kept.window = None
