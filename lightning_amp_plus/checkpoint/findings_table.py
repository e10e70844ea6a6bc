"""Findings as people read them: in an error, in a log line, in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lightning_amp_plus.checkpoint.compatibility import Finding, refusals
from lightning_amp_plus.plan_table import as_text, cell

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"ok": "green", "note": "cyan", "convert": "yellow", "refuse": "bold red"}
_WIDEST = 44
_OF_ITSELF = ("scaler", "weights")  # fields that say something of the checkpoint alone

SIDES = ("saved", "this run")


def plain_table(findings: Iterable[Finding], sides: tuple[str, str] = SIDES) -> str:
    """Aligned plain text, long cells folded.

    Args:
        findings: A row each.
        sides: What the two sides of the comparison are called.
    """
    rows = ((f.field, cell(f.saved), cell(f.current), f.verdict) for f in findings)
    return as_text([("field", *sides, "verdict"), *rows], widest=_WIDEST)


def rich_table(title: str, findings: Iterable[Finding], sides: tuple[str, str] = SIDES) -> Table:
    """The same for a terminal, with the reasons."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title))
    for column in ("field", *sides, "verdict", "why, and what to do"):
        table.add_column(column, overflow="fold", no_wrap=column in ("field", "verdict"))
    for f in findings:
        texts = (Text(part) for part in (f.field, cell(f.saved), cell(f.current)))  # not markup, whatever they hold
        table.add_row(*texts, Text(f.verdict, style=_STYLES[f.verdict]), Text(_reason(f)))
    return table


def _reason(finding: Finding) -> str:
    return " ".join(part for part in (finding.why, finding.remedy) if part)


def reasons(findings: Iterable[Finding]) -> str:
    """A line for each finding that has something to say."""
    return "\n".join(f"{f.field}: {_reason(f)}" for f in findings if f.why)


def to_allow(findings: Iterable[Finding], allowed: Iterable[str] = ()) -> list[str]:
    """What ``AmpPrecision(allow=...)`` has to name for a resume to go on: what was refused, and what was named before."""
    return sorted({*allowed, *(finding.field for finding in refusals(findings))})


def refusal_text(path: str, findings: Sequence[Finding], allowed: Iterable[str] = (), *, restored: bool = False) -> str:
    """The message of a refusal: what differs, why it matters, and what to paste to go on all the same.

    Args:
        path: The checkpoint.
        findings: What was compared.
        allowed: What the user allowed already.
        restored: Whether the model's weights have been replaced by the checkpoint's before it could be refused.
    """
    refused = refusals(findings)
    broken = all(finding.field in _OF_ITSELF for finding in refused)
    why = "what it holds is broken" if broken else "it would go on in other numerics than it was saved in"
    state = "The model holds the checkpoint's weights by now; training" if restored else "Training"
    return (
        f"This run cannot continue {path}: {why}.\n\n"
        f"{plain_table(f for f in findings if f.verdict != 'ok')}\n\n"
        f"{reasons(refused)}\n\n"
        f"{state} has not begun and no file was changed. To go on all the same, knowing this, pass "
        f"AmpPrecision(..., allow={to_allow(findings, allowed)!r})."
    )


def conversions_text(path: str, findings: Sequence[Finding]) -> str:
    """What is converted in a resume."""
    converted = [finding for finding in findings if finding.verdict == "convert"]
    return f"Resuming {path} converts:\n{plain_table(converted)}\n{reasons(converted)}"


def notes_text(path: str, findings: Sequence[Finding]) -> str:
    """What else differs."""
    noted = [finding for finding in findings if finding.verdict == "note"]
    return f"Since {path} was saved:\n{plain_table(noted)}\n{reasons(noted)}"
