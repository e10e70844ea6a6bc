"""Turns FP8 on and off for a whole model while its routes stay as they are: the steps before FP8 begins."""

from __future__ import annotations

from torch import nn

from lightning_amp_plus.routed import FP8_SWITCH, route_of


def switch_fp8(model: nn.Module, on: bool) -> int:
    """Lets the model's FP8 modules compute in FP8, or in the format around them.

    Args:
        model: A model whose plan has been applied.
        on: Whether FP8 is on.

    Returns:
        Number of modules in FP8 by their route.
    """
    count = 0
    for module in model.modules():
        route = route_of(module)
        if route is None or route.fp8 is None:
            continue
        count += 1
        if on:
            vars(module).pop(FP8_SWITCH, None)
        else:
            setattr(module, FP8_SWITCH, False)
    return count
