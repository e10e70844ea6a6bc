"""How a table is shown: as plain text, or in a terminal in one that fits its width.

Used by ``RoutePlan``, by what monitors found, by findings about a checkpoint and by the commands.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

# Left out one after the other where a terminal has no room for all.
_LESS_WANTED = ("reduction", "gradient", "optimizer", "accumulator", "reason", "rule", "input", "output", "weight")
# Of a plan with FP8 the reason says why a layer is or is not in it, and the column fp8 how: formats follow from those.
FORMATS_LESS_WANTED = ("optimizer", "accumulator", "output", "input", "weight", "rule", "parameter", "reason")
# Columns that go on below where there is no room.
_PROSE = ("module", "layer", "rule", "reason", "recorded", "found", "remedy", "op", "dtypes")


def cell(value: Any) -> str:
    """A value in words, on one line and without control characters, wherever it comes from."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{cell(key)} {cell(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value)) or "none"
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(value).split()))


def plural(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``; for nouns that take an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_text(rows: Sequence[Sequence[str]], notes: Sequence[str] = (), widest: int | None = None) -> str:
    """Plain text, columns aligned; the first row is the header.

    Args:
        rows: One string for each column.
        notes: Lines below the table.
        widest: Letters in a cell beyond which it goes on below.
    """
    cells = [[[text] if widest is None else textwrap.wrap(text, widest) or [""] for text in row] for row in rows]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(rows[0]))]
    lines = [
        "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
        for row in cells
        for parts in zip_longest(*row, fillvalue="")
    ]
    below = max(map(len, cells[0]))
    return "\n".join([*lines[:below], "-" * max(map(len, lines)), *lines[below:], *notes])


def as_table(title: str, rows: Sequence[Sequence[str]], notes: Sequence[str], left_out: Iterable[str] = ()) -> Table:
    """A Rich table without the columns ``left_out``, which are named below it."""
    from rich.table import Table
    from rich.text import Text

    left_out = list(left_out)
    shown = [index for index, name in enumerate(rows[0]) if name not in left_out]
    table = Table(title=title, caption_justify="left")
    for index in shown:
        name = rows[0][index]
        table.add_column(name, overflow="fold", no_wrap=name not in _PROSE)
    for row in rows[1:]:
        table.add_row(*(Text(row[index]) for index in shown))
    below = [*notes, *([f"no room for: {', '.join(reversed(left_out))}"] if left_out else [])]
    # Not as a string: names in it may look like markup.
    table.caption = Text("\n".join(below), style="table.caption") if below else None
    return table


def fitting_table(
    title: str,
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    console: Console,
    options: ConsoleOptions,
    less_wanted: Sequence[str] = _LESS_WANTED,
    least_prose: int | None = None,
) -> Table:
    """The table with as many columns as the terminal has room for.

    Args:
        title: Above it.
        rows: One string for each column; the first row is the header.
        notes: Lines below it.
        console: The terminal.
        options: Its width.
        less_wanted: Columns to leave out, one after the other.
        least_prose: Letters that are room enough for columns that go on below, beyond their longest word; ``None`` asks
            for room for whole cells.
    """
    from rich.measure import Measurement

    left_out: list[str] = []
    for name in (*(name for name in less_wanted if name in rows[0]), ""):
        table = as_table(title, rows, notes, left_out)
        needed = Measurement.get(console, options.update(max_width=1000), table)
        wanted = needed.maximum if least_prose is None else min(needed.maximum, needed.minimum + least_prose)
        if wanted <= options.max_width or not name:
            break
        left_out.append(name)
    return table
