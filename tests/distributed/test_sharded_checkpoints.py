"""Saving and resuming over ranks: bit for bit on as many, with scale, counters and history on more or fewer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy
from tests.support.faults import INF
from tests.support.models import adamw
from tests.support.ranks import run_on_ranks
from tests.support.sharding import (
    CpuFSDPStrategy,
    RankedRegressor,
    halves,
    outcomes_of,
    shard_units,
    whole_weights,
)
from tests.support.training import SCALE, ResumableLoader, make_trainer, regression_batches, reports_of, same

LAYOUTS = ["ddp", "fsdp1, sharded", "fsdp2, distributed", "fsdp2, full"]
ANY_WORLD = ["ddp", "fsdp2, distributed", "fsdp2, full"]
BATCHES, SAVED_AT = 8, 4


def strategy_of(layout: str) -> Any:
    if layout == "ddp":
        return DDPStrategy()
    if layout == "fsdp1, sharded":
        return CpuFSDPStrategy(state_dict_type="sharded")
    return ModelParallelStrategy(dist.get_world_size(), 1, save_distributed_checkpoint=layout != "fsdp2, full")


def plugin() -> AmpPrecision:
    return AmpPrecision("16-mixed", loss_scale=LossScale(init=SCALE, growth_interval=3, hysteresis=2))


def state_of(amp: AmpPrecision) -> dict[str, Any]:
    history = amp.history
    return {
        "scaler": amp.scaler.state_dict(),  # type: ignore[union-attr]
        "scales": list(history.scales),
        "counts": (history.skipped, history.growths, history.backoffs, amp.applied_steps),
    }


class AtStart(L.Callback):
    """Keeps the plugin's state when training goes on."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.state = state_of(trainer.precision_plugin)  # type: ignore[arg-type]


def run(layout: str, steps: int, resume: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    amp, start = plugin(), AtStart()
    seen = SAVED_AT if resume is not None else 0
    model = RankedRegressor(
        adamw, {1: INF, 2: INF} if rank == 0 else None, layout=shard_units if layout.startswith("fsdp2") else None
    )
    model.seen = seen
    reports = reports_of(amp)
    trainer = make_trainer(
        amp,
        strategy=strategy_of(layout),
        devices=world,
        use_distributed_sampler=False,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[start],
    )
    batches = ResumableLoader(halves(regression_batches(BATCHES), world)[rank])
    trainer.fit(model, batches, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {
        "start": start.state,
        "end": state_of(amp),
        "next scales": [report.next_scale for report in reports],
        "weights": whole_weights(model),
    }


def path_of(folder: str, layout: str, world: int) -> Path:
    return Path(folder, f"{layout} of {world}".replace(", ", "-"))


def write_and_resume(folder: str) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for layout in LAYOUTS:
        path = path_of(folder, layout, dist.get_world_size())
        jobs[f"whole: {layout}"] = partial(run, layout, BATCHES)
        jobs[f"first: {layout}"] = partial(run, layout, SAVED_AT, save=path)
        jobs[f"second: {layout}"] = partial(run, layout, BATCHES, path)
    return outcomes_of(jobs)


def write_only(folder: str) -> dict[str, Any]:
    world = dist.get_world_size()
    return outcomes_of(
        {f"first: {name}": partial(run, name, SAVED_AT, save=path_of(folder, name, world)) for name in ANY_WORLD}
    )


def resume_elsewhere(folder: str, world: int, write: bool) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for layout in ANY_WORLD:
        if write:
            own = path_of(folder, layout, dist.get_world_size())
            jobs[f"first: {layout}"] = partial(run, layout, SAVED_AT, save=own)
        jobs[f"second: {layout}"] = partial(run, layout, BATCHES, path_of(folder, layout, world))
    return outcomes_of(jobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def two(folder: str) -> list[dict[str, Any]]:
    return run_on_ranks(write_and_resume, 2, folder)


@pytest.fixture(scope="module")
def one(folder: str, two: Any) -> list[dict[str, Any]]:
    return run_on_ranks(resume_elsewhere, 1, folder, 2, True)


@pytest.fixture(scope="module")
def two_again(folder: str, one: Any) -> list[dict[str, Any]]:
    return run_on_ranks(resume_elsewhere, 2, folder, 1, False)


@pytest.fixture(scope="module")
def four(folder: str) -> list[dict[str, Any]]:
    return run_on_ranks(write_only, 4, folder)


@pytest.fixture(scope="module")
def four_became_two(folder: str, four: Any) -> list[dict[str, Any]]:
    return run_on_ranks(resume_elsewhere, 2, folder, 4, False)


def fine(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    assert [rank.get("error") for rank in found] == [None] * len(found)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(two: list[dict[str, Any]], layout: str) -> None:
    for whole, first, second in zip(
        fine(two, f"whole: {layout}"), fine(two, f"first: {layout}"), fine(two, f"second: {layout}"), strict=True
    ):
        assert len(set(whole["next scales"])) > 1
        assert first["next scales"] + second["next scales"] == whole["next scales"]
        assert second["end"] == whole["end"]
        assert not same(first["weights"], whole["weights"])
        assert same(second["weights"], whole["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_goes_on_with_the_state_that_was_saved(two: list[dict[str, Any]], layout: str) -> None:
    for first, second in zip(fine(two, f"first: {layout}"), fine(two, f"second: {layout}"), strict=True):
        assert first["end"]["counts"][0] == 2  # two windows were skipped, one of them lowered the scale
        assert second["start"] == first["end"]


@pytest.mark.parametrize("layout", ANY_WORLD)
def test_two_ranks_become_one_with_scale_counters_and_history(
    two: list[dict[str, Any]], one: list[dict[str, Any]], layout: str
) -> None:
    saved = fine(two, f"first: {layout}")[0]["end"]
    assert [rank["start"] for rank in fine(one, f"second: {layout}")] == [saved]


@pytest.mark.parametrize("layout", ANY_WORLD)
def test_one_rank_becomes_two_with_scale_counters_and_history(
    one: list[dict[str, Any]], two_again: list[dict[str, Any]], layout: str
) -> None:
    saved = fine(one, f"first: {layout}")[0]["end"]
    assert [rank["start"] for rank in fine(two_again, f"second: {layout}")] == [saved, saved]
    first, second = fine(two_again, f"second: {layout}")
    assert same(first["weights"], second["weights"])


@pytest.mark.parametrize("layout", ANY_WORLD)
def test_four_ranks_become_two_with_scale_counters_and_history(
    four: list[dict[str, Any]], four_became_two: list[dict[str, Any]], layout: str
) -> None:
    saved = fine(four, f"first: {layout}")[0]["end"]
    assert [rank["start"] for rank in fine(four_became_two, f"second: {layout}")] == [saved, saved]


def test_the_state_of_ours_is_plain_and_saved_once_beside_the_shards(folder: str, two: list[dict[str, Any]]) -> None:
    fine(two, "first: fsdp2, distributed")
    path = path_of(folder, "fsdp2, distributed", 2)
    checkpoint = torch.load(path / "meta.pt", weights_only=True)
    assert (
        checkpoint["lightning_amp_plus"]["scaler"]["scale"]
        == two[0]["first: fsdp2, distributed"]["end"]["scaler"]["scale"]
    )
    assert len(list(path.glob("*.pt"))) == 1


# -------------------------------------------------------------------- master weights between layouts

MASTERS = PrecisionPolicy("bf16", params="bf16", master_weights=True)


def with_masters(folder: str, sharded: bool, resume: str | None = None) -> dict[str, Any]:
    model = RankedRegressor(adamw, layout=shard_units if sharded else None)
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False) if sharded else DDPStrategy()
    trainer = make_trainer(
        AmpPrecision(MASTERS),
        strategy=strategy,
        devices=2,
        use_distributed_sampler=False,
        max_steps=4 if resume is None else 8,
        max_epochs=-1,
    )
    batches = ResumableLoader(halves(regression_batches(BATCHES), 2)[dist.get_rank()])
    path = None if resume is None else Path(folder, resume)
    trainer.fit(model, batches, ckpt_path=path)
    if resume is None:
        trainer.save_checkpoint(Path(folder, "sharded" if sharded else "whole"))
    return {"weights": whole_weights(model)}


def masters_both_ways(folder: str) -> dict[str, Any]:
    return outcomes_of(
        {
            "saved whole": partial(with_masters, folder, False),
            "saved sharded": partial(with_masters, folder, True),
            "whole into shards": partial(with_masters, folder, True, "whole"),
            "shards into whole": partial(with_masters, folder, False, "sharded"),
            "whole": partial(with_masters, folder, False, "whole"),
        }
    )


def test_master_weights_go_into_shards_and_out_of_them(tmp_path: Path) -> None:
    ranks = run_on_ranks(masters_both_ways, 2, str(tmp_path))
    for rank in ranks:
        assert [rank[job].get("error") for job in rank] == [None] * 5
        whole = rank["whole"]["weights"]
        for job in ("whole into shards", "shards into whole"):
            for name, weight in rank[job]["weights"].items():
                assert torch.allclose(weight.float(), whole[name].float(), atol=5e-2), (job, name)
