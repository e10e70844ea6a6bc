"""From the device to the host at a log point: :func:`read`, for all monitors together one collective and one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.wide import wide_dtype

Over = Literal["sum", "max", "min", "own"]


@dataclass(frozen=True)
class Measurement:
    """What a monitor has on the device.

    Attributes:
        values: ``[rows, columns]``, of the same size on every rank.
        over_ranks: For each column what is taken over ranks; ``own`` keeps each rank's number.
    """

    values: Tensor
    over_ranks: tuple[Over, ...]


@torch.no_grad()
def read(measurements: Sequence[Measurement], consensus: Consensus) -> list[Tensor]:
    """The numbers behind measurements, over all ranks.

    Args:
        measurements: Of all monitors; on every rank the same kinds in the same order.
        consensus: The ranks.

    Returns:
        For each measurement a CPU tensor of its shape, FP64 where the device has it. Where NaN meets a maximum or a
        minimum, NaN comes out.
    """
    filled = [measured for measured in measurements if measured.values.numel()]
    if not filled:
        return [measured.values.cpu() for measured in measurements]
    device = filled[0].values.device
    # What is each rank's own stays out of the exchange: of that one rank may have asked for less before than the others.
    shared = [measured for measured in filled if set(measured.over_ranks) != {"own"}]
    own = [measured for measured in filled if set(measured.over_ranks) == {"own"}]
    flat = [_flat(shared, device), _flat(own, device)]
    if consensus.world_size > 1 and shared:
        flat[0] = _over_ranks(flat[0], shared, consensus)
    ordered = [*shared, *own]
    numbers = torch.split(torch.cat(flat).cpu(), [measured.values.numel() for measured in ordered])
    found = {id(measured): part.view(measured.values.shape) for measured, part in zip(ordered, numbers, strict=True)}
    return [found[id(m)] if m.values.numel() else m.values.cpu() for m in measurements]


def _flat(measurements: Sequence[Measurement], device: torch.device) -> Tensor:
    wide = wide_dtype(device)
    parts = [measured.values.detach().to(device, wide).reshape(-1) for measured in measurements]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=wide, device=device)


def _over_ranks(own: Tensor, measurements: Sequence[Measurement], consensus: Consensus) -> Tensor:
    """One exchange for sums, maxima and minima alike: every rank's numbers go to every rank and are reduced there."""
    by_rank = consensus.gather(own)
    kinds = [kind for m in measurements for kind in m.over_ranks * m.values.shape[0]]
    found = own
    for name, reduced in (("sum", by_rank.sum(0)), ("max", by_rank.amax(0)), ("min", by_rank.amin(0))):
        chosen = torch.tensor([kind == name for kind in kinds], device=own.device)
        found = torch.where(chosen, reduced, found)
    return found
