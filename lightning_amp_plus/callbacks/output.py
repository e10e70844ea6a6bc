"""What people look at: TensorBoard's dashboard and heat maps, a table in the terminal at the end. For ``monitor``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_amp_plus.callbacks.layers import LayerHistory
from lightning_amp_plus.plan_table import fitting_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_TABLE_ROWS = 30  # layers in the table at the end; a screen
_NAMED_ROWS = 60  # layers whose names can still be read beside a picture

# Charts of TensorBoard's dashboard: title, and the tags that share it, as regular expressions that match from the start.
_CHARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Loss scale": {
        "scale": ("precision/loss_scale$",),
        "skip rate": ("precision/skip_rate$", "precision/skip_rate_total$"),
        "growths and backoffs": ("precision/scale_growths$", "precision/scale_backoffs$", "precision/skipped_steps$"),
        "scales that fit": ("precision/scale_window_low$", "precision/scale_window_high$", "precision/loss_scale$"),
    },
    "Gradients": {
        "norm": ("precision/grad_norm$",),
        "norm by layer": ("precision/grad_norm/.*",),
        "zeros by layer": ("precision/zero_grad_fraction/.*",),
    },
    "Weights": {
        "update ratio, median": ("precision/update_ratio_median$",),
        "update ratio by layer": ("precision/update_ratio/.*",),
        "largest parameter by layer": ("precision/parameter_amax/.*",),
    },
    "Activations": {"largest by layer": ("precision/activation_amax/.*",)},
    "FP8": {
        "coverage by FLOPs": (
            "fp8/coverage_flops$",
            "fp8/coverage_flops_without_attention$",
            "fp8/native_flops$",
        ),
        "coverage by number of GEMMs": (
            "fp8/coverage_gemms$",
            "fp8/coverage_gemms_without_attention$",
            "fp8/native_gemms$",
        ),
        "not in FP8, by reason": ("fp8/fallback/.*",),
        "time": ("fp8/time_.*",),
        "SQNR in dB": ("fp8/sqnr/.*",),
        "saturation": ("fp8/saturation/.*",),
        "underflow": ("fp8/underflow/.*",),
        "scale": ("fp8/scale/.*",),
        "amax": ("fp8/amax/.*",),
    },
}


# Columns of the table at the end, by the keys that they show.
_COLUMNS: Mapping[str, str] = {
    "update ratio": "precision/update_ratio/",
    "rounded away": "precision/rounded_away/",
    "grad norm": "precision/grad_norm/",
    "zero grads": "precision/zero_grad_fraction/",
    "activation amax": "precision/activation_amax/",
    "parameter amax": "precision/parameter_amax/",
}
# Left out first in a narrow terminal.
_LESS_WANTED = ("rounded away", "parameter amax", "grad norm", "zero grads", "activation amax")


def layer_columns(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What was logged of layers: titles of columns, and numbers by layer."""
    found = {
        title: {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        for title, prefix in _COLUMNS.items()
    }
    return {title: numbers for title, numbers in found.items() if numbers}


def tensorboards(trainer: pl.Trainer) -> list[Any]:
    """The writers of the Trainer's TensorBoard loggers; none but on rank zero."""
    if not trainer.is_global_zero:
        return []
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def lay_out(trainer: pl.Trainer, keys: Iterable[str]) -> None:
    """Arranges TensorBoard's custom scalars: related curves in one chart.

    Args:
        trainer: Whose loggers.
        keys: What is logged; charts without any of them are left out.
    """
    known = tuple(keys)
    layout: dict[str, dict[str, list[Any]]] = {}
    for group, charts in _CHARTS.items():
        for title, tags in charts.items():
            if any(_is_logged(tag, known) for tag in tags):
                layout.setdefault(group, {})[title] = ["Multiline", list(tags)]
    for writer in tensorboards(trainer) if layout else ():
        writer.add_custom_scalars(layout)


def _is_logged(tag: str, keys: tuple[str, ...]) -> bool:
    return any(re.match(tag, key) for key in keys)


def draw(trainer: pl.Trainer, histories: Sequence[LayerHistory], step: int) -> None:
    """Writes heat maps, layers over steps, where there is a TensorBoard logger and matplotlib."""
    writers = tensorboards(trainer)
    drawn = [history for history in histories if len(history.steps) > 1 and history.names]
    if not writers or not drawn or find_spec("matplotlib") is None:
        return
    for history in drawn:
        for writer in writers:
            writer.add_figure(f"{history.group}/{history.title}", heat_map(history), step)


def heat_map(history: LayerHistory) -> Any:
    """A matplotlib figure: a row for each layer, a column for each log point; what was not there is left white."""
    import numpy as np
    from matplotlib.figure import Figure  # not pyplot, whose figures stay in memory and want a screen

    values = np.ma.masked_invalid(np.array(history.rows(), dtype=float))
    figure = Figure(figsize=(10, min(12.0, 1.5 + 0.22 * len(history.names))), layout="constrained")
    axes = figure.subplots()
    edges = [*history.steps, 2 * history.steps[-1] - history.steps[-2]]
    lines = np.arange(len(history.names) + 1)
    mesh = axes.pcolormesh(edges, lines, values, cmap="viridis", vmin=history.floor, vmax=history.ceiling)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    if len(history.names) <= _NAMED_ROWS:
        axes.set_yticks(np.arange(len(history.names)) + 0.5, history.names, fontsize=7)
    else:
        axes.set_ylabel(f"{len(history.names)} layers, {history.names[0]} to {history.names[-1]}")
    above = history.ceiling is not None and values.max() > history.ceiling
    figure.colorbar(mesh, ax=axes, label=history.title, extend="max" if above else "neither")
    return figure


class LayerTable:
    """What was logged last of layers, as a table that fits the terminal.

    Of many layers those are shown at which some column has its lowest or highest numbers.

    Args:
        columns: Title of each column, and its numbers by layer.
    """

    def __init__(self, columns: Mapping[str, Mapping[str, float]]) -> None:
        names = list(dict.fromkeys(name for numbers in columns.values() for name in numbers))
        shown = _extremes(names, columns) if len(names) > _TABLE_ROWS else set(names)
        self.rows = [["layer", *columns]]
        for name in names:
            if name in shown:
                self.rows.append([name, *(_number(numbers.get(name)) for numbers in columns.values())])
        few = f"{len(shown)} of {len(names)} layers: those at the ends of a column. All are in the loggers."
        self.notes = [few] if len(shown) < len(names) else []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield fitting_table("Last log point", self.rows, self.notes, console, options, less_wanted=_LESS_WANTED)


def _extremes(names: Sequence[str], columns: Mapping[str, Mapping[str, float]]) -> set[str]:
    each = max(1, _TABLE_ROWS // (2 * len(columns)))
    shown: set[str] = set()
    for numbers in columns.values():
        ordered = sorted(
            (name for name in names if not math.isnan(numbers.get(name, math.nan))), key=numbers.__getitem__
        )
        shown |= {*ordered[:each], *ordered[-each:]}
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"
