"""The global gradient norm, for clipping and for reports: of gradients held whole, and of sharded ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.gradients import by_device_and_dtype, dense_gradients

# Summing the squares of more elements than this in one go loses digits on CPU (8e-3 relative at 15M elements in FP32).
_PIECE = 2**18


class GradNorm:
    """Global L2 norm of gradients that this process holds whole, alone or as one of equal replicas."""

    sharded = False

    def total(
        self, parameters: list[Tensor], dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Tensor:
        """The L2 norm over all elements of the gradients.

        Args:
            parameters: Those with gradients; of any floating dtypes and devices; may be empty.
            dtype: What squares are summed in. FP32 overflows from elements of 1.8e19 on; FP64 does not, at four times
                the cost on CPU.
            device: Where the norm is wanted; by default where the first gradient is.

        Returns:
            0-dim tensor of ``dtype``; 0 for an empty list.
        """
        norm = _norm(dense_gradients(parameters), dtype)
        return norm if device is None else norm.to(device)


class ShardedGradNorm(GradNorm):
    """Global L2 norm of gradients of which ranks hold parts, replicas, or replicas of parts.

    Each rank adds up the squares of what it holds, every tensor weighted by one over the number of ranks that hold the
    same elements; the sum over all ranks is the square of the norm. In FP64, since the square of 1e25 does not fit
    FP32.

    Args:
        consensus: The ranks that hold the model.
        holders: Number of ranks among them that hold the same elements of a parameter as this one.
    """

    sharded = True

    def __init__(self, consensus: Consensus, holders: Callable[[Tensor], int]) -> None:
        self.consensus = consensus
        self.holders = holders

    @torch.no_grad()
    def square_sum(self, parameters: list[Tensor], device: torch.device) -> Tensor:
        """This rank's share of the squared norm, 0-dim FP64 on ``device``; the sum over ranks is the square."""
        by_holders: dict[int, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_holders[self.holders(parameter)].append(parameter)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for holders, group in by_holders.items():
            norm = _norm(dense_gradients(group), torch.float64).to(device)
            total = total + norm * norm / holders
        return total

    def total(
        self, parameters: list[Tensor], dtype: torch.dtype = torch.float64, device: torch.device | None = None
    ) -> Tensor:
        """The norm over all ranks: one collective, which every rank has to enter.

        Args:
            parameters: As in :meth:`GradNorm.total`.
            dtype: The result's dtype; squares are summed in FP64.
            device: Where ranks exchange it; a rank without gradients has to be told.
        """
        if device is None:
            device = parameters[0].device if parameters else torch.device("cpu")
        return self.consensus.agree(self.square_sum(parameters, device).reshape(1))[0].sqrt().to(dtype)


@torch.no_grad()
def _norm(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=dtype)
    norms: list[Tensor] = []
    for group in by_device_and_dtype(gradients):
        pieces = [
            piece for g in group for piece in (torch.split(g.reshape(-1), _PIECE) if g.numel() > _PIECE else (g,))
        ]
        if dtype == group[0].dtype or group[0].dtype == torch.float64:
            norms.extend(torch._foreach_norm(pieces, 2))
        else:
            norms.extend(torch._foreach_norm(pieces, 2, dtype=dtype))
    device = gradients[0].device
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, dtype) for norm in norms]), 2)
    return norm
