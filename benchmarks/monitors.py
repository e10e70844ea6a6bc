"""What the monitors cost: time of a step on which all of them look, over the same step without, beside other tools.

One thread, fused AdamW, BF16, process CPU time, arms in turns. Every step is looked at, since the machine's noise is
larger than what is left of it at the default interval of 50: divide by that. Bars: 1.35 on an MLP of 200 Linear(64, 64),
1.06 on a transformer of six layers with d = 256. Between log points the same ops as without monitors and no transfer; at a
log point one transfer for all.

    PYTHONPATH=. python benchmarks/monitors.py [--rounds 6]

transformers' DebugUnderflowOverflow is measured where transformers is installed. Composer (0.32) wants torch below 2.7.1
and cannot be installed beside this package.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import grad_norm
from support.runs import Meter, quiet, table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp_plus import AmpPrecision
from lightning_amp_plus.callbacks import DtypeCensus, precision_callbacks
from lightning_amp_plus.callbacks.monitor import Monitor

WARM_UP = 4


class Block(nn.Module):
    """A transformer block, norms before attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Model(L.LightningModule):
    """Either of the two models, trained to give back its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        if kind == "MLP":
            self.net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200)))
            for layer in self.net:
                # So that signals keep their size through 200 layers: subnormal numbers are slow on a CPU.
                nn.init.orthogonal_(layer.weight)
                nn.init.zeros_(layer.bias)
        else:
            self.net = nn.Sequential(*(Block(256, 4) for _ in range(6)))
        self.log_norms = False

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch).float(), batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.log_norms:
            self.log_dict(grad_norm(self, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


class TheirDebugging(L.Callback):
    """transformers' DebugUnderflowOverflow, which keeps its hooks on for the whole run."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        from transformers.debug_utils import DebugUnderflowOverflow

        self.tool = DebugUnderflowOverflow(pl_module, max_frames_to_save=1)


def fit(
    kind: str,
    *,
    callbacks: Any = (),
    policy: str = "bf16-mixed",
    norms: bool = False,
    steps: int = 14,
    count: bool = False,
    **trainer: Any,
) -> Meter:
    meter = Meter(count)
    model = Model(kind)
    model.log_norms = norms
    shape = (64, 64) if kind == "MLP" else (8, 128, 256)
    batches = [torch.randn(shape) for _ in range(steps)]
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": steps,
        "logger": DummyLogger(),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    plugin = AmpPrecision(policy)
    with contextlib.redirect_stdout(io.StringIO()):  # the table at the end is none of the step's
        L.Trainer(plugins=[plugin], callbacks=[meter, *callbacks], **{**options, **trainer}).fit(
            model, DataLoader(batches, batch_size=None)
        )
    return meter


def arms(kind: str) -> dict[str, Callable[[], Meter]]:
    def each(name: str) -> Callable[[], Meter]:
        return lambda: fit(kind, callbacks=[m for m in monitors() if type(m).__name__ == name])

    found: dict[str, Callable[[], Meter]] = {
        "nothing": lambda: fit(kind),
        "all monitors": lambda: fit(kind, callbacks=monitors()),
    }
    found |= {name: each(name) for name in (type(monitor).__name__ for monitor in monitors())}
    found["Lightning's grad_norm"] = lambda: fit(kind, norms=True)
    found["detect_anomaly"] = lambda: fit(kind, detect_anomaly=True)
    if find_spec("transformers") is not None:
        found["DebugUnderflowOverflow"] = lambda: fit(kind, callbacks=[TheirDebugging()])
    return found


def monitors(every: int = 1) -> list[Any]:
    """All that look at every interval: not the dtype census, which looks once."""
    return [c for c in precision_callbacks("full", every) if isinstance(c, Monitor) and not isinstance(c, DtypeCensus)]


def interleaved(kind: str, rounds: int) -> dict[str, float]:
    """Median seconds of each arm over that of the step without anything, each round compared with itself."""
    ratios: dict[str, list[float]] = {}
    for turn in range(rounds):
        seconds = {}
        tried = list(arms(kind).items())
        for name, arm in tried if turn % 2 == 0 else tried[::-1]:
            seconds[name] = statistics.median(arm().seconds[WARM_UP:])
        for name, value in seconds.items():
            ratios.setdefault(name, []).append(value / seconds["nothing"])
    return {name: statistics.median(values) for name, values in ratios.items()}


def counted(kind: str) -> list[list[str]]:
    """Ops and transfers of a step between log points and of one at a log point, beside the same without monitors."""
    rows = []
    arms = {"nothing": [], "all monitors, every 50": monitors(50), "all monitors, every step": monitors()}
    for name, callbacks in arms.items():
        transfers = Transfers()
        meter = fit(kind, callbacks=[*callbacks, transfers], steps=8, count=True, log_every_n_steps=50)
        counter = meter.counters[5]
        counts = [sum(counter.counts.values()), counter.transfers, transfers.of_step[5]]
        rows.append([kind, name, *map(str, counts)])
    return rows


class Transfers(L.Callback):
    """How often a step asks for a vector on the host, which dispatches nothing where that is where it is."""

    def __init__(self) -> None:
        self.of_step: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.original, self.count = Tensor.cpu, 0

        def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.count += 1
            return self.original(tensor, *args, **kwargs)

        Tensor.cpu = counting  # type: ignore[method-assign, assignment]

    def on_train_batch_end(self, *_: Any) -> None:
        Tensor.cpu = self.original  # type: ignore[method-assign]
        self.of_step.append(self.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    quiet()
    start = time.monotonic()
    ratios = {kind: interleaved(kind, rounds) for kind in ("MLP", "transformer")}
    rows = [
        [
            name,
            f"{ratios['MLP'][name]:.2f}",
            f"{ratios['transformer'][name]:.3f}",
            f"{(ratios['MLP'][name] - 1) * 2:.2f} %",
            f"{(ratios['transformer'][name] - 1) * 2:.2f} %",
        ]
        for name in ratios["MLP"]
    ]
    table(
        "A step that is looked at, over one without anything (bars: 1.35 and 1.06)",
        ["what", "MLP", "transformer", "MLP, every 50", "transformer, every 50"],
        rows,
    )
    table(
        "Ops and transfers of a step (bars: between log points as without; at a log point one transfer)",
        ["model", "what", "ops", "reads of one number", "transfers of a vector"],
        [row for kind in ("MLP", "transformer") for row in counted(kind)],
    )
    print(f"\n{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
