"""LossScaleMonitor: the loss scale, skipped windows and the gradient norm, logged once an interval."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus.callbacks.monitor import Monitor, bound, last_step, whole_number
from lightning_amp_plus.callbacks.readout import Measurement
from lightning_amp_plus.history import History
from lightning_amp_plus.metrics import skip_rate
from lightning_amp_plus.precision import AmpPrecision
from lightning_amp_plus.step_report import StepReport, resolve, unresolved
from lightning_amp_plus.window import Window

# What became of a window, as kept for the windowed rate and in the checkpoint.
_APPLIED, _FORWARD, _BACKWARD = 0, 1, 2


class LossScaleMonitor(Monitor):
    """Logs the loss scale, the skipped windows and the gradient norm, and says when the scale cannot settle.

    Works with every precision of ``AmpPrecision``; where no loss scale is in use, it logs the skipped windows and the
    norm. Between log points it only keeps references, so it neither waits for the device nor runs anything on it. At a
    log point all that the device alone knew is moved in one transfer, that of the other monitors. What is left at the
    end of the fit is logged then.

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
                                   window at the log point; not finite if that window was skipped    gradient, unless
                                                                                                     ``GradientMonitor``
                                                                                                     logs it
    ``precision/loss_scale_log2``  histogram, TensorBoard only                                       ``histogram=True``
    ============================== ================================================================= ================

    "Since the start" goes over fits and resumes, like ``plugin.history``. With several optimizers each closes windows
    of its own; the norm is that of the last one in the batch that ends the interval.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        window: int = 100,
        skip_rate_threshold: float = 0.1,
        histogram: bool = False,
        prog_bar: bool = True,
    ) -> None:
        whole_number(self, "window", window)
        if not 0 <= skip_rate_threshold <= 1:
            raise ValueError(
                f"LossScaleMonitor(skip_rate_threshold={skip_rate_threshold!r}): expected a share between 0 and 1."
            )
        self.window = window
        self.skip_rate_threshold = skip_rate_threshold
        self.histogram = histogram
        self.prog_bar = prog_bar
        self._outcomes: deque[int] = deque(maxlen=window)
        self._counted = 0
        self._warned: set[str] = set()
        super().__init__(every_n_steps)

    @override
    def settings(self) -> dict[str, Any]:
        """See :class:`Monitor`."""
        return {"every_n_steps": self.every_n_steps, "window": self.window}

    @override
    def forget_run(self) -> None:
        """See :class:`Monitor`."""
        super().forget_run()
        self._waiting: deque[StepReport] = deque(maxlen=self.window)
        self._due: StepReport | None = None
        self._latest: StepReport | None = None
        self._lowest_scale = math.inf
        self._charted = 0
        self._bar: dict[str, float] = {}
        self._measuring: list[Monitor] = []
        self._norm_elsewhere = False
        self._taking: Callable[[Sequence[float]], None] = _nothing

    # ---------------------------------------------------------------- binding to a run

    @override
    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes up where an earlier fit or the checkpoint ended."""
        assert self.plugin is not None
        history = self.plugin.history
        self._charted = history.applied + history.skipped
        if self._charted < self._counted:  # outcomes kept from a run that this one does not continue
            self._outcomes.clear()
        self._bar = trainer.progress_bar_metrics
        self._measuring = [monitor for monitor in bound(trainer) if monitor.logs_grad_norm]

    # ---------------------------------------------------------------- the windows

    @override
    def wants_grad_norm(self, window: Window) -> bool:
        """See :class:`Monitor`."""
        return self.looking and not self._is_measured()

    def _is_measured(self) -> bool:
        return any(monitor.looking for monitor in self._measuring)

    @override
    def see_report(self, report: StepReport) -> None:
        """Keeps the report."""
        self._waiting.append(report)
        self._latest = report

    @override
    def see_step(self, report: StepReport, optimizer: Optimizer) -> None:
        """The norm is that of this window, unless another closes in the same batch."""
        self._due = report
        self._norm_elsewhere = self._is_measured()

    @override
    def measure(self) -> Sequence[Measurement]:
        """What the device alone knows of the reports; the same on every rank."""
        numbers, self._taking = unresolved(self._to_resolve(), everything=True)
        if numbers is None:
            return ()
        return (Measurement(numbers.unsqueeze(1), ("own",)),)

    @override
    def take(self, numbers: Sequence[Tensor], step: int) -> Mapping[str, float]:
        """Counts what waited, and gives what the table of the class says."""
        for row in numbers:
            self._taking(row.flatten().tolist())
        return self._values()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the histogram."""
        super().on_train_epoch_end(trainer, pl_module)
        self._chart(trainer)

    @override
    def finish(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs what is left since the last log point."""
        if self._latest is not None:
            self.write(trainer, self._values(), last_step(trainer))
        self._chart(trainer)

    def _to_resolve(self) -> list[StepReport]:
        """What waited, and the report at the log point, which of very many may have been pushed out by others."""
        reports = list(self._waiting)
        return reports if self._due is None or self._due in reports else [*reports, self._due]

    def _count_waiting(self) -> None:
        """Brings the outcomes and the history up to date: one transfer for all that only the device knew."""
        if self.plugin is None:
            return
        resolve(self._to_resolve(), everything=True)
        reports = list(self._waiting)
        self._waiting.clear()
        for report in reports:
            self._lowest_scale = min(self._lowest_scale, report.next_scale)
            if report.outcome == "applied":
                self._outcomes.append(_APPLIED)
            elif report.outcome == "skipped_overflow":
                self._outcomes.append(_FORWARD if report.overflow_origin == "forward" else _BACKWARD)
        history = self.plugin.history
        self._counted = history.applied + history.skipped

    # ---------------------------------------------------------------- what comes out

    def _values(self) -> dict[str, float]:
        assert self.plugin is not None and self._latest is not None
        self._count_waiting()
        history = self.plugin.history
        rate = skip_rate(sum(outcome != _APPLIED for outcome in self._outcomes), len(self._outcomes))
        # Away from a log point the norm is there only if clipping measured it.
        norm = self._latest.values.grad_norm
        if self._due is not None:
            norm = None if self._norm_elsewhere else self._due.grad_norm
        values: dict[str, float] = {
            "precision/skip_rate": rate,
            "precision/skip_rate_total": history.skip_rate,
            "precision/skipped_steps": float(history.skipped),
        }
        shown = {"skip_rate": rate}
        if self.plugin.scaler is not None:
            scale = self._latest.next_scale
            values["precision/loss_scale"] = shown["loss_scale"] = scale
            values["precision/scale_growths"] = float(history.growths)
            values["precision/scale_backoffs"] = float(history.backoffs)
        if norm is not None:
            values["precision/grad_norm"] = float(norm)
        if self.prog_bar:
            self._bar.update(shown)
        self._warn(rate, history, self._latest.step)
        self._due = self._latest = None
        self._lowest_scale = math.inf
        return values

    def _chart(self, trainer: pl.Trainer) -> None:
        """Writes log2 of the scale after each window since the last time, where the logger is TensorBoard's."""
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not self.histogram or not loggers or self.plugin is None or self.plugin.scaler is None:
            return
        history = self.plugin.history
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
                "precision/loss_scale_log2", values, last_step(trainer), bins=edges.tolist()
            )

    def _warn(self, rate: float, history: History, step: int) -> None:
        assert self.plugin is not None
        scaler = self.plugin.scaler
        # Of fewer, the few skips in which a scale finds its level are too many.
        full = len(self._outcomes) == self.window
        if "rate" not in self._warned and full and rate > self.skip_rate_threshold:
            self._warned.add("rate")
            rank_zero_warn(_too_many_skips(list(self._outcomes), self.plugin, step))
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
        self.forget_run()


def _nothing(numbers: Sequence[float]) -> None:
    """Takes no numbers."""


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
