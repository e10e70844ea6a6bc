"""Gradients that are still partial sums (sequence-parallel norms), brought to their parameter's placements.

A ``Partial`` gradient on a replicated parameter holds on each rank only what that rank's tokens contributed: its local
norm is not the norm, and its local overflow not the overflow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from lightning_amp_plus.local_parts import is_dtensor


@torch.no_grad()
def settle_partial(parameters: Iterable[Tensor]) -> None:
    """Redistributes every gradient whose placements are not its parameter's.

    Plain sums onto replicated parameters go through one all-reduce for each mesh dimension and dtype, whatever their
    number; every other change of placement is redistributed by itself.
    """
    sums: dict[tuple[Any, int, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is None or not is_dtensor(gradient):
            continue
        target: Any = parameter
        if not is_dtensor(target) or gradient.placements == target.placements:
            continue
        dim = _only_sum(gradient.placements, target.placements)
        if dim is None:
            parameter.grad = gradient.redistribute(placements=target.placements)
        else:
            sums[gradient.device_mesh, dim, gradient.dtype].append(parameter)
    for (mesh, dim, _), group in sums.items():
        gradients: list[Any] = [parameter.grad for parameter in group]
        local = [gradient.to_local() for gradient in gradients]
        flat = torch.cat([tensor.reshape(-1) for tensor in local])
        torch.distributed.all_reduce(flat, group=mesh.get_group(dim))
        kind: Any = type(gradients[0])
        pieces = flat.split([tensor.numel() for tensor in local])  # type: ignore[no-untyped-call]
        for parameter, gradient, tensor, piece in zip(group, gradients, local, pieces, strict=True):
            placed: Any = parameter
            parameter.grad = kind.from_local(
                piece.view(tensor.shape),
                mesh,
                placed.placements,
                run_check=False,
                shape=gradient.shape,
                stride=gradient.stride(),
            )


def _only_sum(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> int | None:
    """The one mesh dimension on which a sum is to become a replica, if that is the whole difference."""
    different = [dim for dim, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    if len(different) != 1:
        return None
    placement = found[different[0]]
    is_sum = placement.is_partial() and getattr(placement, "reduce_op", None) == "sum"
    return different[0] if is_sum and wanted[different[0]].is_replicate() else None
