"""Has a strategy's part of a training step watched: :func:`watch_step`. For the callbacks that look at operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from lightning_amp_plus.integration.instance_hooks import InstanceHooks
from lightning_amp_plus.watching.watcher import Watcher


def watch_step(strategy: Any, watcher: Watcher, optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[], None]:
    """Watches what a strategy computes, forward, backward and optimizer's step. Returns the function that ends it.

    Args:
        strategy: Lightning's.
        watcher: What looks.
        optimizers: All of the run.
    """
    hooks = InstanceHooks()
    watcher.begin(optimizers)
    for verb in ("training_step", "backward", "optimizer_step"):
        hooks.wrap(strategy, verb, partial(_watched, watcher, verb))

    def end() -> None:
        hooks.undo()
        watcher.end()

    return end


def _watched(watcher: Watcher, verb: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with watcher.entered(verb):
            return run(*args, **kwargs)

    return watched
