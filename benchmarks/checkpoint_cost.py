"""Time to save and to resume a checkpoint with AmpPrecision over Lightning's MixedPrecision, and to refuse one.

Bars: save and load at most 1.01 of stock for a model of 100M parameters; a refusal below 50 ms whatever the size of the
checkpoint, with and without a sidecar. The arms take turns in one run, and the best times are compared: writing a
gigabyte varies by a tenth from one time to the next. By default restored weights are not checked for NaN and inf at this
size on a CPU; the arm with ``check_restored_weights=True`` shows what that costs.

    PYTHONPATH=. python benchmarks/checkpoint_cost.py [millions of parameters] [rounds]
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support.runs import Mlp, ours, quiet, stock, table
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError
from lightning_amp_plus.callbacks import PrecisionCheckpoint

DEPTH = 24


class TimedMlp(Mlp):
    """Notes when its checkpoint's turn has come: Lightning calls ``configure_model`` right before it loads."""

    start = 0.0

    def configure_model(self) -> None:
        self.start = time.perf_counter()


class ResumeClock(L.Callback):
    """Seconds from the checkpoint's turn to the first batch, or to a refusal."""

    def on_train_start(self, trainer: L.Trainer, model: Any) -> None:
        self.seconds = time.perf_counter() - model.start
        trainer.should_stop = trainer.global_step > 0  # resumed: all that is timed has happened

    def on_exception(self, trainer: L.Trainer, model: Any, exception: BaseException) -> None:
        self.seconds = time.perf_counter() - model.start


def width_of(millions: float) -> int:
    return max(8, round((millions * 1e6 / DEPTH) ** 0.5))


def run(
    plugin: Any, width: int, steps: int, resume: Path | None = None, *callbacks: Any
) -> tuple[L.Trainer, ResumeClock]:
    clock = ResumeClock()
    data = DataLoader(TensorDataset(torch.randn(8, width), torch.randn(8, 8)), batch_size=2)
    trainer = L.Trainer(
        accelerator="cpu",
        plugins=[plugin],
        callbacks=[*callbacks, clock],
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1000,
    )
    model = TimedMlp(width, DEPTH, lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True))
    trainer.fit(model, data, ckpt_path=resume)
    return trainer, clock


def seconds_to_save(trainer: L.Trainer, path: Path) -> float:
    gc.collect()
    start = time.perf_counter()
    trainer.save_checkpoint(path)
    return time.perf_counter() - start


def seconds_to_refuse(path: Path, width: int) -> float:
    seconds = []
    for _ in range(7):
        clock = ResumeClock()
        trainer = L.Trainer(
            accelerator="cpu", plugins=[AmpPrecision("16-mixed")], callbacks=[clock], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_steps=9,
        )  # fmt: skip
        try:
            trainer.fit(TimedMlp(width, DEPTH, lambda p: torch.optim.AdamW(p)), DataLoader([0]), ckpt_path=path)
        except IncompatiblePrecisionError:
            seconds.append(clock.seconds)
    return statistics.median(seconds)


def main() -> None:
    quiet()
    millions = float(sys.argv[1]) if len(sys.argv) > 1 else 100.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    width = width_of(millions)
    arms: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
        "stock": (lambda: stock("bf16-mixed"), lambda: ()),
        "ours": (lambda: ours("bf16-mixed"), lambda: ()),
        "ours, sidecar": (lambda: ours("bf16-mixed"), lambda: (PrecisionCheckpoint(),)),
        "ours, weights checked": (lambda: ours("bf16-mixed", check_restored_weights=True), lambda: ()),
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{name}.ckpt") for name in arms}
        saves: dict[str, list[float]] = {name: [] for name in arms}
        loads: dict[str, list[float]] = {name: [] for name in arms}
        trainers: dict[str, Any] = {}
        for name, (plugin, callbacks) in arms.items():
            if name == "ours, weights checked":
                continue
            trainer, _ = run(plugin(), width, 1, None, *callbacks())
            seconds_to_save(trainer, paths[name])
            trainers[name] = trainer
        for turn in range(rounds):
            names = list(trainers) if turn % 2 == 0 else list(trainers)[::-1]
            for name in names:
                saves[name].append(seconds_to_save(trainers[name], paths[name]))
        trainers.clear()
        gc.collect()
        paths["ours, weights checked"] = paths["ours"]
        for turn in range(rounds):
            names = list(arms) if turn % 2 == 0 else list(arms)[::-1]
            for name in names:
                plugin, callbacks = arms[name]
                gc.collect()
                loads[name].append(run(plugin(), width, 9, paths[name], *callbacks())[1].seconds)
        size = paths["ours"].stat().st_size
        rows = []
        for name in arms:
            row = [name]
            for measured in (saves, loads):
                if not measured[name]:
                    row += ["-", "-"]
                    continue
                middle = min(measured[name])
                row += [f"{middle:.3f} s", f"{middle / min(measured['stock']):.3f}"]
            rows.append(row)
        what = f"{millions:g}M parameters, AdamW, {size / 2**20:,.0f} MiB"
        title = f"{what}; best of {rounds}, ratio over stock (bar 1.01)"
        table(title, ["arm", "save", "ratio", "load and restore", "ratio"], rows)
        small = Path(folder, "small.ckpt")
        trainer, _ = run(ours("bf16-mixed"), width_of(1), 1)
        trainer.save_checkpoint(small)
        rows = [
            [
                f"{path.stat().st_size / 2**20:,.0f} MiB",
                sidecar,
                f"{seconds_to_refuse(path, width_of(size)) * 1e3:.1f} ms",
            ]
            for path, size, sidecar in (
                (small, 1.0, "no"),
                (paths["ours"], millions, "no"),
                (paths["ours, sidecar"], millions, "yes"),
            )
        ]
        table("Refusal, from the call of load_checkpoint to the error (bar 50 ms)", ["size", "sidecar", "time"], rows)


if __name__ == "__main__":
    main()
