"""The one step sequence: unscale once, agree, show hooks and clipping true gradients, step or skip, update once.

Automatic and manual optimization, one optimizer or several, a single device or many ranks all go through
:class:`StepSequence`; strategies differ only in the ``Consensus`` and ``GradNorm`` objects it is given. It knows no
Trainer: ``precision`` tells it what it needs in a :class:`Window`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.fused import given_verdict, needs_verdict
from lightning_amp_plus.journal import Journal
from lightning_amp_plus.ledger import Ledger, OpenWindow
from lightning_amp_plus.scaling.clipping import clip_by_norm, clip_by_value
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.grad_norm import GradNorm
from lightning_amp_plus.scaling.gradients import (
    dense_gradients,
    multiply,
    parameters_of,
    parameters_with_gradients,
    unscale_and_check,
)
from lightning_amp_plus.scaling.master_weights import MasterWeights
from lightning_amp_plus.scaling.partial import settle_partial
from lightning_amp_plus.scaling.scaler import LossScaler
from lightning_amp_plus.step_report import StepReport, Values, Verdictless
from lightning_amp_plus.verdict import Verdicts, add_verdict, scalar
from lightning_amp_plus.window import Window


class StepSequence:
    """Executes windows. One instance lives as long as its plugin; :meth:`begin_fit` binds it to a run.

    Args:
        scaler: The loss scale's state, or ``None`` where no scale is in use.
        check_finite: Whether windows with non-finite gradients are skipped where there is no scale.
        max_consecutive_skips: Number of skips in a row at which the run is stopped.
        warn: Called with a message for the user.
        check_ranks_every: Number of windows after which ranks compare what steers the run; ``None`` for never.
    """

    def __init__(
        self,
        scaler: LossScaler | None,
        check_finite: bool,
        max_consecutive_skips: int,
        warn: Callable[[str], None] = warnings.warn,
        check_ranks_every: int | None = None,
    ) -> None:
        self.scaler = scaler
        self.check_finite = check_finite
        self.check_ranks_every = check_ranks_every
        self._end_watch: Callable[[], None] = _nothing
        static = scaler is not None and not scaler.dynamic
        self.journal = Journal(scaler is not None, max_consecutive_skips, warn, static)
        self._unbind()

    def end_fit(self) -> None:
        """Counts what is still on the device and takes the hooks off the parameters; reports stay readable."""
        self.journal.settle()
        self._end_watch()
        self._end_watch = _nothing

    def _unbind(self) -> None:
        self._end_watch = _nothing
        self.ledger = Ledger()
        self.journal.consensus = Consensus()
        self.verdicts = Verdicts(self.ledger, self.journal.consensus, GradNorm())
        self.masters: MasterWeights | None = None
        self._ones: dict[torch.device, Tensor] = {}
        self._before_backward: Callable[[], None] | None = None
        self._looked_at: set[int] = set()
        if self.scaler is not None:
            self.scaler.unscaler, self.scaler.on_set = self.unscale, self._rescale

    def begin_fit(
        self,
        optimizers: Sequence[Optimizer],
        named_parameters: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        manual: bool,
        consensus: Consensus,
        grad_norm: GradNorm,
        masters: MasterWeights | None,
        settle_every: int,
        device: torch.device,
        before_backward: Callable[[], None] | None = None,
    ) -> None:
        """Binds the sequence to a run, with an empty window: gradients left by an earlier one are dropped.

        Args:
            optimizers: All optimizers of the run.
            named_parameters: The model's parameters, for error messages.
            manual: Whether the run is in manual optimization.
            consensus: How ranks agree.
            grad_norm: How the global norm is taken.
            masters: FP32 copies of low-precision parameters, if any.
            settle_every: Number of windows after which verdicts known to the device only are moved to the host.
            device: Where ranks exchange what they compare.
            before_backward: Called before each backward, where the strategy has to be told that one follows.
        """
        self.end_fit()
        self._unbind()
        self.ledger = Ledger(optimizers, manual)
        if manual and self.scaler is not None:
            self._end_watch = self.ledger.watch_backwards()
        self.journal.named_parameters = named_parameters
        self.journal.settle_every = settle_every
        self.journal.consensus = consensus
        self.verdicts = Verdicts(self.ledger, consensus, grad_norm)
        self.masters = masters
        self.journal.device = device
        self._before_backward = before_backward
        for optimizer in optimizers:
            for parameter in parameters_with_gradients(optimizer):
                parameter.grad = None

    # ---------------------------------------------------------------- while the window is open

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: ``loss * S``, or ``loss`` where no scale is in use."""
        for optimizer in self.ledger.unscaled_early():
            # The window goes on after scaler.unscale_(): its gradients get their scale back, or two scales would be
            # added up.
            gradients = dense_gradients(parameters_with_gradients(optimizer))
            if gradients and self.scaler is not None:
                multiply(gradients, self.scaler.scale_on(gradients[0].device))
            self.ledger.window_of(optimizer).unscaled = False
        if self._before_backward is not None:
            self._before_backward()
        self.ledger.backwards += 1
        self.ledger.interrupted = False
        if self.scaler is None:
            return loss
        scaled = self.scaler.scale(loss)
        assert isinstance(scaled, Tensor)
        return scaled

    def _rescale(self, ratio: float) -> None:
        """The scale was set by hand: gradients that carry the old one are brought to the new one."""
        for gradients in self.ledger.scaled_gradients():
            multiply(gradients, ratio)

    def record_loss(self, loss: Tensor) -> None:
        """Keeps the loss of the backward that just ran, detached and still scaled, to tell where an overflow began."""
        if self.check_finite:
            self.ledger.record_loss(loss)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surrounds each backward of a loss that went through :meth:`scale_loss`; any other is noticed as foreign."""
        ledger = self.ledger
        ledger.in_backward = True
        try:
            yield
        finally:
            ledger.in_backward = False

    def unscale(
        self, optimizer: Optimizer, window: Window | None = None, parameters: list[Tensor] | None = None
    ) -> None:
        """Unscales and checks the optimizer's gradients in place. At most once a window, whoever asks first.

        Args:
            optimizer: Whose gradients.
            window: How the window is weighted, where it closes with this.
            parameters: Those with gradients, where the caller knows them.
        """
        state = self.ledger.window_of(optimizer)
        if state.unscaled:
            return
        if parameters is None:
            parameters = parameters_with_gradients(optimizer)
        state.parameters = parameters
        if self.verdicts.grad_norm.sharded:
            settle_partial(parameters)
        fresh = [p for p in parameters if self.ledger.is_fresh(p)] if self.ledger.manual else parameters
        gradients = dense_gradients(fresh)
        if gradients:
            add_verdict(state, unscale_and_check(gradients, self._factor(gradients[0].device, window)))
            if self._may_overflow(gradients, window):
                # The check looked at what was there before the multiplication.
                add_verdict(state, unscale_and_check(gradients, self._one(gradients[0].device)))
        # Unscaled by an earlier step: a second step on the same backward, or parameters shared with another optimizer.
        others = [p for p in parameters if not self.ledger.is_fresh(p)] if len(fresh) < len(parameters) else []
        consumed = dense_gradients(others)
        if consumed:
            add_verdict(state, unscale_and_check(consumed, self._one(consumed[0].device)))
        state.unscaled = True

    def _factor(self, device: torch.device, window: Window | None) -> Tensor:
        """``1 / S`` and the window's weight in one number, so that weighting costs no pass of its own."""
        factor = self._one(device) if self.scaler is None else self.scaler.inverse_on(device)
        if window is None:
            return factor
        if window.gradient_factor != 1.0:
            factor = factor * window.gradient_factor
        if window.num_items is not None and self.verdicts.alone:
            items = scalar(window.num_items, device)
            factor = factor / torch.where(items > 0, items, 1.0)  # a sum over no item at all has no gradient either
        return factor

    def _may_overflow(self, gradients: list[Tensor], window: Window | None) -> bool:
        """Whether unscaling can carry a finite gradient past its format's range: a factor above 1, as far as is known."""
        known = 1.0 if self.scaler is None else self.scaler.host_scale()
        weighted = window is not None and (window.gradient_factor > 1.0 or window.num_items is not None)
        # A scale that only the device knows may be below 1, which matters where the range is FP16's.
        narrow = known is None and any(gradient.dtype == torch.float16 for gradient in gradients)
        return weighted or narrow or (known is not None and known < 1.0)

    def _one(self, device: torch.device) -> Tensor:
        if device not in self._ones:
            self._ones[device] = torch.ones((), dtype=torch.float32, device=device)
        return self._ones[device]

    def clip(self, optimizer: Optimizer, value: float, algorithm: Literal["norm", "value"]) -> None:
        """Clips the optimizer's gradients so that the *unscaled* ones obey ``value``.

        Called in the step sequence after the finite check, or by a user in mid-window, where gradients stay in their
        scale.
        """
        state = self.ledger.window_of(optimizer)
        parameters = parameters_with_gradients(optimizer)
        if self.verdicts.grad_norm.sharded and not state.unscaled:
            settle_partial(parameters)
        gradients = dense_gradients(parameters)
        if not gradients and not self.verdicts.grad_norm.sharded:
            return
        device = gradients[0].device if gradients else self.verdicts.device_of(optimizer)
        still_scaled = None if state.unscaled or self.scaler is None else self.scaler.scale_on(device)
        if algorithm == "value" and not state.unscaled and gradients:
            # Clamping turns inf into the threshold and would hide it from the check at the window's end.
            add_verdict(state, unscale_and_check(gradients, self._one(device)))
        if self.scaler is None and not self.check_finite and not self.verdicts.grad_norm.sharded:
            # Nothing is checked and nothing scaled: the very calls of stock Lightning, to the bit.
            if algorithm == "norm":
                state.norm, state.norm_at = torch.nn.utils.clip_grad_norm_(parameters, value), self.ledger.backwards
            else:
                torch.nn.utils.clip_grad_value_(parameters, value)
            return
        norm = self._measure(optimizer, state, parameters)
        if algorithm == "value":
            state.clipped = True
            clip_by_value(gradients, value, still_scaled)
            return
        known = None
        if state.unscaled and not state.clipped and needs_verdict(optimizer):
            # Read now rather than before the step: the norm comes along, and below the threshold a pass is saved.
            if self.verdicts.read(state):
                return
            norm, known = state.norm if state.norm is not None else norm, state.known_norm
        state.clipped = True
        clip_by_norm(gradients, norm, value, known)

    def _measure(self, optimizer: Optimizer, state: OpenWindow, parameters: list[Tensor]) -> Tensor:
        """The norm of the unscaled gradients as they are now; kept for the report unless they were clipped before."""
        grad_norm, fresh = self.verdicts.grad_norm, state.norm_at == self.ledger.backwards and not state.clipped
        if grad_norm.sharded and state.unscaled and fresh and state.norm is not None:
            return state.norm  # it came with the verdict
        device = self.verdicts.device_of(optimizer)
        norm = grad_norm.total(parameters, torch.float32, device)
        if not (grad_norm.sharded or (state.unscaled and needs_verdict(optimizer))):
            # Nobody on the host will see whether the squares overflowed FP32, so the sum in FP64 is taken along.
            wide = grad_norm.total(parameters, torch.float64, device)
            norm = torch.where(torch.isinf(norm), wide.to(norm.dtype), norm)
        if self.scaler is not None and not state.unscaled:
            norm = norm * self.scaler.inverse_on(norm.device)
        if not state.clipped or state.norm_at != self.ledger.backwards:
            state.norm, state.norm_at = norm, self.ledger.backwards
        return norm

    # ---------------------------------------------------------------- the window closes

    def run(
        self,
        optimizer: Optimizer,
        close: Callable[[], Window],
        *,
        closure: Callable[[], Any],
        hooks: Callable[[], None],
        step: Callable[[], Any],
        host_verdict: bool,
    ) -> Any:
        """One window of one optimizer, from the closure (forward and backward) to the report.

        Args:
            optimizer: The optimizer that consumes the window.
            close: Says which window it was, once the closure has run.
            closure: Runs forward and backward (automatic optimization), or nothing (manual).
            hooks: Runs ``on_before_optimizer_step`` and clipping; called exactly once, also when there is nothing to
                step.
            step: Applies the optimizer's arithmetic.
            host_verdict: Whether somebody (a per-step scheduler, weight averaging) will ask for the verdict at once
                anyway.

        Returns:
            What ``step`` returns, or the closure's result for a skipped window.

        Raises:
            RuntimeError: If gradients were made past the plugin while a scale is in use. No weight is changed then.
            SkipLimitError: If too many windows in a row were skipped.
        """
        result = closure()
        parameters = parameters_with_gradients(optimizer)
        has_backward = self.ledger.has_backward(optimizer)
        window, error = self._closing(optimizer, close, parameters, has_backward)
        if error is not None and self.verdicts.alone:
            raise error
        nothing: Verdictless | None = None
        if not has_backward and (not parameters or not self.ledger.manual):
            nothing = "skipped_no_backward"
        elif not parameters:
            nothing = "skipped_no_grads"
        if nothing is not None and self.verdicts.alone:
            hooks()
            self._close(optimizer, window, self._without_verdict(), nothing)
            return result
        if self.masters is not None:
            self.masters.enter(optimizer)
        try:
            self.unscale(optimizer, window, parameters)
            state = self.ledger.window_of(optimizer)
            state.parameters = parameters  # also where scaler.unscale_() came first
            if error is not None:  # the others wait for this rank's verdict; they get one that makes them skip
                add_verdict(state, torch.ones((), device=self.verdicts.device_of(optimizer)))
            self.verdicts.agree(optimizer, state, window)
            if error is not None:
                # The window still closes here as on the other ranks, which go on to name the ranks that overflowed.
                self._step_or_skip(optimizer, window, state, lambda: None, None, host_verdict, nothing)
                raise error
            hooks()
            return self._step_or_skip(optimizer, window, state, step, result, host_verdict, nothing)
        finally:
            if self.masters is not None:
                self.masters.leave(optimizer)

    def run_unchecked(
        self,
        optimizer: Optimizer,
        close: Callable[[], Window],
        *,
        closure: Callable[[], Any],
        hooks: Callable[[], None],
        step: Callable[[Callable[[], Any]], Any],
    ) -> Any:
        """The window without any check (``check_finite=False``): what stock Lightning does, plus the report.

        Args:
            optimizer: As in :meth:`run`.
            close: As in :meth:`run`.
            closure: As in :meth:`run`.
            hooks: As in :meth:`run`, but called after each evaluation of the closure.
            step: Called with the closure that the optimizer is to call.
        """
        window = Window(0)

        def backward_and_hooks() -> Any:
            nonlocal window
            if self.masters is not None:
                self.masters.leave(optimizer)
            result = closure()
            window = close()
            if self.masters is not None:
                self.masters.enter(optimizer)
            parameters = parameters_with_gradients(optimizer)
            weighted = window.gradient_factor != 1.0 or window.num_items is not None
            if parameters and weighted:
                multiply(dense_gradients(parameters), self._factor(parameters[0].device, window))
            self.verdicts.agree_on_items(optimizer, window, parameters)
            state = self.ledger.window_of(optimizer)
            state.unscaled, state.overflowed = True, False  # nothing to unscale and nobody to ask
            if self.journal.wants_grad_norm(window):
                self._measure(optimizer, state, parameters)
            hooks()
            return result

        try:
            result = step(backward_and_hooks)
            nothing: Verdictless | None = None if self.ledger.has_backward(optimizer) else "skipped_no_backward"
            state = self.ledger.window_of(optimizer)
            measured = state.norm_at == self.ledger.backwards
            values = Values(grad_norm=state.norm) if measured else Values(late_norm=self._late_norm(optimizer))
            self._close(optimizer, window, values, nothing)  # as in run(): who subscribed sees what the step worked on
        finally:
            if self.masters is not None:
                self.masters.leave(optimizer)
        return result

    def evaluate_again(self, optimizer: Optimizer, closure: Callable[[], Any], close: Callable[[], Window]) -> Any:
        """Runs the closure once more inside a step, for optimizers that evaluate the loss several times (LBFGS)."""
        if self.masters is not None:
            self.masters.leave(optimizer)
        self.ledger.reopen(optimizer)
        result = closure()
        window = close()
        self.unscale(optimizer, window)
        self.verdicts.agree(optimizer, self.ledger.window_of(optimizer), window)
        return result

    def _closing(
        self, optimizer: Optimizer, close: Callable[[], Window], parameters: list[Tensor], has_backward: bool
    ) -> tuple[Window, Exception | None]:
        """Which window closes, or what is wrong with it; on several ranks the error waits for the verdict."""
        try:
            self._refuse_hidden_gradients(optimizer)
            window = close()
        except (RuntimeError, ValueError) as error:
            return Window(self.journal.windows), error
        raw = self._raw_backward(optimizer, parameters, has_backward) if self.ledger.manual else None
        return window, None if raw is None else RuntimeError(raw)

    def _refuse_hidden_gradients(self, optimizer: Optimizer) -> None:
        """Raises if gradients are kept elsewhere than in ``.grad``, where nobody would unscale, check or clip them."""
        if id(optimizer) in self._looked_at:
            return
        self._looked_at.add(id(optimizer))
        hidden = [p for p in parameters_of(optimizer) if getattr(p, "main_grad", None) is not None]
        if hidden:
            raise RuntimeError(
                f"Parameter {self._name_of(hidden)} accumulates its gradient in .main_grad "
                f"(fused weight-gradient accumulation; {len(hidden)} do), which leaves .grad empty: it would be neither "
                "unscaled nor checked nor clipped. Turn gradient_accumulation_fusion / fuse_wgrad_accumulation off."
            )

    def _raw_backward(self, optimizer: Optimizer, parameters: list[Tensor], has_backward: bool) -> str | None:
        """What to say if gradients came from a backward that did not go through the plugin while a scale is in use."""
        unseen = not has_backward and any(self.ledger.is_fresh(p) for p in parameters)
        if self.scaler is None or not (unseen or self.ledger.has_foreign_gradient(optimizer)):
            return None
        name = self._name_of(p for p in parameters if self.ledger.is_fresh(p))
        return (
            f"The gradient of parameter {name} was not made from a scaled loss: a backward past the plugin changed it "
            f"since the last step. With a loss scale in use (S = {self.scaler.get_scale():g}) call "
            "self.manual_backward(loss) instead of loss.backward(). No weight was changed."
        )

    def _name_of(self, parameters: Iterable[Tensor]) -> str:
        """The first of ``parameters`` that the model has a name for, quoted for a message."""
        names = {id(p): repr(name) for name, p in self.journal.named_parameters()}
        return next((names[id(p)] for p in parameters if id(p) in names), "of this optimizer")

    def _step_or_skip(
        self,
        optimizer: Optimizer,
        window: Window,
        state: OpenWindow,
        step: Callable[[], Any],
        result: Any,
        host_verdict: bool,
        nothing: Verdictless | None,
    ) -> Any:
        parameters = state.parameters
        if state.norm_at != self.ledger.backwards and self.journal.wants_grad_norm(window):
            self._measure(optimizer, state, parameters)
        on_host = needs_verdict(optimizer)
        if on_host:
            if not self.verdicts.read(state) and parameters:
                result = step()
        else:
            with given_verdict(optimizer, parameters, state.found_inf):
                result = step()
            if host_verdict:
                on_host = True
                self.verdicts.read(state)
        self.ledger.mark_consumed(parameters)
        values = self._update(optimizer, state, on_host)
        try:
            self._close(optimizer, window, values, nothing)
        finally:
            if state.overflowed:
                for parameter in parameters:
                    parameter.grad = None
        return result

    def _update(self, optimizer: Optimizer, state: OpenWindow, on_host: bool) -> Values:
        """Moves the scale by this window's verdict and collects the report's values."""
        measured = state.norm_at == self.ledger.backwards
        found = state.found_inf
        verdict: bool | Tensor = bool(state.overflowed) if on_host or found is None else found
        values = Values(
            found_inf=verdict,
            forward_overflow=None if state.terms is None else state.terms[1],
            losses=() if state.terms is not None else self.ledger.losses_of(optimizer),
            found_here=state.found_here,
        )
        if verdict is True:
            values.grad_norm = state.known_norm if measured and state.known_norm is not None else float("inf")
        elif measured:
            values.grad_norm = state.norm if state.known_norm is None else state.known_norm
        else:
            values.late_norm = self._late_norm(optimizer)
        if self.scaler is None:
            return values
        scaler, values.scaled = self.scaler, True
        device = self.verdicts.device_of(optimizer) if found is None else found.device
        lowers = verdict
        if verdict is not False and not scaler.config.backoff_on_forward_overflow:
            if values.forward_overflow is None:
                values.forward_overflow = self.ledger.forward_overflow(optimizer, device)
            forward = values.forward_overflow
            lowers = (
                not bool(forward)
                if isinstance(verdict, bool)
                else verdict * (1.0 - torch.as_tensor(forward).clamp(max=1.0))
            )
        held = self.ledger.held_gradients(optimizer)
        before, after = scaler.take_verdict(verdict, lowers, device, may_grow=not held, overdue=bool(held))
        values.scale, values.next_scale = before, after
        if held and before is not after:
            multiply(held, after / before)
        return values

    def _without_verdict(self) -> Values:
        if self.scaler is None:
            return Values()
        known = self.scaler.host_scale()
        scale = self.scaler.scale_on(torch.device("cpu")) if known is None else known
        return Values(scale=scale, next_scale=scale, scaled=True)

    def _late_norm(self, optimizer: Optimizer) -> Callable[[], Tensor | None] | None:
        """Measures the norm when a report's reader asks, as long as the gradients are still those of its window.

        Not where ranks would have to measure together: the reader may be on one rank only. There the verdict brings it.
        """
        if self.verdicts.grad_norm.sharded:
            return None

        def stamp(windows: int) -> tuple[Any, ...]:
            first = next((p.grad for p in parameters_of(optimizer) if p.grad is not None), None)
            version = None if first is None else (id(first), first._version)
            return (self.ledger, self.ledger.backwards, windows, version)

        at = stamp(self.journal.windows + 1)

        def measure() -> Tensor | None:
            now = stamp(self.journal.windows)
            if now != at or now[-1] is None:
                return None
            return self.verdicts.grad_norm.total(parameters_with_gradients(optimizer), torch.float64)

        return measure

    def _close(self, optimizer: Optimizer, window: Window, values: Values, nothing: Verdictless | None) -> None:
        self.ledger.close(optimizer)
        index = next((i for i, other in enumerate(self.ledger.optimizers) if other is optimizer), 0)
        self.journal.take(StepReport(window.index, self.journal.windows, index, values, nothing))
        if self.check_ranks_every and self.journal.windows % self.check_ranks_every == 0:
            self.compare_ranks(f"after window {self.journal.windows - 1}")

    def compare_ranks(self, when: str) -> None:
        """Raises on every rank if ranks differ in what steers the run. Every rank has to call it.

        Raises:
            RuntimeError: Naming the rank, the field and both values.
        """
        if not self.verdicts.alone:
            state = (1.0, 0.0, 0.0) if self.scaler is None else self.scaler.digest()
            self.journal.compare_ranks((self.journal.windows, self.journal.settle().applied, *state), when)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Scaler, counts and history as plain types."""
        return {"scaler": None if self.scaler is None else self.scaler.state_dict(), **self.journal.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``; without a scaler's state the scale stays where it is.

        Raises:
            ValueError: If the saved scaler state is broken.
        """
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.journal.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        """Scaler, counts and settings travel; what belongs to a run or to a process does not."""
        kept = ("scaler", "check_finite", "check_ranks_every", "journal")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._unbind()


def _nothing() -> None:
    pass
