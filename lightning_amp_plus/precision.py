"""AmpPrecision, the Lightning precision plugin: the front door.

It speaks Lightning's verbs and hands the work on: routes to ``routing``, the window to ``step``, what Lightning must be
told to ``integration``. One class serves every strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from lightning_utilities import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus.casts import DTYPES
from lightning_amp_plus.census import Census
from lightning_amp_plus.checkpoint.compatibility import check_allow
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, Manifest, Move
from lightning_amp_plus.history import History
from lightning_amp_plus.integration.averaging import gate_averaging
from lightning_amp_plus.integration.checks import refuse_half_parameters, refuse_lbfgs, silent_faults
from lightning_amp_plus.integration.contract import CheckpointContract, moved_policy
from lightning_amp_plus.integration.fp8_gather import check_gathered, gather_in_fp8
from lightning_amp_plus.integration.fp8_run import Fp8Run
from lightning_amp_plus.integration.instance_hooks import InstanceHooks
from lightning_amp_plus.integration.items import ItemCounts
from lightning_amp_plus.integration.loops import batch_in_flight
from lightning_amp_plus.integration.resume import CheckWeights, Judgment
from lightning_amp_plus.integration.schedulers import gate_schedulers
from lightning_amp_plus.integration.sharding import (
    check_fsdp2_units,
    defer_gradient_sync,
    fsdp1_config,
    fsdp2_config,
    fsdp2_units,
    grad_norm_of,
    is_fsdp1,
    unsharded_gradient_bytes,
)
from lightning_amp_plus.integration.strategies import as_group, consensus_of, device_type, refuse_strategy
from lightning_amp_plus.integration.throughput import correct_throughput_monitors
from lightning_amp_plus.integration.windows import closes_window, closing_window, starts_window
from lightning_amp_plus.matching import compute_of, fp8_moves
from lightning_amp_plus.naming import globs_of
from lightning_amp_plus.optimizers import real_optimizer
from lightning_amp_plus.policy import ComputeFormat, PrecisionPolicy, Rule
from lightning_amp_plus.routing import RoutePlan, plan
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.grad_norm import ShardedGradNorm
from lightning_amp_plus.scaling.loss_scale import LossScale
from lightning_amp_plus.scaling.master_weights import MasterWeights
from lightning_amp_plus.scaling.scaler import LossScaler, make_scaler
from lightning_amp_plus.step import StepSequence
from lightning_amp_plus.step_report import StepReport
from lightning_amp_plus.window import Window


class AmpPrecision(FSDPPrecision):
    """Mixed precision with a loss scale whose verdict and state are right, and a report on every step.

    It is an ``FSDPPrecision`` because ``FSDPStrategy`` takes nothing else; none of that class's methods is used.

    Args:
        policy: What computes in which format: a :class:`PrecisionPolicy` or one of the strings ``32-true``,
            ``16-mixed``, ``bf16-mixed``, ``16-true``, ``bf16-true``, ``fp8-mixed``.
        loss_scale: ``"auto"``: dynamic where the policy computes in FP16, none otherwise. A :class:`LossScale`
            configures the dynamic one, a number is a static scale, ``None`` is none (with a warning in FP16), and a
            ``torch.amp.GradScaler`` (or torch's ShardedGradScaler) lends its present scale and factors.
        check_finite: Skip windows with non-finite gradients also where there is no loss scale. One device-to-host
            transfer a step; with a fused optimizer none, unless a per-step scheduler or weight averaging asks.
            ``False`` gives exactly what stock Lightning does.
        max_consecutive_skips: Number of skipped windows in a row at which the run stops with a :class:`SkipLimitError`.
            By default 100 where a loss scale can still be lowered, else 10.
        advance_scheduler_on_skip: Let per-step schedulers advance on skipped windows too, as stock Lightning does.
        partial_window: How the last, shorter accumulation window of an epoch is weighted: ``"lightning"`` divides by
            ``accumulate_grad_batches`` all the same, ``"mean"`` by the window's own size.
        process_group: Ranks that take the verdict together: a process group or a DeviceMesh; by default all.
        sync_each_microbatch: ``False`` makes FSDP2 reduce gradients once a window instead of once a micro-batch. That
            saves communication and holds the whole unsharded gradient on every rank until the window closes.
        check_ranks_every: Number of windows after which ranks compare scale and counters, to stop a run that has split.
        allow: Fields of the checkpoint contract (``docs/checkpoints.md``) in which a resumed run may differ although a
            difference is refused. A refusal prints what to name here.
        check_restored_weights: Whether restored weights and optimizer state are checked for NaN and inf before a
            resumed run begins. ``"auto"``: on an accelerator and under sharding, and on a CPU up to 64 million elements.

    Raises:
        ValueError: If the policy string is unknown or arguments contradict each other.

    Example::

        trainer = L.Trainer(plugins=[AmpPrecision("16-mixed")], callbacks=precision_callbacks())
    """

    def __init__(
        self,
        policy: PrecisionPolicy | str,
        *,
        loss_scale: LossScale | float | torch.amp.GradScaler | Literal["auto"] | None = "auto",
        check_finite: bool = True,
        max_consecutive_skips: int | None = None,
        advance_scheduler_on_skip: bool = False,
        partial_window: Literal["lightning", "mean"] = "lightning",
        process_group: Any = None,
        sync_each_microbatch: bool = True,
        check_ranks_every: int | None = None,
        allow: Sequence[str] = (),
        check_restored_weights: CheckWeights = "auto",
    ) -> None:
        # FSDPPrecision's constructor is not run: it would make a scaler of its own and knows five strings only.
        if not isinstance(policy, PrecisionPolicy):
            policy = PrecisionPolicy.from_string(policy)
        if partial_window not in ("lightning", "mean"):
            raise ValueError(f"partial_window={partial_window!r}: expected 'lightning' or 'mean'.")
        scaler = make_scaler(loss_scale, fp16=policy.base_compute == "fp16", warn=_warn)
        if scaler is not None and not check_finite:
            raise ValueError(
                "check_finite=False together with a loss scale: the scale is steered by that check. Leave check_finite "
                "at True, or pass loss_scale=None."
            )
        if max_consecutive_skips is None:
            max_consecutive_skips = 100 if scaler is not None and scaler.dynamic else 10
        for name, flag in (
            ("check_finite", check_finite),
            ("advance_scheduler_on_skip", advance_scheduler_on_skip),
            ("sync_each_microbatch", sync_each_microbatch),
        ):
            if not isinstance(flag, bool):
                raise ValueError(f"{name}={flag!r}: expected True or False.")
        if check_restored_weights not in (True, False, "auto"):
            raise ValueError(f"check_restored_weights={check_restored_weights!r}: expected True, False or 'auto'.")
        _whole("max_consecutive_skips", max_consecutive_skips)
        if check_ranks_every is not None:
            _whole("check_ranks_every", check_ranks_every)
        self.allow = check_allow(allow)
        self.check_restored_weights = check_restored_weights
        self.policy = policy
        self.precision = policy.lightning_precision
        self.check_finite = check_finite
        self.advance_scheduler_on_skip = advance_scheduler_on_skip
        self.partial_window = partial_window
        self.process_group = process_group
        self.sync_each_microbatch = sync_each_microbatch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.plan: RoutePlan | None = None
        self._census: Census | None = None
        self._sequence = StepSequence(scaler, check_finite, max_consecutive_skips, _warn, check_ranks_every)
        self._masters = MasterWeights() if policy.master_weights else None
        self._moves: tuple[Move, ...] = ()
        self._forget_run()

    def _forget_run(self) -> None:
        self._module: Module | None = None
        self._hooks = InstanceHooks()
        self._items = ItemCounts()
        self._verdict_awaited = False
        self._notes: tuple[str, ...] = ()
        self._fp8 = Fp8Run(self.policy, self._sequence.journal)
        self._contract = CheckpointContract(self, self._sequence, self._masters, self._items, self._fp8)

    # ---------------------------------------------------------------- what people and callbacks read

    @property
    def scaler(self) -> LossScaler | None:  # type: ignore[override]
        """The loss scale's state, a ``torch.amp.GradScaler``; ``None`` where no scale is in use."""
        return self._sequence.scaler

    @property
    def history(self) -> History:
        """Scales and counts of the run so far. Reading it moves what only the device knew: one transfer at most."""
        return self._sequence.journal.settle()

    @property
    def applied_steps(self) -> int:
        """Windows whose step was applied; Lightning's ``global_step`` counts skipped ones too."""
        return self.history.applied

    @property
    def last_report(self) -> StepReport | None:
        """The report on the window that closed last, for people; callbacks use :meth:`subscribe`."""
        return self._sequence.journal.last_report

    @property
    def census(self) -> Census | None:
        """The last dtype census of the model: what :class:`DtypeCensus` found, or until then what the checkpoint holds."""
        return self._census

    def keep_census(self, census: Census) -> None:
        """Has a census stored in the checkpoints that follow."""
        self._census = census

    def subscribe(
        self, fn: Callable[[StepReport], None], grad_norm: Callable[[Window], bool] | None = None
    ) -> Callable[[], None]:
        """Delivers every :class:`StepReport` to ``fn`` once, unresolved. Returns the function that ends it.

        Args:
            fn: Called when a window closes.
            grad_norm: Says for which windows ``fn`` wants the gradient norm; that costs a pass over the gradients.
        """
        return self._sequence.journal.subscribe(fn, grad_norm)

    @property
    def consensus(self) -> Consensus:
        """The ranks that take the verdict together; callbacks add up over the same ones."""
        return self._sequence.journal.consensus

    def holders(self, parameter: Tensor) -> int:
        """Number of ranks that hold the same elements of a parameter as this one, itself included."""
        grad_norm = self._sequence.verdicts.grad_norm
        return grad_norm.holders(parameter) if isinstance(grad_norm, ShardedGradNorm) else self.consensus.world_size

    @property
    def moves(self) -> tuple[Move, ...]:
        """What :meth:`set_route` has moved in this run, or in the one that it continues, oldest first."""
        return self._moves

    def set_route(self, module_name: str, compute: ComputeFormat, reason: str = "") -> None:
        """Moves a module, and what is below it, to another compute format while training. The optimizer is not touched.

        Args:
            module_name: Qualified name, as in the plan.
            compute: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
            reason: Shown in the plan.

        Raises:
            RuntimeError: If no model is connected yet.
            ValueError: If there is no such module or format. Nothing is changed then.
        """
        if self._module is None or self.plan is None:
            raise RuntimeError(
                "set_route() moves modules of a running Trainer; before it, write a Rule into the policy."
            )
        names = [route.name for route in self.plan.routes]
        if module_name not in names:
            close = get_close_matches(module_name, names, n=3) or names[1:4]
            raise ValueError(f"set_route({module_name!r}): there is no such module. Close to it: {close}.")
        if not module_name:
            raise ValueError("set_route(''): the model as a whole is moved by another policy; name one of its modules.")
        why = reason or "moved while training"
        Rule(module_name, compute=compute)  # for its errors
        trainer = getattr(self._module, "_trainer", None)
        step = None if trainer is None else int(trainer.global_step)
        into: dict[str, Any] = {"compute": compute, "reason": why, "step": step}
        settings: dict[str, dict[str, Any]] = {glob: {} for glob in globs_of(module_name, names)}
        if compute == "fp8":  # as the policy would have it there
            settings = fp8_moves(self._module, self.policy, module_name, self.device)
        moves = tuple(Move(match=glob, **into, **more) for glob, more in settings.items())
        self._apply_plan(self._module, self._moves + moves)
        self._moves += moves

    # ---------------------------------------------------------------- model and inputs

    @property
    def _compute_dtype(self) -> torch.dtype:
        return DTYPES[self.policy.base_compute]

    @property
    def _storage_dtype(self) -> torch.dtype | None:
        """Default dtype of new tensors where the model is stored in 16 bits, else ``None``."""
        return DTYPES[self.policy.params] if self.policy.is_true else None

    @override
    def convert_module(self, module: Module) -> Module:
        """Applies the policy's plan to ``module`` in place: routes and storage."""
        trainer = getattr(module, "_trainer", None)
        if isinstance(module, pl.LightningModule) and trainer is not None:
            refuse_strategy(trainer.strategy)
            self.device = device_type(trainer.strategy)
        refuse_half_parameters(module, self.policy)
        if self._module is not None and self._module is not module:
            self._moves, self._census = (), None  # they were of another model
        self._apply_plan(module, self._moves)
        self._module = module
        return module

    def _apply_plan(self, module: Module, moves: tuple[Move, ...]) -> None:
        policy = moved_policy(self.policy, moves)
        new = self._with_notes(plan(module, policy, hardware=self.device))
        check_gathered(module, new)
        sharded = fsdp2_units(module) or is_fsdp1(module)
        if self._masters is not None and not sharded:
            self._masters.capture(module.parameters())
        for warning in check_fsdp2_units(module, new):
            _warn(warning)
        # FSDP keeps FP32 shards and computes with 16-bit copies by itself: those shards are the master weights.
        new.apply(module, storage=not (sharded and self.policy.master_weights))
        self.plan = new
        self._fp8.take_plan(module)

    def _with_notes(self, plan: RoutePlan) -> RoutePlan:
        return replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *self._notes))))

    def fsdp2_policy(self, module: Module, name: str | None = None) -> Any:
        """The ``mp_policy`` for ``fully_shard(module, mp_policy=...)``, as this plugin's policy wants it.

        Args:
            module: What is to become a unit.
            name: Its qualified name in the LightningModule. Without it only ``type:`` rules can meet it.

        Returns:
            A ``torch.distributed.fsdp.MixedPrecisionPolicy``: 16-bit copies for computing, the policy's ``reduce``
            format for communication, inputs left to autocast.
        """
        return fsdp2_config(compute_of(module, name, self.policy), self.policy)

    def gather_in_fp8(self, model: Module) -> list[str]:
        """Lets FSDP2 gather weights in FP8, half the bytes of BF16. For ``configure_model``, before ``fully_shard``.

        Args:
            model: The LightningModule, not sharded yet.

        Returns:
            Names of the layers whose weights will be gathered so: those that the policy has compute in FP8 by torchao, with
            current scaling and all three GEMMs. Evaluation multiplies their gathered weights in BF16.

        Raises:
            ValueError: If there is no such layer, or one is sharded already. Nothing is changed then.
        """
        trainer = getattr(model, "_trainer", None)
        device = self.device if trainer is None else device_type(trainer.strategy)
        return gather_in_fp8(model, plan(model, self.policy, hardware=device))

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        """New tensors in the storage dtype of a 16-bit model; FP32 where masters are kept, to round nothing early."""
        if self._storage_dtype is None or self._masters is not None:
            return nullcontext()
        return _default_dtype(self._storage_dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[None]:
        """See :meth:`tensor_init_context`."""
        return self.tensor_init_context()

    @override
    def convert_input(self, data: Any) -> Any:
        """Floating tensors in ``data`` in the storage dtype of a 16-bit model; unchanged under autocast."""
        dtype = self._storage_dtype
        if dtype is None:
            return data
        return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)

    @override
    def convert_output(self, data: Any) -> Any:
        """``data`` unchanged: a module's output is what its computation gives."""
        return data

    def autocast_context_manager(self) -> AbstractContextManager[Any]:
        """The autocast region of the policy's base format, as in Lightning's MixedPrecision."""
        return torch.autocast(self.device, dtype=self._compute_dtype, cache_enabled=False)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """What surrounds every step: autocast, the default dtype of a 16-bit model, or nothing in FP32."""
        if self._storage_dtype is not None:
            return _default_dtype(self._storage_dtype)
        if self.policy.base_compute == "fp32":
            return nullcontext()
        return self.autocast_context_manager()

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Surrounds ``training_step``; an exception in it discards the window that is open."""
        try:
            with self.forward_context(), self._fp8.step_region(as_group(self.process_group)):
                yield
        except BaseException:
            self._discard_window(interrupted=True)
            raise

    @property
    @override
    def mixed_precision_config(self) -> Any:
        """FSDP1's dtypes, all concrete and each from its own field of the policy.

        With FP32 parameters autocast makes the 16-bit copies, and gradients of inner micro-batches add up in FP32; with
        ``params="bf16", master_weights=True`` FSDP makes them, gathers in 16 bits, and its FP32 shards are the masters.
        """
        return fsdp1_config(self.policy)

    # ---------------------------------------------------------------- binding to a run

    @override
    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        """Binds the plugin to a run. Every fit begins with an empty window."""
        module = self._module
        trainer = getattr(module, "_trainer", None)
        if not isinstance(module, pl.LightningModule) or trainer is None:
            return model, optimizers, lr_schedulers
        self._hooks.undo()
        correct_throughput_monitors(trainer, self._compute_dtype)
        if trainer.state.fn != TrainerFn.FITTING:
            return model, optimizers, lr_schedulers
        for optimizer in optimizers:
            if self.scaler is not None:
                refuse_lbfgs(optimizer, self.precision)
        # All that can be refused comes before anything is changed.
        consensus = consensus_of(trainer.strategy, self.process_group)
        grad_norm = grad_norm_of(model, consensus, self.process_group is not None)
        before_backward = None if self.sync_each_microbatch else self._deferral(model, trainer)
        masters = None if fsdp2_units(model) or is_fsdp1(module) else self._masters
        if masters is not None:
            masters.attach(module.parameters())
        for optimizer in optimizers:
            if masters is not None:
                masters.attach_optimizer(optimizer)
                continue
            for warning in silent_faults(optimizer):
                _warn(warning)
        self._items.clear()
        self._fp8.begin_fit()
        # Also without a history: set_route() may bring one.
        self._hooks.until_undone(self.subscribe(self._fp8.on_report, self._fp8.start.wants_grad_norm))
        self._sequence.begin_fit(
            optimizers,
            module.named_parameters,
            manual=not module.automatic_optimization,
            consensus=consensus,
            grad_norm=grad_norm,
            masters=masters,
            settle_every=max(1, trainer.log_every_n_steps or 50),
            device=trainer.strategy.root_device,
            before_backward=before_backward,
        )
        averaging = gate_averaging(trainer.callbacks, self._was_skipped, self._hooks)
        scheduling = False
        if module.automatic_optimization:
            self._hooks.wrap(trainer.strategy, "training_step", partial(self._watch_items, trainer))
            if not self.advance_scheduler_on_skip:
                lr_schedulers, scheduling = gate_schedulers(lr_schedulers, self._was_skipped)
        self._verdict_awaited = averaging or scheduling
        return model, optimizers, lr_schedulers

    def _deferral(self, model: Module, trainer: pl.Trainer) -> Callable[[], None]:
        deferral = defer_gradient_sync(model, lambda: closes_window(trainer))
        module = self._module
        if deferral is None or not isinstance(module, pl.LightningModule) or not module.automatic_optimization:
            found = "manual optimization" if deferral is not None else "no module with fully_shard"
            raise ValueError(
                "AmpPrecision(sync_each_microbatch=False) defers FSDP2's gradient reduction in automatic optimization; "
                f"this run has {found}. Leave it out: DDP and FSDP1 reduce once a window anyway, and in manual "
                "optimization you call set_requires_gradient_sync() yourself."
            )
        held = unsharded_gradient_bytes(model) / 2**20
        note = f"sync_each_microbatch=False holds {held:,.1f} MiB of unsharded gradients a rank until a window closes."
        self._notes = (note,)
        if self.plan is not None:
            self.plan = self._with_notes(self.plan)
        return deferral

    def _was_skipped(self) -> bool:
        report = self._sequence.journal.last_report
        if report is None:  # resumed: what became of the window before the save is in the history
            return self.history.consecutive_skips > 0
        return report.outcome in ("skipped_overflow", "skipped_no_backward")

    def _watch_items(self, trainer: pl.Trainer, training_step: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if starts_window(trainer):
                self._discard_window()
                self._fp8.weights.begin(several=not closes_window(trainer))
            output = training_step(*args, **kwargs)
            self._items.note(output)
            return output

        return watched

    def _discard_window(self, interrupted: bool = False) -> None:
        self._sequence.ledger.discard(interrupted)
        self._fp8.start.discard_window()
        if interrupted:
            self._fp8.discard_window()
        self._items.clear()

    @override
    def teardown(self) -> None:
        """Counts what is still on the device and takes back what was wrapped."""
        self._sequence.end_fit()
        self._fp8.start.say_why_not()
        self._fp8.weights.end()
        self._hooks.undo()
        self._contract.resume.close()

    # ---------------------------------------------------------------- the window

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scales the loss and runs ``on_before_backward``."""
        if self._fp8.start.observing:
            self._fp8.start.note_loss(*self._items.whole_loss(tensor, module))
        return Precision.pre_backward(self, self._sequence.scale_loss(tensor), module)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Runs backward, outside autocast also in manual optimization; an exception discards the open window."""
        try:
            with self._sequence.backward(), self._outside_autocast(model):
                Precision.backward(self, tensor, model, optimizer, *args, **kwargs)
        except BaseException:
            self._discard_window(interrupted=True)
            raise

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Runs ``on_after_backward``; keeps the detached loss for the overflow's origin."""
        loss = Precision.post_backward(self, tensor, module)
        self._sequence.record_loss(loss)
        return loss

    def _outside_autocast(self, model: Any) -> AbstractContextManager[Any]:
        # Automatic optimization is outside already: Lightning's step contexts surround training_step only.
        if getattr(model, "automatic_optimization", True):
            return nullcontext()
        return torch.autocast(self.device, enabled=False)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """One window: unscale once, verdict, hooks, clipping, step or skip, update."""
        if self.scaler is not None:
            refuse_lbfgs(optimizer, self.precision)
        closure = self._fp8.ends_window(closure)

        def hooks() -> None:
            with self._outside_autocast(model):
                self._after_closure(model, optimizer)

        if self.scaler is None and not self.check_finite:
            return self._sequence.run_unchecked(
                optimizer,
                self._window,
                closure=closure,
                hooks=hooks,
                step=lambda inner: optimizer.step(closure=inner, **kwargs),
            )

        again = False

        def evaluate() -> Any:
            """The closure for an optimizer that wants one: first what was computed already, then, for LBFGS, anew."""
            nonlocal again
            if not again:
                again = True
                return result
            with self.forward_context() if not model.automatic_optimization else nullcontext():
                value = self._sequence.evaluate_again(optimizer, closure, self._window)
            hooks()
            return value

        result: Any = None

        def compute() -> Any:
            nonlocal result
            result = closure()
            return result

        def step() -> Any:
            with self._outside_autocast(model):
                # With a loss scale the closure cannot be evaluated twice, so it is not handed over (as in stock
                # Lightning).
                return (
                    optimizer.step(**kwargs) if self.scaler is not None else optimizer.step(closure=evaluate, **kwargs)
                )

        try:
            return self._sequence.run(
                optimizer,
                self._window,
                closure=compute,
                hooks=hooks,
                step=step,
                host_verdict=self._verdict_awaited,
            )
        finally:
            self._items.clear()

    def _window(self) -> Window:
        return closing_window(self._module, self._items, mean_of_partial=self.partial_window == "mean")

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float | None = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType | str = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips what the unscaled gradients are, in whatever scale they are held; fused optimizers included.

        Args:
            optimizer: Whose gradients.
            clip_val: Threshold; 0 and ``None`` mean no clipping.
            gradient_clip_algorithm: ``norm`` or ``value``.
        """
        if not clip_val or clip_val <= 0:
            return
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm)
        self._sequence.clip(
            real_optimizer(optimizer), float(clip_val), "value" if algorithm == GradClipAlgorithmType.VALUE else "norm"
        )

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """:meth:`clip_gradients` by norm."""
        self.clip_gradients(optimizer, clip_val, GradClipAlgorithmType.NORM)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """:meth:`clip_gradients` by value."""
        self.clip_gradients(optimizer, clip_val, GradClipAlgorithmType.VALUE)

    # ---------------------------------------------------------------- checkpoint

    @override
    def state_dict(self) -> dict[str, Any]:
        """Everything of ours that does not depend on the Trainer, as plain types and tensors."""
        return self._contract.state(self._moves, self._named_parameters())

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`.

        Raises:
            IncompatiblePrecisionError: If the state is broken, from another version, or of a run in another precision,
                and ``allow`` does not name the difference. Nothing is changed then.
        """
        judgment, document = self._contract.judged_alone(state_dict, self._moves)
        self._take(judgment, document)

    def _take(self, judgment: Judgment, document: Mapping[str, Any]) -> None:
        moves = tuple(judgment.manifest.moves)
        self._contract.take(judgment, document, self._named_parameters())
        if self._module is not None and moves != self._moves:
            self._apply_plan(self._module, moves)
        self._moves = moves
        saved = judgment.manifest.census
        self._census = None if saved is None else Census.from_dict(saved.model_dump())
        self._fp8.start.load(judgment.manifest)
        self._fp8.load_state_dict(document)

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._module.named_parameters() if self._module is not None else ()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Puts our state under the fixed key, which outlives renaming, together with the manifest."""
        trainer = getattr(self._module, "_trainer", None)
        if trainer is None or not batch_in_flight(trainer):  # else an exception may have brought this rank here alone
            self._sequence.compare_ranks("at the save of a checkpoint, which is refused")
        state = checkpoint.pop(type(self).__qualname__, None) or self.state_dict()
        checkpoint[CHECKPOINT_KEY] = state if trainer is None else self._contract.written(trainer, self._moves, state)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores our state when a fit resumes. Lightning calls this in evaluation too, which must not change it."""
        trainer = getattr(self._module, "_trainer", None)
        if trainer is None:
            if CHECKPOINT_KEY in checkpoint:
                self.load_state_dict(checkpoint[CHECKPOINT_KEY])
            return
        if trainer.state.fn != TrainerFn.FITTING:
            return
        resume = self._contract.resume
        resume.saves.hold(trainer)
        judgment, document = self._contract.judged(trainer, checkpoint)
        self._take(judgment, document)
        self._contract.take_moment(trainer, judgment, document, self._named_parameters())
        resume.when_training_starts(trainer, resume.saves.release)
        if CHECKPOINT_KEY not in checkpoint and self.scaler is not None and judgment.manifest.scaler is None:
            _warn(
                "The checkpoint holds no state of lightning_amp_plus (it was written without AmpPrecision), so the "
                f"loss scale starts at {self.scaler.get_scale():g}."
            )

    def guard_resume(self, trainer: pl.Trainer) -> None:
        """Has every checkpoint that ``trainer`` loads judged before Lightning restores anything from it.

        Called by the callback that joins each Trainer by itself; any number of calls make one guard, for one run.
        """
        self._contract.resume.guard(trainer)

    def manifest(
        self, trainer: pl.Trainer | None = None, model: Module | None = None, moves: Sequence[Move] = ()
    ) -> Manifest:
        """What this plugin would write into a checkpoint now, without tensors; see ``docs/checkpoints.md``.

        Args:
            trainer: The Trainer of the run, if there is one.
            model: The model, where there is no Trainer.
            moves: Modules that a checkpoint's run had moved while training, which a resume moves again.

        Raises:
            IncompatiblePrecisionError: If the model does not have one of them.
        """
        if trainer is not None:
            return self._contract.now(trainer, self._moves)
        return self._contract.manifest(None, model, (*self._moves, *moves))

    def filled(self, manifest: Manifest, model: Module) -> Manifest:
        """A saved manifest with what each module got, where an older version recorded the policy only."""
        return self._contract.filled(manifest, model)

    def keep_gradients(self) -> None:
        """Lets checkpoints saved in mid-window hold the gradients accumulated so far, in the run that is being set up."""
        self._contract.resume.store_gradients = True

    # ---------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """Settings, scale and counts travel to another process; the run they were used in does not."""
        if self.process_group is not None:
            raise TypeError(
                "AmpPrecision(process_group=...) can be neither pickled nor copied: a process group belongs to its "
                "process. Make the plugin anew on each rank."
            )
        dropped = ("_module", "_hooks", "_items", "_verdict_awaited", "_notes", "_contract", "_fp8")
        kept = {name: value for name, value in self.__dict__.items() if name not in dropped}
        return {**kept, "_fp8_start": self._fp8.start.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fp8_start = state["_fp8_start"]
        self.__dict__.update({name: value for name, value in state.items() if name != "_fp8_start"})
        self._forget_run()
        self._fp8.start.copy_from(fp8_start)

    def __repr__(self) -> str:
        scale = "none" if self.scaler is None else f"{'dynamic' if self.scaler.dynamic else 'static'}"
        rules = f", rules={len(self.policy.rules)}" if self.policy.rules else ""
        return f"{type(self).__name__}({self.precision!r}{rules}, loss scale: {scale})"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least 1.")


def _warn(message: str) -> None:
    rank_zero_warn(message)
