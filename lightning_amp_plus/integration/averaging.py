"""The gate on weight averaging: a skipped window does not move the average. Installed in ``connect``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks

from lightning_amp_plus.integration.instance_hooks import InstanceHooks


def gate_averaging(callbacks: list[Any], skipped: Callable[[], bool], hooks: InstanceHooks) -> bool:
    """Makes every WeightAveraging callback (EMA included) decline ``should_update`` after a skipped window.

    Args:
        callbacks: The Trainer's callbacks.
        skipped: Whether the window that just closed was skipped.
        hooks: Where the wrapping is noted, to be undone after the fit.

    Returns:
        Whether any callback is gated.
    """
    averaging = getattr(lightning_callbacks, "WeightAveraging", None)  # newer than the oldest Lightning we run with
    if averaging is None:
        return False

    def gate(should_update: Callable[..., bool]) -> Callable[..., bool]:
        def gated(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            if step_idx is not None and skipped():
                return False
            return should_update(step_idx=step_idx, epoch_idx=epoch_idx)

        return gated

    found = [callback for callback in callbacks if isinstance(callback, averaging)]
    for callback in found:
        hooks.wrap(callback, "should_update", gate)
    return bool(found)
