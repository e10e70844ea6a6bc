"""A census as tables: modules, operations, flags."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_amp_plus.census.census import COLUMNS
from lightning_amp_plus.census.comparing import NOT_COMPARED
from lightning_amp_plus.naming import pattern_of
from lightning_amp_plus.plan_table import cell

if TYPE_CHECKING:
    from lightning_amp_plus.census.census import Census

Rows = list[tuple[str, ...]]

WIDEST = 60
_FEW_NAMES = 4


def tables(census: Census) -> list[Rows]:
    """The tables, each with its header; those without rows are left out."""
    modules: Rows = [("module", "compute", *COLUMNS), *(_module(census, name) for name in census.modules)]
    found = [modules, _ops(census), _flags(census)]
    return [rows for rows in found if len(rows) > 1]


def closing(census: Census) -> list[str]:
    """What stands below them."""
    device = (census.hardware or {}).get("name") or "an unknown device"
    libraries = ", ".join(f"{name} {value}" for name, value in (census.versions or {}).items() if value is not None)
    return [
        f"Step {census.step}: {census.summary()}. Found beside (planned), where they differ.",
        *map(cell, census.notes),
        cell(f"On {device}; {libraries}."),
        f"fingerprint {census.fingerprint}",
    ]


def _module(census: Census, name: str) -> tuple[str, ...]:
    row, planned = census.modules[name], census.planned.get(name, {})
    cells = []
    for column in COLUMNS:
        found, promised = row.get(column, "-"), planned.get(column, "-")
        differs = promised not in NOT_COMPARED and found not in ("-", promised) and column != "accumulator"
        cells.append(f"{found} ({promised})" if differs else found)
    return (cell(name) or "(model)", row.get("compute", "-"), *cells)


def _ops(census: Census) -> Rows:
    """Operations, those alike in one row."""
    alike: dict[tuple[str, ...], dict[str, int]] = {}
    for op in census.ops:
        if op.kind == "in place" and op.phase != "forward":
            continue  # optimizers write in place and nothing else
        counts = alike.setdefault((op.kind, op.phase, op.op, op.dtypes), {})
        counts[op.module] = counts.get(op.module, 0) + op.count
    rows = [(*what, str(sum(counts.values())), _folded(counts)) for what, counts in alike.items()]
    return [("operation", "phase", "op", "dtypes", "count", "module"), *sorted(rows)]


def _flags(census: Census) -> Rows:
    alike: dict[tuple[str, ...], list[str]] = {}
    for flag in census.flags:
        alike.setdefault((flag.kind, flag.op, flag.found, flag.remedy), []).append(flag.module)
    rows = [(kind, _folded(names), op, found, do) for (kind, op, found, do), names in alike.items()]
    return [("flag", "module", "op", "found", "remedy"), *rows]


def _folded(modules: Iterable[Any]) -> str:
    """Names in few words: those that differ in a number are counted under one pattern."""
    alike: dict[str, list[str]] = {}
    for name in modules:
        alike.setdefault(pattern_of(name), []).append(name)
    said = [
        f"{cell(pattern)} ({len(names)})" if len(names) > 1 else cell(names[0]) or "(model)"
        for pattern, names in alike.items()
    ]
    more = len(said) - _FEW_NAMES
    return ", ".join(said[:_FEW_NAMES]) + (f" and {more} more" if more > 0 else "")
