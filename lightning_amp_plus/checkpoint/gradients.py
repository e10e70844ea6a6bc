"""Gradients of an open accumulation window, stored per rank and put back: plain CPU tensors, of a shard the local part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_amp_plus.local_parts import is_dtensor, local_part


def gather_gradients(
    named: Iterable[tuple[str, Tensor]], wanted: Callable[[Tensor], bool], device: torch.device
) -> list[dict[str, Tensor]]:
    """The gradients of every rank, by rank and parameter name; complete on rank 0 only.

    A collective: first which rank holds how much of which gradient, then parameter by parameter, so that no more than one
    of them is on the way at a time.

    Args:
        named: The model's parameters; the same names in the same order on every rank.
        wanted: Whether a parameter's gradient belongs to the window.
        device: Where the backend exchanges tensors.
    """
    local = [(name, p.dtype, local_part(p.grad) if p.grad is not None and wanted(p) else None) for name, p in named]
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [{name: grad.detach().to("cpu", copy=True) for name, _, grad in local if grad is not None}]
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = torch.tensor(
        [-1 if grad is None else grad.numel() for _, _, grad in local], dtype=torch.int64, device=device
    )
    sizes = torch.empty(world * len(local), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, mine)
    table = sizes.cpu().view(world, len(local))
    found: list[dict[str, Tensor]] = [{} for _ in range(world)]
    for column, (name, dtype, grad) in enumerate(local):
        longest = int(table[:, column].max())
        if longest < 0:
            continue
        flat = torch.zeros(longest, dtype=dtype, device=device)
        if grad is not None:
            flat[: grad.numel()] = grad.detach().flatten()
        rows = [torch.empty_like(flat) for _ in range(world)] if rank == 0 else None
        dist.gather(flat, rows, dst=0)
        for other, row in enumerate(rows or ()):
            length = int(table[other, column])
            if length >= 0:
                found[other][name] = row[:length].to("cpu", copy=True)
    return found


def put_back(stored: Mapping[str, Tensor], named: Iterable[tuple[str, Tensor]]) -> None:
    """Gives parameters the gradients stored under their names.

    Raises:
        ValueError: If a stored gradient has no parameter, or another number of elements. Nothing is changed then.
    """
    parameters = dict(named)
    for name, gradient in stored.items():
        parameter = parameters.get(name)
        if parameter is None:
            raise ValueError(f"The checkpoint holds a gradient of {name!r}, which the model does not have.")
        if local_part(parameter).numel() != gradient.numel():
            raise ValueError(
                f"The checkpoint's gradient of {name!r} has {gradient.numel()} elements on this rank; the parameter has "
                f"{local_part(parameter).numel()}."
            )
    for name, gradient in stored.items():
        target: Any = parameters[name]
        inner = local_part(target)
        local = gradient.to(inner.device, inner.dtype).reshape(inner.shape)
        if is_dtensor(target):
            from torch.distributed.tensor import DTensor

            target.grad = DTensor.from_local(
                local,
                target.device_mesh,
                target.placements,
                run_check=False,
                shape=target.shape,
                stride=target.stride(),
            )
        else:
            target.grad = local
