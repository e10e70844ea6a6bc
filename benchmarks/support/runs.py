"""Fits that the benchmarks time and count: the same model under two plugins, interleaved, one thread, medians."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_plus import AmpPrecision, LossScale

TRANSFERS = ("_local_scalar_dense",)


class OpCounter(TorchDispatchMode):
    """Counts dispatched ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def transfers(self) -> int:
        return sum(self.counts[name] for name in TRANSFERS)


class Mlp(L.LightningModule):
    """``depth`` square linear layers; the optimizer and scheduler come from the benchmark."""

    def __init__(self, width: int, depth: int, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.GELU()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 8))
        self.configure = configure

    def training_step(self, batch: Any, _: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return self.configure(self.parameters())


@dataclass
class Meter(L.Callback):
    """Process CPU time, or op counts, of each training step between its first and its last hook."""

    count: bool = False
    seconds: list[float] = field(default_factory=list)
    counters: list[OpCounter] = field(default_factory=list)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.count:
            self.counters.append(OpCounter())
            self.counters[-1].__enter__()
        else:
            self._start = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.count:
            self.counters[-1].__exit__(None, None, None)
        else:
            self.seconds.append(time.process_time() - self._start)


def stock(precision: str, **_: Any) -> MixedPrecision:
    """Lightning's own plugin, with a scaler that works on CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "16-mixed" else None
    return MixedPrecision(precision, "cpu", scaler)  # type: ignore[arg-type]


def ours(precision: str, **options: Any) -> AmpPrecision:
    """Our plugin, starting from the same scale."""
    if precision == "16-mixed":
        options.setdefault("loss_scale", LossScale(init=1024.0))
    return AmpPrecision(precision, **options)


def fit(
    plugin: Any,
    configure: Callable[[Any], Any],
    *,
    width: int = 64,
    depth: int = 4,
    batch: int = 16,
    steps: int = 30,
    count: bool = False,
    callbacks: tuple[Any, ...] = (),
    **trainer: Any,
) -> Meter:
    """One fit; returns what was measured."""
    meter = Meter(count)
    data = TensorDataset(torch.randn(batch * 4, width), torch.randn(batch * 4, 8))
    loader = DataLoader(data, batch_size=batch)
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 10_000,
    }
    # The meter goes first and last: callbacks between its two hooks are part of the step.
    L.Trainer(plugins=[plugin], callbacks=[meter, *callbacks], **{**options, **trainer}).fit(
        Mlp(width, depth, configure), loader
    )
    return meter


def interleaved(arms: dict[str, Callable[[], Meter]], rounds: int, warm_up: int = 5) -> dict[str, float]:
    """Median seconds a step of each arm, the arms taking turns so that the machine's drift meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        names = list(arms) if turn % 2 == 0 else list(arms)[::-1]
        for name in names:
            seconds[name] += arms[name]().seconds[warm_up:]
    return {name: statistics.median(values) for name, values in seconds.items()}


def quiet() -> None:
    """One thread; Lightning's notes about the benchmark's own choices are of no interest here."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a plain table."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}\n")
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
