"""Trainers, batches and plugins for tests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_amp_plus import AmpPrecision, LossScale, StepReport

SCALE = 1024.0

# Lightning before 2.6 has no such argument, and reads everything.
PLAIN_TYPES_ONLY: dict[str, Any] = (
    {"weights_only": True} if "weights_only" in inspect.signature(L.Trainer.fit).parameters else {}
)


def regression_batches(count: int = 20, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """``count`` batches of ``size`` rows with four features and one target, always the same."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, size, 4, generator=generator)
    y = x.sum(dim=2, keepdim=True).sin()
    return list(zip(x, y, strict=True))


def loader(batches: Any) -> DataLoader[Any]:
    """Hands out ``batches`` as they are, in order."""
    return DataLoader(batches, batch_size=None, shuffle=False)


class ResumableLoader:
    """Hands out ``batches`` and, after a resume, goes on behind the last one handed out.

    Lightning starts a plain DataLoader over when a run resumes in mid-epoch.
    """

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.at, self.start = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for index in range(start, len(self.batches)):
            self.at = index + 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"] % len(self.batches)


def make_trainer(plugin: Any = None, **arguments: Any) -> L.Trainer:
    """A quiet Trainer on one CPU device."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(plugins=None if plugin is None else [plugin], **{**defaults, **arguments})


def fit(model: L.LightningModule, plugin: Any, batches: Any = None, **arguments: Any) -> L.Trainer:
    """Trains over ``batches`` once and returns the Trainer."""
    trainer = make_trainer(plugin, **arguments)
    trainer.fit(model, loader(regression_batches() if batches is None else batches))
    return trainer


def stock_fp16(scale: float = SCALE, growth_interval: int = 2000) -> MixedPrecision:
    """Lightning's own FP16 plugin with a scaler that works on a CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    return MixedPrecision("16-mixed", "cpu", scaler)


def stock_bf16() -> MixedPrecision:
    return MixedPrecision("bf16-mixed", "cpu")


def amp_fp16(scale: float = SCALE, growth_interval: int = 2000, **arguments: Any) -> AmpPrecision:
    """Ours, with the same scale as :func:`stock_fp16`."""
    return AmpPrecision("16-mixed", loss_scale=LossScale(init=scale, growth_interval=growth_interval), **arguments)


def reports_of(plugin: AmpPrecision) -> list[StepReport]:
    """A list that fills with the reports of the run."""
    reports: list[StepReport] = []
    plugin.subscribe(reports.append)
    return reports


def outcomes(reports: list[StepReport]) -> list[str]:
    return [report.outcome for report in reports]


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equal names and equal bits."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class WeightTrace(L.Callback):
    """Weights after every batch; index 0 holds those before the first."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights.append(weights(pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.weights.append(weights(pl_module))

    def moved(self) -> list[bool]:
        """For each batch, whether any weight changed."""
        return [not same(a, b) for a, b in zip(self.weights, self.weights[1:], strict=False)]
