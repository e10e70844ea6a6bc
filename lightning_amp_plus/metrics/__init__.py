"""Measures of a training run's numerics: pure functions and the torchmetrics Metrics built on them."""

from lightning_amp_plus.metrics.skip_rate import SkipRate, skip_rate

__all__ = ["SkipRate", "skip_rate"]
