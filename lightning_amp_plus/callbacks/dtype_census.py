"""DtypeCensus: in which dtypes the first training step really ran, beside what the plan promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus.autocast_probe import AS_GIVEN
from lightning_amp_plus.callbacks.monitor import Monitor, batches_that_stepped, flag
from lightning_amp_plus.census.across_ranks import ranks_that_differ
from lightning_amp_plus.census.census import Census
from lightning_amp_plus.census.comparing import (
    Change,
    changes,
    flags_of,
    modules_of,
    ops_of,
    plan_columns,
    upgrades,
)
from lightning_amp_plus.census.record import Record
from lightning_amp_plus.census.recording import Recorder
from lightning_amp_plus.checkpoint.environment import hardware, versions
from lightning_amp_plus.integration.sharding import fsdp2_units, is_fsdp1
from lightning_amp_plus.integration.watched_step import watch_step
from lightning_amp_plus.integration.windows import closes_window
from lightning_amp_plus.naming import ModelNames
from lightning_amp_plus.precision import AmpPrecision
from lightning_amp_plus.routed import fp8_has_begun
from lightning_amp_plus.watching.modules import closed

_MOST_TRIES = 8  # windows skipped in a row, as while a loss scale finds its level
_SAID_CHANGES = 10


class DtypeCensus(Monitor):
    """Records in which dtypes one real training step ran, module by module, and flags what is not as planned.

    It looks at the micro-batch that closes the first window of a fit: forward, backward, the exchange of gradients and the
    optimizer's step. For each module it finds the dtypes of parameters, input and weight as the GEMM read them, output,
    gradients, optimizer state and gradient communication; besides those, every softmax, attention, reduction, loss and
    in-place operation with the module it ran in. Where the optimizer does not step in that window (an overflow), it looks
    at the next one. The look changes no number; it costs Python time for each operation (on a CPU the micro-batch took 1.2
    times as long for a transformer of width 256, 3.7 times for 200 tiny layers). Between looks there is no hook and nothing
    runs.

    The census goes into every checkpoint that follows. A run that resumes from one takes its own and warns where another
    library or device has changed a dtype. Each rank looks; rank zero's census is kept, and a difference is warned about.
    Modules in compiled code cannot be watched one by one: there the columns show what parameters and GEMMs tell.

    Args:
        every_n_steps: ``None``: look once, at the start. A number: look again each time the window at its end comes.
        verbose: Log the whole table, not just a line.

    Attributes:
        last: The last :class:`~lightning_amp_plus.census.Census`, to be printed; ``None`` before the first.

    Raises:
        ValueError: If ``every_n_steps`` is no whole number of at least 1.
        MisconfigurationException: In ``setup``, if the Trainer's precision plugin is not an ``AmpPrecision``.

    Example::

        census = DtypeCensus()
        L.Trainer(plugins=[AmpPrecision("bf16-mixed")], callbacks=[census]).fit(model)
        print(census.last)

    Logged keys: none. One line is logged through Python's logging on rank zero.
    """

    def __init__(self, every_n_steps: int | None = None, verbose: bool = False) -> None:
        self.verbose = flag(self, "verbose", verbose)
        self.last: Census | None = None
        super().__init__(every_n_steps)

    @override
    def forget_run(self) -> None:
        """See :class:`Monitor`."""
        super().forget_run()
        self._wanted = False
        self._tries = 0
        self._said = False
        self._step = 0
        self._device = torch.device("cpu")
        self._module: pl.LightningModule | None = None
        self._modules: dict[str, nn.Module] = {}
        self._compiled: list[str] = []
        self._fp8_off: list[str] = []
        self._sharded = False
        self._recorder: Recorder | None = None
        self._end_look: Callable[[], None] | None = None

    # ---------------------------------------------------------------- when it looks

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Subscribes to the reports, also where logging is off: a census is no log entry."""
        super().on_fit_start(trainer, pl_module)
        plugin = trainer.precision_plugin
        if self.plugin is None and isinstance(plugin, AmpPrecision):
            self.plugin = plugin
            self._unsubscribe = plugin.subscribe(self._on_report)

    @override
    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the modules to watch."""
        names = ModelNames(pl_module)
        self._module, self._device = pl_module, trainer.strategy.root_device
        self._modules = {aliases[0]: names.module[aliases[0]] for aliases in names.aliases.values()}
        self._compiled = _compiled_parts(pl_module, names)
        self._sharded = bool(fsdp2_units(pl_module)) or is_fsdp1(pl_module)
        self._wanted, self._tries = True, 0

    @override
    def is_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Whether the batch closes a window that is to be looked at."""
        if self.every_n_steps is not None and (batches_that_stepped(trainer) + 1) % self.every_n_steps == 0:
            self._wanted = True
        if self._fp8_off and fp8_has_begun(self._modules[self._fp8_off[0]]):
            self._wanted, self._fp8_off = True, []  # FP8 has begun
        return self._wanted and (not pl_module.automatic_optimization or closes_window(trainer))

    @override
    def before_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to record."""
        self._step = int(trainer.global_step)
        self._recorder = Recorder(self._modules, self._compiled)
        self._end_look = watch_step(trainer.strategy, self._recorder, self.optimizers)

    @override
    def after_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends it."""
        if self._end_look is not None:
            self._end_look()
            self._end_look = None

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes the dtypes of gradients, before master weights turn them into FP32."""
        if self._recorder is not None:
            self._recorder.see_gradients()

    @override
    def see_gradients(self, optimizer: Optimizer) -> None:
        """Notes those of a backward that nobody was told of."""
        if self._recorder is not None:
            self._recorder.see_gradients()

    # ---------------------------------------------------------------- what comes out

    @override
    def take(self, numbers: Sequence[Tensor], step: int) -> Mapping[str, float]:
        """Makes the census of what was recorded, unless no optimizer stepped and there will be another window."""
        assert self._recorder is not None
        self._recorder.see_rest(self.optimizers)
        record, self._recorder = self._recorder.record, None
        self._tries += 1
        if record.stepped or self._tries >= _MOST_TRIES:
            self._wanted, self._tries = False, 0
        # Kept already: the fit may end before an optimizer steps.
        self._keep(record, final=not self._wanted)
        return {}

    @override
    def finish(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Says what was found, where no optimizer stepped before the fit ended."""
        if self._wanted and self._tries and self.last is not None:
            self._say(self.last)

    def _keep(self, record: Record, final: bool) -> None:
        assert self.plugin is not None
        census = self._census_of(record)
        before = self.plugin.census
        self.last = census
        if final:
            self._compare_ranks(census)
            if before is not None:
                self._compare_with(before, census)
            self.plugin.keep_census(census)
            self._say(census)

    def _census_of(self, record: Record) -> Census:
        assert self.plugin is not None and self.plugin.plan is not None
        policy, plan = self.plugin.policy, self.plugin.plan
        reduce = policy.reduce if self.plugin.consensus.world_size > 1 else None
        routes = {route.name: route.to_dict() for route in plan.routes if route.name in self._modules}
        planned = {name: plan_columns(route, reduce) for name, route in routes.items()}
        for name, columns in planned.items() if self._sharded else ():
            if policy.master_weights and columns["parameter"] == policy.params:
                columns["parameter"] = "fp32"  # FSDP's own shards are the masters, and what modules hold
            if columns["weight"] == "fp32" and routes[name]["compute"] != "fp32":
                columns["weight"] = AS_GIVEN  # a norm gets it in the dtype that its unit gathers in
        in_fp8 = [route.name for route in plan.routes if route.fp8 is not None and route.name in self._modules]
        self._fp8_off = [name for name in in_fp8 if not fp8_has_begun(self._modules[name])]
        modules = modules_of(record, routes, planned, self._fp8_off)
        return Census(
            step=self._step,
            modules=modules,
            ops=ops_of(record),
            flags=flags_of(record, modules, planned, self._fp8_off),
            notes=self._notes(record),
            versions=versions().model_dump(),
            hardware=hardware(self._device).model_dump(),
            planned=planned,
        )

    def _notes(self, record: Record) -> tuple[str, ...]:
        notes = []
        if self._compiled:
            notes.append(
                f"{len(self._compiled)} modules are compiled: of those only parameters, gradients, optimizer state and the "
                "GEMMs that read a weight as it is stored can be told apart."
            )
        if self._fp8_off:
            notes.append(f"FP8 had not begun: {len(self._fp8_off)} modules in FP8 by the plan computed in BF16.")
        if not record.stepped:
            notes.append("No optimizer stepped in the window that was looked at.")
        return tuple(notes)

    def _say(self, census: Census) -> None:
        if self.verbose:
            rank_zero_info(f"Dtype census.\n{census}")
        elif not self._said or census.flags:
            first = [f"First: {_said(census)}"] if census.flags else []
            said = [f"Dtype census at step {census.step}: {census.summary()}.", *first, *census.notes]
            rank_zero_info(" ".join([*said, "print(census.last) shows all."]))
        self._said = True

    def _compare_with(self, before: Census, now: Census) -> None:
        found = changes(before, now)
        if not found:
            return
        others = upgrades(before, now)
        why = (
            f"Since then: {', '.join(others)}."
            if others
            else "Libraries and hardware are the same: look at the model's code, its inputs and the optimizer."
        )
        rank_zero_warn(
            f"{len(found)} dtypes differ from the census of step {before.step}, with the same routes:\n"
            f"{_listed(found)}\n{why} What follows is trained in other numerics than before; with a Rule for these "
            "modules, or the earlier versions, it is not."
        )

    def _compare_ranks(self, census: Census) -> None:
        assert self.plugin is not None and self._module is not None
        # Of FSDP1's flat shards a rank may hold nothing of a module, so gradients and states differ by nature.
        left_out = ("gradient", "optimizer", "reduction") if is_fsdp1(self._module) else ()
        differing, other = ranks_that_differ(census, self.plugin.consensus, self._device, left_out)
        if not differing:
            return
        found = changes(census, other)
        rank_zero_warn(
            f"Ranks {differing} ran in other dtypes than rank 0 in step {census.step}. Rank {differing[0]} beside rank 0:\n"
            f"{_listed(found) or '  the operations alone differ'}\nRanks have to run the same model on the same libraries "
            "and hardware; branches that depend on data differ too. The census of rank 0 is kept."
        )

    # ---------------------------------------------------------------- copies

    @override
    def settings(self) -> dict[str, Any]:
        """See :class:`Monitor`."""
        return {"every_n_steps": self.every_n_steps, "verbose": self.verbose}

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("every_n_steps", "verbose", "last")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget_run()


def _compiled_parts(model: nn.Module, names: ModelNames) -> list[str]:
    """Modules that run in compiled code; what a hook of theirs did would be compiled too."""
    if getattr(model, "_compiler_ctx", None) is not None:  # torch.compile(LightningModule)
        return list(names.module)
    hidden: set[int] = set()
    for module in model.modules():
        if closed(module):
            hidden |= {id(part) for part in module.modules()}
    return [name for name, module in names.module.items() if id(module) in hidden]


def _listed(found: list[Change]) -> str:
    lines = [f"  {change}" for change in found[:_SAID_CHANGES]]
    more = len(found) - _SAID_CHANGES
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


def _said(census: Census) -> str:
    flag = census.flags[0]
    return f"{flag.kind} in {flag.module or '(model)'}, {flag.op}: {flag.found}. {flag.remedy}"
