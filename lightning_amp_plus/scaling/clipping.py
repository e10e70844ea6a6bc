"""Clipping by norm and by value, of gradients that are unscaled or still multiplied by a scale.

Both work in the scale the buffer is in, so that clipping in mid-window (manual optimization) needs no unscaling: no
buffer ever holds a mixture of scaled and unscaled gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_amp_plus.scaling.gradients import by_device_and_dtype, multiply


@torch.no_grad()
def clip_by_norm(gradients: list[Tensor], norm: Tensor, max_norm: float, known_norm: float | None = None) -> None:
    """Scales ``gradients`` in place so that their global norm is at most ``max_norm``.

    The arithmetic is that of ``torch.nn.utils.clip_grad_norm_``: ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        gradients: Dense tensors.
        norm: 0-dim tensor, the global norm of the *unscaled* gradients.
        max_norm: Threshold for the unscaled norm.
        known_norm: The same norm as a float where the host knows it: below the threshold the pass over the gradients is
            saved.
    """
    if known_norm is not None and known_norm + 2e-6 <= max_norm * (1 - 1e-6):
        return
    multiply(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def clip_by_value(gradients: list[Tensor], max_value: float, scale: Tensor | None = None) -> None:
    """Clamps every element of the unscaled gradient to ``[-max_value, max_value]`` in place.

    Args:
        gradients: Dense tensors.
        max_value: Threshold for the unscaled gradient.
        scale: 0-dim tensor, what the gradients are still multiplied by; ``None`` for 1.
    """
    for group in by_device_and_dtype(gradients):
        if scale is None:
            reachable = min(max_value, torch.finfo(group[0].dtype).max)
            torch._foreach_clamp_min_(group, -reachable)
            torch._foreach_clamp_max_(group, reachable)
        else:
            bound = (scale * max_value).to(group[0].device)
            for gradient in group:
                gradient.clamp_(-bound.to(gradient.dtype), bound.to(gradient.dtype))
