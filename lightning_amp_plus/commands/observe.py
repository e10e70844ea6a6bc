"""``explain --observe``: one training step of a config's model, to see what its GEMMs really ran in."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING

from lightning_amp_plus.commands.run_config import RunConfig, UsageError, reporting
from lightning_amp_plus.fp8.coverage.report import Coverage
from lightning_amp_plus.fp8.fit.report import FitReport
from lightning_amp_plus.routing import RoutePlan

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from rich.console import Console, ConsoleOptions, RenderResult

    from lightning_amp_plus.callbacks import Fp8CoverageMonitor


@dataclass(frozen=True)
class Observed:
    """A plan, and what one step made of it.

    Attributes:
        plan: What every module is to compute in.
        coverage: What its GEMMs ran in.
        fit: How well the scales of FP8 fitted, where there is FP8.
    """

    plan: RoutePlan
    coverage: Coverage
    fit: FitReport | None = None

    def to_json(self) -> str:
        """The plan, the coverage and the fit as JSON."""
        fit = None if self.fit is None else self.fit.to_dict()
        return json.dumps({"plan": self.plan.to_dict(), "coverage": self.coverage.to_dict(), "fit": fit}, indent=1)

    def __str__(self) -> str:
        return "\n\n".join(str(part) for part in (self.plan, self.coverage, self.fit) if part is not None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (part for part in (self.plan, self.coverage, self.fit) if part is not None)


def observe(config: RunConfig, model_class: str | None, data_class: str | None) -> Observed:
    """Trains one window of a config's model, on one device, and says what was seen. Nothing is logged or saved.

    No callback runs, neither of the config nor of the model: they log, save and stop by numbers of a whole run.

    Args:
        config: Of a LightningCLI.
        model_class: The model's class as ``module:Class``, where the config does not name it.
        data_class: The data module's, where the config does not name it.

    Raises:
        UsageError: If there is no batch to train on, or the step fails.
    """
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lightning_amp_plus.callbacks import Fp8CoverageMonitor

    plugin = config.plugin()
    waits = plugin.policy.fp8_after_steps or plugin.policy.fp8_when_stable
    if waits:
        plugin = config.plugin(replace(plugin.policy, fp8_after_steps=0, fp8_when_stable=False))
    model, data = config.build_model(model_class), config.build_data(data_class)
    if data is None and not is_overridden("train_dataloader", model):
        raise UsageError(
            "--observe needs a batch to train on: the config has no section 'data', and the model no train_dataloader. Add "
            "one of them, or name a data module: --data MODULE:CLASS."
        )
    if not is_overridden("configure_optimizers", model):  # the config makes one; its step is not what is looked at
        model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.0)
    model.configure_callbacks = list
    monitor = Fp8CoverageMonitor(1)
    window = config.accumulate_grad_batches()
    with reporting("the step failed"), _quietly():
        trainer = pl.Trainer(
            accelerator="gpu" if config.device_type() == "cuda" else config.device_type(),
            devices=1,
            plugins=[plugin],
            callbacks=[monitor, LambdaCallback(on_train_start=_without_validation)],
            max_steps=1,
            max_epochs=1,
            accumulate_grad_batches=window,
            # Manual optimization may step at a later batch.
            limit_train_batches=window if model.automatic_optimization else None,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=DummyLogger(),  # a model may use what its logger has
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, datamodule=data)
    return _shown(monitor, plugin.plan, bool(waits))


def _without_validation(trainer: pl.Trainer, _: pl.LightningModule) -> None:
    """Has schedulers go without what validation logs, as it does not run."""
    for scheduler in trainer.lr_scheduler_configs:
        scheduler.strict = False


def _shown(monitor: Fp8CoverageMonitor, plan: RoutePlan | None, waits: bool) -> Observed:
    if monitor.last is None or plan is None or not monitor.last.counted():
        raise UsageError(
            "no GEMM ran in a step: the data gave no batch, training_step multiplied nothing and returned None, or no "
            "optimizer stepped."
        )
    note = "The policy has FP8 begin later; here it was on." if waits else ""
    coverage = replace(monitor.last, notes=(*monitor.last.notes, *([note] if note else [])))
    return Observed(plan, coverage, monitor.last_fit)


@contextmanager
def _quietly() -> Generator[None, None, None]:
    """Without what a Trainer says about itself, which is about another run, and without what the model prints."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
