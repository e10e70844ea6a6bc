"""FP8: recipes as data, quantization as pure functions, and the backends that multiply. Knows no Lightning."""

from lightning_amp_plus.fp8.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    Recipe,
    RowwiseScaling,
)
from lightning_amp_plus.fp8.recompute import activation_checkpoint

__all__ = [
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "MXScaling",
    "Recipe",
    "RowwiseScaling",
    "activation_checkpoint",
]
