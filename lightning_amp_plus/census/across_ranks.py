"""Whether ranks ran in the same dtypes: one exchange of digests, and only where they differ one census more."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lightning_amp_plus.census.census import Census, OpRow
from lightning_amp_plus.scaling.consensus import Consensus

_COMPARED = ("gemm", "attention", "softmax", "norm", "reduction", "loss")


def ranks_that_differ(
    census: Census, consensus: Consensus, device: torch.device, left_out: Sequence[str] = ()
) -> tuple[list[int], Census]:
    """The ranks whose dtypes are not rank 0's, and what the first of them found. Every rank has to call it.

    Ranks with other modules, the stages of a pipeline, are not compared.

    Args:
        census: This rank's.
        consensus: The ranks.
        device: Where they exchange tensors.
        left_out: Columns that differ between ranks by nature.

    Returns:
        Ranks in ascending order, and the census of the first; without any, this rank's own.
    """
    if consensus.world_size == 1:
        return [], census
    plain = _comparable(census, left_out)
    own = torch.cat([_digest(sorted(census.modules)), _digest(plain)]).to(device)
    digests = consensus.gather(own).cpu()
    names, dtypes = digests[:, :4], digests[:, 4:]
    differ = (names == names[0]).all(1) & (dtypes != dtypes[0]).any(1)
    ranks: list[int] = differ.nonzero().flatten().tolist()
    if not ranks:
        return [], census
    first = ranks[0]
    mine = bool((own.cpu()[4:] == dtypes[first]).all())
    return ranks, _handed_round(plain if mine else None, consensus, device)


def _comparable(census: Census, left_out: Sequence[str]) -> dict[str, Any]:
    modules = {
        name: {column: "-" if column in left_out else dtype for column, dtype in row.items()}
        for name, row in census.modules.items()
    }
    ops = sorted({(row.module, row.phase, row.kind, row.op, row.dtypes) for row in census.ops if row.kind in _COMPARED})
    return {"step": census.step, "modules": modules, "ops": [asdict(OpRow(*row, 1)) for row in ops]}


def _digest(value: Any) -> Tensor:
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return torch.tensor([int.from_bytes(digest[i : i + 8], "big", signed=True) for i in range(0, 32, 8)])


def _handed_round(plain: dict[str, Any] | None, consensus: Consensus, device: torch.device) -> Census:
    """What some ranks have, and all the same, to all: the maximum with the zeros of the others."""
    text = b"" if plain is None else json.dumps(plain).encode()
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    consensus.maximum(length)
    letters = torch.zeros(int(length.item()), dtype=torch.int32)
    letters[: len(text)] = torch.tensor(list(text), dtype=torch.int32)
    letters = letters.to(device)
    consensus.maximum(letters)
    found = json.loads(bytes(letters.tolist()).decode())
    return Census(found["step"], found["modules"], tuple(OpRow(**row) for row in found["ops"]))
