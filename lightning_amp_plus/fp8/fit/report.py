"""How well the scales of FP8 fitted in a step, for people and programs: :class:`FitReport`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_amp_plus.fp8.coverage.report import percent
from lightning_amp_plus.fp8.fit.measure import Fit
from lightning_amp_plus.fp8.recipes import Operand
from lightning_amp_plus.naming import ROOT
from lightning_amp_plus.plan_table import as_text, cell, fitting_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

ByLayer = Mapping[str, Mapping[Operand, Fit]]

_BETTER = 1.0  # decibels from which another recipe is said to fit better: less is the noise of a sample


@dataclass(frozen=True)
class FitReport:
    """The fit of each layer in FP8 and each of its operands, over all ranks. Print it, or store it with :meth:`to_dict`.

    Attributes:
        step: The Trainer's ``global_step`` when the step began.
        own: By layer and operand (``input weight grad_output``), of the layer's own recipe.
        what_if: By the label of a recipe the same, as if layers had been quantized by it.
        recipes: Label of each layer's own recipe.
        shown: Number of rows that are printed; those with the lowest SQNR. ``None`` for all.
    """

    step: int
    own: ByLayer
    what_if: Mapping[str, ByLayer] = field(default_factory=dict)
    recipes: Mapping[str, str] = field(default_factory=dict)
    shown: int | None = None

    def best(self, layer: str, operand: Operand) -> tuple[str, float] | None:
        """The recipe that would have fitted an operand best, and by how many decibels better than its own.

        ``None`` where none was tried, or none is better by at least one.
        """
        own = self.own[layer][operand].sqnr
        tried = {
            label: fit.sqnr
            for label, layers in self.what_if.items()
            if (fit := layers.get(layer, {}).get(operand)) is not None and not math.isnan(fit.sqnr)
        }
        if not tried or not math.isfinite(own):
            return None
        label = max(tried, key=tried.__getitem__)
        gain = tried[label] - own
        return (label, gain) if gain >= _BETTER else None

    def rows(self) -> Iterator[tuple[str, Operand, Fit]]:
        """Layer, operand and fit, in the order of the model."""
        for layer, operands in self.own.items():
            for operand, fit in operands.items():
                yield layer, operand, fit

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types; numbers that are not finite as strings, ``inf``, ``-inf`` and ``nan``."""
        return {
            "step": self.step,
            "recipes": dict(self.recipes),
            "own": _plain(self.own),
            "what_if": {label: _plain(layers) for label, layers in self.what_if.items()},
        }

    def __str__(self) -> str:
        return as_text(self._table(), self._below())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = f"Fit of FP8 scales, step {self.step}"
        tried = [f"{label}?" for label in self.what_if]  # which of them is best is said beside
        less_wanted = ("updates", "scale", "amax", "recipe", *tried, "underflow", "saturation")
        yield fitting_table(title, self._table(), self._below(), console, options, less_wanted)

    def _chosen(self) -> list[tuple[str, Operand, Fit]]:
        rows = list(self.rows())
        if self.shown is None or len(rows) <= self.shown:
            return rows
        worst = sorted(rows, key=lambda row: -math.inf if math.isnan(row[2].sqnr) else row[2].sqnr)[: self.shown]
        chosen = {(layer, operand) for layer, operand, _ in worst}
        return [row for row in rows if row[:2] in chosen]

    def _table(self) -> list[tuple[str, ...]]:
        tried = list(self.what_if)
        better = ("would fit better",) if tried else ()
        header = ("layer", "tensor", "recipe", "amax", "scale", "updates", "saturation", "underflow", "SQNR")
        lines: list[tuple[str, ...]] = [(*header, *(f"{label}?" for label in tried), *better)]
        for layer, operand, fit in self._chosen():
            others = [self.what_if[label].get(layer, {}).get(operand) for label in tried]
            found = self.best(layer, operand)
            lines.append(
                (
                    cell(layer) or ROOT,
                    operand,
                    self.recipes.get(layer, "-"),
                    f"{fit.amax:.3g}",
                    f"{fit.scale:.3g}",
                    "-" if fit.updates is None else str(fit.updates),
                    percent(fit.saturation),
                    percent(fit.underflow),
                    _decibels(fit),
                    *("-" if other is None else _decibels(other) for other in others),
                    *(() if not tried else ("-",) if found is None else (f"{found[0]} +{found[1]:.1f} dB",)),
                )
            )
        return lines

    def _below(self) -> list[str]:
        total = sum(1 for _ in self.rows())
        if not total:
            return ["No layer quantized anything in FP8."]
        few = (
            [] if self.shown is None or total <= self.shown else [f"The {self.shown} of {total} with the lowest SQNR."]
        )
        return [
            *few,
            "SQNR in dB, higher is better: 6 dB are one bit. Saturation: share of elements clipped. Underflow: share of "
            "elements that became zero, of those that were not.",
        ]


def _decibels(fit: Fit) -> str:
    if math.isnan(fit.sqnr):
        return "not finite"
    return "exact" if math.isinf(fit.sqnr) else f"{fit.sqnr:.1f}"


def _plain(layers: ByLayer) -> dict[str, Any]:
    return {
        layer: {operand: _finite(asdict(fit).items()) for operand, fit in operands.items()}
        for layer, operands in layers.items()
    }


def _finite(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """JSON knows no infinity: what is not finite becomes a word."""
    return {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in items}
