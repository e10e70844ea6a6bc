"""Fp8CoverageMonitor: which GEMMs really ran in FP8, why the others did not, and how well the scales fitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus.callbacks.fp8_fit import LayerFits, histories, logged, pictured
from lightning_amp_plus.callbacks.layers import LayerHistory
from lightning_amp_plus.callbacks.monitor import Monitor, batches_that_stepped, flag
from lightning_amp_plus.callbacks.readout import Measurement, Over
from lightning_amp_plus.checkpoint.manifest import Move
from lightning_amp_plus.fp8.coverage.fallback import Fallbacks, Layer
from lightning_amp_plus.fp8.coverage.gemm_watcher import GemmWatcher
from lightning_amp_plus.fp8.coverage.kernels import KernelTimes
from lightning_amp_plus.fp8.coverage.report import (
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
from lightning_amp_plus.fp8.coverage.tally import Tally
from lightning_amp_plus.fp8.coverage.transformer_engine import borne_out
from lightning_amp_plus.fp8.fit.measure import label_of
from lightning_amp_plus.fp8.fit.report import FitReport
from lightning_amp_plus.fp8.recipes import Recipe
from lightning_amp_plus.fp8.selection import is_of_package
from lightning_amp_plus.integration.watched_step import watch_step
from lightning_amp_plus.metrics.fp8_coverage import fp8_coverage
from lightning_amp_plus.naming import ROOT, ModelNames
from lightning_amp_plus.plan_table import plural
from lightning_amp_plus.routed import fp8_has_begun
from lightning_amp_plus.routing import RoutePlan
from lightning_amp_plus.step_report import StepReport
from lightning_amp_plus.watching.modules import Watchable, watchable
from lightning_amp_plus.wide import wide_dtype

_SHOWN = 30  # rows of the fit that are printed at the end; a screen
_MULTIPLIES_FP8 = ("transformer_engine", "torchao")  # packages whose modules do, whatever the plan says


class Fp8CoverageMonitor(Monitor):
    """Observes one training step in an interval, and shows which of its GEMMs ran in FP8.

    Every GEMM that is dispatched counts (linear, matmul, bmm, convolution, attention, einsum, RNN; forward, both gradients,
    recomputation), with the module it ran in, the format of its operands, what multiplied, and its FLOPs: what the step
    did, not what was configured. Those not in FP8 have a reason of a closed list. The look changes no number of the
    training; between looks there is no hook and nothing runs.

    Args:
        every_n_steps: The interval; by default the Trainer's ``log_every_n_steps``.
        fit: Also measure how well scales fit, layer by layer: a sample of each operand is quantized once more.
        what_if: Recipes to try on the same operands, as a policy takes them: which of them would have fitted better.
            Nothing is trained in them. Delayed scaling goes by histories of its own, of the observed windows only.
        always: Also observe a run whose plan has no layer in FP8 and whose model none of Transformer Engine's or torchao's.
            Its coverage is 0, unless the model multiplies in FP8 by itself.

    Attributes:
        last: The :class:`~lightning_amp_plus.fp8.coverage.report.Coverage` of the last step that was observed, of this
            rank, to be printed; ``None`` before the first.
        last_fit: The :class:`~lightning_amp_plus.fp8.fit.report.FitReport` of that step, over all ranks, to be printed;
            ``None`` without one, or without FP8.

    Raises:
        ValueError: If ``every_n_steps`` is no whole number of at least 1, or ``what_if`` holds something else than recipes,
            one of them twice, or anything without ``fit``.
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
    ``fp8/amax/NAME/TENSOR``                     largest magnitude of a layer's ``input``, ``weight`` or ``grad_output``
    ``fp8/scale/NAME/TENSOR``                    what it was multiplied by; of several scales the smallest
    ``fp8/scale_updates/NAME/TENSOR``            how often that changed since the last log point; delayed scaling only
    ``fp8/saturation/NAME/TENSOR``               share of elements clipped to the largest finite number
    ``fp8/underflow/NAME/TENSOR``                share of elements that became zero, of those that are not
    ``fp8/sqnr/NAME/TENSOR``                     signal to quantization noise ratio in dB; no key where it was exact
    ``fp8/what_if/RECIPE/NAME/TENSOR``           the same, had it been quantized by that recipe
    ============================================ ==========================================================================

    Over ranks work and time are added up before they are divided. In a compiled region no module can be seen: what it
    multiplied counts for the region. ``layer_histories()`` holds the coverage of each layer by FLOPs.
    """

    by_layer = True

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        fit: bool = True,
        what_if: Sequence[Recipe | str | dict[str, Any]] = (),
        always: bool = True,
    ) -> None:
        self.fit, self.always = flag(self, "fit", fit), flag(self, "always", always)
        self.what_if = _recipes(what_if)
        if self.what_if and not fit:
            raise ValueError("Fp8CoverageMonitor(fit=False, what_if=...): to try recipes is a part of the fit.")
        self._forget_numbers()
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
        self._fits = LayerFits(self.what_if)
        self._applied: Tensor | bool = False
        self._tally: Tally | None = None
        self._kernels: KernelTimes | None = None
        self._step = 0
        self._seen_reasons: set[str] = set()
        self._planned, self._begun = "", False  # layers in FP8, and whether that is switched on
        self._said = False
        self._end_look: Callable[[], None] | None = None

    def _forget_numbers(self) -> None:
        self.last: Coverage | None = None
        self.last_fit: FitReport | None = None
        self._warned = False
        self._histories = {
            "coverage": LayerHistory("FP8 coverage by FLOPs", ceiling=1.0, floor=0.0, group="fp8"),
            **histories(),
        }

    @override
    def settings(self) -> dict[str, Any]:
        """See :class:`Monitor`."""
        tried = [label_of(recipe) for recipe in self.what_if]
        return {"every_n_steps": self.every_n_steps, "fit": self.fit, "what_if": tried, "always": self.always}

    # ---------------------------------------------------------------- binding to a run

    @override
    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the modules to watch."""
        drawn = self._histories["coverage"].steps
        if not drawn or drawn[-1] >= batches_that_stepped(trainer):
            self._forget_numbers()  # another run
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
        # torchao makes FP8 of a plain Linear by the class of its weight too.
        modules, parameters = self._module.modules(), self._module.parameters()
        return any(is_of_package(part, *_MULTIPLIES_FP8) for part in chain[nn.Module | Tensor](modules, parameters))

    @override
    def before_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to watch a micro-batch."""
        assert self.plugin is not None and self.plugin.plan is not None
        if self._tally is None:
            self._tally, self._step = Tally(), int(trainer.global_step)
            self._kernels = KernelTimes(self._device)
            # Anew for each window: set_route() may have moved modules.
            self._layers = _layers(self.plugin.plan, ModelNames(pl_module).module, self.plugin.moves)
            if self.fit:
                self._fits.choose(self._layers, {*self._parts.hidden, *self._regions}, self._device)
            # Asked now: the window that is last before FP8 begins switches it on as it closes.
            planned = [layer.module for layer in self._layers.values() if layer.route is not None]
            self._planned, self._begun = plural(len(planned), "layer"), any(map(fp8_has_begun, planned))
        watcher = GemmWatcher(self._parts, Fallbacks(self._layers, self._regions), self._tally)
        self._end_look = watch_step(trainer.strategy, watcher, self.optimizers)
        self._fits.begin()
        if self._kernels is not None:
            self._kernels.begin()

    @override
    def after_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends it."""
        if self._end_look is not None:
            self._end_look()
            self._end_look = None
        self._fits.end()
        if self._kernels is not None:
            self._kernels.end()

    @override
    def see_step(self, report: StepReport, optimizer: Optimizer) -> None:
        """Notes whether the window was applied."""
        self._applied = report.applied

    # ---------------------------------------------------------------- what comes out

    @override
    def measure(self) -> Sequence[Measurement]:
        """The work of the step with and without attention, by reason and by layer, and its time."""
        assert self.plugin is not None and self._tally is not None and self._kernels is not None
        tally, self._tally = self._tally, None
        spent = self._kernels.spent() or tally.spent(set(self._parts.leaves) - set(self._regions))
        rows, doubt = borne_out(tally.rows(), self._kernels.fp8_gemms)
        notes = (*self._notes(tally), *tally.remarks(), *filter(None, (self._kernels.note, doubt)))
        self.last = coverage = Coverage(self._step, rows, time_shares(spent.values()), notes)
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
        reduce_max = self.plugin.consensus.maximum if self.plugin.consensus.world_size > 1 else None
        fits = self._fits.measure(self._applied, reduce_max)
        return (self._over_ranks(work), self._over_ranks([tuple(spent.values())]), *fits)

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
        covered = {name: shares.flops for name, shares in layers.items() if not math.isnan(shares.flops)}
        self._histories["coverage"].add(step, covered)
        self._say(all_, step)
        values = {key: value for key, value in values.items() if not math.isnan(value)}
        self.last_fit = report = self._fits.take(numbers[2:], self._step)
        if report is None:
            return values
        for what, shown in pictured(report).items():
            self._histories[what].add(step, shown)
        return values | logged(report)

    def _say(self, shares: Shares, step: int) -> None:
        assert self.last is not None and self.plugin is not None
        if not self._said:
            self._said = True
            rank_zero_info(f"FP8 coverage at step {step}: {self.last.summary()}. print(monitor.last) shows all.")
        if self._begun and not self._warned and shares.flops == 0:
            self._warned = True
            why = ", ".join(f"{reason} {percent(share)}" for reason, share in self.last.fallbacks().items())
            rank_zero_warn(
                f"FP8 coverage is 0 at step {step}: the plan has {self._planned} in FP8, and no GEMM ran in it (by "
                f"FLOPs: {why}). Look at print(monitor.last) for where they ran; layers that forward never calls, or whose "
                "weights it multiplies itself, cannot run in FP8. Said once."
            )

    @override
    def finish(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the last coverage, and the worst of the last fits."""
        if self.last is not None and trainer.is_global_zero:
            from rich.console import Console

            Console().print(self.last)
            if self.last_fit is not None:
                Console().print(replace(self.last_fit, shown=_SHOWN))

    @override
    def layer_histories(self) -> Sequence[LayerHistory]:
        """Coverage by layer; SQNR, saturation and underflow by layer and tensor."""
        return tuple(history for history in self._histories.values() if history.names)

    # ---------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """Settings travel; the run they come from does not."""
        kept = ("every_n_steps", "fit", "what_if", "always", "last", "last_fit", "_warned")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget_numbers()
        self.__dict__.update(state)
        self.forget_run()


def _recipes(what_if: Sequence[Recipe | str | dict[str, Any]]) -> tuple[Recipe, ...]:
    """The recipes that are meant.

    Raises:
        ValueError: If something is none, or one is there twice.
    """
    if isinstance(what_if, (str, Recipe, dict)):
        what_if = (what_if,)
    try:
        found = tuple(Recipe.of(value) for value in what_if)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Fp8CoverageMonitor(what_if={what_if!r}): expected a list of recipes. {error}") from None
    if len(set(found)) < len(found):
        raise ValueError(f"Fp8CoverageMonitor(what_if={what_if!r}): one recipe is there twice.")
    return found


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
