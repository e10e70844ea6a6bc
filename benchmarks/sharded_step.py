"""Time of a DDP step in FP16 on two gloo ranks: AmpPrecision over Lightning's MixedPrecision, taking turns in one run.

Bar: ratio at most 1.03.

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


def main() -> None:
    found = run_on_ranks(measure, 2, 128, 32, timeout=400)
    rows = [
        [str(rank), f"{s['stock'] * 1e3:.2f} ms", f"{s['ours'] * 1e3:.2f} ms", f"{s['ours'] / s['stock']:.3f}"]
        for rank, s in enumerate(found)
    ]
    table(
        "A DDP step in FP16 (median wall time, one thread a rank; bar: 1.03)", ["rank", "stock", "ours", "ratio"], rows
    )


if __name__ == "__main__":
    main()
