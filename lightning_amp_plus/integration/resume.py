"""The resume of a checkpoint: judged before Lightning touches anything, refused with a table, or gone on with.

No plugin hook of Lightning runs before weights are restored, and under FSDP none before the optimizer is. The one uniform
place is around ``strategy.load_checkpoint``, which :meth:`Resume.guard` wraps for the time of a run. Where nobody called
it, ``AmpPrecision.on_load_checkpoint`` asks for the same judgment, which is late but not silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_amp_plus.checkpoint import compatibility, health, random_state
from lightning_amp_plus.checkpoint.compatibility import Finding
from lightning_amp_plus.checkpoint.findings_table import conversions_text, notes_text, refusal_text
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, Manifest, Move
from lightning_amp_plus.checkpoint.migrations import document_of, drop_extra_state
from lightning_amp_plus.checkpoint.parts import fault_of_parts
from lightning_amp_plus.checkpoint.saved import SavedPrecision, saved_precision
from lightning_amp_plus.errors import IncompatiblePrecisionError
from lightning_amp_plus.integration.instance_hooks import InstanceHooks
from lightning_amp_plus.integration.loops import at_epoch_start
from lightning_amp_plus.integration.saves import HeldSaves

CheckWeights = bool | Literal["auto"]

_OF_NUMERICS = ("precision", "routes", "parameters", "buffers")  # what evaluation computes in
_JUDGED_LATER = ("weights", "optimizer")  # when they are there to be looked at
_FEW_ELEMENTS = 2**26  # checked on a CPU without being asked: some tens of milliseconds


@dataclass(frozen=True)
class Judgment:
    """What was decided about a checkpoint.

    Attributes:
        manifest: The checkpoint's.
        findings: After ``allow=`` has been taken into account; no refusals are left.
    """

    manifest: Manifest
    findings: tuple[Finding, ...]

    def verdict(self, field: str) -> str:
        """Verdict on one field; ``not judged`` where there was nothing to compare."""
        return next((finding.verdict for finding in self.findings if finding.field == field), "not judged")


class Resume:
    """Judges checkpoints for one plugin, and puts back what belongs to the moment training goes on.

    Args:
        allow: Fields whose refusal the user waives.
        check_weights: Whether restored weights and optimizer state are checked to be finite.
        describe: Describes the run as it is now, with the moves of the checkpoint made.
        with_routes: Fills in what each module got where a manifest holds the policy only.
        precheck: Raises where what is beside the manifest cannot be taken into the model.
        warn: Called with a message for the user.
    """

    def __init__(
        self,
        allow: tuple[str, ...],
        check_weights: CheckWeights,
        describe: Callable[[Any, list[Move]], Manifest],
        with_routes: Callable[[Any, Manifest], Manifest],
        precheck: Callable[[Any, SavedPrecision], None],
        warn: Callable[[str], None],
    ) -> None:
        self.allow = allow
        self.check_weights = check_weights
        self._describe = describe
        self._with_routes = with_routes
        self._precheck = precheck
        self._warn = warn
        self._hooks = InstanceHooks()
        self.saves = HeldSaves()
        self._awaiting_loader = False
        self.waiting_states: dict[str, Tensor] | None = None
        self.store_gradients = False
        self._guarding: Any = None
        self.judgment: Judgment | None = None

    # ---------------------------------------------------------------- before anything is touched

    def guard(self, trainer: Any) -> None:
        """Makes this Trainer's run ask before it loads a checkpoint. Calling it again changes nothing."""
        if self._guarding is trainer:
            return
        self.close()
        self.waiting_states, self.store_gradients = None, False
        self._guarding = trainer
        self._hooks.wrap(trainer.strategy, "load_checkpoint", partial(self._guarded, trainer))

    def close(self) -> None:
        """Takes back what was wrapped; the run is over."""
        self._hooks.undo()
        self.saves.close()
        self.judgment = self._guarding = None

    def _guarded(self, trainer: Any, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            path = trainer.strategy.broadcast(checkpoint_path)
            if trainer.state.fn == TrainerFn.FITTING:
                self.saves.hold(trainer)
            saved = self._read(trainer, path)
            if saved is not None:  # else there is no such file, and Lightning says so
                self.judgment = self._judge(trainer, saved)
            checkpoint = load(checkpoint_path, *args, **kwargs)
            fitting = trainer.state.fn == TrainerFn.FITTING
            if saved is None and fitting and isinstance(checkpoint, Mapping):  # a format of its own: judged as loaded
                document = document_of(checkpoint)
                manifest = Manifest.from_dict(document, f"the checkpoint {path}")
                self.judgment = self.late_judgment(trainer, document, manifest, restored=False)
            self._after_loading(trainer, path, checkpoint)
            return checkpoint

        return load_checkpoint

    def _read(self, trainer: Any, path: Any) -> SavedPrecision | None:
        """Rank 0 reads, all ranks know: a file that one rank cannot see must not leave the others waiting."""
        found: SavedPrecision | Exception | None = None
        if trainer.is_global_zero:
            try:
                found = saved_precision(path)
            except FileNotFoundError:
                found = None
            except IncompatiblePrecisionError as error:
                found = error
            except Exception as error:  # whatever it is, the other ranks wait for an answer
                found = IncompatiblePrecisionError(f"{path} cannot be read: {type(error).__name__}: {error}")
        found = trainer.strategy.broadcast(found)
        if not isinstance(found, Exception) or _has_format_of_its_own(trainer):
            return None if isinstance(found, Exception) else found
        if trainer.state.fn != TrainerFn.FITTING:  # it takes the weights, which may be fine
            rank_zero_info(f"The precision of {path} cannot be compared. {found}")
            return None
        raise found

    def _judge(self, trainer: Any, saved: SavedPrecision) -> Judgment:
        fitting = trainer.state.fn == TrainerFn.FITTING
        findings: list[Finding] = []

        def judge() -> None:
            if fitting and (why := saved.why_no_fit()) is not None:
                raise IncompatiblePrecisionError(why)
            findings.extend(self.compare(trainer, saved.manifest, fitting=fitting))
            if fitting:
                self._refuse(findings, saved.path)
                self._precheck(trainer, saved)

        together(trainer, judge, saved.path)
        self._say(findings, saved, fitting)
        return Judgment(saved.manifest, tuple(findings))

    def compare(self, trainer: Any, manifest: Manifest, *, fitting: bool) -> list[Finding]:
        """The findings on a manifest, with ``allow=`` taken into account, or as evaluation sees them.

        Raises:
            ValueError: If the moves of the checkpoint do not fit the model that is to be trained on.
        """
        try:
            current = self._describe(trainer, manifest.moves)
        except IncompatiblePrecisionError:
            if fitting:
                raise
            current = self._describe(trainer, [])
        findings = compatibility.compare(self._with_routes(trainer, manifest), current)
        return compatibility.waive(findings, self.allow) if fitting else compatibility.in_evaluation(findings)

    def _refuse(self, findings: list[Finding], path: Any, *, restored: bool = False) -> None:
        if compatibility.refusals(findings):
            text = refusal_text(str(path), findings, self.allow, restored=restored)
            raise IncompatiblePrecisionError(text, findings=tuple(findings))

    def _say(self, findings: list[Finding], saved: SavedPrecision, fitting: bool) -> None:
        for note in saved.notes:
            rank_zero_info(note)
        if not fitting:
            if saved.weights_only and saved.source == "checkpoint":
                rank_zero_info(
                    f"{saved.path} holds no precision state (saved with save_weights_only=True), so its precision "
                    "cannot be compared."
                )
                return
            numerics = [f for f in findings if f.field in _OF_NUMERICS and f.verdict in ("note", "convert")]
            if numerics:
                rank_zero_info(notes_text(saved.path, numerics))
            return
        if any(finding.verdict == "convert" for finding in findings):
            self._warn(conversions_text(saved.path, findings))
        if any(finding.verdict == "note" for finding in findings):
            rank_zero_info(notes_text(saved.path, findings))
        needed = {finding.field for finding in findings if finding.waived}
        unused = [name for name in self.allow if name not in needed and name not in _JUDGED_LATER]
        if unused:
            rank_zero_info(f"AmpPrecision(allow={unused!r}) was not needed for {saved.path}.")

    # ---------------------------------------------------------------- loaded, not yet restored

    def late_judgment(
        self, trainer: Any, document: Mapping[str, Any], manifest: Manifest, *, restored: bool = True
    ) -> Judgment:
        """The judgment on a checkpoint that is loaded already: no guard was there, or only its own IO can read it.

        Args:
            trainer: The Trainer.
            document: The checkpoint's document.
            manifest: What it says.
            restored: Whether the model holds its weights by now.

        Raises:
            IncompatiblePrecisionError: If it is a refusal.
        """
        path = str(getattr(trainer, "ckpt_path", None) or "the checkpoint")
        saved = SavedPrecision(path, manifest, "checkpoint", False, fault=fault_of_parts(document, manifest))
        findings: list[Finding] = []

        def judge() -> None:
            if (why := saved.why_no_fit()) is not None:
                raise IncompatiblePrecisionError(why)
            findings.extend(self.compare(trainer, manifest, fitting=True))
            self._refuse(findings, path, restored=restored)

        together(trainer, judge, path)
        self._say(findings, saved, fitting=True)
        return Judgment(manifest, tuple(findings))

    def check_optimizers(self, trainer: Any, saved: Manifest, current: Manifest) -> None:
        """The rule on optimizers, once the Trainer has made them and before their state is restored.

        Raises:
            IncompatiblePrecisionError: If it is a refusal.
        """
        findings = [f for f in compatibility.compare(saved, current) if f.field == "optimizer"]
        findings = compatibility.waive(findings, self.allow)
        path = str(getattr(trainer, "ckpt_path", None) or "the checkpoint")
        together(trainer, lambda: self._refuse(findings, path, restored=True), path)
        if any(finding.verdict == "convert" for finding in findings):
            self._warn(conversions_text(path, findings))

    def judge_state(self, document: Mapping[str, Any], manifest: Manifest, current: Manifest) -> Judgment:
        """The judgment on a state that comes without Trainer and checkpoint.

        Raises:
            IncompatiblePrecisionError: If it is a refusal.
        """
        findings = compatibility.waive(compatibility.compare(manifest, current), self.allow)
        self._refuse(findings, "this state")
        fault = fault_of_parts({**document, "random_state": None}, manifest.model_copy(update={"random": None}))
        if fault is not None:
            raise IncompatiblePrecisionError(f"This state is damaged, or was edited: {fault}.")
        return Judgment(manifest, tuple(findings))

    def _after_loading(self, trainer: Any, path: Any, checkpoint: Any) -> None:
        if not isinstance(checkpoint, Mapping):
            return
        module = trainer.lightning_module
        foreign = CHECKPOINT_KEY not in checkpoint  # ours holds nothing of Transformer Engine's
        dropped = drop_extra_state(checkpoint, lambda: set(module.state_dict())) if foreign else []
        if dropped:
            rank_zero_info(
                f"Left out {len(dropped)} entries of Transformer Engine ({dropped[0]!r} ...), which this model has no "
                "modules for."
            )
        if trainer.state.fn != TrainerFn.FITTING or self.check_weights is False:
            return
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if "state_dict" in checkpoint and on_cpu:
            names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            tensors = list(health.tensors_of(checkpoint, names))
            if self.check_weights is True or sum(t.numel() for _, t in tensors) <= _FEW_ELEMENTS:
                self._check(trainer, path, tensors, restored=False)
            else:
                rank_zero_info(
                    f"{path} was not checked for NaN and inf: on a CPU a checkpoint of this size is checked with "
                    "AmpPrecision(check_restored_weights=True) only."
                )
        else:
            self._hooks.wrap(trainer.strategy, "on_train_start", partial(self._checking, trainer, path))

    def _checking(self, trainer: Any, path: Any, on_train_start: Callable[[], Any]) -> Callable[[], Any]:
        """Looks at what was restored where it is: on an accelerator, or in shards."""

        def check_and_start() -> Any:
            self._check(trainer, path, list(_restored(trainer)), restored=True)
            return on_train_start()

        return check_and_start

    def _check(self, trainer: Any, path: Any, tensors: list[tuple[str, Tensor]], *, restored: bool) -> None:
        bad = health.nonfinite(tensors)
        if not trainer.strategy.reduce_boolean_decision(bool(bad), all=False):
            return
        where = f"{len(bad)} of {len(tensors)}, the first is {bad[0]!r}" if bad else "on another rank"
        finding = Finding(
            "weights",
            where,
            "finite",
            "refuse",
            "Saved weights or optimizer state hold NaN or inf, and no training recovers from that.",
            "Resume from an earlier checkpoint.",
        )
        [finding] = compatibility.waive([finding], self.allow)
        if finding.verdict == "refuse":
            self._refuse([finding], path, restored=restored)
        self._warn(conversions_text(str(path), [finding]))

    # ---------------------------------------------------------------- when training goes on

    def put_back_randomness(self, trainer: Any, states: Mapping[str, Tensor], mid_epoch: bool) -> None:
        """Restores this rank's random states at the moments that count.

        Once ``train_dataloader()`` has run, whose draws the saved run made long ago, from the script's own seed, and
        before the loader draws its seed; and once more when all is set up and training starts.

        Args:
            trainer: The Trainer.
            states: As of :func:`random_state.capture`.
            mid_epoch: Whether the checkpoint is from the middle of an epoch.
        """
        device = trainer.strategy.root_device

        def after_dataloader(barrier: Callable[..., Any]) -> Callable[..., Any]:
            def restoring(name: str | None = None, *args: Any, **kwargs: Any) -> Any:
                result = barrier(name, *args, **kwargs)
                if name == "train_dataloader()" and self._awaiting_loader:
                    self._awaiting_loader = False
                    random_state.restore(states, device)
                return result

            return restoring

        def start() -> None:
            if self._awaiting_loader:
                self._warn(
                    "The random states of the checkpoint could not be put back before the data was set up (this version of "
                    "Lightning sets it up in another way), so shuffling may differ from the uninterrupted run."
                )
            self._awaiting_loader = False
            self.waiting_states = None
            if mid_epoch:
                random_state.restore(states, device)
            else:
                with at_epoch_start(trainer):
                    random_state.restore(states, device)

        self._awaiting_loader = True
        self.waiting_states = dict(states)
        self._hooks.wrap(trainer.strategy, "barrier", after_dataloader)
        self.when_training_starts(trainer, start)

    def when_training_starts(self, trainer: Any, action: Callable[[], None]) -> None:
        """Runs ``action`` once Lightning has zeroed gradients and set the loops up, right before the first batch."""

        def acting(on_train_start: Callable[[], Any]) -> Callable[[], Any]:
            def act() -> Any:
                result = on_train_start()
                action()
                return result

            return act

        self._hooks.wrap(trainer.strategy, "on_train_start", acting)


def together(trainer: Any, judge: Callable[[], None], path: str) -> None:
    """Runs a judgment on every rank; one rank's refusal is everybody's, since the others would wait for it in the load.

    Raises:
        ValueError: What this rank's judgment raised.
        IncompatiblePrecisionError: Where another rank's did.
    """
    error: Exception | None = None
    try:
        judge()
    except Exception as refusal:
        error = refusal
    if trainer.strategy.reduce_boolean_decision(error is None, all=True):
        return
    raise error or IncompatiblePrecisionError(f"Another rank refused to continue {path}; see its message.")


def _has_format_of_its_own(trainer: Any) -> bool:
    """Whether checkpoints are written by somebody's own CheckpointIO, in a format that only it may know."""
    io = trainer.strategy.checkpoint_io
    while isinstance(io, _WrappingCheckpointIO):
        io = io.checkpoint_io
    return io is not None and not type(io).__module__.startswith("lightning.")


def _restored(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    yield from _named(trainer.lightning_module.named_parameters(), "")
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    for index, optimizer in enumerate(trainer.optimizers):
        for parameter, state in optimizer.state.items():
            prefix = f"optimizer {index}, {names.get(id(parameter), 'a parameter')}."
            yield from _named(state.items() if isinstance(state, dict) else (), prefix)


def _named(items: Iterable[tuple[str, Any]], prefix: str) -> Iterator[tuple[str, Tensor]]:
    return ((f"{prefix}{name}", value) for name, value in items if isinstance(value, Tensor))
