"""Whether a run may continue a checkpoint: the pure function that applies the rules, and what a user may allow.

Two manifests in, findings out; nothing is read, asked or changed. The guard turns findings into an error or a log line, the
command line prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from lightning_amp_plus.checkpoint.manifest import Manifest, Move
from lightning_amp_plus.checkpoint.rules import TABLE, Verdict


@dataclass(frozen=True)
class Finding:
    """One field of the two manifests, compared.

    Attributes:
        field: Its name, as in :data:`TABLE` and in ``AmpPrecision(allow=...)``.
        saved: What the checkpoint says, for people.
        current: What this run says.
        verdict: ``ok``: the same. ``note``: another, without harm. ``convert``: goes on, with a logged step. ``refuse``:
            stops the resume unless the field is allowed.
        why: Why it matters.
        remedy: What to do.
        waived: Whether it is a refusal that the user allowed.
    """

    field: str
    saved: str
    current: str
    verdict: Verdict
    why: str = ""
    remedy: str = ""
    waived: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The finding in plain types."""
        return dict(vars(self))


def compare(saved: Manifest, current: Manifest) -> list[Finding]:
    """What there is to say about continuing ``saved`` in a run described by ``current``, in the order of the table."""
    findings = []
    for check in TABLE:
        judgment = check.judge(saved, current)
        if judgment is not None:
            verdict, before, now, why, remedy = judgment
            findings.append(Finding(check.field, before, now, verdict, why, remedy))
    return findings


def with_moves(current: Manifest, moves: Iterable[Move]) -> Manifest:
    """``current`` as it is once a resume has moved the modules again that the saved run had moved."""
    routes = {name: dict(route) for name, route in (current.routes or {}).items()}
    for move in moves:
        for name, route in routes.items():
            if fnmatchcase(name, move.match):
                route["compute"] = move.compute
    return current.model_copy(update={"routes": routes}) if current.routes is not None else current


def in_evaluation(findings: Iterable[Finding]) -> list[Finding]:
    """The same findings for ``validate``, ``test`` and ``predict``, which take the weights and nothing else."""
    remedy = "Evaluation goes on; a fit would be refused."
    return [replace(f, verdict="note", remedy=remedy) if f.verdict == "refuse" else f for f in findings]


def waive(findings: Iterable[Finding], allow: Iterable[str]) -> list[Finding]:
    """The findings with those refusals turned into conversions that the user named."""
    allowed = set(allow)
    return [
        replace(f, verdict="convert", remedy=f"Allowed by allow={[f.field]!r}.", waived=True)
        if f.verdict == "refuse" and f.field in allowed
        else f
        for f in findings
    ]


def refusals(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop a resume."""
    return [finding for finding in findings if finding.verdict == "refuse"]


def check_allow(allow: Any) -> tuple[str, ...]:
    """The fields named in ``AmpPrecision(allow=...)``.

    Raises:
        ValueError: If it is no collection of names, or one of them is none that can be allowed, naming it.
    """
    if isinstance(allow, str) or not isinstance(allow, (Sequence, set, frozenset)):
        raise ValueError(f"AmpPrecision(allow={allow!r}): expected a list of field names, such as allow=['precision'].")
    known = [check.field for check in TABLE if check.waivable]
    for name in allow:
        if name in (check.field for check in TABLE) and name not in known:
            raise ValueError(f"AmpPrecision(allow=[{name!r}]): a difference there is never refused; leave it out.")
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"AmpPrecision(allow=[{name!r}]): there is no such field. {hint}Fields that can be allowed:\n  "
                + ", ".join(known)
            )
    return tuple(dict.fromkeys(allow))
