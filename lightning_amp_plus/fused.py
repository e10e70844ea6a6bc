"""Optimizers whose kernel takes ``found_inf`` and skips by itself, as torch's fused ones do. Used by ``step``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def needs_verdict(optimizer: Optimizer) -> bool:
    """Whether the host must know the verdict before the step: unless the optimizer's kernel takes ``found_inf``."""
    kind: Any = type(optimizer)
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or _takes_grad_scaler(kind):
        return True
    # Dampening does not apply to SGD's first step, so a momentum buffer started at zero would not do (_start_momentum).
    return isinstance(optimizer, torch.optim.SGD) and any(
        g["momentum"] and g["dampening"] for g in optimizer.param_groups
    )


@contextmanager
def given_verdict(optimizer: Optimizer, parameters: list[Tensor], found_inf: Tensor | None) -> Iterator[None]:
    """Lets the optimizer's kernel see the verdict while it steps on gradients that are unscaled already.

    Args:
        optimizer: One that :func:`needs_verdict` says no of.
        parameters: Those with gradients.
        found_inf: 0-dim FP32 tensor, above 0 to skip; ``None`` where this rank has no gradient.
    """
    _start_momentum(optimizer, parameters)
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = None, found_inf
    try:
        yield
    finally:
        del fused.grad_scale, fused.found_inf


def _start_momentum(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Starts the momentum of fused SGD at zero, which its first step makes the gradient, as torch does.

    torch itself leaves the buffer it has just made uninitialized if that first step is skipped.
    """
    if not isinstance(optimizer, torch.optim.SGD) or not any(group["momentum"] for group in optimizer.param_groups):
        return
    if len(optimizer.state) < sum(len(group["params"]) for group in optimizer.param_groups):
        for parameter in parameters:
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@functools.cache
def _takes_grad_scaler(kind: Any) -> bool:
    """Whether ``step`` follows an older protocol, which hands it the whole scaler and would unscale a second time."""
    return "grad_scaler" in inspect.signature(kind.step).parameters
