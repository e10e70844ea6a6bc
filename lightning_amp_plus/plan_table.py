"""How a plan is shown: as plain text, or in a terminal as a table that fits its width. Used by ``RoutePlan`` itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

# Left out one after the other where a terminal has no room for all.
_LESS_WANTED = ("optimizer", "accumulator", "reason", "rule", "input", "output", "weight")


def as_text(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Plain text, columns aligned; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *notes])


def as_table(title: str, rows: Sequence[Sequence[str]], notes: Sequence[str], left_out: Iterable[str] = ()) -> Table:
    """A Rich table without the columns ``left_out``, which are named below it."""
    from rich.table import Table
    from rich.text import Text

    left_out = list(left_out)
    shown = [index for index, name in enumerate(rows[0]) if name not in left_out]
    table = Table(title=title)
    for index in shown:
        name = rows[0][index]
        table.add_column(name, overflow="fold", no_wrap=name not in ("module", "rule", "reason"))
    for row in rows[1:]:
        table.add_row(*(Text(row[index]) for index in shown))
    below = [*notes, *([f"no room for: {', '.join(reversed(left_out))}"] if left_out else [])]
    table.caption = "\n".join(below) or None
    return table


def fitting_table(
    title: str, rows: Sequence[Sequence[str]], notes: Sequence[str], console: Console, options: ConsoleOptions
) -> Table:
    """The table with as many columns as the terminal has room for."""
    from rich.measure import Measurement

    left_out: list[str] = []
    for name in (*_LESS_WANTED, ""):
        table = as_table(title, rows, notes, left_out)
        if Measurement.get(console, options.update(max_width=1000), table).maximum <= options.max_width or not name:
            break
        left_out.append(name)
    return table
