"""Where in an accumulation window the Trainer is. The only place that does arithmetic on Lightning's batch counters."""

from __future__ import annotations

from typing import Any

from lightning_amp_plus.integration.items import ItemCounts
from lightning_amp_plus.window import Window


def starts_window(trainer: Any) -> bool:
    """Whether the micro-batch is the first of its window: Lightning zeroes the gradients then, consumed or not."""
    return bool(trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0)


def closes_window(trainer: Any) -> bool:
    """Whether the micro-batch is the last of its window."""
    return bool(trainer.is_last_batch or (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0)


def closing_window(module: Any, items: ItemCounts, mean_of_partial: bool) -> Window:
    """The window that closes now, weighted. Called after the closing micro-batch's backward.

    Args:
        module: The LightningModule, or ``None`` outside a Trainer.
        items: What ``training_step`` said about numbers of items.
        mean_of_partial: Whether a window shorter than ``accumulate_grad_batches`` is weighted by its own size.

    Raises:
        ValueError: If the numbers of items cannot be meant.
    """
    trainer = getattr(module, "_trainer", None)
    if trainer is None:
        return Window(0)
    if not module.automatic_optimization:
        return Window(trainer.global_step)
    batches = trainer.accumulate_grad_batches
    size = trainer.fit_loop.batch_idx % batches + 1
    total = items.total()
    # Lightning has divided each micro-batch's loss by `batches`; a sum over items wants none of that.
    factor = float(batches) if total is not None else batches / size if mean_of_partial else 1.0
    return Window(trainer.global_step, size, trainer.is_last_batch, factor, total)
