"""What people look at: TensorBoard's dashboard and heat maps, a table in the terminal at the end. For ``monitor``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_amp_plus.callbacks.layers import LayerHistory

_TABLE_ROWS = 30  # layers in the table at the end; a screen
_NUMBER = 8  # letters of the longest number in it, 1.23e-05
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
}


# Columns of the table at the end, by the keys that they show.
_COLUMNS: Mapping[str, str] = {
    "update ratio": "precision/update_ratio/",
    "rounded away": "precision/rounded_away/",
    "gradient norm": "precision/grad_norm/",
    "zero gradients": "precision/zero_grad_fraction/",
    "largest activation": "precision/activation_amax/",
    "largest parameter": "precision/parameter_amax/",
}


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
            writer.add_figure(f"precision/{history.title}", heat_map(history), step)


def heat_map(history: LayerHistory) -> Any:
    """A matplotlib figure: a row for each layer, a column for each log point; what was not there is left white."""
    import numpy as np
    from matplotlib.figure import Figure  # not pyplot, whose figures stay in memory and want a screen

    values = np.ma.masked_invalid(np.array(history.rows(), dtype=float))
    figure = Figure(figsize=(10, min(12.0, 1.5 + 0.22 * len(history.names))), layout="constrained")
    axes = figure.subplots()
    edges = [*history.steps, 2 * history.steps[-1] - history.steps[-2]]
    mesh = axes.pcolormesh(edges, np.arange(len(history.names) + 1), values, cmap="viridis")
    axes.invert_yaxis()
    axes.set_xlabel("step")
    if len(history.names) <= _NAMED_ROWS:
        axes.set_yticks(np.arange(len(history.names)) + 0.5, history.names, fontsize=7)
    else:
        axes.set_ylabel(f"{len(history.names)} layers, {history.names[0]} to {history.names[-1]}")
    figure.colorbar(mesh, ax=axes, label=history.title)
    return figure


def layer_table(columns: Mapping[str, Mapping[str, float]]) -> Any:
    """A Rich table of the last numbers by layer.

    Of many layers those are shown at which some column has its lowest or highest numbers.

    Args:
        columns: Title of each column, and its numbers by layer.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = list(dict.fromkeys(name for numbers in columns.values() for name in numbers))
    shown = _extremes(names, columns) if len(names) > _TABLE_ROWS else set(names)
    # Six columns have to leave room for names in a terminal of 80 letters; titles on two lines and no frame do.
    table = Table(title="Last log point", box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("layer", overflow="fold")
    for title in columns:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True, min_width=_NUMBER)
    for name in names:
        if name in shown:
            table.add_row(name, *(_number(numbers.get(name)) for numbers in columns.values()))
    if len(shown) < len(names):
        table.caption = f"{len(shown)} of {len(names)} layers: those at the ends of a column. All are in the loggers."
    return table


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
