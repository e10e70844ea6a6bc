"""Whether weights and optimizer state read from a checkpoint are finite: one fused pass for each device, one transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.no_grad()
def nonfinite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that hold NaN or inf, in the order given; of a DTensor the local part is looked at."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, Tensor]]] = {}
    for index, (name, tensor) in enumerate(named):
        local = getattr(tensor, "_local_tensor", tensor)
        if local.dtype in _FLOATS and local.numel() and local.layout == torch.strided and not local.is_meta:
            groups.setdefault((local.device, local.dtype), []).append((index, name, local.detach()))
    bad: list[tuple[int, str]] = []
    for entries in groups.values():
        # The largest magnitude is finite if and only if every element is; unlike a sum, it cannot overflow.
        largest = torch._foreach_norm([tensor for _, _, tensor in entries], float("inf"))
        finite = torch.isfinite(torch.stack(list(largest))).tolist()
        bad += [entry[:2] for entry, fine in zip(entries, finite, strict=True) if not fine]
    return [name for _, name in sorted(bad)]


def tensors_of(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Weights and optimizer state of a loaded checkpoint, named as in it."""
    for part in ("state_dict", "optimizer_states"):
        yield from _walk(checkpoint.get(part), part)


def _walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _walk(item, f"{name}.{key}")
