"""The part of ``Fp8CoverageMonitor`` that is about scales: :class:`LayerFits`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_amp_plus.callbacks.layers import LayerHistory
from lightning_amp_plus.callbacks.readout import Measurement
from lightning_amp_plus.fp8.coverage.fallback import Layer
from lightning_amp_plus.fp8.fit.measure import OVER_RANKS, label_of
from lightning_amp_plus.fp8.fit.report import FitReport
from lightning_amp_plus.fp8.fit.watch import FitWatch
from lightning_amp_plus.fp8.recipes import Recipe
from lightning_amp_plus.fp8.selection import Fp8Route
from lightning_amp_plus.naming import ROOT

_LOGGED = ("amax", "scale", "saturation", "underflow")


class LayerFits:
    """Measures how well scales fit, in the windows that a monitor looks at, and makes keys and pictures of it.

    Args:
        what_if: Recipes to try on the same tensors.
    """

    def __init__(self, what_if: Sequence[Recipe]) -> None:
        self._what_if = what_if
        self._watch: FitWatch | None = None
        self._routes: dict[str, Fp8Route] = {}

    def choose(self, layers: Mapping[str, Layer], hidden: Collection[str], device: torch.device) -> None:
        """A window begins: takes the layers that are in FP8 by now, a shared one by its first name.

        Args:
            layers: All modules of the model.
            hidden: Names of those in compiled regions, and of the regions.
            device: Where results are kept.
        """
        first: dict[int, str] = {}
        for name, layer in layers.items():
            first.setdefault(id(layer.module), name)
        routes = {name: route for name in first.values() if (route := layers[name].route) is not None}
        if routes == self._routes:
            return
        self._routes = routes
        modules = {name: layers[name].module for name in routes}
        before, self._watch = self._watch, FitWatch(modules, device, hidden=hidden, what_if=self._what_if)
        if before is not None:
            self._watch.go_on_from(before)

    def begin(self) -> None:
        """A micro-batch begins."""
        if self._watch is not None:
            self._watch.begin()

    def end(self) -> None:
        """It ended, also by an exception."""
        if self._watch is not None:
            self._watch.end()

    def measure(self, applied: Tensor | bool, reduce_max: Callable[[Tensor], None] | None) -> tuple[Measurement, ...]:
        """The window closed: what was measured in it; see :meth:`FitWatch.end_window`."""
        if self._watch is None:
            return ()
        self._watch.end_window(applied, reduce_max)
        return (Measurement(self._watch.numbers(), OVER_RANKS),)

    def take(self, numbers: Sequence[Tensor], step: int) -> FitReport | None:
        """What numbers over all ranks say; ``None`` where nothing was to be measured.

        Args:
            numbers: Those of :meth:`measure`.
            step: The Trainer's ``global_step``.
        """
        if self._watch is None or not numbers:
            return None
        found = self._watch.fits(numbers[0])
        recipes = {name: label_of(route.recipe) for name, route in self._routes.items()}
        return FitReport(step, found.own, found.what_if, recipes)


def histories() -> dict[str, LayerHistory]:
    """Empty pictures of what is drawn by layer and tensor."""
    return {
        "sqnr": LayerHistory("SQNR in dB", group="fp8"),
        "saturation": LayerHistory("Saturation", floor=0.0, group="fp8"),
        "underflow": LayerHistory("Underflow", floor=0.0, group="fp8"),
    }


def pictured(report: FitReport) -> dict[str, dict[str, float]]:
    """The numbers of :func:`histories`, by layer and tensor."""
    found: dict[str, dict[str, float]] = {what: {} for what in histories()}
    for layer, operand, fit in report.rows():
        for what, numbers in found.items():
            if math.isfinite(number := getattr(fit, what)):
                numbers[f"{layer or ROOT}/{operand}"] = number
    return found


def logged(report: FitReport) -> dict[str, float]:
    """What is logged of a report, by key."""
    values: dict[str, float] = {}
    for layer, operand, fit in report.rows():
        where = f"{layer or ROOT}/{operand}"
        values |= {f"fp8/{what}/{where}": getattr(fit, what) for what in _LOGGED}
        if fit.updates is not None:
            values[f"fp8/scale_updates/{where}"] = fit.updates
        if math.isfinite(fit.sqnr):
            values[f"fp8/sqnr/{where}"] = fit.sqnr
    for label, layers in report.what_if.items():
        for layer, operands in layers.items():
            tried = {operand: fit.sqnr for operand, fit in operands.items() if math.isfinite(fit.sqnr)}
            values |= {f"fp8/what_if/{label}/{layer or ROOT}/{operand}": sqnr for operand, sqnr in tried.items()}
    return values
