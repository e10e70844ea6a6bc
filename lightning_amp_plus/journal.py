"""Where reports go: subscribers, the history, a warning, and an error if a run only skips. Used by ``step``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp_plus.errors import ScaleCollapseError, SkipLimitError
from lightning_amp_plus.history import History
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.gradients import first_nonfinite
from lightning_amp_plus.step_report import StepReport, resolve

# What is compared across ranks, in this order.
_DIGEST = ("the number of windows", "the number of applied steps", "the loss scale", "the growth tracker", "hysteresis")

Subscriber = Callable[[StepReport], None]


class Journal:
    """Takes each report once: delivers it unresolved, and counts it as soon as the host knows its verdict anyway.

    Reports whose verdict only the device knows wait and are counted together, in one transfer.

    Args:
        scaled: Whether the run has a loss scale.
        max_consecutive_skips: Number of skips in a row at which the run is stopped.
        warn: Called with a message for the user.
        static: Whether the loss scale never changes.
    """

    def __init__(
        self,
        scaled: bool,
        max_consecutive_skips: int,
        warn: Callable[[str], None] = warnings.warn,
        static: bool = False,
    ) -> None:
        self.scaled = scaled
        self.static = static
        self.max_consecutive_skips = max_consecutive_skips
        self.warn = warn
        self.history = History()
        self.windows = 0
        self.last_report: StepReport | None = None
        self.settle_every = 50
        self.named_parameters: Callable[[], Iterable[tuple[str, Tensor]]] = lambda: ()
        self.consensus = Consensus()
        self.device = torch.device("cpu")
        self._unranked: list[StepReport] = []
        # Whether a verdict since the last log point is known to the device only. The same on every rank, whoever has read
        # what in between.
        self.deferred = False
        self._subscribers: list[tuple[Subscriber, Callable[[Any], bool] | None]] = []
        self._pending: list[StepReport] = []
        self._warned: set[str] = set()

    def subscribe(self, subscriber: Subscriber, grad_norm: Callable[[Any], bool] | None = None) -> Callable[[], None]:
        """See ``AmpPrecision.subscribe``."""
        if not callable(subscriber):
            raise TypeError(f"subscribe({subscriber!r}): expected a function that takes a StepReport.")
        entry = (subscriber, grad_norm)
        self._subscribers.append(entry)

        def unsubscribe() -> None:
            self._subscribers[:] = [other for other in self._subscribers if other is not entry]

        return unsubscribe

    def wants_grad_norm(self, window: Any) -> bool:
        """Whether a subscriber asks for the gradient norm of ``window``."""
        return any(wants(window) for _, wants in self._subscribers if wants is not None)

    def take(self, report: StepReport) -> None:
        """Delivers ``report``; counts what can be counted without a transfer, and at log points all that is waiting.

        Raises:
            SkipLimitError: If the run has done nothing but skip for too long.
        """
        self.windows += 1
        self.last_report = report
        self._pending.append(report)
        on_host = not isinstance(report.values.found_inf, Tensor)
        log_point = self.windows % self.settle_every == 0
        if report.values.found_here is not None:
            self._unranked.append(report)
            if on_host or log_point:  # the same windows on every rank, whoever has read what in between
                self._name_ranks()
        self.deferred = not log_point and (self.deferred or not on_host)
        for subscriber, _ in list(self._subscribers):
            subscriber(report)
        if not self.deferred:
            self.settle()
            self._check_health()

    def compare_ranks(self, state: Sequence[float], when: str) -> None:
        """Compares a digest of what steers the run over all ranks; one small collective, which every rank has to enter.

        Args:
            state: Numbers that must be equal on all ranks, in the order of ``_DIGEST``.
            when: What is going on, for the message.

        Raises:
            RuntimeError: On every rank, naming the first rank that differs, the field and both values.
        """
        if self.consensus.world_size == 1:
            return
        rows = self.consensus.gather(torch.tensor(list(state), dtype=torch.float64, device=self.device)).tolist()
        for rank, row in enumerate(rows):
            for name, mine, theirs in zip(_DIGEST, rows[0], row, strict=True):
                if mine != theirs:
                    raise RuntimeError(
                        f"Ranks disagree {when}: {name} is {mine:g} on rank 0 and {theirs:g} on rank {rank}. From here "
                        "on their weights drift apart. Something changed the scale or skipped a step on some ranks "
                        "only; resume from a checkpoint saved before, and look for code that calls scaler.update() or "
                        "optimizer.step() past the plugin."
                    )

    def _name_ranks(self) -> None:
        """Asks all ranks where overflows were found, if any: one collective for all reports since last time."""
        unranked, self._unranked = self._unranked, []
        resolve(unranked)
        overflowed = [report for report in unranked if report.values.found_inf]
        if not overflowed:
            return
        flags = torch.stack([f.reshape(()) for r in overflowed if (f := r.values.found_here) is not None])
        by_rank = self.consensus.gather(flags).tolist()
        for column, report in enumerate(overflowed):
            report.values.ranks = tuple(rank for rank, row in enumerate(by_rank) if row[column])

    def settle(self) -> History:
        """The history with every report counted: one transfer for all that only the device knew, none without any."""
        pending, self._pending = self._pending, []
        resolve([report for report in pending if isinstance(report.values.found_inf, Tensor)])
        for report in pending:
            self.history.absorb(report)
            if report.outcome == "skipped_overflow" and "skip" not in self._warned:
                self._warned.add("skip")
                self.warn(self._first_skip(report))
            if self.scaled and "below one" not in self._warned and report.verdictless is None and report.next_scale < 1:
                self._warned.add("below one")
                self.warn(_below_one(report))
        return self.history

    def _first_skip(self, report: StepReport) -> str:
        origin = report.overflow_origin
        start = f"Step {report.step} was skipped: a gradient is not finite (overflow in the {origin} pass). "
        if not self.scaled:
            kept = "Weights, optimizer state and per-step schedulers stay as they were."
            return f"{start}{kept} Said once; see plugin.history."
        moved = report.next_scale != report.scale
        scale = f"went from {report.scale:g} to {report.next_scale:g}" if moved else f"stays at {report.scale:g}"
        if self.static:
            return f"{start}The static loss scale stays at {report.scale:g}. Said once; see plugin.history."
        return (
            f"{start}The loss scale {scale}. A few skips while the scale finds its level are normal. Said once; see "
            "plugin.history or add LossScaleMonitor()."
        )

    def _check_health(self) -> None:
        skips = self.history.consecutive_skips
        report = self.last_report
        if skips < self.max_consecutive_skips or report is None:
            return
        self.history.consecutive_skips = 0  # whoever catches the error and goes on gets the same patience again
        bad = first_nonfinite(self.named_parameters())
        where = (
            f"the first gradient hit, in backward order, is that of {bad[0]!r} (of {bad[2]} non-finite, back to "
            f"{bad[1]!r})"
            if bad
            else "the gradients are gone, so the first bad layer is not known"
        )
        origin = report.overflow_origin or "backward"
        limit = "AmpPrecision(max_consecutive_skips=...) sets the limit."
        if not self.scaled:
            raise SkipLimitError(
                f"{skips} windows in a row were skipped, up to step {report.step}, because gradients were not finite: "
                f"overflow in the {origin} pass; {where}. Look at the data and the learning rate of these steps, lower "
                f"the learning rate, or clip gradients (gradient_clip_val). {limit}"
            )
        remedy = (
            "the loss itself is not finite, which no loss scale can mend: activations beyond 65504 need bf16-mixed, "
            "or a rule that keeps the layer in fp32"
            if origin == "forward"
            else "use bf16-mixed, or a rule that keeps this layer in fp32, or lower the learning rate"
        )
        if self.static:
            raise SkipLimitError(
                f"{skips} windows in a row were skipped, up to step {report.step}: under the static loss scale of "
                f"{report.scale:g} the {origin} pass overflowed every time; {where}. What to do: {remedy}"
                f"{'' if origin == 'forward' else '; or use a lower scale, or a LossScale, which finds its own'}. {limit}"
            )
        raise ScaleCollapseError(
            f"{skips} windows in a row were skipped, up to step {report.step}: the loss scale is down to "
            f"{report.next_scale:g} and the {origin} pass still overflowed; {where}. "
            f"Scale history (scale*windows): {_tail(self.history)}. What to do: {remedy}. {limit}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Counts and history as plain types."""
        return {"history": self.settle().state_dict(), "windows": self.windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``."""
        windows, history = int(state["windows"]), History()
        history.load_state_dict(state["history"])
        self._pending.clear()
        self.last_report = None
        self.windows, self.history = windows, history
        if self.history.skipped:
            self._warned.add("skip")  # said in the run that is continued

    def __getstate__(self) -> dict[str, Any]:
        """Counts and settings travel; subscribers, reports and the model's names belong to this process."""
        self.settle()
        dropped = (
            "last_report",
            "named_parameters",
            "consensus",
            "device",
            "_unranked",
            "deferred",
            "_subscribers",
            "_pending",
        )
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scaled"], state["max_consecutive_skips"], state["warn"], state["static"])  # type: ignore[misc]
        self.__dict__.update(state)


def _below_one(report: StepReport) -> str:
    return (
        f"The loss scale is {report.next_scale:g}, below 1, at step {report.step}: it now shrinks gradients instead "
        "of lifting them. Activations or gradients come near FP16's limit of 65504; consider bf16-mixed or a rule that "
        "keeps the layers in fp32."
    )


def _tail(history: History, runs: int = 12) -> str:
    tail = history.scales.runs
    text = " ".join(f"{value:g}*{count}" for value, count in tail[-runs:])
    return f"... {text}" if len(tail) > runs else text
