"""UpdateRatioMonitor over two ranks: shards, replicas and skips give the numbers of the whole model, on every rank."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_amp_plus import AmpPrecision, LossScale
from lightning_amp_plus.callbacks import UpdateRatioMonitor
from lightning_amp_plus.metrics import update_ratio
from tests.support.faults import INF
from tests.support.models import adamw, fused_adamw, sgd_momentum
from tests.support.ranks import run_on_ranks
from tests.support.sharding import (
    CpuFSDPStrategy,
    RankedRegressor,
    WholeWeights,
    counted_collectives,
    fit_on_rank,
    halves,
    outcomes_of,
    shard_units,
)
from tests.support.training import regression_batches

RATIO = "precision/update_ratio/"
LAYERS = {"net.first", "net.norm", "net.second", "net.third"}


def rmsprop(parameters: Any) -> Any:
    return torch.optim.RMSprop(parameters, lr=0.01)


class Keep(L.Callback):
    """What the monitor made of each batch; comes behind it."""

    def __init__(self, monitor: UpdateRatioMonitor) -> None:
        self.monitor, self.seen = monitor, []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        last = self.monitor.last
        new = last is not None and (not self.seen or self.seen[-1] is not last)
        self.seen.append(last if new else None)


def run(make: Any, strategy: str, per: str = "layer", policy: str = "bf16-mixed", faults: Any = None) -> dict[str, Any]:
    strategies: dict[str, Any] = {"ddp": "ddp", "fsdp2": partial(ModelParallelStrategy, 2, 1), "fsdp1": CpuFSDPStrategy}
    made = strategies[strategy] if isinstance(strategies[strategy], str) else strategies[strategy]()
    model = RankedRegressor(make, faults, layout=shard_units if strategy == "fsdp2" else None)
    scale = {"loss_scale": LossScale(init=8.0)} if policy == "16-mixed" else {}
    monitor = UpdateRatioMonitor(1, per=per)  # type: ignore[arg-type]
    weights, keep = WholeWeights(), Keep(monitor)
    batches = halves(regression_batches(3), 2)[dist.get_rank()]
    fit_on_rank(model, AmpPrecision(policy, **scale), made, batches, callbacks=[weights, monitor, keep])
    wanted = []
    for before, after in itertools.pairwise(weights.weights):
        rows: dict[str, list[str]] = {}
        for name in before:
            rows.setdefault(name if per == "parameter" else name.rpartition(".")[0], []).append(name)
        wanted.append(
            {
                row: float(update_ratio([before[n] for n in names], [after[n] for n in names]))
                for row, names in rows.items()
            }
        )
    found = [None if last is None else (last.ratios, last.at_zero) for last in keep.seen]
    return {"found": found, "wanted": wanted}


def collectives(every: int | None) -> int:
    monitors: list[L.Callback] = [] if every is None else [UpdateRatioMonitor(every)]
    with counted_collectives() as counts:
        fit_on_rank(
            RankedRegressor(fused_adamw, layout=shard_units),
            AmpPrecision("bf16-mixed"),
            ModelParallelStrategy(2, 1),
            halves(regression_batches(4), 2)[dist.get_rank()],
            callbacks=monitors,
        )
    return sum(counts.values())


RUNS = {
    f"{strategy}, {name}": partial(run, make, strategy)
    for strategy in ("ddp", "fsdp2", "fsdp1")
    for name, make in (("adamw", adamw), ("fused adamw", fused_adamw), ("momentum", sgd_momentum), ("rmsprop", rmsprop))
}
RUNS["fsdp2, by parameter"] = partial(run, adamw, "fsdp2", "parameter")
RUNS["fsdp2, 16 bits"] = partial(run, fused_adamw, "fsdp2", policy="bf16-true")
SKIPS = {
    f"{strategy}, skipped": partial(run, fused_adamw, strategy, policy="16-mixed", faults={1: INF})
    for strategy in ("ddp", "fsdp2", "fsdp1")
}


def everything() -> dict[str, Any]:
    jobs: dict[str, Any] = {**RUNS, **SKIPS}
    jobs["collectives"] = lambda: {"counts": [collectives(None), collectives(2), collectives(1)]}
    return outcomes_of(jobs)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 2, timeout=240.0)


def both(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    assert [rank.get("error") for rank in found] == [None, None]
    return found


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_sees_the_ratios_of_the_whole_model(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = both(ranks, name)
    assert first["found"] == second["found"]
    for (ratios, at_zero), wanted in zip(first["found"], first["wanted"], strict=True):
        assert at_zero == {} and ratios == pytest.approx(wanted, rel=1e-4)
        assert ratios.keys() == LAYERS or "parameter" in name


@pytest.mark.parametrize("name", SKIPS)
def test_a_window_that_was_skipped_has_none(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = both(ranks, name)
    assert first["found"] == second["found"]
    assert [seen is None for seen in first["found"]] == [False, True, False]
    for seen, wanted in zip(first["found"], first["wanted"], strict=True):
        assert seen is None or seen[0] == pytest.approx(wanted, rel=1e-4)


def test_a_log_point_costs_one_collective(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "collectives"):
        none, two, four = rank["counts"]
        # One more at the start of the fit: whether ranks have the same layers.
        assert two - none == 2 + 1 and four - none == 4 + 1
