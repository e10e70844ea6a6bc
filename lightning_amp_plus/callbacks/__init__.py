"""Callbacks that show what a run in mixed precision does, and keep it with its checkpoints."""

from lightning_amp_plus.callbacks.activation import ActivationMonitor
from lightning_amp_plus.callbacks.checkpoint import PrecisionCheckpoint
from lightning_amp_plus.callbacks.dtype_census import DtypeCensus
from lightning_amp_plus.callbacks.fp8_coverage import Fp8CoverageMonitor
from lightning_amp_plus.callbacks.gradient import GradientMonitor
from lightning_amp_plus.callbacks.loss_scale import LossScaleMonitor
from lightning_amp_plus.callbacks.suite import precision_callbacks
from lightning_amp_plus.callbacks.update_ratio import UpdateRatioMonitor

__all__ = [
    "ActivationMonitor",
    "DtypeCensus",
    "Fp8CoverageMonitor",
    "GradientMonitor",
    "LossScaleMonitor",
    "PrecisionCheckpoint",
    "UpdateRatioMonitor",
    "precision_callbacks",
]
