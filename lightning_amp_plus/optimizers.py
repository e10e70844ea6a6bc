"""The optimizer itself behind what Lightning hands to users. Used where users may hand that back."""

from __future__ import annotations

from typing import Any


def real_optimizer(optimizer: Any) -> Any:
    """The optimizer that a LightningOptimizer holds; any other as it is, though it may wrap one of its own.

    A LightningOptimizer is known by its ``toggle_model``, since who asks may not know Lightning. By its attribute
    ``optimizer`` alone one that wraps another (Lookahead) would be taken for it.
    """
    return optimizer.optimizer if hasattr(optimizer, "toggle_model") else optimizer
