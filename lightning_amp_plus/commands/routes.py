"""The part of ``inspect`` that is about modules: their routes, many of which are alike, and those moved while training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_amp_plus.checkpoint.manifest import Manifest
from lightning_amp_plus.naming import pattern_of
from lightning_amp_plus.plan_table import cell

UNKNOWN = "not recorded"

Rows = list[tuple[str, ...]]

_FEW_NAMES = 6
_ROUTE_COLUMNS = {"compute": "compute", "params": "parameter", "input": "input", "weight": "weight", "output": "output",
                  "accumulator": "accumulator", "optimizer": "optimizer", "rule": "rule", "reason": "reason"}  # fmt: skip


def moves_tables(manifest: Manifest) -> Iterator[Rows]:
    """The modules moved while training, if any were."""
    rows = [
        (cell(m.match), m.compute, UNKNOWN if m.step is None else cell(m.step), cell(m.reason)) for m in manifest.moves
    ]
    if rows:
        yield [("module", "moved to", "at step", "reason"), *rows]


def route_tables(manifest: Manifest, every_module: bool) -> Iterator[Rows]:
    """What every module got, those alike in one row unless each is wanted; none where nothing was recorded."""
    if not manifest.routes:
        return
    columns = [key for key in _ROUTE_COLUMNS if any(key in route for route in manifest.routes.values())]
    routes = {name: tuple(cell(route.get(key, "-")) for key in columns) for name, route in manifest.routes.items()}
    header = ("module", *(_ROUTE_COLUMNS[key] for key in columns))
    if every_module:
        yield [header, *((_name(name), *route) for name, route in routes.items())]
        return
    alike: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, route in routes.items():
        alike.setdefault(route, []).append((name, manifest.routes[name].get("module_type", "")))
    yield [header, *((folded(names), *route) for route, names in alike.items())]


def folded(modules: Iterable[tuple[str, str]]) -> str:
    """Names of modules in few words: those of a class that differ in a number are counted under one pattern.

    Args:
        modules: Name and class of each.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for name, kind in modules:
        alike.setdefault((pattern_of(name), kind), []).append(name)
    said = [
        f"{cell(pattern)} ({cell(f'{len(names)} {kind}')})" if len(names) > 1 else _name(names[0])
        for (pattern, kind), names in alike.items()
    ]
    more = sum(map(len, list(alike.values())[_FEW_NAMES:]))
    return ", ".join(said[:_FEW_NAMES]) + (f" and {more} more" if more else "")


def _name(name: str) -> str:
    return cell(name) or "(model)"
