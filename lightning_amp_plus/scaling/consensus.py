"""Consensus: every rank takes the same verdict on a window, by one collective whatever the number of parameters.

Strategies differ only here and in ``grad_norm``; the step sequence knows just ``Consensus``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor


class Consensus:
    """Consensus of a single process: its own verdict."""

    world_size = 1

    def agree(self, terms: Tensor) -> Tensor:
        """Sums ``terms`` over all ranks that hold a replica or a part of the model.

        Args:
            terms: 1-dim tensor, FP64 where the device has it, the same length on every rank; each element a count, a flag
                or a sum.

        Returns:
            The sums, the same on every rank.
        """
        return terms

    def maximum(self, values: Tensor) -> None:
        """Makes ``values`` the largest over all ranks, in place; the same shape on every rank."""

    def gather(self, values: Tensor) -> Tensor:
        """The ``values`` of all ranks, for the rare moments in which ranks are compared or named.

        Args:
            values: 1-dim tensor, the same length on every rank.

        Returns:
            2-dim tensor of shape ``(world size, length)``, the same on every rank.
        """
        return values.unsqueeze(0)


class GroupConsensus(Consensus):
    """Consensus over a process group (the world by default) by one all-reduce.

    Args:
        group: Process group that takes the verdict together.

    Raises:
        ValueError: If this rank is not part of ``group``.
    """

    def __init__(self, group: Any = None) -> None:
        if group is not None and torch.distributed.get_rank(group) < 0:
            raise ValueError(
                f"AmpPrecision(process_group=...): rank {torch.distributed.get_rank()} is not part of the group given "
                f"(ranks {torch.distributed.get_process_group_ranks(group)}). Give every rank a group that contains it."
            )
        self.group = group
        self.world_size = torch.distributed.get_world_size(group)

    def agree(self, terms: Tensor) -> Tensor:
        """See :meth:`Consensus.agree`; in place."""
        torch.distributed.all_reduce(terms, op=torch.distributed.ReduceOp.SUM, group=self.group)
        return terms

    def maximum(self, values: Tensor) -> None:
        """See :meth:`Consensus.maximum`."""
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=self.group)

    def gather(self, values: Tensor) -> Tensor:
        """See :meth:`Consensus.gather`."""
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)
