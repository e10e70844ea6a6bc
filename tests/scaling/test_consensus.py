"""One verdict for all ranks: alone, and in two real processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_amp_plus.scaling.consensus import Consensus, GroupConsensus

_PATIENCE = 90.0  # seconds


def _rank(rank: int, folder: str) -> None:
    """What each of the two processes does; its findings go to a file of its own."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=_PATIENCE)
    )
    found: dict[str, Any] = {}
    world = GroupConsensus()
    found["world_size"] = world.world_size

    terms = torch.tensor([float(rank == 1), 1.0, 10.0 + rank])
    agreed = world.agree(terms)
    found["sums"] = agreed.tolist()
    found["in_place"] = agreed is terms
    found["nobody"] = world.agree(torch.zeros(2)).tolist()
    found["one_term"] = world.agree(torch.full((1,), rank + 1.0)).tolist()

    found["gathered"] = world.gather(torch.tensor([[1.0, 9.0], [float(rank), 9.0]])[:, 0]).tolist()

    both, first = dist.new_group([0, 1]), dist.new_group([0])
    found["group_of_two"] = GroupConsensus(both).agree(torch.ones(1)).tolist()
    if rank == 0:
        alone = GroupConsensus(first)
        found["alone"] = [alone.world_size, alone.agree(torch.ones(1)).item(), alone.gather(torch.ones(1)).tolist()]
    else:
        try:
            GroupConsensus(first)
        except Exception as error:
            found["refused"] = [type(error).__name__, str(error)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    processes = mp.spawn(_rank, args=(str(folder),), nprocs=2, join=False)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not processes.join(timeout=1.0):
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
                process.join()
    yield [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_single_process_keeps_its_own_verdict() -> None:
    terms = torch.tensor([1.0, 0.0])
    alone = Consensus()
    assert alone.world_size == 1
    assert alone.agree(terms) is terms
    assert terms.tolist() == [1.0, 0.0]


def test_a_single_process_transfers_nothing() -> None:
    assert Consensus().agree(torch.ones(2, device="meta")).device.type == "meta"


def test_a_verdict_found_on_one_rank_reaches_both_with_all_other_terms_summed(ranks: list[dict[str, Any]]) -> None:
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    assert [rank["sums"] for rank in ranks] == [[1.0, 2.0, 21.0]] * 2


def test_the_sums_take_the_place_of_the_terms(ranks: list[dict[str, Any]]) -> None:
    assert [rank["in_place"] for rank in ranks] == [True, True]


def test_a_single_process_gathers_its_own_values_as_one_row() -> None:
    assert Consensus().gather(torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]]


def test_values_are_gathered_in_the_order_of_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["gathered"] for rank in ranks] == [[[1.0, 0.0], [1.0, 1.0]]] * 2


def test_ranks_that_found_nothing_agree_on_nothing(ranks: list[dict[str, Any]]) -> None:
    assert [rank["nobody"] for rank in ranks] == [[0.0, 0.0]] * 2


def test_any_number_of_terms_is_summed(ranks: list[dict[str, Any]]) -> None:
    assert [rank["one_term"] for rank in ranks] == [[3.0]] * 2


def test_a_group_that_is_named_takes_the_verdict(ranks: list[dict[str, Any]]) -> None:
    assert [rank["group_of_two"] for rank in ranks] == [[2.0]] * 2
    assert ranks[0]["alone"] == [1, 1.0, [[1.0]]]


def test_a_rank_outside_the_group_is_refused_with_its_number_and_what_to_do(ranks: list[dict[str, Any]]) -> None:
    kind, text = ranks[1]["refused"]
    assert kind == "ValueError", text
    for words in ("process_group", "rank 1 is not part of the group", "Give every rank a group that contains it"):
        assert words in text
