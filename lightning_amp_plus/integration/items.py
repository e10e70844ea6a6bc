"""Reads ``num_items`` off what ``training_step`` returns, to weight summed losses by their number of items."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


class ItemCounts:
    """Numbers of items (tokens, samples) of the micro-batches in the open window."""

    def __init__(self) -> None:
        self._counts: list[Any] = []

    def note(self, output: Any) -> None:
        """Takes what ``training_step`` returned for one micro-batch; without a loss it contributes nothing.

        Raises:
            ValueError: If ``num_items`` is not one number of items.
        """
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            return
        count = output.get("num_items") if isinstance(output, Mapping) else None
        if isinstance(count, Tensor):
            if count.numel() != 1:
                raise ValueError(
                    f"training_step returned num_items of shape {tuple(count.shape)}; expected one number."
                )
            count = count.detach().reshape(())
        elif count is not None and not _is_count(count):
            raise ValueError(f"training_step returned num_items={count!r}; expected the number of items, 0 or more.")
        self._counts.append(count)

    def whole_loss(self, loss: Tensor, module: Any) -> tuple[Tensor, float | Tensor]:
        """The loss that backward is called on as ``training_step`` made it, and the number of items it was summed over.

        In automatic optimization Lightning has divided it by ``accumulate_grad_batches``. The number is 1 for a mean.
        """
        trainer = getattr(module, "_trainer", None)
        if trainer is None or not module.automatic_optimization:
            return loss, 1.0
        count = self._counts[-1] if self._counts else None
        return loss.detach() * trainer.accumulate_grad_batches, 1.0 if count is None else count

    def clear(self) -> None:
        """A new window begins."""
        self._counts.clear()

    def to_list(self) -> list[float | None]:
        """The counts as plain numbers, for a checkpoint in mid-window."""
        return [None if count is None else float(count) for count in self._counts]

    def take_list(self, counts: list[float | None]) -> None:
        """Goes on from :meth:`to_list`."""
        self._counts[:] = counts

    def total(self) -> float | Tensor | None:
        """The window's number of items, or ``None`` where ``training_step`` does not return it.

        Raises:
            ValueError: If some micro-batches of the window came with ``num_items`` and others without.
        """
        counts = [count for count in self._counts if count is not None]
        if not counts:
            return None
        if len(counts) != len(self._counts):
            raise ValueError(
                f"training_step returned num_items for {len(counts)} of the {len(self._counts)} micro-batches of this "
                "window. Summed and averaged losses cannot be mixed: return it always or never."
            )
        tensors = [count for count in counts if isinstance(count, Tensor)]
        if tensors:
            device = tensors[0].device
            return torch.stack([torch.as_tensor(c, dtype=torch.float64, device=device) for c in counts]).sum()
        return float(sum(counts))
