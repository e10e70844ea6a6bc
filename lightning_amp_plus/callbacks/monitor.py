"""What all monitors share: when they look, how what they saw leaves the device, and where it is logged. :class:`Monitor`.

A monitor looks at the windows that end a log interval and at nothing else: in between it has no hook anywhere and runs
nothing. What it finds stays on the device until the window has closed. Then all monitors of the Trainer that looked are
read together, in one collective and one transfer, and what they make of it is logged in one call to each logger.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus.callbacks.layers import LayerHistory
from lightning_amp_plus.callbacks.output import LayerTable, draw, lay_out, layer_columns
from lightning_amp_plus.callbacks.readout import Measurement, read
from lightning_amp_plus.precision import AmpPrecision
from lightning_amp_plus.step_report import StepReport
from lightning_amp_plus.window import Window

_NEW_COLUMNS = 20  # log points after which an epoch's end draws pictures anew


class Monitor(pl.Callback):
    """Base of the monitors. A subclass overrides what it needs of the methods below "what a monitor does".

    The batches of an interval are counted as Lightning counts those that stepped, the number that its loggers call
    ``step``: a window is looked at if ``(batches that stepped + 1) % every_n_steps == 0``.

    Args:
        every_n_steps: Length of an interval; by default the Trainer's ``log_every_n_steps``. Where that is 0, nothing is
            looked at.

    Raises:
        ValueError: If it is not a whole number of at least 1.
        MisconfigurationException: In ``setup``, if the Trainer's precision plugin is not an ``AmpPrecision``.
    """

    by_layer = False  # whether its rows are those of the model's modules, so that all ranks need the same ones
    logs_grad_norm = False  # whether it measures and logs ``precision/grad_norm``, so that no other has to

    def __init__(self, every_n_steps: int | None = None) -> None:
        whole_number(self, "every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self.forget_run()

    @property
    @override
    def state_key(self) -> str:
        """Of its own for other :meth:`settings`, so that a Trainer can hold several."""
        return self._generate_state_key(**self.settings())

    # ---------------------------------------------------------------- what a monitor does

    def settings(self) -> dict[str, Any]:
        """Those of the constructor's arguments that tell monitors of one class apart, for the state's key."""
        return {"every_n_steps": self.every_n_steps}

    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training starts: optimizers, shards and routes are in place."""

    def before_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A micro-batch of a window that is looked at begins."""

    def after_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """It ended, also by an exception: hooks go."""

    def see_gradients(self, optimizer: Optimizer) -> None:
        """The optimizer's gradients are unscaled and not clipped yet."""

    def see_report(self, report: StepReport) -> None:
        """A window closed, whether it is looked at or not; nothing may run on the device here."""

    def see_step(self, report: StepReport, optimizer: Optimizer) -> None:
        """A window that is looked at closed: the optimizer has stepped, or skipped; gradients are still there."""

    def measure(self) -> Sequence[Measurement]:
        """What was seen, still on the device. The same kinds and sizes on every rank, whatever each one saw."""
        return ()

    def take(self, numbers: Sequence[Tensor], step: int) -> Mapping[str, float]:
        """What to log, from the numbers of :meth:`measure` over all ranks."""
        return {}

    def layer_histories(self) -> Sequence[LayerHistory]:
        """Numbers of layers over log points, for a picture."""
        return ()

    def finish(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The fit ends without an exception."""

    def forget_run(self) -> None:
        """Drops what belongs to one run. A subclass drops its own and calls this."""
        self.plugin: AmpPrecision | None = None
        self.optimizers: list[Optimizer] = []
        self.looking = False  # at the window that is open
        self.closed = False  # a window was closed in this batch
        self._every = 0
        self._unsubscribe: Callable[[], None] | None = None
        self._metrics: tuple[dict[str, Any], ...] = ()
        self._drawn_to = -1
        self._laid_out = False
        self._shown: dict[str, float] = {}  # what was logged last under each key

    # ---------------------------------------------------------------- binding to a run

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses a fit whose precision plugin delivers no reports."""
        plugin = trainer.precision_plugin
        if stage == "fit" and not isinstance(plugin, AmpPrecision):
            raise MisconfigurationException(
                f"{type(self).__name__} reads the reports of AmpPrecision, but this Trainer's precision plugin is "
                f"{type(plugin).__name__} (precision {plugin.precision!r}). Pass plugins=[AmpPrecision(...)] to the "
                "Trainer in place of precision=..., or remove the callback."
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Subscribes to the reports, unless logging is off."""
        self._end(trainer, pl_module)
        # fast_dev_run is there to go through all that a run does, and Lightning itself logs every step of it.
        settings: Any = trainer
        self._every = 1 if settings.fast_dev_run else self.every_n_steps or settings.log_every_n_steps
        plugin = trainer.precision_plugin
        if self._every and isinstance(plugin, AmpPrecision):
            self.plugin = plugin
            self._unsubscribe = plugin.subscribe(self._on_report, grad_norm=self.wants_grad_norm)

    def wants_grad_norm(self, window: Window) -> bool:
        """Whether the report of a window is to hold the gradient norm, which costs a pass over the gradients."""
        return False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes up where an earlier fit or the checkpoint ended: both have been restored by now."""
        if self.plugin is None:
            return
        if self.by_layer:
            self._refuse_other_layers_elsewhere(pl_module)
        self.optimizers = list(trainer.optimizers)
        # Lightning empties these dicts at the start of a run and after the sanity check only. Each later access
        # converts what users logged with prog_bar=True once more, a transfer for every such value.
        self._metrics = (trainer.callback_metrics, trainer.logged_metrics)
        self.begin(trainer, pl_module)

    def _refuse_other_layers_elsewhere(self, pl_module: pl.LightningModule) -> None:
        """Raises where ranks would submit different rows, which an exchange of equal sizes would take for each other's."""
        assert self.plugin is not None
        names = "\n".join(name for name, _ in pl_module.named_modules())
        mine = torch.tensor([float(zlib.crc32(names.encode()))], dtype=torch.float64)
        device = next((p.device for p in pl_module.parameters()), mine.device)
        if device.type != "mps":
            mine = mine.to(device)
        by_rank = self.plugin.consensus.gather(mine).flatten().tolist()
        if len(set(by_rank)) > 1:
            other = next(rank for rank, digest in enumerate(by_rank) if digest != by_rank[0])
            raise MisconfigurationException(
                f"{type(self).__name__} adds up layers over ranks, but ranks 0 and {other} have modules of different "
                "names, as stages of a pipeline do. Name the ranks that hold one and the same part by "
                "AmpPrecision(process_group=...), or leave the callback out."
            )

    def _end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._look_away(trainer, pl_module)
        self.forget_run()

    def _look_away(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.looking:
            self.looking = False
            self.after_batch(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Says what is left to say; the last of the Trainer's monitors shows pictures and the table of all."""
        if self.plugin is None:
            return
        self.finish(trainer, pl_module)
        monitors = bound(trainer)
        if monitors[-1] is not self:
            return
        self._draw(trainer, monitors, least=1)
        columns = layer_columns(self._shown)
        if columns and trainer.is_global_zero:
            from rich.console import Console

            Console().print(LayerTable(columns))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws pictures of all monitors, unless little has come to them since the last time."""
        self._look_away(trainer, pl_module)  # a hook that ends an epoch early leaves out the end of its last batch
        monitors = bound(trainer)
        if self.plugin is None or monitors[-1] is not self:
            return
        self._draw(trainer, monitors, least=_NEW_COLUMNS)

    def _draw(self, trainer: pl.Trainer, monitors: Sequence[Monitor], least: int) -> None:
        histories = [history for monitor in monitors for history in monitor.layer_histories()]
        new = {step for history in histories for step in history.steps if step > self._drawn_to}
        if len(new) >= least:
            self._drawn_to = max(new)
            draw(trainer, histories, last_step(trainer))

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the subscription."""
        self._end(trainer, pl_module)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ends the subscription, if the fit ended early."""
        self._end(trainer, pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends the subscription. Reads nothing: after some exceptions the device cannot be asked any more."""
        self._end(trainer, pl_module)

    # ---------------------------------------------------------------- the windows

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Looks at the batch, if the window that it belongs to ends an interval."""
        if self.plugin is None:
            return
        self.closed = False
        self.looking = self.is_due(trainer, pl_module)
        if self.looking:
            self.look(trainer, pl_module)

    def is_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Whether the batch that begins is to be looked at."""
        return (batches_that_stepped(trainer) + 1) % self._every == 0

    def look(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to look at a micro-batch, with the optimizers as they are by now: callbacks may have made new ones."""
        self.optimizers = list(trainer.optimizers)
        self.before_batch(trainer, pl_module)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Looks at the gradients."""
        if self.looking:
            self.see_gradients(optimizer)

    def _on_report(self, report: StepReport) -> None:
        self.closed = True
        self.see_report(report)
        if self.looking:
            self.see_step(report, self.optimizers[report.optimizer])

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs, if a window that was looked at closed in this batch: the last of the Trainer's monitors, for all."""
        if not self.looking:
            return
        self.after_batch(trainer, pl_module)
        if not self.closed:
            return
        looking = [monitor for monitor in bound(trainer) if monitor.looking]
        if looking[-1] is self:
            for monitor in looking:
                monitor.looking = False
            publish(trainer, looking, batches_that_stepped(trainer))

    def write(self, trainer: pl.Trainer, values: Mapping[str, float], step: int) -> None:
        """Writes to every logger, and to where ``ModelCheckpoint`` and others look values up."""
        if not values:
            return
        tensors = torch.tensor(list(values.values()), dtype=torch.float32).unbind()
        for metrics in self._metrics:
            metrics.update(zip(values, tensors, strict=True))
        if not self._laid_out:
            self._laid_out = True
            lay_out(trainer, values)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)  # type: ignore[arg-type]


def publish(trainer: pl.Trainer, monitors: Sequence[Monitor], step: int) -> None:
    """Reads monitors together and logs what they make of it.

    Args:
        trainer: Their Trainer.
        monitors: Those that looked, on every rank the same in the same order.
        step: What loggers are to call the step.
    """
    plugin = monitors[-1].plugin
    assert plugin is not None
    measured = [list(monitor.measure()) for monitor in monitors]
    numbers = iter(read([part for parts in measured for part in parts], plugin.consensus))
    values: dict[str, float] = {}
    for monitor, parts in zip(monitors, measured, strict=True):
        values.update(monitor.take([next(numbers) for _ in parts], step))
    monitors[-1].write(trainer, values, step)
    bound(trainer)[-1]._shown.update(values)


def bound(trainer: pl.Trainer) -> list[Monitor]:
    """The Trainer's monitors that take part in its fit, in its order."""
    return [m for m in trainer.callbacks if isinstance(m, Monitor) and m.plugin is not None]  # type: ignore[attr-defined]


def batches_that_stepped(trainer: pl.Trainer) -> int:
    """Lightning's count behind the ``step`` of its loggers; public nowhere."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def last_step(trainer: pl.Trainer) -> int:
    """The step under which loggers know the last batch; Lightning has counted on by the time an epoch or a fit ends."""
    return max(0, batches_that_stepped(trainer) - 1)


def whole_number(callback: Any, name: str, value: Any) -> None:
    """Raises ValueError unless a setting is a whole number of at least 1, or ``every_n_steps`` is ``None``."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not whole and not (name == "every_n_steps" and value is None):
        raise ValueError(f"{type(callback).__name__}({name}={value!r}): expected a whole number of at least 1.")


def flag(callback: Any, name: str, value: Any) -> bool:
    """A setting that is True or False.

    Raises:
        ValueError: If it is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{type(callback).__name__}({name}={value!r}): expected True or False.")
    return value
