"""Who takes the verdict: the world, a process group, or the ranks of a DeviceMesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_amp_plus.integration.strategies import consensus_of
from tests.support.ranks import run_on_ranks


def sums_by_group() -> dict[str, Any]:
    """What four ranks agree on, each giving one more than its number, under each kind of group."""
    from torch.distributed.device_mesh import init_device_mesh

    strategy = DDPStrategy()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    groups = {
        "world": None,
        "pair": pairs[dist.get_rank() // 2],
        "mesh of one dimension": square["tensor"],
        "mesh of two dimensions": square,
    }
    found: dict[str, Any] = {}
    for name, group in groups.items():
        consensus = consensus_of(strategy, group)
        own = torch.tensor([dist.get_rank() + 1.0])
        gathered = consensus.gather(own).flatten().tolist()
        found[name] = (consensus.world_size, consensus.agree(own.clone()).item(), gathered)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(sums_by_group, 4)


@pytest.mark.parametrize("name", ["world", "mesh of two dimensions"])
def test_all_ranks_agree_by_default_and_over_a_whole_mesh(ranks: list[dict[str, Any]], name: str) -> None:
    assert [found[name] for found in ranks] == [(4, 10.0, [1.0, 2.0, 3.0, 4.0])] * 4


@pytest.mark.parametrize("name", ["pair", "mesh of one dimension"])
def test_ranks_of_a_group_agree_among_themselves(ranks: list[dict[str, Any]], name: str) -> None:
    assert [found[name] for found in ranks] == [(2, 3.0, [1.0, 2.0])] * 2 + [(2, 7.0, [3.0, 4.0])] * 2
