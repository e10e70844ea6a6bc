"""Gradients of an optimizer as flat lists, and the one pass that unscales and checks them. Used by ``step``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.local_parts import is_dtensor, local_part


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The optimizer's parameters, in the order of its groups."""
    return (p for group in optimizer.param_groups for p in group["params"])


def parameters_with_gradients(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters whose ``.grad`` is set, in the order of its groups."""
    return [p for p in parameters_of(optimizer) if p.grad is not None]


def dense_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Plain tensors that hold the gradients' values, empty ones left out.

    That is ``.grad`` itself, this rank's part of a sharded one, or the values of a sparse one.

    A sparse gradient with repeated indices is coalesced first: its parts may be finite where their sum is not, and a
    norm over the parts is not the norm of the gradient.
    """
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            if not gradient.is_coalesced():
                parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        elif is_dtensor(gradient):
            gradient = local_part(gradient)
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        if gradient.numel():
            gradients.append(gradient)
    return gradients


def by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """``tensors`` in groups that torch's ``_foreach`` kernels take in one call."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return list(groups.values())


@torch.no_grad()
def unscale_and_check(gradients: list[Tensor], factor: Tensor) -> Tensor:
    """Multiplies ``gradients`` by ``factor`` in place and reports whether any element is not finite.

    One fused pass. The check looks at the elements, not at a norm: 1e25 is a finite FP32 gradient whose square is not.

    Args:
        gradients: Non-empty list of dense tensors of any floating dtypes and devices.
        factor: 0-dim FP32 tensor, usually ``1 / S``.

    Returns:
        0-dim FP32 tensor on the device of ``factor``: 1 if any element is not finite, else 0.
    """
    verdicts: dict[torch.device, Tensor] = {}
    for group in by_device_and_dtype(gradients):
        device = group[0].device
        if device not in verdicts:
            verdicts[device] = torch.full((), 0.0, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, verdicts[device], factor.to(device, non_blocking=True))
    first, *others = verdicts.values()
    if others:  # a model spread over several devices
        first = torch.stack([v.to(factor.device, non_blocking=True) for v in verdicts.values()]).amax()
    return first.to(factor.device, non_blocking=True)


@torch.no_grad()
def multiply(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiplies ``gradients`` by ``factor`` in place."""
    for group in by_device_and_dtype(gradients):
        torch._foreach_mul_(group, factor.to(group[0].device) if isinstance(factor, Tensor) else factor)


def first_nonfinite(named_parameters: Iterable[tuple[str, Tensor]]) -> tuple[str, str, int] | None:
    """Where non-finite gradients begin and end, for an error message; reads every gradient, so only for the bad case.

    Backward runs from the last layer to the first, so of the bad parameters the one registered last was hit first.

    Returns:
        ``(hit first, reaching back to, how many)`` or ``None`` if every gradient is finite.
    """
    bad = [
        name
        for name, parameter in named_parameters
        if any(not bool(torch.isfinite(gradient).all()) for gradient in dense_gradients([parameter]))
    ]
    return (bad[-1], bad[0], len(bad)) if bad else None
