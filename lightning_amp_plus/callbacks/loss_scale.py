"""LossScaleMonitor: the loss scale, skipped windows and the gradient norm, logged once an interval."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_amp_plus.history import History
from lightning_amp_plus.metrics import skip_rate
from lightning_amp_plus.precision import AmpPrecision
from lightning_amp_plus.step_report import StepReport, resolve
from lightning_amp_plus.window import Window

# What became of a window, as kept for the windowed rate and in the checkpoint.
_APPLIED, _FORWARD, _BACKWARD = 0, 1, 2


class LossScaleMonitor(pl.Callback):
    """Logs the loss scale, the skipped windows and the gradient norm, and says when the scale cannot settle.

    Works with every precision of ``AmpPrecision``; where no loss scale is in use, it logs the skipped windows and the
    norm. Between log points it only keeps references, so it neither waits for the device nor runs anything on it. At a
    log point all that the device alone knew is moved in one transfer. A log point is the end of the batch in which a
    window closed whose ``global_step`` ends an interval, counted as Lightning counts (``(global_step + 1) %
    every_n_steps == 0``). What is left at the end of the fit is logged then.

    Args:
        every_n_steps: Length of an interval in steps; by default the Trainer's ``log_every_n_steps``. Where that is 0,
            nothing is logged.
        window: Number of windows that ``precision/skip_rate`` looks back on.
        skip_rate_threshold: Warn, once, when the rate over a full ``window`` is above this; 1 turns the warning off.
        histogram: Also write a histogram of log2 of the loss scale over the epoch's windows to a TensorBoardLogger, at
            the end of each training epoch.
        prog_bar: Show the loss scale and the skip rate on the progress bar.

    Raises:
        ValueError: If an argument is out of range.
        MisconfigurationException: In ``setup``, if the Trainer's precision plugin is not an ``AmpPrecision``.

    Example::

        trainer = L.Trainer(plugins=[AmpPrecision("16-mixed")], callbacks=[LossScaleMonitor(every_n_steps=10)])

    Logged keys, in the loggers, in ``trainer.callback_metrics`` and in ``trainer.logged_metrics``:

    ============================== ================================================================= ================
    key                            value                                                             where
    ============================== ================================================================= ================
    ``precision/loss_scale``       loss scale after the last window's update                         with a loss scale
    ``precision/scale_growths``    how often the scale grew, since the start                         with a loss scale
    ``precision/scale_backoffs``   how often it was lowered, since the start                         with a loss scale
    ``precision/skip_rate``        share skipped for an overflow of the last ``window`` windows      always
    ``precision/skip_rate_total``  that share since the start                                        always
    ``precision/skipped_steps``    windows skipped for an overflow, since the start                  always
    ``precision/grad_norm``        global L2 norm of the unscaled gradients before clipping, of the  where there was a
                                   window at the log point; not finite if that window was skipped    gradient
    ``precision/loss_scale_log2``  histogram, TensorBoard only                                       ``histogram=True``
    ============================== ================================================================= ================

    "Since the start" goes over fits and resumes, like ``plugin.history``. With several optimizers each closes windows
    of its own; the norm is that of the optimizer whose step ends the interval.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        window: int = 100,
        skip_rate_threshold: float = 0.1,
        histogram: bool = False,
        prog_bar: bool = True,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("window", window)):
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (name == "every_n_steps" and value is None):
                raise ValueError(f"LossScaleMonitor({name}={value!r}): expected a whole number of at least 1.")
        if not 0 <= skip_rate_threshold <= 1:
            raise ValueError(
                f"LossScaleMonitor(skip_rate_threshold={skip_rate_threshold!r}): expected a share between 0 and 1."
            )
        self.every_n_steps = every_n_steps
        self.window = window
        self.skip_rate_threshold = skip_rate_threshold
        self.histogram = histogram
        self.prog_bar = prog_bar
        self._outcomes: deque[int] = deque(maxlen=window)
        self._counted = 0
        self._warned: set[str] = set()
        self._forget_run()

    @property
    @override
    def state_key(self) -> str:
        """Of its own for each setting, so that a Trainer can hold several."""
        return self._generate_state_key(every_n_steps=self.every_n_steps, window=self.window)

    def _forget_run(self) -> None:
        self._plugin: AmpPrecision | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._every = 0
        self._waiting: deque[StepReport] = deque(maxlen=self.window)
        self._due: StepReport | None = None
        self._latest: StepReport | None = None
        self._lowest_scale = math.inf
        self._charted = 0
        self._metrics: tuple[dict[str, Tensor], ...] = ()
        self._bar: dict[str, float] = {}

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
        self._end()
        # fast_dev_run is there to go through all that a run does, and Lightning itself logs every step of it.
        settings: Any = trainer
        self._every = 1 if settings.fast_dev_run else self.every_n_steps or settings.log_every_n_steps
        plugin = trainer.precision_plugin
        if self._every and isinstance(plugin, AmpPrecision):
            self._plugin = plugin
            self._unsubscribe = plugin.subscribe(self._on_report, grad_norm=self._wants_norm)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes up where an earlier fit or the checkpoint ended: both have been restored by now."""
        if self._plugin is None:
            return
        history = self._plugin.history
        self._charted = history.applied + history.skipped
        if self._charted < self._counted:  # outcomes kept from a run that this one does not continue
            self._outcomes.clear()
        # Lightning empties these dicts at the start of a run and after the sanity check only. Each later access
        # converts what users logged with prog_bar=True once more, a transfer for every such value.
        self._metrics = (trainer.callback_metrics, trainer.logged_metrics)
        self._bar = trainer.progress_bar_metrics

    def _end(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._forget_run()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the subscription."""
        self._end()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ends the subscription, if the fit ended early."""
        self._end()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends the subscription. Reads nothing: after some exceptions the device cannot be asked any more."""
        self._end()

    # ---------------------------------------------------------------- the windows

    def _ends_interval(self, step: int) -> bool:
        return (step + 1) % self._every == 0

    def _wants_norm(self, window: Window) -> bool:
        return self._ends_interval(window.index)

    def _on_report(self, report: StepReport) -> None:
        self._waiting.append(report)
        self._latest = report
        if self._ends_interval(report.step):
            self._due = report

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs, if a window that ends an interval closed in this batch."""
        if self._due is not None:
            self._log(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the histogram."""
        self._chart(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs what is left since the last log point."""
        if self._latest is not None:
            self._log(trainer, _last_step(trainer))
        self._chart(trainer)

    def _count_waiting(self) -> None:
        """Brings the outcomes and the history up to date: one transfer for all that only the device knew."""
        if self._plugin is None:
            return
        reports = list(self._waiting)
        self._waiting.clear()
        resolve(reports if self._due is None or self._due in reports else [*reports, self._due], everything=True)
        for report in reports:
            self._lowest_scale = min(self._lowest_scale, report.next_scale)
            if report.outcome == "applied":
                self._outcomes.append(_APPLIED)
            elif report.outcome == "skipped_overflow":
                self._outcomes.append(_FORWARD if report.overflow_origin == "forward" else _BACKWARD)
        history = self._plugin.history
        self._counted = history.applied + history.skipped

    # ---------------------------------------------------------------- what comes out

    def _log(self, trainer: pl.Trainer, step: int) -> None:
        assert self._plugin is not None and self._latest is not None
        self._count_waiting()
        history = self._plugin.history
        rate = skip_rate(sum(outcome != _APPLIED for outcome in self._outcomes), len(self._outcomes))
        # Away from a log point the norm is there only if clipping measured it.
        norm = self._due.grad_norm if self._due is not None else self._latest.values.grad_norm
        values: dict[str, float] = {
            "precision/skip_rate": rate,
            "precision/skip_rate_total": history.skip_rate,
            "precision/skipped_steps": float(history.skipped),
        }
        shown = {"skip_rate": rate}
        if self._plugin.scaler is not None:
            scale = self._latest.next_scale
            values["precision/loss_scale"] = shown["loss_scale"] = scale
            values["precision/scale_growths"] = float(history.growths)
            values["precision/scale_backoffs"] = float(history.backoffs)
        if norm is not None:
            values["precision/grad_norm"] = float(norm)
        for metrics in self._metrics:
            metrics.update({key: torch.tensor(value, dtype=torch.float32) for key, value in values.items()})
        if self.prog_bar:
            self._bar.update(shown)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)
        self._warn(rate, history, self._latest.step)
        self._due = self._latest = None
        self._lowest_scale = math.inf

    def _chart(self, trainer: pl.Trainer) -> None:
        """Writes log2 of the scale after each window since the last time, where the logger is TensorBoard's."""
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not self.histogram or not loggers or self._plugin is None or self._plugin.scaler is None:
            return
        history = self._plugin.history
        windows = history.applied + history.skipped - self._charted
        self._charted += windows
        if not windows or not trainer.is_global_zero:
            return
        exponents, counts = [], []
        for scale, count in reversed(history.scales.runs):
            exponents.append(math.log2(scale))
            counts.append(min(count, windows))
            windows -= counts[-1]
            if not windows:
                break
        values = torch.tensor(exponents).repeat_interleave(torch.tensor(counts))
        # A bin for each power of two: the writer's own bins grow by a tenth and would hold 2^15 and 2^16 in one.
        edges = torch.arange(round(min(exponents)), round(max(exponents)) + 2) - 0.5
        for logger in loggers:
            logger.experiment.add_histogram(
                "precision/loss_scale_log2", values, _last_step(trainer), bins=edges.tolist()
            )

    def _warn(self, rate: float, history: History, step: int) -> None:
        assert self._plugin is not None
        scaler = self._plugin.scaler
        # Of fewer, the few skips in which a scale finds its level are too many.
        full = len(self._outcomes) == self.window
        if "rate" not in self._warned and full and rate > self.skip_rate_threshold:
            self._warned.add("rate")
            rank_zero_warn(_too_many_skips(list(self._outcomes), self._plugin, step))
        if scaler is None or not scaler.dynamic or not history.skipped or "floor" in self._warned:
            return
        config = scaler.config
        if self._lowest_scale * config.backoff_factor**2 <= config.min:
            self._warned.add("floor")
            rank_zero_warn(
                f"The loss scale came down to {self._lowest_scale:g} by step {step}, within two backoffs of its floor "
                f"(LossScale(min={config.min:g})). At the floor it can go no lower, and every further overflow skips "
                "its step. Use bf16-mixed, or a rule that keeps the layers that overflow in fp32; lower the floor only "
                "if gradients really are that large. Said once."
            )

    # ---------------------------------------------------------------- checkpoint and copies

    @override
    def state_dict(self) -> dict[str, Any]:
        """What became of the last windows, so that the windowed rate goes on after a resume."""
        self._count_waiting()
        return {"outcomes": list(self._outcomes), "counted": self._counted}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from ``state_dict()``; of a longer window saved, the newest part counts."""
        self._outcomes = deque((int(outcome) for outcome in state_dict["outcomes"]), maxlen=self.window)
        self._counted = int(state_dict["counted"])

    def __getstate__(self) -> dict[str, Any]:
        """Settings and counts travel; the run they come from does not."""
        kept = ("every_n_steps", "window", "skip_rate_threshold", "histogram", "prog_bar")
        counts = ("_outcomes", "_counted", "_warned")
        return {name: self.__dict__[name] for name in (*kept, *counts)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_run()


def _last_step(trainer: pl.Trainer) -> int:
    """The step under which loggers know the last batch; Lightning has counted on by the time an epoch or a fit ends."""
    return max(0, trainer.fit_loop.epoch_loop._batches_that_stepped - 1)


def _too_many_skips(outcomes: list[int], plugin: AmpPrecision, step: int) -> str:
    forward, backward = outcomes.count(_FORWARD), outcomes.count(_BACKWARD)
    skipped = forward + backward
    origin = "forward" if forward > backward else "backward"
    if plugin.scaler is None:
        remedy = "Look at the data and the learning rate of these steps, lower the learning rate, or clip gradients."
    elif origin == "forward":
        remedy = (
            "There the loss itself is not finite, which no loss scale can mend: use bf16-mixed, or a rule that keeps "
            "the layers whose activations pass 65504 in fp32."
        )
    else:
        remedy = (
            "If the loss scale keeps rising into the overflow, use a longer LossScale(growth_interval=...) or a lower "
            "max; if it keeps falling, gradients are too large or not finite whatever the scale: use bf16-mixed, a "
            "rule that keeps the layers that overflow in fp32, or a lower learning rate."
        )
    rate = f"{skipped} of the last {len(outcomes)} windows ({skipped / len(outcomes):.1%})"
    return (
        f"{rate} were skipped up to step {step}, because gradients were not finite; in {max(forward, backward)} of "
        f"them the overflow began in the {origin} pass. {remedy} Said once."
    )
