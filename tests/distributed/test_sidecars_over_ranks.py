"""Sidecars of runs on two ranks: one beside each checkpoint, whatever its shape, and the same for every reader."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_amp_plus import AmpPrecision, LossScale
from lightning_amp_plus.callbacks.checkpoint import PrecisionCheckpoint
from lightning_amp_plus.checkpoint.saved import saved_precision
from tests.support.models import adamw
from tests.support.sharding import (
    CpuFSDPStrategy,
    RankedRegressor,
    halves,
    outcomes_of,
    outcomes_or_failure,
    shard_units,
)
from tests.support.training import SCALE, loader, make_trainer, regression_batches

LAYOUTS = ["ddp", "fsdp1, sharded", "fsdp2, distributed", "fsdp2, full"]
FOLDERS = ["fsdp1, sharded", "fsdp2, distributed"]
SUFFIX = ".precision.json"


def strategy_of(layout: str) -> Any:
    if layout == "ddp":
        return DDPStrategy()
    if layout == "fsdp1, sharded":
        return CpuFSDPStrategy(state_dict_type="sharded")
    return ModelParallelStrategy(dist.get_world_size(), 1, save_distributed_checkpoint=layout != "fsdp2, full")


def place(folder: str, layout: str) -> Path:
    return Path(folder, layout.replace(", ", "-"))


def run(folder: str, layout: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    where = place(folder, layout)
    trainer = make_trainer(
        AmpPrecision("16-mixed", loss_scale=LossScale(init=SCALE)),
        strategy=strategy_of(layout),
        devices=world,
        use_distributed_sampler=False,
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(where, save_top_k=1, filename="{epoch}"), PrecisionCheckpoint()],
    )
    model = RankedRegressor(adamw, layout=shard_units if layout.startswith("fsdp2") else None)
    trainer.fit(model, loader(halves(regression_batches(2), world)[rank]))
    trainer.save_checkpoint(where / "weights.ckpt", weights_only=True)
    trainer.strategy.barrier()
    found = saved_precision(where / "epoch=2.ckpt")
    weights = saved_precision(where / "weights.ckpt")
    return {
        "manifest": found.manifest.to_dict(),
        "source": found.source,
        "notes": [*found.notes],
        "weights": (weights.source, weights.weights_only, weights.manifest.precision),
    }


def runs(folder: str) -> dict[str, Any]:
    return outcomes_of({layout: partial(run, folder, layout) for layout in LAYOUTS})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("sidecars"))


@pytest.fixture(scope="module")
def two(folder: str) -> list[dict[str, Any]]:
    return outcomes_or_failure(runs, 2, folder)


def fine(ranks: list[dict[str, Any]], layout: str) -> list[dict[str, Any]]:
    found = [rank[layout] for rank in ranks]
    assert [rank.get("error") for rank in found] == [None] * len(found)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_leave_one_sidecar_beside_each_checkpoint_that_was_kept(
    folder: str, two: list[dict[str, Any]], layout: str
) -> None:
    fine(two, layout)
    names = sorted(path.name for path in place(folder, layout).iterdir())
    assert names == ["epoch=2.ckpt", f"epoch=2.ckpt{SUFFIX}", "weights.ckpt", f"weights.ckpt{SUFFIX}"]
    assert (place(folder, layout) / "epoch=2.ckpt").is_dir() == (layout in FOLDERS)
    assert not list(place(folder, layout).rglob("*.tmp"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_belongs_to_the_checkpoint_and_says_what_the_ranks_were(
    folder: str, two: list[dict[str, Any]], layout: str
) -> None:
    first, second = fine(two, layout)
    assert (first["source"], first["notes"]) == ("checkpoint", [])
    assert first["manifest"] == second["manifest"]
    assert json.loads((place(folder, layout) / f"epoch=2.ckpt{SUFFIX}").read_text()) == first["manifest"]
    assert first["manifest"]["strategy"]["world_size"] == 2
    assert first["manifest"]["random"]["ranks"] == 2
    mesh = {"data_parallel": 2, "tensor_parallel": 1} if layout.startswith("fsdp2") else None
    assert first["manifest"]["strategy"]["mesh"] == mesh
    assert first["manifest"]["progress"] == {"epoch": 2, "global_step": 6}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_alone_have_one_too(two: list[dict[str, Any]], layout: str) -> None:
    for rank in fine(two, layout):
        assert rank["weights"] == ("sidecar", True, "16-mixed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_checkpoint_itself_holds_the_same(folder: str, two: list[dict[str, Any]], layout: str) -> None:
    manifest = fine(two, layout)[0]["manifest"]
    path = place(folder, layout) / "epoch=2.ckpt"
    inside = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)["lightning_amp_plus"]
    assert {key: inside[key] for key in manifest} == manifest
