"""The plugin's side of the checkpoint contract: what it writes into a checkpoint, and what it takes back from one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module

from lightning_amp_plus.checkpoint import random_state
from lightning_amp_plus.checkpoint.compatibility import scaler_fault
from lightning_amp_plus.checkpoint.environment import versions
from lightning_amp_plus.checkpoint.gradients import gather_gradients, put_back
from lightning_amp_plus.checkpoint.manifest import (
    SCHEMA_VERSION,
    Accumulation,
    LossScaleEntry,
    Manifest,
    Move,
    RandomState,
    Settings,
    WindowPosition,
)
from lightning_amp_plus.checkpoint.migrations import document_of, upgrade
from lightning_amp_plus.errors import IncompatiblePrecisionError
from lightning_amp_plus.integration.describe import micro_batches_done, sections_of
from lightning_amp_plus.integration.items import ItemCounts
from lightning_amp_plus.integration.resume import Judgment, Resume
from lightning_amp_plus.policy import PrecisionPolicy, Rule
from lightning_amp_plus.routing import outline
from lightning_amp_plus.scaling.master_weights import MasterWeights
from lightning_amp_plus.step import StepSequence

if TYPE_CHECKING:
    from lightning_amp_plus.precision import AmpPrecision

Named = Iterable[tuple[str, Tensor]]


def moved_policy(policy: PrecisionPolicy, moves: Iterable[Move]) -> PrecisionPolicy:
    """The policy with the modules that were moved while training."""
    rules = tuple(Rule(move.match, compute=move.compute, reason=move.reason) for move in moves)
    return PrecisionPolicy.from_dict({**policy.to_dict(), "rules": (*policy.rules, *rules)}) if rules else policy


class CheckpointContract:
    """Writes and reads the precision state of one plugin.

    Args:
        plugin: Whose settings and plan are recorded.
        sequence: Scaler, counts, history and the open window.
        masters: FP32 copies of 16-bit parameters, if any.
        items: Numbers of items of the open window.
    """

    def __init__(
        self, plugin: AmpPrecision, sequence: StepSequence, masters: MasterWeights | None, items: ItemCounts
    ) -> None:
        self._plugin = plugin
        self._sequence = sequence
        self._masters = masters
        self._items = items
        self._said: set[str] = set()
        self.resume = Resume(plugin.allow, plugin.check_restored_weights, self._of_trainer, rank_zero_warn)
        self.store_gradients = False

    # ---------------------------------------------------------------- what is written

    def core(self, moves: Sequence[Move]) -> dict[str, Any]:
        """The part of the manifest that the plugin knows without a Trainer, as plain types."""
        policy = self._plugin.policy
        return {
            "schema_version": SCHEMA_VERSION,
            "precision": policy.precision_name,
            "policy": policy.to_dict(),
            "fingerprint": policy.fingerprint(),
            "moves": [move.model_dump() for move in moves],
            "loss_scale": None if self._plugin.scaler is None else self._plugin.scaler.describe(),
            "master_weights_kept": policy.master_weights,
            **self._sequence.state_dict(),
        }

    def state(self, moves: Sequence[Move], named: Named) -> dict[str, Any]:
        """What Lightning's ``state_dict`` verb is to give: the core, and master weights."""
        state = self.core(moves)
        if self._masters is not None:
            state["master_weights"] = self._masters.state_dict(named)
        return state

    def manifest(self, trainer: Any, module: Module | None, moves: Sequence[Move], **sections: Any) -> Manifest:
        """The manifest of the run as it is now; no collective and no look at any number of a tensor.

        Args:
            trainer: The Trainer, or ``None`` where only policy and model are known.
            module: The model, or ``None``.
            moves: Modules moved while training.
            **sections: Sections that the caller knows better.
        """
        plugin = self._plugin
        document: dict[str, Any] = {
            **self.core(moves),
            "versions": versions(),
            "settings": Settings(
                check_finite=plugin.check_finite,
                max_consecutive_skips=self._sequence.journal.max_consecutive_skips,
                advance_scheduler_on_skip=plugin.advance_scheduler_on_skip,
            ),
        }
        if trainer is not None:
            document |= sections_of(trainer)
            document["accumulation"] = Accumulation(
                batches=int(trainer.accumulate_grad_batches),
                partial_window=plugin.partial_window,
                sync_each_microbatch=plugin.sync_each_microbatch,
            )
        document |= sections
        if module is not None and "routes" not in document:
            try:
                document["routes"] = outline(module, moved_policy(plugin.policy, moves))
            except ValueError as error:
                outline(module, plugin.policy)  # an error of the policy itself is said as such
                raise IncompatiblePrecisionError(
                    f"The checkpoint was saved by a run that had moved modules to another format, and this model does "
                    f"not have them: {error}"
                ) from error
        entry = document["loss_scale"]
        document["loss_scale"] = None if entry is None else LossScaleEntry(**entry)
        document["moves"] = list(moves)
        return Manifest.model_validate(document)

    def _of_trainer(self, trainer: Any, moves: Sequence[Move]) -> Manifest:
        return self.manifest(trainer, trainer.lightning_module, moves)

    def written(self, trainer: Any, moves: Sequence[Move], state: Mapping[str, Any]) -> dict[str, Any]:
        """What goes into the checkpoint under our key. Every rank has to call it: random states are gathered.

        Args:
            trainer: The Trainer that saves.
            moves: Modules moved while training.
            state: As of :meth:`state`, a moment ago.
        """
        device = trainer.strategy.root_device
        ranks = random_state.gather(random_state.capture(device), device)
        tensors: dict[str, Any] = {"random_state": ranks}
        if "master_weights" in state:
            tensors["master_weights"] = state["master_weights"]
        window = self._window(trainer)
        if window.gradients == "stored":
            tensors["gradients"] = self._gradients(trainer)
        manifest = self.now(
            trainer, moves, window=window, random=RandomState(ranks=len(ranks), generators=sorted(ranks[0]))
        )
        self._say_what_is_lost(manifest)
        return {**manifest.to_dict(), **tensors}

    def now(self, trainer: Any, moves: Sequence[Move], **sections: Any) -> Manifest:
        """The manifest of a save: as :meth:`manifest`, with a new ``save_id`` and the plan's routes."""
        plan = self._plugin.plan
        routes = {} if plan is None else plan.describe()
        return self.manifest(trainer, trainer.lightning_module, moves, save_id=uuid4().hex, **routes, **sections)

    def _window(self, trainer: Any) -> WindowPosition:
        automatic = trainer.lightning_module.automatic_optimization
        noted = self._sequence.ledger.micro_batches()
        done = micro_batches_done(trainer) if automatic else noted
        if not done:
            return WindowPosition(micro_batches=0, size=None, gradients="none")
        # An exception discards the window: what its gradients hold then is not known.
        stored = self.store_gradients and noted > 0
        size = int(trainer.accumulate_grad_batches) if automatic else None
        return WindowPosition(micro_batches=done, size=size, gradients="stored" if stored else "lost")

    def _gradients(self, trainer: Any) -> dict[str, Any]:
        ledger = self._sequence.ledger
        fresh = ledger.is_fresh if ledger.manual else (lambda parameter: True)
        device = trainer.strategy.root_device
        ranks = gather_gradients(trainer.lightning_module.named_parameters(), fresh, device)
        items: list[Any] = [self._items.to_list()]
        if len(ranks) > 1:
            items = [None] * len(ranks)
            dist.all_gather_object(items, self._items.to_list())
        return {"ranks": ranks, "items": items, "backwards": ledger.micro_batches()}

    def _say_what_is_lost(self, manifest: Manifest) -> None:
        window, data = manifest.window, manifest.data
        if window is not None and window.gradients == "lost" and "window" not in self._said:
            self._said.add("window")
            of = "" if window.size is None else f" of {window.size}"
            rank_zero_warn(
                f"This checkpoint is saved in mid-window: the gradients of {window.micro_batches}{of} micro-batches are "
                "not in it, and a resume goes on without them. Save between two windows, or add "
                "PrecisionCheckpoint(save_window=True). Said once."
            )
        if data is not None and data.mid_epoch and not data.stateful and "data" not in self._said:
            self._said.add("data")
            rank_zero_info(
                "This checkpoint is saved in the middle of an epoch, and the loader has no state_dict: a resume starts "
                "the epoch's data again. Use a stateful loader, such as torchdata's StatefulDataLoader, or save at the "
                "end of an epoch. Said once."
            )

    # ---------------------------------------------------------------- what is taken back

    def judged(self, trainer: Any, checkpoint: Mapping[str, Any]) -> tuple[Judgment, Mapping[str, Any]]:
        """The judgment on a loaded checkpoint, and its document of the present version.

        Raises:
            IncompatiblePrecisionError: If it is refused, and no guard was there to refuse it earlier.
        """
        document = document_of(checkpoint)
        judgment = self.resume.judgment
        if judgment is None:
            judgment = self.resume.late_judgment(trainer, Manifest.from_dict(document, "the checkpoint"))
        return judgment, document

    def judged_alone(self, state: Mapping[str, Any], moves: Sequence[Move]) -> tuple[Judgment, Mapping[str, Any]]:
        """The same for a state handed over without a Trainer.

        Raises:
            IncompatiblePrecisionError: If it does not fit this plugin.
        """
        document = upgrade(state)
        manifest = Manifest.from_dict(document, "the state")
        return self.resume.judge_state(manifest, self.manifest(None, None, moves)), document

    def take(self, judgment: Judgment, document: Mapping[str, Any], named: Named) -> None:
        """Continues scaler, counts, history and master weights. What can be refused has been."""
        if self._masters is not None and "master_weights" in document:
            self._masters.load_state_dict(document["master_weights"], named)
        saved = judgment.manifest.scaler
        usable = saved is not None and scaler_fault(saved) is None
        history = judgment.manifest.history.model_dump()
        state = {"scaler": saved if usable else None, "windows": judgment.manifest.windows, "history": history}
        self._sequence.load_state_dict(state)

    def take_moment(self, trainer: Any, judgment: Judgment, document: Mapping[str, Any], named: Named) -> None:
        """Puts back random states and the open window's gradients, each when Lightning will no longer disturb it.

        Raises:
            IncompatiblePrecisionError: If what is saved of them is damaged.
        """
        rank, world = trainer.global_rank, trainer.world_size
        states = document.get("random_state")
        if states is not None:
            fault = random_state.fault(states)
            if fault is not None:
                raise IncompatiblePrecisionError(f"The random states in the checkpoint are damaged: {fault}.")
            if len(states) == world:
                data = judgment.manifest.data
                self.resume.put_back_randomness(trainer, states[rank], data is not None and data.mid_epoch)
        gradients = document.get("gradients")
        if gradients is None or judgment.verdict("window") != "ok":
            return
        parameters = list(named)

        def reopen() -> None:
            put_back(gradients["ranks"][rank], parameters)
            self._sequence.ledger.resume_window(int(gradients["backwards"]))
            self._items.take_list(gradients["items"][rank])

        self.resume.when_training_starts(trainer, reopen)
