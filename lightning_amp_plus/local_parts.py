"""What this rank holds of a tensor that may be a DTensor. Used wherever the numbers themselves are read or written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def is_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; asked without importing torch.distributed.tensor, which takes long."""
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, out of reach of autograd, or the tensor itself; shares its storage."""
    if not is_dtensor(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():
        local: Tensor = sharded.to_local()
    return local
