"""Findings as people read them: in an error, in a log line, in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lightning_amp_plus.checkpoint.compatibility import Finding, refusals

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("field", "saved", "this run", "verdict")
_STYLES = {"ok": "green", "note": "cyan", "convert": "yellow", "refuse": "bold red"}
_WIDEST = 44


def plain_table(findings: Iterable[Finding]) -> str:
    """Aligned plain text, long cells folded."""
    rows = [_COLUMNS, *((f.field, f.saved, f.current, f.verdict) for f in findings)]
    cells = [[textwrap.wrap(cell, _WIDEST) or [""] for cell in row] for row in rows]
    widths = [max(len(line) for row in cells for line in row[i]) for i in range(len(_COLUMNS))]
    lines = []
    for number, row in enumerate(cells):
        for k in range(max(map(len, row))):
            parts = (cell[k] if k < len(cell) else "" for cell in row)
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def rich_table(title: str, findings: Iterable[Finding]) -> Table:
    """The same for a terminal, with the reasons."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for column in (*_COLUMNS, "why, and what to do"):
        table.add_column(column, overflow="fold", no_wrap=column in ("field", "verdict"))
    for f in findings:
        reason = " ".join(part for part in (f.why, f.remedy) if part)
        table.add_row(f.field, f.saved, f.current, Text(f.verdict, style=_STYLES[f.verdict]), reason)
    return table


def reasons(findings: Iterable[Finding]) -> str:
    """A line for each finding that has something to say."""
    return "\n".join(f"{f.field}: {' '.join(part for part in (f.why, f.remedy) if part)}" for f in findings if f.why)


def refusal_text(path: str, findings: Sequence[Finding], allowed: Iterable[str] = ()) -> str:
    """The message of a refusal: what differs, why it matters, and what to paste to go on all the same."""
    refused = refusals(findings)
    names = sorted({*allowed, *(finding.field for finding in refused)})
    return (
        f"This run cannot continue {path}: it would go on in other numerics than it was saved in.\n\n"
        f"{plain_table(f for f in findings if f.verdict != 'ok')}\n\n"
        f"{reasons(refused)}\n\n"
        "Training has not begun and no file was changed. To go on all the same, knowing this, pass "
        f"AmpPrecision(..., allow={names!r})."
    )


def conversions_text(path: str, findings: Sequence[Finding]) -> str:
    """What is converted in a resume."""
    converted = [finding for finding in findings if finding.verdict == "convert"]
    return f"Resuming {path} converts:\n{plain_table(converted)}\n{reasons(converted)}"


def notes_text(path: str, findings: Sequence[Finding]) -> str:
    """What else differs."""
    noted = [finding for finding in findings if finding.verdict == "note"]
    return f"Since {path} was saved:\n{plain_table(noted)}\n{reasons(noted)}"
