"""The callback that lets the plugin judge a checkpoint before Lightning loads it. Joins a Trainer by itself.

An installed package joins through the entry point ``lightning.pytorch.callbacks_factory``, in the module
``lightning_amp_plus_guard``; our own Trainer and ``PrecisionCheckpoint`` see to it where that is not so.
"""

from __future__ import annotations

import lightning.pytorch as pl
from typing_extensions import override

from lightning_amp_plus.precision import AmpPrecision


class ResumeGuard(pl.Callback):
    """Has the Trainer's ``AmpPrecision`` look at every checkpoint first. Does nothing in a Trainer without one."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Puts the plugin's guard around the strategy's ``load_checkpoint``, for this run."""
        guard_resume(trainer)


def guard_resume(trainer: pl.Trainer) -> None:
    """Guards the resume of ``trainer`` if its precision is ours; any number of calls make one guard."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, AmpPrecision):
        plugin.guard_resume(trainer)
