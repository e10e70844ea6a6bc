"""What the step sequence is told about a window: :class:`Window`. Made by ``precision``, read by ``step``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Window:
    """One accumulation window, as it closes.

    Attributes:
        index: The Trainer's ``global_step`` at which it closes.
        size: Number of micro-batches in it.
        is_last: Whether it is the last of its epoch (and then possibly shorter than the others).
        gradient_factor: What gradients are multiplied by beside ``1 / S``, to weight a partial window by its own size.
        num_items: Number of items (tokens, samples) that this rank's summed losses of the window were taken over;
            gradients are divided by the number over all ranks. ``None`` where losses are means.
    """

    index: int
    size: int = 1
    is_last: bool = False
    gradient_factor: float = 1.0
    num_items: float | Tensor | None = None
