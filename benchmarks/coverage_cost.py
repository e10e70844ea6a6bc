"""What observing FP8 coverage costs: time of an observed step over the same step without, and the ops of all other steps.

One thread, fused AdamW, process CPU time, arms in turns; every step of the timed arms is observed. Bars: 1.3 on a
transformer of six layers with d = 256, 3.5 on an MLP of 200 Linear(64, 64); a step that is not observed dispatches exactly
the ops of a run without the monitor. The peer is torch's own FlopCounterMode, which counts FLOPs by module and knows
neither formats nor reasons; "a bare mode" is a dispatch mode that does nothing, the floor of whatever sees operations.

    PYTHONPATH=. python benchmarks/coverage_cost.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from monitors import WARM_UP, fit
from support.runs import Meter, quiet, table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_amp_plus.callbacks import Fp8CoverageMonitor
from lightning_amp_plus.fp8 import RowwiseScaling

BARS = {"MLP": 3.5, "transformer": 1.3}


class Bare(TorchDispatchMode):
    """Runs what it is shown."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Around(L.Callback):
    """Has a mode entered during every batch."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def on_train_batch_start(self, *_: Any) -> None:
        self.mode = self.make()
        self.mode.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)


def arms(kind: str, policy: str) -> dict[str, Callable[[], Meter]]:
    def run(*callbacks: Any) -> Callable[[], Meter]:
        return lambda: fit(kind, callbacks=callbacks, policy=policy)

    return {
        "nothing": run(),
        "coverage and fit": run(Fp8CoverageMonitor(1)),
        "coverage alone": run(Fp8CoverageMonitor(1, fit=False)),
        "with what_if=[rowwise]": run(Fp8CoverageMonitor(1, what_if=[RowwiseScaling()])),
        "a bare mode": run(Around(Bare)),
        "FlopCounterMode": run(Around(lambda: FlopCounterMode(display=False))),
    }


def interleaved(kind: str, policy: str, rounds: int) -> dict[str, float]:
    """Median seconds of each arm over that of the step without anything, each round compared with itself."""
    ratios: dict[str, list[float]] = {}
    for turn in range(rounds):
        tried = list(arms(kind, policy).items())
        seconds = {}
        for name, arm in tried if turn % 2 == 0 else tried[::-1]:
            seconds[name] = statistics.median(arm().seconds[WARM_UP:])
        for name, value in seconds.items():
            ratios.setdefault(name, []).append(value / seconds["nothing"])
    return {name: statistics.median(values) for name, values in ratios.items()}


def ops_of_a_step(kind: str, policy: str, callbacks: list[Any]) -> int:
    meter = fit(kind, callbacks=callbacks, policy=policy, steps=8, count=True, log_every_n_steps=50)
    return sum(meter.counters[5].counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    quiet()
    torch.set_num_threads(1)
    start = time.monotonic()
    found = {
        (kind, policy): interleaved(kind, policy, rounds) for kind in BARS for policy in ("bf16-mixed", "fp8-mixed")
    }
    names = next(iter(found.values()))
    table(
        f"An observed step over one without anything (bars: MLP {BARS['MLP']}, transformer {BARS['transformer']})",
        ["what", *(f"{kind}, {policy}" for kind, policy in found)],
        [[name, *(f"{ratios[name]:.3f}" for ratios in found.values())] for name in names],
    )
    table(
        "Dispatched ops of a step that is not observed (bar: as many as without)",
        ["model", "without", "with the monitor"],
        [
            [
                f"{kind}, {policy}",
                str(ops_of_a_step(kind, policy, [])),
                str(ops_of_a_step(kind, policy, [Fp8CoverageMonitor(50)])),
            ]
            for kind, policy in found
        ],
    )
    print(f"\n{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
