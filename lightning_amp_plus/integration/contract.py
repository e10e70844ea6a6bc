"""The plugin's side of the checkpoint contract: what it writes into a checkpoint, and what it takes back from one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import Module

from lightning_amp_plus.checkpoint import random_state
from lightning_amp_plus.checkpoint.environment import versions
from lightning_amp_plus.checkpoint.gradients import gather_gradients, put_back
from lightning_amp_plus.checkpoint.manifest import (
    SCHEMA_VERSION,
    Accumulation,
    Fp8,
    Fp8Module,
    LossScaleEntry,
    Manifest,
    Move,
    RandomState,
    Settings,
    WindowPosition,
)
from lightning_amp_plus.checkpoint.migrations import document_of, upgrade
from lightning_amp_plus.checkpoint.rules import UNCLEAN, scaler_fault
from lightning_amp_plus.checkpoint.saved import SavedPrecision
from lightning_amp_plus.errors import IncompatiblePrecisionError
from lightning_amp_plus.fp8.backends import BACKENDS
from lightning_amp_plus.fp8.recipes import GEMMS, DelayedScaling
from lightning_amp_plus.integration.describe import sections_of
from lightning_amp_plus.integration.fp8_run import Fp8Run
from lightning_amp_plus.integration.items import ItemCounts
from lightning_amp_plus.integration.loops import batch_in_flight, micro_batches_done
from lightning_amp_plus.integration.resume import Judgment, Resume, together
from lightning_amp_plus.integration.sharding import check_fsdp2_units, copy_into_shards, fsdp2_units, is_fsdp1
from lightning_amp_plus.integration.strategies import ranks_of
from lightning_amp_plus.policy import PrecisionPolicy, Rule
from lightning_amp_plus.routing import outline, plan
from lightning_amp_plus.scaling.master_weights import MasterWeights, may_be_master
from lightning_amp_plus.step import StepSequence

if TYPE_CHECKING:
    from lightning_amp_plus.precision import AmpPrecision

Named = Iterable[tuple[str, Tensor]]


def moved_policy(policy: PrecisionPolicy, moves: Iterable[Move]) -> PrecisionPolicy:
    """The policy with the modules that were moved while training."""
    rules = tuple(
        Rule(m.match, compute=m.compute, reason=m.reason, recipe=m.recipe, gemms=m.gemms, backend=m.backend)  # type: ignore[arg-type]
        for m in moves
    )
    return PrecisionPolicy.from_dict({**policy.to_dict(), "rules": (*policy.rules, *rules)}) if rules else policy


def _fp8_entry(described: Mapping[str, Any], process_group: Any) -> Fp8:
    """The manifest's section on FP8, from what a plan says of each module in FP8."""
    group = ranks_of(process_group)
    delayed = {name: route for name, route in described.items() if route["recipe"]["name"] == DelayedScaling.name}
    clocks = {BACKENDS[route["backend"]].clock for route in delayed.values()}
    return Fp8(
        modules={
            name: Fp8Module(
                recipe=_recipe_text(route["recipe"], route["gemms"]),
                history_length=route["recipe"].get("history"),
                backend=route["backend"],
                amax_group=group if route["recipe"].get("reduce_amax") else None,
            )
            for name, route in described.items()
        },
        amax_clock="micro_batch" if "micro_batch" in clocks else "window",
    )


def _recipe_text(recipe: Mapping[str, Any], gemms: Sequence[str]) -> str:
    """A recipe's name and settings, without the history's length, which is a field of its own."""
    parts = [f"{key}={value}" for key, value in recipe.items() if key not in ("name", "history")]
    settings = ", ".join([*parts, *([] if len(gemms) == len(GEMMS) else [f"gemms={'+'.join(gemms)}"])])
    return f"{recipe['name']} ({settings})" if settings else str(recipe["name"])


class CheckpointContract:
    """Writes and reads the precision state of one plugin.

    Args:
        plugin: Whose settings and plan are recorded.
        sequence: Scaler, counts, history and the open window.
        masters: FP32 copies of 16-bit parameters, if any.
        items: Numbers of items of the open window.
        fp8: Amax histories.
    """

    def __init__(
        self,
        plugin: AmpPrecision,
        sequence: StepSequence,
        masters: MasterWeights | None,
        items: ItemCounts,
        fp8: Fp8Run,
    ) -> None:
        self._plugin = plugin
        self._sequence = sequence
        self._masters = masters
        self._items = items
        self._fp8 = fp8
        self._said: set[str] = set()
        self.resume = Resume(
            plugin.allow,
            plugin.check_restored_weights,
            self._of_trainer,
            self._with_routes,
            self._precheck,
            rank_zero_warn,
        )

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
            "fp8_start": self._fp8.start.state().model_dump() if policy.uses_fp8 else None,
            "census": None if self._plugin.census is None else self._plugin.census.to_dict(),
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
                document |= self._outlined(module, moved_policy(plugin.policy, moves))
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

    def _outlined(self, module: Module, policy: PrecisionPolicy) -> dict[str, Any]:
        """What each module will get, as sections of the manifest."""
        sections = outline(module, policy, self._plugin.device)
        fp8 = sections["fp8"]
        return {**sections, "fp8": None if fp8 is None else _fp8_entry(fp8, self._plugin.process_group)}

    def _of_trainer(self, trainer: Any, moves: Sequence[Move]) -> Manifest:
        return self.manifest(trainer, trainer.lightning_module, moves)

    def _with_routes(self, trainer: Any, manifest: Manifest) -> Manifest:
        return self.filled(manifest, trainer.lightning_module)

    def filled(self, manifest: Manifest, module: Module) -> Manifest:
        """A manifest of schema 1 holds the policy only; what that comes to in this model is what was trained."""
        if manifest.routes is not None or manifest.policy is None:
            return manifest
        try:
            policy = moved_policy(PrecisionPolicy.from_dict(manifest.policy), manifest.moves)
            return manifest.model_copy(update=self._outlined(module, policy))
        except (TypeError, ValueError):
            return manifest  # a policy of other modules; strict loading says so

    def written(self, trainer: Any, moves: Sequence[Move], state: Mapping[str, Any]) -> dict[str, Any]:
        """What goes into the checkpoint under our key. Every rank has to call it: random states are gathered.

        Args:
            trainer: The Trainer that saves.
            moves: Modules moved while training.
            state: As of :meth:`state`, a moment ago.
        """
        device = trainer.strategy.root_device
        tensors: dict[str, Any] = {}
        random = None
        # In the middle of a batch there may have been an exception, on this rank alone: nobody else would come to the
        # exchange. A resume runs that batch again, so it is not exact anyway.
        if trainer.world_size == 1 or not batch_in_flight(trainer):
            # A resumed run that had nothing left to train never came to putting its random states back.
            states = self.resume.waiting_states or random_state.capture(device)
            ranks = tensors["random_state"] = random_state.gather(states, device)
            self._fp8.start.settle(with_open=True)
            random = RandomState(ranks=len(ranks), generators=sorted(ranks[0]))
        if "master_weights" in state:
            tensors["master_weights"] = state["master_weights"]
        if self._fp8.keeps_histories:
            tensors |= self._fp8.state_dict()
        window = self._window(trainer)
        if window.gradients == "stored":
            tensors["gradients"] = self._gradients(trainer)
            if self._fp8.histories:
                tensors["fp8_noted"] = self._fp8.noted()
        manifest = self.now(trainer, moves, window=window, random=random)
        self._say_what_is_lost(manifest)
        return {**manifest.to_dict(), **tensors}

    def now(self, trainer: Any, moves: Sequence[Move], **sections: Any) -> Manifest:
        """The manifest of a save: as :meth:`manifest`, with a new ``save_id`` and the plan's routes."""
        plan = self._plugin.plan
        routes: dict[str, Any] = {} if plan is None else plan.describe()
        if routes.get("fp8") is not None:
            routes["fp8"] = _fp8_entry(routes["fp8"], self._plugin.process_group)
        return self.manifest(trainer, trainer.lightning_module, moves, save_id=uuid4().hex, **routes, **sections)

    def _window(self, trainer: Any) -> WindowPosition:
        automatic = trainer.lightning_module.automatic_optimization
        ledger = self._sequence.ledger
        noted = ledger.micro_batches()
        done = micro_batches_done(trainer) if automatic else noted or int(ledger.interrupted)
        if not done:
            return WindowPosition(micro_batches=0, size=None, gradients="none")
        # In the middle of a batch nobody knows what gradients hold, and a resume runs that batch again. Sparse ones, of
        # an embedding, have no fixed size.
        stored = (
            self.resume.store_gradients and noted > 0 and not batch_in_flight(trainer) and not self._sparse(trainer)
        )
        size = int(trainer.accumulate_grad_batches) if automatic else None
        return WindowPosition(micro_batches=done, size=size, gradients="stored" if stored else "lost")

    @staticmethod
    def _sparse(trainer: Any) -> bool:
        gradients = (parameter.grad for parameter in trainer.lightning_module.parameters())
        return any(gradient is not None and gradient.layout != torch.strided for gradient in gradients)

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
        if data is not None and data.moment != "clean" and data.moment not in self._said:
            self._said.add(data.moment)
            where, what = UNCLEAN[data.moment]
            rank_zero_info(f"This checkpoint is saved {where}, from where Lightning cannot go on: {what}. Said once.")
        elif data is not None and data.mid_epoch and not data.stateful and "data" not in self._said:
            self._said.add("data")
            rank_zero_info(
                "This checkpoint is saved in the middle of an epoch, and the loader has no state_dict: a resume starts "
                "the epoch's data again. Use a stateful loader, such as torchdata's StatefulDataLoader, or save at the "
                "end of an epoch. Said once."
            )

    # ---------------------------------------------------------------- what is taken back

    def _precheck(self, trainer: Any, saved: SavedPrecision) -> None:
        """Raises where what lies beside the manifest cannot be taken into the model, before any of it is."""
        module = trainer.lightning_module
        sharded = bool(fsdp2_units(module)) or is_fsdp1(module)
        lazy = nn.parameter.UninitializedParameter  # has no shape yet
        shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if not isinstance(p, lazy)}
        for name, elements in saved.gradients.items():
            expected = math.prod(shapes[name]) if name in shapes else None
            if expected is None or (elements != expected and not sharded):
                raise IncompatiblePrecisionError(
                    f"{saved.path} holds the gradient of {name!r} in an open window with {elements} elements; the model "
                    f"has {'no such parameter' if expected is None else f'{expected} of them'}. Resume with the model it "
                    "was saved from."
                )
        if self._masters is not None and saved.masters:
            masters = {n: shapes[n] for n, p in module.named_parameters() if n in shapes and may_be_master(p)}
            names = masters.keys() | saved.masters.keys()
            differing = sorted(n for n in names if masters.get(n) != saved.masters.get(n))
            if differing:
                first = differing[0]
                raise IncompatiblePrecisionError(
                    f"The master weights in {saved.path} do not fit the model: {first!r} has shape "
                    f"{saved.masters.get(first, 'none')} in the checkpoint and {masters.get(first, 'none')} in the model "
                    f"({len(differing)} differ). Resume with the model it was saved from."
                )
        units = fsdp2_units(module)
        if units and saved.manifest.moves:
            moved = plan(module, moved_policy(self._plugin.policy, saved.manifest.moves), hardware=self._plugin.device)
            try:
                check_fsdp2_units(module, moved)
            except ValueError as error:
                rules = ", ".join(f"Rule({m.match!r}, compute={m.compute!r})" for m in saved.manifest.moves)
                raise IncompatiblePrecisionError(
                    f"{saved.path} was saved by a run that had moved modules to another format, which FSDP2's units, "
                    f"built before the checkpoint is read, do not allow for. Put {rules} into the policy. ({error})"
                ) from error

    def judged(self, trainer: Any, checkpoint: Mapping[str, Any]) -> tuple[Judgment, Mapping[str, Any]]:
        """The judgment on a loaded checkpoint, and its document of the present version.

        Raises:
            IncompatiblePrecisionError: If it is refused, and no guard was there to refuse it earlier.
        """
        document = document_of(checkpoint)
        judgment = self.resume.judgment
        if judgment is None:
            judgment = self.resume.late_judgment(trainer, document, Manifest.from_dict(document, "the checkpoint"))
        self.resume.check_optimizers(trainer, judgment.manifest, self._of_trainer(trainer, judgment.manifest.moves))
        return judgment, document

    def judged_alone(self, state: Mapping[str, Any], moves: Sequence[Move]) -> tuple[Judgment, Mapping[str, Any]]:
        """The same for a state handed over without a Trainer.

        Raises:
            IncompatiblePrecisionError: If it does not fit this plugin.
        """
        document = upgrade(state)
        manifest = Manifest.from_dict(document, "the state")
        return self.resume.judge_state(document, manifest, self.manifest(None, None, moves)), document

    def take(self, judgment: Judgment, document: Mapping[str, Any], named: Named) -> None:
        """Continues scaler, counts, history and master weights. What can be refused has been."""
        if self._masters is not None and document.get("master_weights"):
            parameters = list(named)
            # Under FSDP the FP32 shards are the masters; without it they were captured from FP32 weights just loaded.
            if not copy_into_shards(parameters, document["master_weights"]):
                self._masters.load_state_dict(document["master_weights"], parameters)
        saved = judgment.manifest.scaler
        usable = saved is not None and scaler_fault(saved) is None
        if self._plugin.scaler is not None and not usable:
            self._plugin.scaler.reset()
        history = judgment.manifest.history.model_dump()
        state = {"scaler": saved if usable else None, "windows": judgment.manifest.windows, "history": history}
        self._sequence.load_state_dict(state)

    def take_moment(self, trainer: Any, judgment: Judgment, document: Mapping[str, Any], named: Named) -> None:
        """Puts back random states and the open window's gradients, each when Lightning will no longer disturb it."""
        rank, world = trainer.global_rank, trainer.world_size
        states = document.get("random_state")
        if states is not None and len(states) == world:
            data = judgment.manifest.data
            self.resume.put_back_randomness(trainer, states[rank], data is not None and data.mid_epoch)
        gradients = document.get("gradients")
        if gradients is None or judgment.verdict("window") != "ok":
            return
        parameters = list(named)

        def reopen() -> None:
            together(trainer, lambda: put_back(gradients["ranks"][rank], parameters), "the open window")
            self._sequence.ledger.resume_window(int(gradients["backwards"]))
            self._items.take_list(gradients["items"][rank])
            self._fp8.start.reopen()
            self._fp8.note_again(document.get("fp8_noted") or {})

        self.resume.when_training_starts(trainer, reopen)
