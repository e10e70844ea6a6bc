"""On as many ranks a resumed run equals the uninterrupted one to the bit, each rank with its own random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_amp_plus.callbacks import PrecisionCheckpoint
from lightning_amp_plus.checkpoint import random_state
from tests.support.faults import INF, NO_FAULT, Fault
from tests.support.models import adamw
from tests.support.resuming import Rows, SaveAt, manifest_in, noisy_precision, seed_everything, unlike
from tests.support.sharding import (
    Body,
    CpuFSDPStrategy,
    RankedRegressor,
    halves,
    local_of,
    outcomes_of,
    outcomes_or_failure,
    shard_units,
    whole_weights,
)
from tests.support.training import ResumableLoader, make_trainer, regression_batches

BATCHES, EPOCHS, ACCUMULATE = 8, 2, 3
# The first save is in mid-window; the second one between two windows.
LAYOUTS = {"ddp": (4, 6), "fsdp2, distributed": (4, 6), "fsdp2, full": (4, 6), "fsdp1, sharded": (6,)}
PLACES = [(layout, place) for layout, places in LAYOUTS.items() for place in places]


class NoisyBody(Body):
    """A :class:`Body` with dropout."""

    def forward(self, x: Tensor, fault: Fault = NO_FAULT) -> Tensor:
        hidden = torch.nn.functional.dropout(self.norm(self.first(x)), 0.3, self.training)
        return self.third(torch.tanh(self.second(fault.on_hidden(hidden))))


class NoisyRanked(RankedRegressor):
    """A :class:`RankedRegressor` with dropout; ``trace`` holds the loss of every micro-batch by its number."""

    def __init__(self, faults: Any, layout: Any) -> None:
        super().__init__(adamw, faults, layout=layout)
        self.net = NoisyBody()
        self.went_on_at = 0
        self.trace: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.seen
        loss = self.loss(batch)
        self.trace[number] = float(loss.detach())
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = self.went_on_at = checkpoint["seen"]


def strategy_of(layout: str) -> Any:
    if layout == "ddp":
        return DDPStrategy()
    if layout == "fsdp1, sharded":
        return CpuFSDPStrategy(state_dict_type="sharded")
    return ModelParallelStrategy(dist.get_world_size(), 1, save_distributed_checkpoint=layout != "fsdp2, full")


def ranked_batches() -> ResumableLoader:
    return ResumableLoader(halves(regression_batches(BATCHES), dist.get_world_size())[dist.get_rank()])


def plain_rows() -> Any:
    """Lightning gives each rank its part of them, shuffled anew every epoch; every row draws numbers."""
    return DataLoader(Rows(64, augment=True), batch_size=4, shuffle=True)


def stateful_rows() -> Any:
    """The same, with the sampler that Lightning would choose for a plain loader."""
    rows = Rows(64, augment=True)
    return StatefulDataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))


def automatic_rows() -> Any:
    """Lightning wraps the sampler, which is torchdata's own, in one that knows no state."""
    return StatefulDataLoader(Rows(64), batch_size=4, shuffle=True)


SAMPLED: dict[str, tuple[Callable[[], Any], int]] = {
    "plain, end of epoch": (plain_rows, 8),
    "stateful, mid-epoch": (stateful_rows, 4),
    "automatic, mid-epoch": (automatic_rows, 4),
}


def run(
    layout: str,
    resume: Path | None = None,
    save: Callable[[], L.Callback] | None = None,
    batches: Callable[[], Any] = ranked_batches,
    **settings: Any,
) -> dict[str, Any]:
    """Trains on this rank, and returns what is compared. Every rank draws other numbers."""
    rank = dist.get_rank()
    seed_everything(rank + (1 if resume is None else 99))
    amp = noisy_precision(**settings)
    # Not in the window that is saved open, whose gradients count; nor in the first one, since torch cannot load the
    # sharded state of an optimizer that has made no step yet.
    faults = {7: INF, 12: INF} if rank == 0 else None
    model = NoisyRanked(faults, shard_units if layout.startswith("fsdp2") else None)
    callbacks = [] if save is None else [save()]
    if layout != "fsdp1, sharded" or settings:
        callbacks.append(PrecisionCheckpoint(save_window=True))
    trainer = make_trainer(
        amp,
        strategy=strategy_of(layout),
        devices=dist.get_world_size(),
        use_distributed_sampler=batches is not ranked_batches,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        callbacks=callbacks,
    )
    trainer.fit(model, batches(), ckpt_path=resume)
    weights = whole_weights(model)
    history = amp.history
    return {
        "went on at": model.went_on_at,
        "trace": model.trace,
        "scales": list(history.scales),
        "skipped": history.skipped,
        "random": random_state.capture(torch.device("cpu")),
        "weights": weights,
        "optimizer": [local_state(state) for state in trainer.optimizers[0].state.values()],
        "scaler": amp.state_dict()["scaler"],
    }


def local_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: local_of(value).clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def folder_of(root: str, layout: str) -> Path:
    path = Path(root, layout.replace(", ", "-"))
    path.mkdir(exist_ok=True)
    return path


def checkpoint_of(root: str, layout: str, place: int) -> Path:
    return folder_of(root, layout) / f"after-{place:02d}.ckpt"


def saver(root: str, name: str, *places: int) -> Callable[[], L.Callback]:
    return partial(SaveAt, folder_of(root, name), *places)


def everything(root: str) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for layout, places in LAYOUTS.items():
        jobs[f"whole: {layout}"] = partial(run, layout, save=saver(root, layout, *places))
        for place in places:
            jobs[f"resumed: {layout}, {place}"] = partial(run, layout, checkpoint_of(root, layout, place))
    for name, (batches, place) in SAMPLED.items():
        jobs[f"whole: {name}"] = partial(run, "ddp", save=saver(root, name, place), batches=batches)
        jobs[f"resumed: {name}"] = partial(run, "ddp", checkpoint_of(root, name, place), batches=batches)
    deferred = {"sync_each_microbatch": False}
    jobs["refused: fsdp1"] = partial(run, "fsdp1, sharded", check_finite=True)
    jobs["refused: deferred"] = partial(run, "fsdp2, distributed", **deferred)
    return outcomes_of(jobs)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def ranks(root: str) -> list[dict[str, Any]]:
    return outcomes_or_failure(everything, 2, root)


def fine(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    assert [rank.get("error") for rank in found] == [None] * len(found)
    return found


def check(whole: dict[str, Any], resumed: dict[str, Any], place: int) -> None:
    wanted = {**whole, "trace": {n: loss for n, loss in whole["trace"].items() if n >= place}, "went on at": place}
    assert unlike(wanted, resumed) == []


@pytest.mark.parametrize(("layout", "place"), PLACES)
def test_every_rank_goes_on_to_the_bit(ranks: list[dict[str, Any]], layout: str, place: int) -> None:
    whole = fine(ranks, f"whole: {layout}")
    for uninterrupted, resumed in zip(whole, fine(ranks, f"resumed: {layout}, {place}"), strict=True):
        assert len(uninterrupted["trace"]) == BATCHES * EPOCHS
        assert uninterrupted["skipped"] == 2
        check(uninterrupted, resumed, place)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_draw_numbers_of_their_own(ranks: list[dict[str, Any]], root: str, layout: str) -> None:
    """Otherwise the state of one rank would do for all."""
    first, second = fine(ranks, f"whole: {layout}")
    assert {name for name in first["random"] if not torch.equal(first["random"][name], second["random"][name])} == {
        "torch",
        "numpy",
        "python",
    }


@pytest.mark.parametrize("layout", ["ddp", "fsdp2, full"])
def test_the_gradients_of_every_rank_are_stored(ranks: list[dict[str, Any]], root: str, layout: str) -> None:
    fine(ranks, f"whole: {layout}")
    manifest = manifest_in(checkpoint_of(root, layout, 4))
    assert manifest["window"] == {"micro_batches": 1, "size": ACCUMULATE, "gradients": "stored"}
    first, second = manifest["gradients"]["ranks"]
    assert first.keys() == second.keys()
    assert not torch.equal(first["net.second.weight"], second["net.second.weight"])
    assert manifest["random"]["ranks"] == 2


@pytest.mark.parametrize("name", SAMPLED)
def test_rows_that_are_spread_over_ranks_go_on_or_are_said_not_to(
    ranks: list[dict[str, Any]], root: str, name: str
) -> None:
    place = SAMPLED[name][1]
    data = manifest_in(checkpoint_of(root, name, place))["data"]
    assert data["mid_epoch"] is (place < BATCHES)
    for whole, resumed in zip(fine(ranks, f"whole: {name}"), fine(ranks, f"resumed: {name}"), strict=True):
        assert len(whole["trace"]) == BATCHES * EPOCHS
        if not name.startswith("automatic") or data["stateful"]:
            check(whole, resumed, place)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fsdp1", "PrecisionCheckpoint(save_window=True) does not work with FSDPStrategy"),
        (
            "deferred",
            "PrecisionCheckpoint(save_window=True) does not work with AmpPrecision(sync_each_microbatch=False)",
        ),
    ],
)
def test_save_window_is_refused_where_gradients_are_held_unsharded(
    ranks: list[dict[str, Any]], name: str, text: str
) -> None:
    errors = [rank[f"refused: {name}"].get("error", "") for rank in ranks]
    assert all(error.startswith(f"MisconfigurationException: {text}") for error in errors), errors
