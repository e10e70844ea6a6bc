"""The one step sequence: unscale once, agree, show hooks and clipping true gradients, step or skip, update once.

Automatic and manual optimization, one optimizer or several, a single device or many ranks all go through
:class:`StepSequence`; strategies differ only in the ``Consensus`` and ``GradNorm`` objects it is given. It knows no
Trainer: ``precision`` tells it what it needs in a :class:`Window`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.journal import Journal
from lightning_amp_plus.ledger import Ledger, OpenWindow
from lightning_amp_plus.scaling.clipping import clip_by_norm, clip_by_value
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.grad_norm import GradNorm, ShardedGradNorm
from lightning_amp_plus.scaling.gradients import (
    dense_gradients,
    multiply,
    parameters_with_gradients,
    unscale_and_check,
)
from lightning_amp_plus.scaling.master_weights import MasterWeights
from lightning_amp_plus.scaling.partial import settle_partial
from lightning_amp_plus.scaling.scaler import LossScaler
from lightning_amp_plus.step_report import StepReport, Values, Verdictless


@dataclass(frozen=True)
class Window:
    """One accumulation window, as the step sequence needs to know it.

    Attributes:
        index: The Trainer's ``global_step`` at which it closes.
        size: Number of micro-batches in it.
        is_last: Whether it is the last of its epoch (and then possibly shorter than the others).
        gradient_factor: What gradients are multiplied by beside ``1 / S``, to weight a partial window by its own size.
        num_items: Number of items (tokens, samples) that this rank's summed losses of the window were taken over;
            gradients are divided by the number over all ranks. ``None`` where losses are means.
    """

    index: int
    size: int = 1
    is_last: bool = False
    gradient_factor: float = 1.0
    num_items: float | Tensor | None = None


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
        self.journal.consensus = self.consensus = Consensus()
        self.grad_norm = GradNorm()
        self.masters: MasterWeights | None = None
        self._ones: dict[torch.device, Tensor] = {}
        self._before_backward: Callable[[], None] | None = None
        self._looked_at: set[int] = set()
        if self.scaler is not None:
            self.scaler.unscaler = self.unscale

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
        self.journal.consensus = self.consensus = consensus
        self.grad_norm = grad_norm
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
        if self.scaler is None:
            return loss
        scaled = self.scaler.scale(loss)
        assert isinstance(scaled, Tensor)
        return scaled

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
        state.unscaled = True
        if self.masters is not None:
            self.masters.enter(optimizer)
        if parameters is None:
            parameters = parameters_with_gradients(optimizer)
        state.parameters = parameters
        if not parameters:
            return
        if self.grad_norm.sharded:
            settle_partial(parameters)
        fresh = [p for p in parameters if self.ledger.is_fresh(p)] if self.ledger.manual else parameters
        gradients = dense_gradients(fresh)
        if gradients:
            _add_verdict(state, unscale_and_check(gradients, self._factor(gradients[0].device, window)))
        # Unscaled by an earlier step: a second step on the same backward, or parameters shared with another optimizer.
        others = [p for p in parameters if not self.ledger.is_fresh(p)] if len(fresh) < len(parameters) else []
        consumed = dense_gradients(others)
        if consumed:
            _add_verdict(state, unscale_and_check(consumed, self._one(consumed[0].device)))

    def _factor(self, device: torch.device, window: Window | None) -> Tensor:
        """``1 / S`` and the window's weight in one number, so that weighting costs no pass of its own."""
        factor = self._one(device) if self.scaler is None else self.scaler.inverse_on(device)
        if window is None:
            return factor
        if window.gradient_factor != 1.0:
            factor = factor * window.gradient_factor
        if window.num_items is not None and self.consensus.world_size == 1:
            if window.num_items == 0 and not isinstance(window.num_items, Tensor):
                raise ValueError(
                    "training_step returned num_items that add up to 0 over the window: a loss over nothing."
                )
            factor = factor / _scalar(window.num_items, device)
        return factor

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
        if self.grad_norm.sharded and not state.unscaled:
            settle_partial(parameters)
        gradients = dense_gradients(parameters)
        if not gradients and not self.grad_norm.sharded:
            return
        device = gradients[0].device if gradients else self._device(optimizer)
        still_scaled = None if state.unscaled or self.scaler is None else self.scaler.scale_on(device)
        if algorithm == "value" and not state.unscaled and gradients:
            # Clamping turns inf into the threshold and would hide it from the check at the window's end.
            _add_verdict(state, unscale_and_check(gradients, self._one(device)))
        if self.scaler is None and not self.check_finite and not self.grad_norm.sharded:
            # Nothing is checked and nothing scaled: the very calls of stock Lightning, to the bit.
            if algorithm == "norm":
                state.norm, state.norm_at = torch.nn.utils.clip_grad_norm_(parameters, value), self.ledger.backwards
            else:
                torch.nn.utils.clip_grad_value_(parameters, value)
            return
        norm = self._measure(optimizer, state, parameters)
        if algorithm == "value":
            clip_by_value(gradients, value, still_scaled)
            return
        if state.unscaled and _needs_verdict(optimizer):
            # Read now rather than before the step: the norm comes along, and below the threshold a pass is saved.
            if self._read_verdict(optimizer, state):
                return
            norm = state.norm if state.norm is not None else norm
        clip_by_norm(gradients, norm, value, state.known_norm)

    def _measure(self, optimizer: Optimizer, state: OpenWindow, parameters: list[Tensor]) -> Tensor:
        if (
            self.grad_norm.sharded
            and state.unscaled
            and state.norm is not None
            and state.norm_at == self.ledger.backwards
        ):
            return state.norm  # it came with the verdict
        norm = self.grad_norm.total(parameters)
        if not (self.grad_norm.sharded or (state.unscaled and _needs_verdict(optimizer))):
            # Nobody on the host will see whether the squares overflowed FP32, so the sum in FP64 is taken along.
            norm = torch.where(torch.isinf(norm), self.grad_norm.total(parameters, torch.float64).to(norm.dtype), norm)
        if self.scaler is not None and not state.unscaled:
            norm = norm * self.scaler.inverse_on(norm.device)
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
        window = close()
        parameters = parameters_with_gradients(optimizer)
        has_backward = self.ledger.has_backward(optimizer)
        self._refuse_hidden_gradients(optimizer)
        raw = self._raw_backward(optimizer, parameters, has_backward) if self.ledger.manual else None
        if raw is not None and self.consensus.world_size == 1:
            raise RuntimeError(raw)
        nothing: Verdictless | None = None
        if not has_backward and (not parameters or not self.ledger.manual):
            nothing = "skipped_no_backward"
        elif not parameters:
            nothing = "skipped_no_grads"
        if nothing is not None and self.consensus.world_size == 1:
            hooks()
            self._close(optimizer, window, self._without_verdict(), nothing)
            return result
        try:
            self.unscale(optimizer, window, parameters)
            state = self.ledger.window_of(optimizer)
            state.parameters = parameters  # also where scaler.unscale_() came first
            if raw is not None:  # the others wait for this rank's verdict; they get one that makes them skip
                _add_verdict(state, torch.ones((), device=self._device(optimizer)))
            self._agree(optimizer, state, window)
            if raw is not None:
                # The window still closes here as on the other ranks, which go on to name the ranks that overflowed.
                self._step_or_skip(optimizer, window, state, lambda: None, None, host_verdict, nothing)
                raise RuntimeError(raw)
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
            gradients = dense_gradients(parameters_with_gradients(optimizer))
            if gradients and (window.gradient_factor != 1.0 or window.num_items is not None):
                multiply(gradients, self._factor(gradients[0].device, window))
            if window.num_items is not None and self.consensus.world_size > 1:
                total = self.consensus.agree(_scalar(window.num_items, self._device(optimizer)).reshape(1))
                multiply(gradients, self.consensus.world_size / total[0])
            state = self.ledger.window_of(optimizer)
            state.unscaled, state.overflowed = True, False  # nothing to unscale and nobody to ask
            if self.journal.wants_grad_norm(window):
                self._measure(optimizer, state, parameters_with_gradients(optimizer))
            hooks()
            return result

        try:
            result = step(backward_and_hooks)
        finally:
            if self.masters is not None:
                self.masters.leave(optimizer)
        nothing: Verdictless | None = None if self.ledger.has_backward(optimizer) else "skipped_no_backward"
        state = self.ledger.window_of(optimizer)
        measured = state.norm_at == self.ledger.backwards
        values = Values(grad_norm=state.norm) if measured else Values(late_norm=self._late_norm(optimizer))
        self._close(optimizer, window, values, nothing)
        return result

    def evaluate_again(self, optimizer: Optimizer, closure: Callable[[], Any], close: Callable[[], Window]) -> Any:
        """Runs the closure once more inside a step, for optimizers that evaluate the loss several times (LBFGS)."""
        if self.masters is not None:
            self.masters.leave(optimizer)
        self.ledger.reopen(optimizer)
        result = closure()
        window = close()
        self.unscale(optimizer, window)
        self._agree(optimizer, self.ledger.window_of(optimizer), window)
        return result

    def _refuse_hidden_gradients(self, optimizer: Optimizer) -> None:
        """Raises if gradients are kept elsewhere than in ``.grad``, where nobody would unscale, check or clip them."""
        if id(optimizer) in self._looked_at:
            return
        self._looked_at.add(id(optimizer))
        hidden = [p for g in optimizer.param_groups for p in g["params"] if getattr(p, "main_grad", None) is not None]
        if hidden:
            names = {id(p): name for name, p in self.journal.named_parameters()}
            raise RuntimeError(
                f"Parameter {names.get(id(hidden[0]), 'of this optimizer')!r} accumulates its gradient in .main_grad "
                "(fused "
                f"weight-gradient accumulation; {len(hidden)} do), which leaves .grad empty: it would be neither "
                "unscaled nor "
                "checked nor clipped. Turn gradient_accumulation_fusion / fuse_wgrad_accumulation off."
            )

    def _raw_backward(self, optimizer: Optimizer, parameters: list[Tensor], has_backward: bool) -> str | None:
        """What to say if gradients came from a backward that did not go through the plugin while a scale is in use."""
        unseen = not has_backward and any(self.ledger.is_fresh(p) for p in parameters)
        if self.scaler is None or not (unseen or self.ledger.has_foreign_gradient(optimizer)):
            return None
        names = {id(p): name for name, p in self.journal.named_parameters()}
        name = next(
            (repr(names[id(p)]) for p in parameters if id(p) in names and self.ledger.is_fresh(p)), "of this optimizer"
        )
        return (
            f"The gradient of parameter {name} was not made from a scaled loss: a backward past the plugin changed it "
            f"since the last step. With a loss scale in use (S = {self.scaler.get_scale():g}) call "
            "self.manual_backward(loss) instead of loss.backward(). No weight was changed."
        )

    def _agree(self, optimizer: Optimizer, state: OpenWindow, window: Window) -> None:
        """One collective for everything that steers the window: the overflow, where it began, the number of items."""
        if self.consensus.world_size == 1:
            return
        device = self._device(optimizer) if state.found_inf is None else state.found_inf.device
        state.found_here = torch.zeros((), device=device) if state.found_inf is None else state.found_inf
        parameters = state.parameters
        items = window.num_items
        terms = [
            state.found_here,
            self.ledger.forward_overflow(optimizer, device),
            _scalar(0.0 if items is None else items, device),
            _scalar(0.0 if items is None else 1.0, device),
        ]
        if isinstance(self.grad_norm, ShardedGradNorm):
            terms.append(self.grad_norm.square_sum(parameters, device))
        wide = torch.float32 if device.type == "mps" else torch.float64
        state.terms = self.consensus.agree(torch.stack([term.to(wide) for term in terms]))
        # No items at all, or items on some ranks only, is nothing to step on: it counts as an overflow everywhere.
        counting = state.terms[3]
        unusable = (counting > 0) * ((counting < self.consensus.world_size) | (state.terms[2] == 0))
        state.found_inf = (state.terms[0] + unusable).clamp(max=1.0).float()
        weight: float | Tensor = 1.0
        if items is not None:
            # The strategy averages over ranks, so the sum over all ranks is world_size times what is in the buffers.
            weight = self.consensus.world_size / state.terms[2]
            multiply(dense_gradients(parameters), weight)
        if self.grad_norm.sharded:
            state.norm, state.norm_at = state.terms[4].sqrt() * weight, self.ledger.backwards

    def _device(self, optimizer: Optimizer) -> torch.device:
        losses = self.ledger.losses_of(optimizer)
        if losses:
            return losses[-1].device
        return next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))

    def _read_verdict(self, optimizer: Optimizer, state: OpenWindow) -> bool:
        """Whether the window overflowed. The step's one transfer; brings the norm along where one was measured."""
        if state.overflowed is None:
            norm = state.norm if state.norm_at == self.ledger.backwards else None
            if state.found_inf is None:
                state.overflowed = False
            elif norm is None:
                state.overflowed = bool(state.found_inf.item())
            else:
                found = state.found_inf
                overflowed, known = torch.stack([found, norm.to(found.device, found.dtype)]).tolist()
                state.overflowed, state.known_norm = bool(overflowed), known
                if not state.overflowed and known == float("inf"):
                    # Finite gradients whose squares are not (1e25): the sum fits FP64.
                    state.norm = self.grad_norm.total(parameters_with_gradients(optimizer), torch.float64)
                    state.known_norm = None
        return state.overflowed

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
        on_host = _needs_verdict(optimizer)
        if on_host:
            if not self._read_verdict(optimizer, state) and parameters:
                result = step()
        else:
            _start_momentum(optimizer, parameters)
            fused: Any = optimizer
            fused.grad_scale, fused.found_inf = None, state.found_inf
            try:
                result = step()
            finally:
                del fused.grad_scale, fused.found_inf
            if host_verdict:
                on_host = True
                self._read_verdict(optimizer, state)
        if state.overflowed and state.terms is not None:
            self._refuse_uneven_items(float(state.terms[3]))
        self.ledger.mark_consumed(parameters)
        values = self._update(optimizer, state, on_host)
        try:
            self._close(optimizer, window, values, nothing)
        finally:
            if state.overflowed:
                for parameter in parameters:
                    parameter.grad = None
        return result

    def _refuse_uneven_items(self, counting: float) -> None:
        """Raises on every rank alike if only some ranks' ``training_step`` returned ``num_items``."""
        if 0 < counting < self.consensus.world_size:
            raise ValueError(
                f"training_step returned num_items on {counting:g} of {self.consensus.world_size} ranks. Summed and "
                "averaged losses cannot be mixed: return it on every rank or on none."
            )

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
        device = self._device(optimizer) if found is None else found.device
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
        if self.grad_norm.sharded:
            return None

        def stamp(windows: int) -> tuple[Any, ...]:
            first = next(
                (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None
            )
            version = None if first is None else (id(first), first._version)
            return (self.ledger, self.ledger.backwards, windows, version)

        at = stamp(self.journal.windows + 1)

        def measure() -> Tensor | None:
            now = stamp(self.journal.windows)
            if now != at or now[-1] is None:
                return None
            return self.grad_norm.total(parameters_with_gradients(optimizer), torch.float64)

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
        if self.consensus.world_size > 1:
            state = (1.0, 0.0, 0.0) if self.scaler is None else self.scaler.digest()
            self.journal.compare_ranks((self.journal.windows, self.journal.settle().applied, *state), when)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Scaler, counts and history as plain types."""
        return {"scaler": None if self.scaler is None else self.scaler.state_dict(), **self.journal.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``.

        Raises:
            ValueError: If only one of the saved and the present run has a loss scale, or the saved state is broken.
        """
        if (state["scaler"] is None) != (self.scaler is None):
            saved, now = ("without", "has one") if self.scaler is not None else ("with", "has none")
            raise ValueError(f"The checkpoint was saved {saved} a loss scale, but this run {now}.")
        if self.scaler is not None:
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


def _add_verdict(state: OpenWindow, found_inf: Tensor) -> None:
    before = state.found_inf
    state.found_inf = found_inf if before is None else torch.maximum(before, found_inf.to(before.device))


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """``value`` as a 0-dim FP32 tensor on ``device``."""
    return value.to(device, torch.float32) if isinstance(value, Tensor) else torch.full((), value, device=device)


def _needs_verdict(optimizer: Optimizer) -> bool:
    """Whether the host must know the verdict before the step: unless the optimizer's kernel takes ``found_inf``."""
    kind: Any = type(optimizer)
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or _takes_grad_scaler(kind):
        return True
    # Dampening does not apply to SGD's first step, so a momentum buffer started at zero would not do (_start_momentum).
    return isinstance(optimizer, torch.optim.SGD) and any(
        g["momentum"] and g["dampening"] for g in optimizer.param_groups
    )


def _start_momentum(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Starts the momentum of fused SGD at zero, which its first step makes the gradient, as torch does.

    torch itself leaves the buffer it has just made uninitialized if that first step is skipped.
    """
    if not isinstance(optimizer, torch.optim.SGD) or not any(group["momentum"] for group in optimizer.param_groups):
        return
    if len(optimizer.state) < sum(len(group["params"]) for group in optimizer.param_groups):
        for parameter in parameters:
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@functools.cache
def _takes_grad_scaler(kind: Any) -> bool:
    """Whether ``step`` follows an older protocol, which hands it the whole scaler and would unscale a second time."""
    return "grad_scaler" in inspect.signature(kind.step).parameters
