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

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_amp_plus.checkpoint import compatibility, health, random_state
from lightning_amp_plus.checkpoint.compatibility import Finding
from lightning_amp_plus.checkpoint.findings_table import conversions_text, notes_text, refusal_text
from lightning_amp_plus.checkpoint.manifest import Manifest, Move
from lightning_amp_plus.checkpoint.migrations import drop_extra_state
from lightning_amp_plus.checkpoint.saved import SavedPrecision, saved_precision
from lightning_amp_plus.errors import IncompatiblePrecisionError
from lightning_amp_plus.integration.instance_hooks import InstanceHooks

CheckWeights = bool | Literal["auto"]

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
        """Verdict on one field; ``ok`` where there was nothing to compare."""
        return next((finding.verdict for finding in self.findings if finding.field == field), "ok")


class Resume:
    """Judges checkpoints for one plugin, and puts back what belongs to the moment training goes on.

    Args:
        allow: Fields whose refusal the user waives.
        check_weights: Whether restored weights and optimizer state are checked to be finite.
        describe: Describes the run as it is now, with the moves of the checkpoint made.
        warn: Called with a message for the user.
    """

    def __init__(
        self,
        allow: tuple[str, ...],
        check_weights: CheckWeights,
        describe: Callable[[Any, list[Move]], Manifest],
        warn: Callable[[str], None],
    ) -> None:
        self.allow = allow
        self.check_weights = check_weights
        self._describe = describe
        self._warn = warn
        self._hooks = InstanceHooks()
        self._awaiting_loader = False
        self.judgment: Judgment | None = None

    # ---------------------------------------------------------------- before anything is touched

    def guard(self, trainer: Any) -> None:
        """Makes this Trainer's run ask before it loads a checkpoint. Calling it again changes nothing."""
        self.close()
        self._hooks.wrap(trainer.strategy, "load_checkpoint", partial(self._guarded, trainer))

    def close(self) -> None:
        """Takes back what was wrapped; the run is over."""
        self._hooks.undo()
        self.judgment = None

    def _guarded(self, trainer: Any, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            path = trainer.strategy.broadcast(checkpoint_path)
            saved = self._read(trainer, path)
            if saved is None:
                return load(checkpoint_path, *args, **kwargs)  # there is no such file, and Lightning says so
            self.judgment = self._judge(trainer, saved)
            checkpoint = load(checkpoint_path, *args, **kwargs)
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
        found = trainer.strategy.broadcast(found)
        if isinstance(found, Exception):
            self._block_saves(trainer)
            raise found
        return found

    def _judge(self, trainer: Any, saved: SavedPrecision) -> Judgment:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and saved.weights_only:
            self._block_saves(trainer)
            raise IncompatiblePrecisionError(
                f"{saved.path} was saved with save_weights_only=True: it holds neither optimizer state nor the state of "
                "the precision, so a fit cannot continue it. Load its state_dict into the model and start a new fit, or "
                "resume from a full checkpoint."
            )
        error: Exception | None = None
        findings: list[Finding] = []
        try:
            findings = self.compare(trainer, saved.manifest, fitting=fitting)
            self._refuse(findings, saved.path)
        except ValueError as refusal:
            error = refusal
        if not trainer.strategy.reduce_boolean_decision(error is None, all=True):
            # One rank's refusal is everybody's: the others would wait for it in the load.
            self._block_saves(trainer)
            if error is not None:
                raise error
            raise IncompatiblePrecisionError(f"Another rank refused to continue {saved.path}; see its message.")
        self._say(findings, saved, fitting)
        return Judgment(saved.manifest, tuple(findings))

    def compare(self, trainer: Any, manifest: Manifest, *, fitting: bool) -> list[Finding]:
        """The findings on a manifest, with ``allow=`` taken into account, or as evaluation sees them.

        Raises:
            ValueError: If the moves of the checkpoint do not fit the model.
        """
        findings = compatibility.compare(manifest, self._describe(trainer, manifest.moves))
        return compatibility.waive(findings, self.allow) if fitting else compatibility.in_evaluation(findings)

    def _refuse(self, findings: list[Finding], path: Any) -> None:
        if compatibility.refusals(findings):
            raise IncompatiblePrecisionError(refusal_text(str(path), findings, self.allow), findings=tuple(findings))

    def _say(self, findings: list[Finding], saved: SavedPrecision, fitting: bool) -> None:
        for note in saved.notes:
            rank_zero_info(note)
        if not fitting:
            if saved.weights_only and saved.source == "checkpoint":
                rank_zero_info(
                    f"{saved.path} holds no precision state (saved with save_weights_only=True), so its precision "
                    "cannot be compared."
                )
            elif any(f.field == "precision" and f.verdict == "note" for f in findings):
                rank_zero_info(notes_text(saved.path, [f for f in findings if f.field == "precision"]))
            return
        if any(finding.verdict == "convert" for finding in findings):
            self._warn(conversions_text(saved.path, findings))
        if any(finding.verdict == "note" for finding in findings):
            rank_zero_info(notes_text(saved.path, findings))
        needed = {f.field for f in findings if f.remedy.startswith("Allowed by")}
        unused = [name for name in self.allow if name not in needed and name != "weights"]
        if unused:
            rank_zero_info(f"AmpPrecision(allow={unused!r}) was not needed for {saved.path}.")

    def _block_saves(self, trainer: Any) -> None:
        """Nothing is saved until this run is torn down: OnExceptionCheckpoint would overwrite the refused file."""

        def blocked(save: Callable[..., Any]) -> Callable[..., None]:
            def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
                rank_zero_info(f"Not saved: {filepath}. The run was refused before it began, and nothing was trained.")

            return save_checkpoint

        self._hooks.wrap(trainer, "save_checkpoint", blocked)

    # ---------------------------------------------------------------- loaded, not yet restored

    def late_judgment(self, trainer: Any, manifest: Manifest) -> Judgment:
        """The judgment where no guard was there: weights are restored by now, training has not begun.

        Raises:
            IncompatiblePrecisionError: If it is a refusal.
        """
        path = getattr(trainer, "ckpt_path", None) or "the checkpoint"
        findings = self.compare(trainer, manifest, fitting=True)
        self._refuse(findings, path)
        self._say(findings, SavedPrecision(str(path), manifest, "checkpoint", False), fitting=True)
        return Judgment(manifest, tuple(findings))

    def judge_state(self, manifest: Manifest, current: Manifest) -> Judgment:
        """The judgment on a state that comes without Trainer and checkpoint.

        Raises:
            IncompatiblePrecisionError: If it is a refusal.
        """
        findings = compatibility.waive(compatibility.compare(manifest, current), self.allow)
        self._refuse(findings, "this state")
        return Judgment(manifest, tuple(findings))

    def _after_loading(self, trainer: Any, path: Any, checkpoint: Any) -> None:
        if not isinstance(checkpoint, Mapping):
            return
        module = trainer.lightning_module
        dropped = drop_extra_state(checkpoint, set(module.state_dict())) if "state_dict" in checkpoint else []
        if dropped:
            rank_zero_info(
                f"Left out {len(dropped)} entries of Transformer Engine ({dropped[0]!r} ...), which this model has no "
                "modules for."
            )
        if trainer.state.fn != TrainerFn.FITTING or self.check_weights is False:
            return
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if "state_dict" in checkpoint and on_cpu:
            tensors = list(health.tensors_of(checkpoint))
            if self.check_weights is True or sum(t.numel() for _, t in tensors) <= _FEW_ELEMENTS:
                self._check(trainer, path, tensors)
        else:
            self._hooks.wrap(trainer.strategy, "on_train_start", partial(self._checking, trainer, path))

    def _checking(self, trainer: Any, path: Any, on_train_start: Callable[[], Any]) -> Callable[[], Any]:
        """Looks at what was restored where it is: on an accelerator, or in shards."""

        def check_and_start() -> Any:
            self._check(trainer, path, list(_restored(trainer)))
            return on_train_start()

        return check_and_start

    def _check(self, trainer: Any, path: Any, tensors: list[tuple[str, Tensor]]) -> None:
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
            self._block_saves(trainer)
            self._refuse([finding], path)
        self._warn(conversions_text(str(path), [finding]))

    # ---------------------------------------------------------------- when training goes on

    def put_back_randomness(self, trainer: Any, states: Mapping[str, Tensor], mid_epoch: bool) -> None:
        """Restores this rank's random states at the moments that count.

        Now; again once ``train_dataloader()`` has run, whose draws the saved run made long ago, and before the loader draws
        its seed; and, where the run goes on in mid-epoch or makes the loader's iterator once more, when that is done.

        Args:
            trainer: The Trainer.
            states: As of :func:`random_state.capture`.
            mid_epoch: Whether the checkpoint is from the middle of an epoch.
        """
        device = trainer.strategy.root_device
        random_state.restore(states, device)

        def after_dataloader(barrier: Callable[..., Any]) -> Callable[..., Any]:
            def restoring(name: str | None = None, *args: Any, **kwargs: Any) -> Any:
                result = barrier(name, *args, **kwargs)
                if name == "train_dataloader()" and self._awaiting_loader:
                    random_state.restore(states, device)
                return result

            return restoring

        def when_training_starts(on_train_start: Callable[[], Any]) -> Callable[[], Any]:
            def restoring() -> Any:
                result = on_train_start()
                self._awaiting_loader = False
                if mid_epoch or _makes_iterator_again(trainer):
                    random_state.restore(states, device)
                return result

            return restoring

        self._awaiting_loader = True
        self._hooks.wrap(trainer.strategy, "barrier", after_dataloader)
        self._hooks.wrap(trainer.strategy, "on_train_start", when_training_starts)

    def when_training_starts(self, trainer: Any, action: Callable[[], None]) -> None:
        """Runs ``action`` once Lightning has zeroed gradients and set the loops up, right before the first batch."""

        def acting(on_train_start: Callable[[], Any]) -> Callable[[], Any]:
            def act() -> Any:
                result = on_train_start()
                action()
                return result

            return act

        self._hooks.wrap(trainer.strategy, "on_train_start", acting)


def _makes_iterator_again(trainer: Any) -> bool:
    """Whether the epoch about to begin makes a new iterator, which draws a seed, after the one of the loops' setup."""
    loop = trainer.fit_loop
    resuming = getattr(loop, "is_resuming", False)
    return bool(trainer.current_epoch > 0 and not resuming and not loop.epoch_loop.restarting)


def _restored(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    yield from _named(trainer.lightning_module.named_parameters(), "")
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    for index, optimizer in enumerate(trainer.optimizers):
        for parameter, state in optimizer.state.items():
            prefix = f"optimizer {index}, {names.get(id(parameter), 'a parameter')}."
            yield from _named(state.items() if isinstance(state, dict) else (), prefix)


def _named(items: Iterable[tuple[str, Any]], prefix: str) -> Iterator[tuple[str, Tensor]]:
    return ((f"{prefix}{name}", value) for name, value in items if isinstance(value, Tensor))
