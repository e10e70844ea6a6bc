"""Time of a DDP step in FP16 on two gloo ranks: AmpPrecision over Lightning's MixedPrecision, taking turns in one run.

Bar: ratio at most 1.03. The difference is one small all-reduce, whose own latency is measured beside it: on gloo over
loopback it can be a millisecond, a thousand times what NCCL takes inside a node, so two sizes of step are shown.

    PYTHONPATH=. python benchmarks/sharded_step.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from support.runs import Mlp, ours, quiet, stock, table

from tests.support.ranks import run_on_ranks
from tests.support.sharding import fit_on_rank

ROUNDS, STEPS, WARM_UP = 8, 25, 5


class WallClock(L.Callback):
    """Seconds of each step between its first and its last hook."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def measure(width: int, batch: int) -> dict[str, float]:
    """Median seconds a step of each plugin; runs on every rank."""
    quiet()
    batches = [(torch.randn(batch, width), torch.randn(batch, 8)) for _ in range(STEPS)]
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for turn in range(ROUNDS):
        arms = [("stock", stock), ("ours", ours)]
        for name, plugin in arms if turn % 2 == 0 else arms[::-1]:
            clock = WallClock()
            model = Mlp(width, 4, lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True))
            fit_on_rank(model, plugin("16-mixed"), DDPStrategy(), batches, callbacks=[clock], log_every_n_steps=1000)
            seconds[name] += clock.seconds[WARM_UP:]
    return {name: statistics.median(values) for name, values in seconds.items()}


def latency() -> float:
    """Median seconds of an all-reduce of four numbers; runs on every rank."""
    numbers, seconds = torch.zeros(4, dtype=torch.float64), []
    for _ in range(300):
        start = time.perf_counter()
        torch.distributed.all_reduce(numbers)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    small = run_on_ranks(latency, 2)[0]
    rows = []
    for width, batch in ((128, 32), (384, 128)):
        for rank, s in enumerate(run_on_ranks(measure, 2, width, batch, timeout=400)):
            times = [f"{s[name] * 1e3:.2f} ms" for name in ("stock", "ours")]
            difference = f"{(s['ours'] - s['stock']) * 1e3:+.2f} ms"
            rows.append([f"4 x {width}, batch {batch}", str(rank), *times, f"{s['ours'] / s['stock']:.3f}", difference])
    table(
        f"A DDP step in FP16 (median wall time, one thread a rank; bar: 1.03). Small all-reduce: {small * 1e3:.2f} ms",
        ["model", "rank", "stock", "ours", "ratio", "difference"],
        rows,
    )


if __name__ == "__main__":
    main()
