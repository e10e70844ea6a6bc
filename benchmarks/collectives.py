"""Collectives and what they carry, a window, on gloo ranks: AmpPrecision over Lightning's own plugins, FP16.

Bars: at most one small all-reduce more than stock; FSDP2 at accumulation 4 with sync_each_microbatch=False: a quarter
of stock's reduce-scatters.

    PYTHONPATH=. python benchmarks/collectives.py
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from support.runs import table

from lightning_amp_plus import AmpPrecision, LossScale
from tests.support.ranks import run_on_ranks
from tests.support.sharding import CpuFSDPStrategy, RankedRegressor, fit_on_rank, halves, shard_units, stock_fsdp1
from tests.support.training import regression_batches

WINDOWS = 6


class Counted(L.Callback):
    """Profiles the third window to the last but one: away from what happens once."""

    def __init__(self, accumulate: int) -> None:
        self.first, self.last = 2 * accumulate, (WINDOWS - 1) * accumulate
        self.windows = WINDOWS - 3
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
            ).__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != self.last - 1:
            return
        self.profile.__exit__(None, None, None)
        for event in self.profile.events():
            if event.name.startswith("gloo:"):
                name = event.name.removeprefix("gloo:").strip("_")
                self.calls[name] += 1
                self.elements[name] += sum(torch.Size(shape).numel() for shape in event.input_shapes[:1])


def measure(strategy: str, which: str, accumulate: int) -> dict[str, tuple[float, float]]:
    """Calls and elements a window, by collective; runs on every rank."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    scale = LossScale(init=64.0)
    makers = {
        "stock": lambda: (
            stock_fsdp1(64.0)
            if strategy == "fsdp1"
            else MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
        ),
        "ours": lambda: AmpPrecision("16-mixed", loss_scale=scale),
        "ours, deferred": lambda: AmpPrecision("16-mixed", loss_scale=scale, sync_each_microbatch=False),
    }
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = halves(regression_batches(WINDOWS * accumulate), ranks)[rank]
    strategies = {
        "ddp": DDPStrategy,
        "fsdp1": CpuFSDPStrategy,
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
    }
    counted = Counted(accumulate)
    fit_on_rank(
        RankedRegressor(layout=shard_units if strategy == "fsdp2" else None),
        makers[which](),
        strategies[strategy](),
        batches,
        accumulate_grad_batches=accumulate,
        callbacks=[counted],
        log_every_n_steps=1000,
    )
    return {
        name: (counted.calls[name] / counted.windows, counted.elements[name] / counted.windows)
        for name in sorted(counted.calls)
    }


def measure_all(strategy: str, accumulate: int) -> dict[str, dict[str, tuple[float, float]]]:
    """All plugins on one strategy."""
    arms = ["stock", "ours"] + (["ours, deferred"] if strategy == "fsdp2" and accumulate > 1 else [])
    return {which: measure(strategy, which, accumulate) for which in arms}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    rows = []
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        for accumulate in (1, 4):
            found = run_on_ranks(measure_all, ranks, strategy, accumulate, timeout=240)[0]
            for which, collectives in found.items():
                cells = [f"{name} {calls:g} ({elements:g})" for name, (calls, elements) in collectives.items()]
                rows.append([strategy, str(accumulate), which, ", ".join(cells)])
    table(
        "Collectives a window and the elements they carry (gloo makes reduce-scatters of all-reduces; the broadcast is "
        "Lightning's own)",
        ["strategy", "accumulation", "plugin", "collectives (elements)"],
        rows,
    )


if __name__ == "__main__":
    main()
