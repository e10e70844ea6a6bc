"""Callbacks that show what a run in mixed precision does. They read reports and module hooks, and change nothing."""

from lightning_amp_plus.callbacks.loss_scale import LossScaleMonitor
from lightning_amp_plus.callbacks.suite import precision_callbacks

__all__ = ["LossScaleMonitor", "precision_callbacks"]
