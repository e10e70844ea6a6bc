"""When FP8 begins: after a number of applied steps, once training is stable, or both. Used by ``fp8_run``.

Every rank decides alike, from numbers that are the same on all of them: counts, and verdicts, losses and gradient norms
added up over ranks. What a step contributes stays on the device until a log point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_amp_plus.checkpoint.manifest import Fp8Start, Manifest, Observed
from lightning_amp_plus.fp8.stability import WINDOW, Stability
from lightning_amp_plus.journal import Journal
from lightning_amp_plus.policy import PrecisionPolicy
from lightning_amp_plus.step_report import StepReport
from lightning_amp_plus.wide import wide_dtype
from lightning_amp_plus.window import Window

Number = float | Tensor

_NOTHING = (0.0, 0.0)  # no loss, of no weight


class _Row(NamedTuple):
    """What this rank knows of one closed window.

    Attributes:
        optimizer: Its optimizer.
        numbers: To be added up over ranks: overflows, verdicts, norms and how many, losses and their weight.
        before: Losses and their weight, over all ranks, of the part of the window before the save that was resumed.
    """

    optimizer: int
    numbers: tuple[Number, ...]
    before: tuple[float, float]


class Start:
    """Decides when FP8 begins, and says so.

    Args:
        policy: Whose ``fp8_after_steps`` and ``fp8_when_stable`` count; both must hold.
        journal: Knows the applied steps, the log points and how ranks agree.
        switch: Called with whether FP8 is on, whenever that may have changed.
    """

    def __init__(self, policy: PrecisionPolicy, journal: Journal, switch: Callable[[bool], None]) -> None:
        self._after = policy.fp8_after_steps
        self._when_stable = policy.fp8_when_stable
        self._journal = journal
        self._switch = switch
        self._begun_at: int | None = None if self.may_wait else 0
        self._waited = False  # in this fit
        self._seen: dict[int, Stability] = {}
        self._rows: list[_Row] = []
        self._losses: list[Tensor] = []
        self._weights: list[Number] = []
        self._before = self._saved_open = _NOTHING

    @property
    def may_wait(self) -> bool:
        """Whether the policy lets FP8 begin later than the run."""
        return self._when_stable or self._after > 0

    @property
    def begun(self) -> bool:
        """Whether FP8 is on."""
        return self._begun_at is not None

    # ---------------------------------------------------------------- what is observed

    def _observes(self, window: int) -> bool:
        """Whether loss and gradient norm of a window, by its running number, are needed.

        The same on every rank and after a resume, without asking for the applied steps, which only the device may know:
        they are never more than the windows.
        """
        return self._when_stable and not self.begun and window + WINDOW >= self._after

    @property
    def observing(self) -> bool:
        """Whether losses and gradient norm of the open window are needed."""
        return self._observes(self._journal.windows)

    def wants_grad_norm(self, window: Window) -> bool:
        """As :meth:`AmpPrecision.subscribe` asks it."""
        return self.observing

    def note_loss(self, loss: Tensor, weight: Number = 1.0) -> None:
        """Takes the unscaled loss of one micro-batch: a mean, or a sum over ``weight`` items."""
        self._losses.append(loss.detach())
        self._weights.append(weight)

    def discard_window(self) -> None:
        """The open window came to nothing."""
        self._losses, self._weights, self._before = [], [], _NOTHING

    def on_report(self, report: StepReport) -> None:
        """A window closed; called on every rank."""
        if self.begun:
            return
        self._waited = True
        if self._observes(report.window):
            numbers = (*_verdict_and_norm(report), *self._open_loss())
            self._rows.append(_Row(report.optimizer, numbers, self._before))
        self.discard_window()
        journal = self._journal
        # Where the host knows each verdict, steps can be counted between log points too; that is so on all ranks or none.
        if journal.windows % journal.settle_every == 0 or not (self._when_stable or journal.deferred):
            self.settle()
            applied = journal.settle().applied
            if applied >= self._after and self._unrest() is None:
                self._begin(applied)

    def _open_loss(self) -> tuple[Number, Number]:
        """Sum of the open window's losses on this rank, and of their weights."""
        if not self._losses:
            return _NOTHING
        device = self._journal.device
        # Sums of FP32 numbers in FP64 are exact but for extremes, so they do not depend on the order of ranks, nor on
        # where a save has cut them.
        total = torch.stack([loss.to(device, wide_dtype(device)).mean() for loss in self._losses]).sum()
        weight: Number = 0.0
        for part in self._weights:
            weight = weight + (part.to(device, wide_dtype(device)) if isinstance(part, Tensor) else part)
        return total, weight

    def settle(self, with_open: bool = False) -> None:
        """Takes in what the device holds: one transfer and, over ranks, one collective that every rank has to enter.

        Args:
            with_open: Also exchange the losses of the open window, which a checkpoint keeps.
        """
        rows, self._rows = self._rows, []
        with_open = with_open and self.observing
        numbers = [number for row in rows for number in row.numbers] + [*(self._open_loss() if with_open else ())]
        known = self._over_ranks(numbers)
        for row in rows:
            overflows, verdicts, norm, norms, loss, weight = (next(known) for _ in row.numbers)
            loss, weight = loss + row.before[0], weight + row.before[1]
            if not verdicts:
                continue  # nothing was stepped, and nothing skipped
            seen = self._seen.setdefault(row.optimizer, Stability())
            if overflows or not norms:
                seen.interrupt()
            else:
                seen.observe(norm / norms, loss / weight if weight else None)
        if with_open:
            total, weight = self._before[0] + next(known), self._before[1] + next(known)
            # A manifest holds finite numbers. With a loss that is not, the window is most likely skipped anyway.
            self._saved_open = (total, weight) if math.isfinite(total) else _NOTHING

    def _over_ranks(self, numbers: Sequence[Number]) -> Iterator[float]:
        consensus, device = self._journal.consensus, self._journal.device
        places = [place for place, number in enumerate(numbers) if isinstance(number, Tensor)]
        host = [0.0 if isinstance(number, Tensor) else number for number in numbers]
        if not numbers or (consensus.world_size == 1 and not places):
            return iter(host)
        flat = torch.tensor(host, dtype=wide_dtype(device)).to(device)
        if places:
            held = [n.detach().to(device, flat.dtype).reshape(()) for n in numbers if isinstance(n, Tensor)]
            flat[torch.tensor(places, device=device)] = torch.stack(held)
        return iter(consensus.agree(flat).tolist())

    # ---------------------------------------------------------------- the decision

    def _unrest(self) -> str | None:
        """What speaks against FP8, as far as is known on the host, or ``None``."""
        if not self._when_stable:
            return None
        if not self._seen:
            return "no step has been looked at"
        found = {index: seen.unrest() for index, seen in sorted(self._seen.items())}
        said = [f"{f'optimizer {index}: ' if len(found) > 1 else ''}{text}" for index, text in found.items() if text]
        return "; ".join(said) or None

    def _begin(self, applied: int) -> None:
        self._begun_at = applied
        self._seen.clear()
        self._switch(True)
        quiet = f", the last {WINDOW} of them quiet in loss and gradient norm" if self._when_stable else ""
        rank_zero_info(f"FP8 begins: {applied} steps have been applied{quiet}.")

    def say_why_not(self) -> None:
        """Says why FP8 has not begun in the fit that ends, if it waited."""
        waited, self._waited = self._waited, False
        if not waited or self.begun:
            return
        applied = self._journal.history.applied
        why = f"fp8_after_steps={self._after} waits for more" if applied < self._after else self._unrest()
        rank_zero_info(f"FP8 has not begun: {applied} steps have been applied; {why or 'the next log point decides'}.")

    # ---------------------------------------------------------------- state

    def state(self) -> Fp8Start:
        """What a checkpoint keeps; as of the last :meth:`settle`."""
        observed = [Observed(optimizer=index, **seen.state_dict()) for index, seen in sorted(self._seen.items())]
        return Fp8Start(begun_at=self._begun_at, open_loss=list(self._saved_open), observed=observed)

    def load(self, saved: Manifest) -> None:
        """Continues from a checkpoint. Where FP8 had begun it stays on, but never before ``fp8_after_steps``."""
        state, applied = saved.fp8_start, saved.history.applied
        if state is None:
            # Of a run without FP8, or of a version that knew no other start than after a number of steps.
            after = (saved.policy or {}).get("fp8_after_steps")
            was_on = saved.fp8 is not None and isinstance(after, int) and applied >= after
            by_count = was_on or not self._when_stable
            state = Fp8Start(begun_at=applied if by_count else None)
        self._take(state, applied)

    def _take(self, state: Fp8Start, applied: int) -> None:
        self.discard_window()
        self._rows = []
        self._begun_at = state.begun_at if applied >= self._after else None
        if not self.may_wait and self._begun_at is None:
            self._begun_at = applied
        self._seen = {}
        for observed in state.observed if self._when_stable and not self.begun else ():
            self._seen[observed.optimizer] = Stability()
            self._seen[observed.optimizer].load_state_dict(observed.model_dump())
        self._saved_open = (state.open_loss[0], state.open_loss[1])
        self._switch(self.begun)

    def reopen(self) -> None:
        """The resumed run goes on in the window that was open at the save."""
        self._before = self._saved_open

    def copy_from(self, state: Fp8Start) -> None:
        """Continues from :meth:`state` in another process, where the counts are those of the journal."""
        self._take(state, self._journal.history.applied)


def _verdict_and_norm(report: StepReport) -> tuple[Number, ...]:
    values = report.values
    found = values.found_inf if isinstance(values.found_inf, Tensor) else float(values.found_inf)
    norm = (0.0, 0.0) if values.grad_norm is None else (values.grad_norm, 1.0)
    return found, float(report.verdictless is None), *norm
