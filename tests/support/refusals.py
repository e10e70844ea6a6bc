"""Saving in one precision, resuming in another, and what a refused resume must not have touched."""

from __future__ import annotations

import ast
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy
import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, LossScale, PrecisionPolicy
from tests.support.models import TinyRegressor
from tests.support.training import PLAIN_TYPES_ONLY, loader, make_trainer, regression_batches

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
KEY = "lightning_amp_plus"
BATCHES = 4  # to an epoch
INIT, STATIC = 1024.0, 64.0


def wide_adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW whose eps is not zero in FP16."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def make_model(**arguments: Any) -> TinyRegressor:
    return TinyRegressor(**{"make_optimizer": wide_adamw, **arguments})


def plugin_for(precision: str | PrecisionPolicy, **arguments: Any) -> AmpPrecision:
    """A plugin whose scale moves within an epoch of four batches in ``16-mixed``, and is static in ``16-true``."""
    scale: Any = "auto"
    if precision == "16-mixed":
        scale = LossScale(init=INIT, growth_interval=3)
    elif precision == "16-true":
        scale = STATIC
    return AmpPrecision(precision, **{"loss_scale": scale, **arguments})


def save_run(path: Path, plugin: Any, model: Any = None, epochs: int = 1, **arguments: Any) -> Path:
    """Trains for ``epochs`` of four batches, saves at the end, and returns ``path``."""
    trainer = make_trainer(plugin, max_epochs=epochs, **arguments)
    trainer.fit(model or make_model(), loader(regression_batches(BATCHES)))
    trainer.save_checkpoint(path)
    return path


def resume(path: Any, plugin: Any, model: Any = None, epochs: int = 2, **arguments: Any) -> L.Trainer:
    """Goes on with a checkpoint of :func:`save_run` in a new Trainer, whose model is ``model``."""
    trainer = make_trainer(plugin, max_epochs=epochs, **arguments)
    trainer.fit(model or make_model(), loader(regression_batches(BATCHES)), ckpt_path=path, **PLAIN_TYPES_ONLY)
    return trainer


def edited(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a checkpoint in which ``change`` has worked on the loaded dictionary."""
    checkpoint = torch.load(source, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, target)
    return target


def allow_of(error: BaseException) -> list[str]:
    """The ``allow=[...]`` that the message of a refusal tells the user to paste."""
    text = str(error)
    start = text.rindex("allow=[") + len("allow=")
    allow = ast.literal_eval(text[start : text.index("]", start) + 1])
    assert isinstance(allow, list)
    return allow


def rows_of(error: BaseException) -> dict[str, str]:
    """The verdict of each field in the table of a refusal's message."""
    lines = str(error).splitlines()
    head = next(i for i, line in enumerate(lines) if line.split() == ["field", "saved", "this", "run", "verdict"])
    rows = {}
    for line in lines[head + 2 :]:
        if not line:
            break
        if not line.startswith(" "):  # folded cells go on below an empty first column
            rows[line.split()[0]] = line.split()[-1]
    return rows


def verdicts(error: IncompatiblePrecisionError) -> dict[str, str]:
    """Fields and verdicts of a refusal's findings, those that are fine left out."""
    return {f.field: f.verdict for f in error.findings if f.verdict != "ok"}


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Said:
    """What was logged and warned of."""

    def __init__(self) -> None:
        self.logged: list[str] = []
        self.warned: list[str] = []

    def having(self, *parts: str) -> list[str]:
        """Messages that hold all ``parts``."""
        return [text for text in (*self.logged, *self.warned) if all(part in text for part in parts)]

    def converts(self) -> str:
        """The message on conversions, or nothing."""
        return "\n".join(text for text in self.warned if " converts:" in text)

    def notes(self) -> str:
        """The message on harmless differences, or nothing."""
        return "\n".join(text for text in self.logged if text.startswith("Since "))


@contextmanager
def listening() -> Iterator[Said]:
    """Collects Lightning's log lines and Python's warnings."""
    said = Said()
    handler = _Lines(said.logged)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
    finally:
        said.warned += [str(warning.message) for warning in caught]
        for logger in loggers:
            logger.removeHandler(handler)


def bits(value: Any) -> Any:
    """``value`` with every tensor as dtype, shape and bytes of its local part, fit for ``==``."""
    if isinstance(value, Tensor):
        local = getattr(value, "_local_tensor", value).detach().cpu().contiguous()
        return str(local.dtype), tuple(local.shape), bytes(local.reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def randomness() -> dict[str, Any]:
    """The random states of this process."""
    name, keys, *rest = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": bytes(torch.get_rng_state().tolist()),
    }


def plugin_state(plugin: AmpPrecision) -> dict[str, Any]:
    """Scale, tracker, counts and history."""
    return {
        "scaler": None if plugin.scaler is None else plugin.scaler.state_dict(),
        "history": plugin.history.state_dict(),
        "applied": plugin.applied_steps,
    }


def on_disk(path: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and time of change of a file, or of every file of a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


class Witness(L.Callback):
    """What a run is like when its setup begins, and when an exception ends it."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.before = self._look(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.after = self._look(trainer, pl_module)

    def _look(self, trainer: L.Trainer, model: L.LightningModule) -> dict[str, Any]:
        return {
            "weights": bits(dict(model.state_dict())),
            "optimizers": [len(optimizer.state) for optimizer in trainer.optimizers] if self.before else [],
            "step": (trainer.global_step, trainer.current_epoch),
            "randomness": randomness(),
            **plugin_state(trainer.precision_plugin),  # type: ignore[arg-type]
        }


def assert_refused(path: Path, plugin: Any, match: str = "", model: Any = None, **arguments: Any) -> Any:
    """Resumes, expects the refusal, and that nothing has changed; returns the error."""
    witness = Witness()
    file, generators = on_disk(path), randomness()
    with pytest.raises(IncompatiblePrecisionError, match=match) as caught:
        resume(path, plugin, model, callbacks=[witness, *arguments.pop("callbacks", [])], **arguments)
    assert on_disk(path) == file
    assert randomness() == generators
    assert witness.after and witness.after == witness.before
    return caught.value


class AtStart(L.Callback):
    """What training goes on with, before its first batch."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.moments: list[Tensor] = []
        self.plugin: dict[str, Any] = {}
        self.routes: dict[str, str] = {}
        self.step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        plugin: Any = trainer.precision_plugin
        self.weights = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.moments = [v.detach().clone() for s in states for v in s.values() if isinstance(v, Tensor) and v.ndim]
        self.plugin = plugin_state(plugin)
        self.routes = {route.name: route.compute for route in plugin.plan.routes}
        self.step = trainer.global_step

    @property
    def scale(self) -> float | None:
        return None if self.plugin["scaler"] is None else self.plugin["scaler"]["scale"]
