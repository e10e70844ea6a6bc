"""GradientMonitor on two ranks, replicated and sharded: what one process sees of the same batches."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_amp_plus import AmpPrecision
from lightning_amp_plus.callbacks import GradientMonitor, LossScaleMonitor
from tests.support.models import fused_adamw, sgd
from tests.support.ranks import run_on_ranks
from tests.support.sharding import (
    CpuFSDPStrategy,
    GradientFault,
    RankedRegressor,
    counted_collectives,
    fit_on_rank,
    halves,
    outcomes_of,
    shard_units,
)
from tests.support.training import amp_fp16, fit, regression_batches

BATCHES = 4


class Rows(Logger):
    name = "rows"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({k: v for k, v in metrics.items() if k.startswith("precision/")})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def strategy_of(kind: str) -> tuple[Any, Any]:
    if kind == "ddp":
        return DDPStrategy(), None
    if kind == "fsdp1":
        return CpuFSDPStrategy(), None
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), shard_units


def watched(
    kind: str,
    plugin: AmpPrecision,
    make_optimizer: Any = sgd,
    fault: bool = False,
    with_norm: bool = False,
    every: int = 1,
    **arguments: Any,
) -> dict[str, Any]:
    strategy, layout = strategy_of(kind)
    monitor, rows = GradientMonitor(every_n_steps=every), Rows()
    callbacks: list[Any] = [monitor, *([LossScaleMonitor(every_n_steps=every)] if with_norm else [])]
    if fault and (kind == "ddp" or dist.get_rank() == 1):  # replicas are alike, shards are one rank's own
        callbacks.append(GradientFault({1}, math.nan, pick="second.weight"))
    model = RankedRegressor(make_optimizer, layout=layout)
    batches = halves(regression_batches(BATCHES), 2)[dist.get_rank()]
    with counted_collectives() as counts:
        fit_on_rank(model, plugin, strategy, batches, callbacks=callbacks, logger=rows, **arguments)
    last = monitor.last
    assert last is not None
    return {
        "rows": rows.rows,
        "norms": dict(last.norms),
        "histogram": last.histogram.tolist(),
        "window": None if last.window is None else (last.window.low, last.window.high),
        "counts": dict(counts),
    }


def no_monitor(kind: str) -> dict[str, Any]:
    strategy, layout = strategy_of(kind)
    with counted_collectives() as counts:
        fit_on_rank(
            RankedRegressor(layout=layout),
            AmpPrecision("32-true"),
            strategy,
            halves(regression_batches(BATCHES), 2)[dist.get_rank()],
        )
    return {"counts": dict(counts)}


KINDS = ("ddp", "fsdp1", "fsdp2")


def everything() -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for kind in KINDS:
        jobs[f"{kind}"] = partial(watched, kind, AmpPrecision("32-true"))
        jobs[f"{kind}, fused"] = partial(watched, kind, AmpPrecision("32-true"), fused_adamw)
        jobs[f"{kind}, accumulated"] = partial(watched, kind, AmpPrecision("32-true"), accumulate_grad_batches=2)
        jobs[f"{kind}, fault"] = partial(watched, kind, amp_fp16(), fault=True, with_norm=True)
        jobs[f"{kind}, two"] = partial(watched, kind, AmpPrecision("32-true"), every=2)
        jobs[f"{kind}, bare"] = partial(no_monitor, kind)
    jobs["ddp, clipped"] = partial(watched, "ddp", AmpPrecision("32-true"), gradient_clip_val=0.5)
    jobs["fsdp2, clipped"] = partial(watched, "fsdp2", AmpPrecision("32-true"), gradient_clip_val=0.5)
    return outcomes_of(jobs)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 2, timeout=180)


def alone(make_optimizer: Any = sgd, **arguments: Any) -> tuple[list[dict[str, float]], GradientMonitor]:
    monitor, rows = GradientMonitor(every_n_steps=1), Rows()
    model = RankedRegressor(make_optimizer)
    fit(model, AmpPrecision("32-true"), regression_batches(BATCHES), callbacks=[monitor], logger=rows, **arguments)
    return rows.rows, monitor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("", {}), (", fused", {"make_optimizer": fused_adamw}), (", accumulated", {"accumulate_grad_batches": 2})],
)
def test_every_rank_sees_what_one_process_sees(found, kind, name, arguments):
    wanted, monitor = alone(**arguments)
    assert "error" not in found[0][kind + name], found[0][kind + name]
    rows = found[0][kind + name]["rows"]
    assert len(rows) == len(wanted)
    for row, alike in zip(rows, wanted, strict=True):
        assert row.keys() == alike.keys()
        for key, value in alike.items():
            tolerance = 1.01 if "scale_window_low" in key else 1e-3  # known up to its binade
            assert row[key] == pytest.approx(value, rel=tolerance, abs=1e-6), key
    assert monitor.last is not None
    for rank in found:
        assert rank[kind + name]["norms"] == pytest.approx(dict(monitor.last.norms), rel=1e-3)
        assert sum(rank[kind + name]["histogram"]) == pytest.approx(float(monitor.last.histogram.sum()))
    assert found[0][kind + name]["window"] == found[1][kind + name]["window"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_clip_share_is_the_same(found, kind):
    wanted, _ = alone(gradient_clip_val=0.5)
    shares = [row["precision/clip_share"] for row in found[0][f"{kind}, clipped"]["rows"]]
    assert shares == [row["precision/clip_share"] for row in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_on_the_rank_that_holds_it_is_seen_by_all(found, kind):
    rows = found[0][f"{kind}, fault"]["rows"]
    assert [row["precision/nonfinite_gradients"] for row in rows] == [0, 1, 0, 0]
    norms = {key: value for key, value in rows[1].items() if key.startswith("precision/grad_norm/")}
    assert [key for key, value in norms.items() if not math.isfinite(value)] == ["precision/grad_norm/net.second"]
    assert all("precision/grad_norm" in row for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_point_costs_one_collective(found, kind):
    def total(name: str) -> int:
        return sum(found[0][f"{kind}{name}"]["counts"].values())

    assert total("") - total(", two") == BATCHES / 2
    # The names of layers are compared once, at the start of the fit.
    assert total(", two") - total(", bare") <= BATCHES / 2 + 4
