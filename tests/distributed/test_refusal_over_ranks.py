"""A resume refused over ranks: all of them raise, none waits for another, and nothing is touched on any."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, LossScale, PrecisionPolicy, Rule
from tests.support.models import adamw
from tests.support.refusals import (
    allow_of,
    listening,
    on_disk,
    plugin_state,
    randomness,
    rows_of,
)
from tests.support.sharding import (
    CpuFSDPStrategy,
    RankedRegressor,
    halves,
    local_of,
    outcomes_of,
    outcomes_or_failure,
    shard_units,
    whole_weights,
)
from tests.support.training import SCALE, ResumableLoader, make_trainer, regression_batches, same, weights

LAYOUTS = ["ddp", "fsdp1", "fsdp2"]
BATCHES = 4


def strategy_of(layout: str) -> Any:
    if layout == "ddp":
        return DDPStrategy()
    if layout == "fsdp1":
        return CpuFSDPStrategy(state_dict_type="sharded")
    return ModelParallelStrategy(dist.get_world_size(), 1, save_distributed_checkpoint=True)


def plugin_of(precision: str, **arguments: Any) -> AmpPrecision:
    scale: Any = LossScale(init=SCALE, growth_interval=3) if precision == "16-mixed" else "auto"
    return AmpPrecision(precision, loss_scale=scale, **arguments)


def model_of(layout: str) -> RankedRegressor:
    return RankedRegressor(adamw, layout=shard_units if layout == "fsdp2" else None)


def trainer_of(layout: str, plugin: AmpPrecision, steps: int, *callbacks: L.Callback, **arguments: Any) -> L.Trainer:
    return make_trainer(
        plugin,
        strategy=strategy_of(layout),
        devices=dist.get_world_size(),
        use_distributed_sampler=False,
        max_steps=steps,
        max_epochs=-1,
        callbacks=list(callbacks),
        **arguments,
    )


def data() -> ResumableLoader:
    return ResumableLoader(halves(regression_batches(2 * BATCHES), dist.get_world_size())[dist.get_rank()])


class Poison(L.Callback):
    """Leaves a NaN in the last rank's own part of the weights; under DDP, where all have all of them, in everybody's."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy, DDPStrategy) or dist.get_rank() == dist.get_world_size() - 1:
            local = [local_of(p.data) for p in pl_module.parameters()]
            next(part for part in reversed(local) if part.numel()).view(-1)[0] = math.nan


def save(layout: str, path: Path, precision: str = "bf16-mixed", *callbacks: L.Callback) -> dict[str, Any]:
    model = model_of(layout)
    trainer = trainer_of(layout, plugin_of(precision), BATCHES, *callbacks)
    trainer.fit(model, data())
    trainer.save_checkpoint(path)
    return {}


class Watch(L.Callback):
    """The run right before its checkpoint is loaded, and when an exception ends it."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}

    def _look(self, trainer: L.Trainer) -> dict[str, Any]:
        return {"randomness": randomness(), **plugin_state(trainer.precision_plugin)}  # type: ignore[arg-type]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.before = self._look(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.before = self._look(trainer)  # sharding comes first, and the checkpoint after it

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.after = self._look(trainer)
        self.weights = whole_weights(pl_module)
        self.moments = [len(optimizer.state) for optimizer in trainer.optimizers]
        self.step = trainer.global_step


def refuse(layout: str, path: Path, plugin: AmpPrecision) -> dict[str, Any]:
    """What a refused resume of ``path`` is like on this rank; the file is also where an exception would be saved."""
    file = on_disk(path)
    dist.barrier()
    watch, model = Watch(), model_of(layout)
    keeper = OnExceptionCheckpoint(path.parent, path.stem)
    trainer = trainer_of(layout, plugin, 2 * BATCHES, watch, keeper, enable_checkpointing=True)
    try:
        trainer.fit(model, data(), ckpt_path=path)
    except IncompatiblePrecisionError as refusal:
        error = refusal
    else:
        raise RuntimeError("the resume was not refused")
    dist.barrier()
    return {
        "message": str(error),
        "rows": rows_of(error) if " verdict\n" in str(error) else {},
        "allow": allow_of(error) if "allow=[" in str(error) else [],
        "same file": on_disk(path) == file,
        "same state": watch.after == watch.before and bool(watch.after),
        "same weights": same(watch.weights, weights(model_of(layout))),
        "moments": watch.moments,
        "step": watch.step,
        "wrapped": [name for name in ("load_checkpoint", "save_checkpoint") if name in vars(trainer.strategy)],
    }


def go_on(layout: str, path: Path, plugin: AmpPrecision) -> dict[str, Any]:
    model, start = model_of(layout), Start()
    trainer = trainer_of(layout, plugin, 2 * BATCHES, start)
    with listening() as said:
        trainer.fit(model, data(), ckpt_path=path)
    found = whole_weights(model)
    return {
        "converts": said.converts(),
        "start": start.seen,
        "applied": plugin.applied_steps,
        "finite": all(bool(torch.isfinite(w).all()) for w in found.values()),
    }


class Start(L.Callback):
    """Scale and routes that training goes on with."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        plugin: Any = trainer.precision_plugin
        self.seen = {
            "scale": None if plugin.scaler is None else plugin.scaler.get_scale(),
            "routes": {route.name: route.compute for route in plugin.plan.routes},
            "step": trainer.global_step,
        }


def own(first: str, last: str) -> AmpPrecision:
    """A plugin whose precision is another on the last rank."""
    return plugin_of(last if dist.get_rank() == dist.get_world_size() - 1 else first)


def cut(path: Path, target: Path) -> Path:
    if dist.get_rank() == 0:
        target.write_bytes(path.read_bytes()[:-700])
    dist.barrier()
    return target


def two_ranks(folder: str, moved: str) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for layout in LAYOUTS:
        path, poisoned = Path(folder, f"{layout}.ckpt"), Path(folder, f"{layout}-nan.ckpt")
        jobs[f"save: {layout}"] = partial(save, layout, path)
        jobs[f"save NaN: {layout}"] = partial(save, layout, poisoned, "bf16-mixed", Poison())
        jobs[f"refused: {layout}"] = lambda layout=layout, path=path: refuse(layout, path, plugin_of("16-mixed"))
        jobs[f"one rank: {layout}"] = lambda layout=layout, path=path: refuse(
            layout, path, own("bf16-mixed", "16-mixed")
        )
        jobs[f"rank 0: {layout}"] = lambda layout=layout, path=path: refuse(layout, path, own("16-mixed", "bf16-mixed"))
        jobs[f"NaN: {layout}"] = lambda layout=layout, path=poisoned: refuse(layout, path, plugin_of("bf16-mixed"))
        jobs[f"allowed: {layout}"] = lambda layout=layout, path=path: go_on(
            layout, path, plugin_of("16-mixed", allow=["precision"])
        )
        jobs[f"same: {layout}"] = lambda layout=layout, path=path: go_on(layout, path, plugin_of("bf16-mixed"))
    ddp = Path(folder, "ddp.ckpt")
    jobs["cut off"] = lambda: refuse("ddp", cut(ddp, Path(folder, "cut.ckpt")), plugin_of("bf16-mixed"))
    jobs["nowhere"] = lambda: refuse_missing(Path(folder, "nowhere.ckpt"))
    jobs["moved: ddp"] = lambda: go_on("ddp", Path(moved), plugin_of("bf16-mixed"))
    ruled = PrecisionPolicy(compute="bf16", rules=[Rule("net.second", compute="fp32")])
    jobs["moved, ruled: fsdp2"] = lambda: go_on("fsdp2", Path(moved), AmpPrecision(ruled))
    jobs["moved: fsdp2"] = lambda: refuse("fsdp2", Path(moved), plugin_of("bf16-mixed"))
    return outcomes_of(jobs)


def refuse_missing(path: Path) -> dict[str, Any]:
    try:
        trainer_of("ddp", plugin_of("bf16-mixed"), BATCHES).fit(model_of("ddp"), data(), ckpt_path=path)
    except FileNotFoundError as error:
        return {"message": str(error)}
    raise RuntimeError("there was nothing to resume from")


class Moving(L.Callback):
    """Moves a module after its second step."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.precision_plugin.set_route("net.second", "fp32")  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("refusals")
    moved = folder / "moved.ckpt"
    trainer = make_trainer(plugin_of("bf16-mixed"), max_steps=BATCHES, max_epochs=-1, callbacks=[Moving()])
    trainer.fit(RankedRegressor(adamw), ResumableLoader(regression_batches(2 * BATCHES)))
    trainer.save_checkpoint(moved)
    return outcomes_or_failure(two_ranks, 2, str(folder), str(moved))


def fine(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    assert [rank.get("error") for rank in found] == [None] * len(found)
    return found


def assert_untouched(rank: dict[str, Any]) -> None:
    assert rank["same weights"] and rank["same state"] and rank["same file"]
    assert not any(rank["moments"]) and rank["step"] == 0
    assert rank["wrapped"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_refuses_with_the_whole_reason_and_nothing_is_touched(ranks: Any, layout: str) -> None:
    for rank in fine(ranks, f"refused: {layout}"):
        assert rank["rows"]["precision"] == "refuse" and rank["allow"] == ["precision"]
        assert "bf16-mixed" in rank["message"] and "16-mixed" in rank["message"]
        assert_untouched(rank)
        assert rank["moments"] == ([] if layout == "ddp" else [0])  # the sharded ones have an optimizer by then


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("job", "refusing"), [("one rank", 1), ("rank 0", 0)])
def test_a_refusal_of_one_rank_is_everybodys(ranks: Any, layout: str, job: str, refusing: int) -> None:
    found = fine(ranks, f"{job}: {layout}")
    assert found[refusing]["rows"]["precision"] == "refuse"
    assert "Another rank refused" in found[1 - refusing]["message"]
    for rank in found:
        assert_untouched(rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_in_the_weights_of_one_rank_stops_all_and_is_named_where_it_is(ranks: Any, layout: str) -> None:
    found = fine(ranks, f"NaN: {layout}")
    for rank in found:
        assert rank["rows"] == {"weights": "refuse"}
        assert rank["same file"]
    assert "net." in found[1]["message"]
    if layout == "ddp":  # looked at in the file, before anything is restored
        assert_untouched(found[0])
        assert "net." in found[0]["message"]
    else:
        assert "on another rank" in found[0]["message"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_allowed_goes_on_over_all_ranks(ranks: Any, layout: str) -> None:
    for rank in fine(ranks, f"allowed: {layout}"):
        assert rank["start"]["scale"] == SCALE and rank["start"]["step"] == BATCHES
        assert rank["applied"] == 2 * BATCHES and rank["finite"]
    assert "Allowed by allow=['precision']" in ranks[0][f"allowed: {layout}"]["converts"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_precision_goes_on_over_all_ranks_after_all_these_refusals(ranks: Any, layout: str) -> None:
    for rank in fine(ranks, f"same: {layout}"):
        assert rank["applied"] == 2 * BATCHES and rank["finite"] and rank["converts"] == ""


def test_a_file_cut_off_is_refused_on_every_rank(ranks: Any) -> None:
    for rank in fine(ranks, "cut off"):
        assert "cut off" in rank["message"]
        assert_untouched(rank)


def test_a_file_that_is_not_there_is_missing_on_every_rank(ranks: Any) -> None:
    assert all("nowhere.ckpt" in rank["message"] for rank in fine(ranks, "nowhere"))


def test_a_move_that_the_policy_now_makes_by_a_rule_goes_on_in_sharded_units(ranks: Any) -> None:
    for rank in fine(ranks, "moved, ruled: fsdp2"):
        assert rank["start"]["routes"]["net.second"] == "fp32" and rank["applied"] == 2 * BATCHES


def test_a_move_that_sharded_units_cannot_make_any_more_is_refused_with_the_rule_to_write(ranks: Any) -> None:
    for rank in fine(ranks, "moved: fsdp2"):
        assert "Put Rule('net.second', compute='fp32') into the policy" in rank["message"]
        assert_untouched(rank)


def test_moves_made_on_one_rank_are_made_again_over_two(ranks: Any) -> None:
    for rank in fine(ranks, "moved: ddp"):
        assert rank["start"]["routes"]["net.second"] == "fp32" and rank["start"]["routes"]["net.first"] == "bf16"
        assert rank["finite"] and rank["applied"] == 2 * BATCHES
    assert "routes" not in ranks[0]["moved: ddp"]["converts"]
    assert "world_size" in ranks[0]["moved: ddp"]["converts"]
