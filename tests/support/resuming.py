"""Runs that draw random numbers everywhere, and what is compared between a resumed run and the uninterrupted one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_amp_plus import AmpPrecision, LossScale
from lightning_amp_plus.checkpoint import random_state
from tests.support.faults import INF, NO_FAULT, Fault
from tests.support.models import TinyRegressor, adamw
from tests.support.training import PLAIN_TYPES_ONLY, SCALE, make_trainer

KEY = "lightning_amp_plus"
FAULTS = {3: INF, 9: INF}


class NoisyRegressor(TinyRegressor):
    """A :class:`TinyRegressor` with dropout, which saves and restores how many micro-batches it has seen.

    ``trace`` holds the loss of every micro-batch by its number, so that a resumed run tells on which one it went on.

    Args:
        *args: As of :class:`TinyRegressor`.
        items: ``training_step`` returns a summed loss together with its number of items.
        **kwargs: As of :class:`TinyRegressor`.
    """

    def __init__(self, *args: Any, items: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.items = items
        self.went_on_at = 0
        self.trace: dict[int, float] = {}

    def loss(self, batch: Any, fault: Fault = NO_FAULT) -> Tensor:
        x, y = batch
        hidden = torch.tanh(fault.on_hidden(self.first(x)))
        hidden = torch.nn.functional.dropout(hidden, 0.3, self.training)
        reduction = "sum" if self.items and self.training else "mean"
        return fault.on_loss(torch.nn.functional.mse_loss(self.second(hidden).float(), y.float(), reduction=reduction))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.seen
        loss = super().training_step(batch, batch_idx)
        self.trace[number] = self.losses[-1]
        # Other numbers of items for every micro-batch: their sum is known only when the window is whole.
        return {"loss": loss, "num_items": 2.0 + number % 4} if self.items else loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = self.went_on_at = checkpoint["seen"]


class Rows(Dataset[Any]):
    """Rows of four features and one target; with ``augment``, each row fetched draws from torch, NumPy and Python."""

    def __init__(self, count: int = 24, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 4, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True).sin()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if self.augment:
            # Of the two normal numbers that a generator makes at a time, the second one is part of its state.
            drawn = [float(torch.rand(())), numpy.random.normal(), random.random(), random.gauss(0.0, 1.0)]
            x = x + 0.1 * torch.tensor(drawn)
        return x, self.y[index]


def shuffled(loader: Any = DataLoader, rows: Any = None, validation: bool = False, **arguments: Any) -> tuple[Any, Any]:
    """A shuffled loader of batches of four, and one for validation or ``None``."""
    train = loader(Rows() if rows is None else rows, batch_size=4, shuffle=True, **arguments)
    return train, DataLoader(Rows(8), batch_size=4) if validation else None


def noisy_precision(precision: str = "16-mixed", **arguments: Any) -> AmpPrecision:
    """Our plugin; with a loss scale that soon grows where there is one."""
    scaled = precision.startswith("16")
    return AmpPrecision(
        precision, loss_scale=LossScale(init=SCALE, growth_interval=3) if scaled else "auto", **arguments
    )


def seed_everything(seed: int) -> None:
    """Seeds what the library restores."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


class SaveAt(L.Callback):
    """Saves at the end of a batch, when the model has seen so many micro-batches."""

    def __init__(self, folder: Path, *numbers: int) -> None:
        self.folder, self.numbers = folder, numbers

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.seen in self.numbers:
            trainer.save_checkpoint(self.folder / f"after-{pl_module.seen:02d}.ckpt")


def by_lightning(**arguments: Any) -> Callable[[Path], ModelCheckpoint]:
    """Makes a ModelCheckpoint that keeps all."""
    return lambda folder: ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **arguments)


def after(*numbers: int) -> Callable[[Path], SaveAt]:
    """Makes a callback that saves after so many micro-batches."""
    return lambda folder: SaveAt(folder, *numbers)


@dataclass
class Training:
    """How to make one training run, as often as it is wanted.

    Attributes:
        model: Makes the model.
        plugin: Makes the precision plugin.
        loaders: Makes the loader and that for validation.
        callbacks: Makes callbacks.
        arguments: For the Trainer.
        seed: What a resumed run starts from; the uninterrupted one starts from 1.
        epochs: How many in all.
    """

    model: Callable[[], Any] = lambda: NoisyRegressor(adamw, faults=FAULTS)
    plugin: Callable[[], Any] = noisy_precision
    loaders: Callable[[], tuple[Any, Any]] = shuffled
    callbacks: Callable[[], list[Any]] = list
    arguments: dict[str, Any] = field(default_factory=dict)
    seed: int = 99
    epochs: int = 3

    def run(self, *callbacks: Any, resume: Path | None = None, **arguments: Any) -> tuple[L.Trainer, Any]:
        """Trains, from the start or from a checkpoint."""
        seed_everything(1 if resume is None else self.seed)
        plugin, model = self.plugin(), self.model()
        train, validation = self.loaders()
        merged = {"max_epochs": self.epochs, "enable_checkpointing": None, **self.arguments, **arguments}
        if not any(isinstance(callback, Checkpoint) for callback in callbacks):
            merged["enable_checkpointing"] = False
        trainer = make_trainer(plugin, callbacks=[*self.callbacks(), *callbacks], **merged)
        trainer.fit(model, train, validation, ckpt_path=resume, **(PLAIN_TYPES_ONLY if resume is not None else {}))
        return trainer, model

    def whole_and_saved(self, folder: Path, save: Callable[[Path], Any]) -> tuple[tuple[L.Trainer, Any], list[Path]]:
        """The uninterrupted run, and the checkpoints that it saved on its way but for one at its very end."""
        whole = self.run(save(folder))
        paths = sorted(folder.rglob("*.ckpt"))
        return whole, [path for path in paths if torch.load(path, weights_only=True)["seen"] < len(whole[1].trace)]

    def stop_after_one_epoch(self, folder: Path) -> tuple[tuple[L.Trainer, Any], list[Path]]:
        """The uninterrupted run, and the checkpoint saved by another run's Trainer when it was done with an epoch."""
        whole = self.run()
        trainer, _ = self.run(max_epochs=1)
        trainer.save_checkpoint(folder / "stopped.ckpt")
        return whole, [folder / "stopped.ckpt"]


def track(trainer: L.Trainer, model: NoisyRegressor) -> dict[str, Any]:
    """What has to be equal at the end of both runs, all but the losses."""
    plugin: Any = trainer.precision_plugin
    ours = plugin.state_dict()
    return {
        "weights": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": {name: ours[name] for name in ("scaler", "windows", "history") if name in ours},
        "steps": trainer.global_step,
        "random": random_state.capture(torch.device("cpu")),
    }


def differences(whole: tuple[L.Trainer, Any], resumed: tuple[L.Trainer, Any]) -> list[str]:
    """Names of what is not the same to the bit: micro-batches by number, weights, optimizer state and so on."""
    (_, model), (_, second) = whole, resumed
    wanted = {number: loss for number, loss in model.trace.items() if number >= second.went_on_at}
    losses = [f"micro-batch {n}" for n in wanted if unlike(wanted[n], second.trace.get(n))]
    return (
        losses
        + [f"micro-batch {n}, too many" for n in second.trace if n not in wanted]
        + unlike(track(*whole), track(*resumed), "")
    )


def unlike(left: Any, right: Any, where: str = "it") -> list[str]:
    """Names of what differs by a bit, in type, or is on one side only."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        alike = left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bits(left), _bits(right))
        return [] if alike else [where]
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        found = [f"{where}.{key}" for key in left if key not in right]
        found += [f"{where}.{key}" for key in right if key not in left]
        return found + [n for key in left if key in right for n in unlike(left[key], right[key], f"{where}.{key}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return [f"length of {where}"]
        return [n for i, (a, b) in enumerate(zip(left, right, strict=True)) for n in unlike(a, b, f"{where}.{i}")]
    both_nan = left != left and right != right
    return [] if type(left) is type(right) and (left == right or both_nan) else [where]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def manifest_in(path: Path) -> dict[str, Any]:
    """The plugin's part of a checkpoint."""
    found = torch.load(path, weights_only=True)[KEY]
    assert isinstance(found, dict)
    return found
