"""Measures of a training run's numerics: pure functions and the torchmetrics Metrics built on them."""

from lightning_amp_plus.metrics.activation_health import ActivationHealth, Health, activation_health
from lightning_amp_plus.metrics.exponents import ExponentHistogram, exponent_histogram
from lightning_amp_plus.metrics.fp8_coverage import Fp8Coverage, fp8_coverage
from lightning_amp_plus.metrics.gradient_health import GradientHealth, gradient_health
from lightning_amp_plus.metrics.skip_rate import SkipRate, skip_rate
from lightning_amp_plus.metrics.update_ratio import UpdateRatio, rounded_away, update_ratio

__all__ = [
    "ActivationHealth",
    "ExponentHistogram",
    "Fp8Coverage",
    "GradientHealth",
    "Health",
    "SkipRate",
    "UpdateRatio",
    "activation_health",
    "exponent_histogram",
    "fp8_coverage",
    "gradient_health",
    "rounded_away",
    "skip_rate",
    "update_ratio",
]
