"""Fp8CoverageMonitor: which GEMMs really ran in FP8, why the others did not, and how well the scales fitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_amp_plus.callbacks.layers import LayerHistory
from lightning_amp_plus.callbacks.monitor import Monitor, batches_that_stepped, flag
from lightning_amp_plus.callbacks.readout import Measurement, Over
from lightning_amp_plus.checkpoint.manifest import Move
from lightning_amp_plus.fp8.coverage import (
    REASONS,
    Coverage,
    GemmRow,
    Reason,
    Shares,
    Work,
    percent,
    shares_of,
    sums,
    time_shares,
)
from lightning_amp_plus.fp8.fallback import Fallbacks, Layer
from lightning_amp_plus.fp8.observing import GemmWatcher, Tally
from lightning_amp_plus.metrics.fp8_coverage import fp8_coverage
from lightning_amp_plus.naming import ROOT, ModelNames
from lightning_amp_plus.routed import FP8_SWITCH, base_class
from lightning_amp_plus.routing import RoutePlan
from lightning_amp_plus.watching.modules import Watchable, watchable
from lightning_amp_plus.wide import wide_dtype

_MULTIPLIES_FP8 = ("transformer_engine", "torchao")  # packages whose modules do, whatever the plan says


class Fp8CoverageMonitor(Monitor):
    """Observes one training step in an interval, and shows which of its GEMMs ran in FP8.

    Every GEMM that is dispatched counts (linear, matmul, bmm, convolution, attention, einsum, RNN; forward, both gradients,
    recomputation), with the module it ran in, the format of its operands, what multiplied, and its FLOPs: what the step
    did, not what was configured. Those not in FP8 have a reason of a closed list. The look changes no number of the
    training; between looks there is no hook and nothing runs.

    Args:
        every_n_steps: The interval; by default the Trainer's ``log_every_n_steps``.
        always: Also observe a run whose plan has no layer in FP8 and whose model none of Transformer Engine's or torchao's.
            Its coverage is 0, unless the model multiplies in FP8 by itself.

    Attributes:
        last: The :class:`~lightning_amp_plus.fp8.coverage.Coverage` of the last step that was observed, of this rank, to
            be printed; ``None`` before the first.

    Raises:
        ValueError: If ``every_n_steps`` is no whole number of at least 1.
        MisconfigurationException: In ``setup``, if the Trainer's precision plugin is not an ``AmpPrecision``; at the start
            of a fit, if ranks have different modules.

    Example::

        monitor = Fp8CoverageMonitor(every_n_steps=100)
        L.Trainer(plugins=[AmpPrecision("fp8-mixed")], callbacks=[monitor]).fit(model)
        print(monitor.last)

    ============================================ ==========================================================================
    key                                          value
    ============================================ ==========================================================================
    ``fp8/coverage_flops``                       share of the FLOPs of all GEMMs whose operands were FP8 numbers
    ``fp8/coverage_gemms``                       share of their number
    ``fp8/coverage_flops_without_attention``,    the same of all but attention
    ``fp8/coverage_gemms_without_attention``
    ``fp8/native_flops``, ``fp8/native_gemms``   shares that the device multiplied as FP8: what is emulated counts in
                                                 coverage, and not here
    ``fp8/fallback/REASON``                      share of the FLOPs that did not run in FP8 for that reason: ``rule shape op
                                                 hardware backend warmup eval demoted``; from its first occurrence on
    ``fp8/time_gemm``, ``fp8/time_cast``,        shares of the device's time (on a CPU of the operators' time) in GEMMs, in
    ``fp8/time_rest``                            casts and quantization, and in the rest
    ============================================ ==========================================================================

    Over ranks work and time are added up before they are divided. In a compiled region no module can be seen: what it
    multiplied counts for the region. ``layer_histories()`` holds the coverage of each layer by FLOPs.
    """

    by_layer = True

    def __init__(self, every_n_steps: int | None = None, *, always: bool = True) -> None:
        self.always = flag(self, "always", always)
        self.last: Coverage | None = None
        self._warned = False
        self._history = _no_history()
        super().__init__(every_n_steps)

    @override
    def forget_run(self) -> None:
        """See :class:`Monitor`."""
        super().forget_run()
        self._device = torch.device("cpu")
        self._module: pl.LightningModule | None = None
        self._parts = Watchable()
        self._regions: dict[str, list[str]] = {}
        self._rows: list[str] = []
        self._layers: Mapping[str, Layer] = {}
        self._tally: Tally | None = None
        self._step = 0
        self._seen_reasons: set[str] = set()
        self._planned, self._begun = 0, False  # layers in FP8, and whether that is switched on
        self._said = False
        self._end_look: Callable[[], None] | None = None

    @override
    def settings(self) -> dict[str, Any]:
        """See :class:`Monitor`."""
        return {"every_n_steps": self.every_n_steps, "always": self.always}

    # ---------------------------------------------------------------- binding to a run

    @override
    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the modules to watch."""
        if not (self._history.steps and self._history.steps[-1] < batches_that_stepped(trainer)):
            self._history = _no_history()  # another run
        self._module, self._device = pl_module, trainer.strategy.root_device
        self._parts = watchable(pl_module)
        self._regions = {}
        for name, region in self._parts.hidden.items():
            self._regions.setdefault(region, [region]).append(name)
        self._rows = list(dict.fromkeys(("", *self._parts.module, *self._regions)))

    # ---------------------------------------------------------------- the windows

    @override
    def is_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Whether the batch is one of a window to be observed."""
        return super().is_due(trainer, pl_module) and (self.always or self._may_be_in_fp8())

    def _may_be_in_fp8(self) -> bool:
        assert self.plugin is not None and self.plugin.plan is not None and self._module is not None
        if any(route.fp8 is not None for route in self.plugin.plan.routes):
            return True
        return any(base_class(m).__module__.partition(".")[0] in _MULTIPLIES_FP8 for m in self._module.modules())

    @override
    def before_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to watch a micro-batch."""
        assert self.plugin is not None and self.plugin.plan is not None
        if self._tally is None:
            self._tally, self._step = Tally(), int(trainer.global_step)
            # Anew for each window: set_route() may have moved modules.
            self._layers = _layers(self.plugin.plan, ModelNames(pl_module).module, self.plugin.moves)
            # Asked now: the window that is last before FP8 begins switches it on as it closes.
            planned = [layer.module for layer in self._layers.values() if layer.route is not None]
            self._planned, self._begun = len(planned), any(vars(module).get(FP8_SWITCH, True) for module in planned)
        watcher = GemmWatcher(self._parts, Fallbacks(self._layers, self._regions), self._tally)
        self._end_look = watcher.watch(trainer.strategy, self.optimizers)

    @override
    def after_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends it."""
        if self._end_look is not None:
            self._end_look()
            self._end_look = None

    # ---------------------------------------------------------------- what comes out

    @override
    def measure(self) -> Sequence[Measurement]:
        """The work of the step with and without attention, by reason and by layer, and its time."""
        assert self._tally is not None
        tally, self._tally = self._tally, None
        spent = tally.spent(set(self._parts.leaves) - set(self._regions))
        self.last = coverage = Coverage(self._step, tally.rows(), time_shares(spent.values()), self._notes(tally))
        counted = coverage.counted()
        by_layer: dict[str, list[GemmRow]] = {name: [] for name in self._rows}
        for row in counted:
            by_layer[row.module].append(row)
        work = [
            sums(counted),
            sums(coverage.counted(attention=False)),
            *(sums(row for row in counted if row.reason == reason) for reason in REASONS),
            *map(sums, by_layer.values()),
        ]
        return (self._over_ranks(work), self._over_ranks([tuple(spent.values())]))

    def _over_ranks(self, rows: Sequence[Sequence[float]]) -> Measurement:
        numbers = torch.tensor([[*map(float, row)] for row in rows], dtype=wide_dtype(self._device))
        added: Over = "sum"
        return Measurement(numbers.to(self._device), (added,) * numbers.shape[1])

    def _notes(self, tally: Tally) -> tuple[str, ...]:
        notes = []
        if regions := [name or ROOT for name in self._regions]:
            more = ", ..." if len(regions) > 4 else ""
            notes.append(
                f"Compiled: {', '.join(map(repr, regions[:4]))}{more}. Inside, a GEMM is known by its region only, "
                "gradients are told apart for FP8 only, and a reason goes by the sizes of layers."
            )
        if tally.unknown:
            notes.append(f"Of unknown work, counted without FLOPs: {', '.join(sorted(tally.unknown))}.")
        return tuple(notes)

    @override
    def take(self, numbers: Sequence[Tensor], step: int) -> Mapping[str, float]:
        """Gives what the table of the class says."""
        work, times = numbers[0].tolist(), numbers[1].flatten().tolist()
        assert self.last is not None
        all_, without = shares_of(work[0]), shares_of(work[1])
        values = {
            "fp8/coverage_flops": all_.flops,
            "fp8/coverage_gemms": all_.gemms,
            "fp8/coverage_flops_without_attention": without.flops,
            "fp8/coverage_gemms_without_attention": without.gemms,
            "fp8/native_flops": all_.native_flops,
            "fp8/native_gemms": all_.native_gemms,
        }
        flops = Work._make(work[0]).flops
        for reason, row in zip(REASONS, work[2:], strict=False):
            if row[-1] or reason in self._seen_reasons:
                self._seen_reasons.add(reason)
                values[f"fp8/fallback/{reason}"] = fp8_coverage(Work._make(row).flops, flops)
        values |= {f"fp8/time_{kind}": share for kind, share in time_shares(times).items()}
        layers = {name or ROOT: shares_of(row) for name, row in zip(self._rows, work[2 + len(REASONS) :], strict=True)}
        self._history.add(step, {name: shares.flops for name, shares in layers.items() if shares.flops == shares.flops})
        self._say(all_, step)
        return {key: value for key, value in values.items() if not math.isnan(value)}

    def _say(self, shares: Shares, step: int) -> None:
        assert self.last is not None and self.plugin is not None
        if not self._said:
            self._said = True
            rank_zero_info(f"FP8 coverage at step {step}: {self.last.summary()}. print(monitor.last) shows all.")
        if self._begun and not self._warned and shares.flops == 0:
            self._warned = True
            why = ", ".join(f"{reason} {percent(share)}" for reason, share in self.last.fallbacks().items())
            rank_zero_warn(
                f"FP8 coverage is 0 at step {step}: the plan has {self._planned} layers in FP8, and no GEMM ran in it (by "
                f"FLOPs: {why}). Look at print(monitor.last) for where they ran; layers that forward never calls, or whose "
                "weights it multiplies itself, cannot run in FP8. Said once."
            )

    @override
    def finish(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the last coverage."""
        if self.last is not None and trainer.is_global_zero:
            from rich.console import Console

            Console().print(self.last)

    @override
    def layer_histories(self) -> Sequence[LayerHistory]:
        """Coverage by FLOPs."""
        return (self._history,)

    # ---------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """Settings travel; the run they come from does not."""
        return {name: self.__dict__[name] for name in ("every_n_steps", "always", "last", "_warned")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._history = _no_history()
        self.forget_run()


def _no_history() -> LayerHistory:
    return LayerHistory("FP8 coverage by FLOPs", ceiling=1.0, floor=0.0, group="fp8")


def _layers(plan: RoutePlan, modules: Mapping[str, nn.Module], moves: Sequence[Move]) -> dict[str, Layer]:
    """What the plan says of FP8, module by module."""
    moved = {move.match for move in moves}
    found = {}
    for route in plan.routes:
        module = modules[route.name]
        why: Reason = route.left_out or ("rule" if isinstance(module, nn.Linear) else "op")
        if why == "rule" and route.rule in moved:
            why = "demoted"
        found[route.name] = Layer(module, route.fp8, why)
    return found
