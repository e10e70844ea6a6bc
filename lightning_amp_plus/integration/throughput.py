"""ThroughputMonitor asks a plugin for its compute dtype by class, and reads the wrong one off an FSDPPrecision."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import ThroughputMonitor


def correct_throughput_monitors(trainer: Any, compute_dtype: torch.dtype) -> None:
    """Gives the Trainer's throughput monitors the peak FLOP rate of the dtype the matrix products run in."""
    for monitor in trainer.callbacks:
        if isinstance(monitor, ThroughputMonitor):
            monitor.available_flops = get_available_flops(trainer.strategy.root_device, compute_dtype)
            for throughput in monitor._throughputs.values():
                throughput.available_flops = monitor.available_flops
