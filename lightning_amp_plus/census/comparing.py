"""What is to be said about a census: against the plan, and against an earlier census. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_amp_plus.autocast_probe import AS_GIVEN
from lightning_amp_plus.census.census import COLUMNS, Census, Flag, OpRow
from lightning_amp_plus.census.record import Event, OpKey, Record
from lightning_amp_plus.watching.ops import joined

# A sum of this many numbers of magnitude 16 is 65536, which FP16 does not have; in BF16 its neighbours are 256 apart.
MANY_ELEMENTS = 4096

_NARROW = ("bf16", "fp16")
_FP8 = ("e4m3", "e5m2")
_COMPARED = ("parameter", "input", "weight", "output", "optimizer", "reduction")
NOT_COMPARED = ("-", AS_GIVEN, "")  # what a column says that says nothing of dtypes
_REMEDIES = {
    "parameter": "It was converted after the plan was applied (.half(), .to(dtype)): leave that to the policy.",
    "input": "Find what switches autocast off, or on, around it, or write the Rule that says what it is to compute in.",
    "weight": "Find what switches autocast off, or on, around it, or write the Rule that says what it is to compute in.",
    "output": "Its forward casts what it returns: remove that cast, or write the Rule that says what it is to return.",
    "optimizer": "The optimizer makes its state in another dtype than the parameters': look at its options.",
    "reduction": "Ranks exchange gradients in it: see the policy's reduce, the strategy's config and its comm hooks.",
}
_OFF_ROUTE = (
    "Its inputs are not what autocast would make of them: remove the autocast region or the cast around it, or write the "
    "Rule that says what the module is to compute in."
)
_UNFUSED = (
    "torch computes attention in FP32 where none of its fused kernels can do it (dropout on a CPU, some masks): leave that "
    "out of the attention where speed matters; nothing is lost in digits."
)
# Kinds of operations that are compared with an earlier census.
_KINDS = ("gemm", "attention", "softmax", "norm", "reduction", "loss", "communication")


def plan_columns(route: Mapping[str, Any], reduce: str | None) -> dict[str, str]:
    """What a route promises of a census's columns.

    Args:
        route: As of ``Route.to_dict``.
        reduce: The policy's format of gradient communication; ``None`` where no gradients are exchanged.
    """
    columns = {name: str(route.get("params" if name == "parameter" else name, "-")) for name in COLUMNS}
    return {**columns, "gradient": "-", "reduction": reduce or "-"}


def modules_of(
    record: Record,
    routes: Mapping[str, Mapping[str, Any]],
    planned: Mapping[str, Mapping[str, str]],
    fp8_off: Iterable[str] = (),
) -> dict[str, dict[str, str]]:
    """The census's rows of modules, in the plan's order.

    Args:
        record: What was seen.
        routes: As of ``Route.to_dict``, by name.
        planned: What each route promises of the columns.
        fp8_off: Modules in FP8 by their route that compute in BF16 for the time being, and are rows of BF16.
    """
    off = set(fp8_off)
    rows: dict[str, dict[str, str]] = {}
    for name, route in routes.items():
        found = record.columns.get(name, {})
        row = {column: joined(found.get(column, ())) for column in COLUMNS}
        row["accumulator"] = _accumulator(row, route, planned.get(name, {}))
        compute = "bf16" if name in off else str(route.get("compute", "-"))
        rows[name] = {"type": str(route.get("module_type", "-")), "compute": compute, **row}
    return rows


def _accumulator(row: Mapping[str, str], route: Mapping[str, Any], planned: Mapping[str, str]) -> str:
    """No operation shows what it adds up in. The plan's probe measured it, for an operation in just these dtypes."""
    promised = planned.get("accumulator", "-")
    if promised in NOT_COMPARED or row["weight"] in NOT_COMPARED or row["weight"] != planned.get("weight"):
        return "-"
    return f"{promised} {'assumed' if route.get('compute') == 'fp8' else 'measured'}"


def ops_of(record: Record) -> tuple[OpRow, ...]:
    """The census's rows of operations."""
    rows: dict[tuple[str, str, str, str, str], int] = {}
    for key, (count, _) in record.rows.items():
        which = (key.module, key.phase, key.kind, key.op, key.dtypes)
        rows[which] = rows.get(which, 0) + count
    return tuple(OpRow(*which, count) for which, count in rows.items())


def flags_of(
    record: Record,
    modules: Mapping[str, Mapping[str, str]],
    planned: Mapping[str, Mapping[str, str]],
    fp8_off: Iterable[str] = (),
) -> tuple[Flag, ...]:
    """What differs from the plan, and what costs digits.

    Args:
        record: What was seen.
        modules: The census's rows.
        planned: What each route promises of their columns.
        fp8_off: Modules in FP8 by their route that compute in BF16 for the time being.
    """
    off = set(fp8_off)
    flags = [*_off_plan(modules, planned, off)]
    blamed = {flag.module for flag in flags if flag.op in ("input", "weight")}
    flags += _off_route(record.rows, modules, planned, blamed)
    kept = {name for name, row in modules.items() if _says_all(row, planned.get(name, {}))}
    flags += _of_casts(record.events, modules, kept)
    flags += _of_reductions(record.rows)
    return tuple({(flag.kind, flag.module, flag.op, flag.found): flag for flag in flags}.values())


def _off_plan(
    modules: Mapping[str, Mapping[str, str]], planned: Mapping[str, Mapping[str, str]], fp8_off: set[str]
) -> Iterator[Flag]:
    for name, row in modules.items():
        for column in _COMPARED:
            if name in fp8_off and column in ("input", "weight"):
                continue
            found, promised = row[column], planned.get(name, {}).get(column, "-")
            if found in NOT_COMPARED or promised in NOT_COMPARED or found == promised:
                continue
            yield Flag("off plan", name, column, f"{found}, planned {promised}", _REMEDIES[column])


def _off_route(
    rows: Mapping[OpKey, Any],
    modules: Mapping[str, Mapping[str, str]],
    planned: Mapping[str, Mapping[str, str]],
    blamed: set[str],
) -> Iterator[Flag]:
    unfused = {key.module for key in rows if key.op == "aten._safe_softmax" and key.lead == "fp32"}
    seen = set(blamed)
    for key in rows:
        row = modules.get(key.module, {})
        compute, weight = row.get("compute", "-"), row.get("weight", "-")
        if key.kind not in ("gemm", "attention") or key.phase not in ("forward", "backward") or key.module in seen:
            continue
        allowed = {"bf16", *_FP8} if compute == "fp8" else {compute}
        if weight == planned.get(key.module, {}).get("weight"):
            allowed.add(weight)  # the plan knows that autocast leaves this layer alone
        if compute == "-" or key.lead in allowed or key.lead in ("-", "fp64"):
            continue
        seen.add(key.module)  # the backward follows the forward
        found = f"{key.dtypes} in the {key.phase}, route {compute}"
        yield Flag("off route", key.module, key.op, found, _UNFUSED if key.module in unfused else _OFF_ROUTE)


def _says_all(row: Mapping[str, str], planned: Mapping[str, str]) -> bool:
    """Whether the plan's probe ran a module's operation, and found the same: casts inside are torch's own."""
    promised = {column: planned.get(column, "-") for column in ("input", "output")}
    return set(promised.values()) != {"-"} and all(
        dtype in NOT_COMPARED or row[column] == dtype for column, dtype in promised.items()
    )


def _of_casts(events: Iterable[Event], modules: Mapping[str, Mapping[str, str]], kept: set[str]) -> Iterator[Flag]:
    seen: set[tuple[str, str]] = set()
    for event in events:
        compute = modules.get(event.module, {}).get("compute", "-")
        if compute == "fp8" or (event.module in kept and event.kind != "chain"):
            continue  # scales are found in FP32
        flag = _of_cast(event, compute)
        if flag is not None and (event.kind == "chain" or (flag.kind, flag.module) not in seen):
            seen.add((flag.kind, flag.module))  # one operation of an island tells where it is
            yield flag


def _of_cast(event: Event, compute: str) -> Flag | None:
    rule = "a Rule with compute='fp32' for the module"
    if event.kind == "chain":
        where = f", the first in {event.other or '(model)'}" if event.other != event.module else ""
        found, do = f"{event.dtypes}{where}", "Nothing was computed in between: remove the first of the two casts."
        return Flag("double cast", event.module, event.op, found, do)
    if event.kind == "downcast":
        if compute != "fp32":
            return None
        do = f"Remove the cast, or give the module another Rule than compute={compute!r}."
        return Flag("cast against route", event.module, event.op, f"{event.dtypes}, route {compute}", do)
    if compute not in _NARROW:
        return None
    if event.kind == "promotion":
        found = f"{event.dtypes}: a parameter or buffer of the module is FP32, and its result too"
        do = f"Cast it to the other operand's dtype in forward, or write {rule} if FP32 is meant."
    else:
        found = f"cast {event.dtypes} in the module, and computed with there"
        do = f"Write {rule} if FP32 is meant (a norm, a softmax), so that the plan says so; else remove the cast."
    return Flag("fp32 island", event.module, event.op, found, do)


def _of_reductions(rows: Mapping[OpKey, Any]) -> Iterator[Flag]:
    for key, (_, elements) in rows.items():
        result = key.dtypes.rpartition(" -> ")[2]
        if elements >= MANY_ELEMENTS and key.lead in _NARROW and result in _NARROW:
            yield Flag(
                "16-bit reduction",
                key.module,
                key.op,
                f"{elements} elements to one {result}",
                "Let it add up to FP32: dtype=torch.float32 where the function takes it, or .float() before it.",
            )


# ---------------------------------------------------------------- census and census


@dataclass(frozen=True)
class Change:
    """What ran in another dtype than in an earlier census, its route being the same.

    Attributes:
        module: Where.
        what: The column, or the kind of operation and its phase.
        before: What it was.
        now: What it is.
    """

    module: str
    what: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.module or '(model)'}, {self.what}: was {self.before}, is {self.now}"


def changes(before: Census, now: Census) -> list[Change]:
    """Modules and operations whose dtypes differ, in modules that are in both and have the same route.

    A kernel of another name in the same dtypes is no change; what one of the two did not see is none either.
    """
    found: list[Change] = []
    alike = {
        name
        for name, row in now.modules.items()
        if name in before.modules and row.get("compute") == before.modules[name].get("compute")
    }
    for name in [name for name in now.modules if name in alike]:
        for column in COLUMNS:
            was, current = before.modules[name].get(column, "-"), now.modules[name].get(column, "-")
            if "-" not in (was, current) and was != current:
                found.append(Change(name, column, was, current))
    earlier, later = _dtypes_by_kind(before.ops), _dtypes_by_kind(now.ops)
    for place, current in later.items():
        module, phase, kind = place
        was = earlier.get(place, current)
        # A pseudo-module is in no plan; the GEMMs of a module are its columns where it has any.
        if was != current and (module in alike or module not in now.modules):
            if kind == "gemm" and any(change.module == module for change in found):
                continue
            found.append(Change(module, f"{kind} in the {phase}", was, current))
    return found


def _dtypes_by_kind(ops: Iterable[OpRow]) -> dict[tuple[str, str, str], str]:
    found: dict[tuple[str, str, str], set[str]] = {}
    for row in ops:
        if row.kind in _KINDS:
            found.setdefault((row.module, row.phase, row.kind), set()).add(row.dtypes)
    return {place: ", ".join(sorted(dtypes)) for place, dtypes in found.items()}


def upgrades(before: Census, now: Census) -> list[str]:
    """What differs in libraries and hardware, in words."""
    found = []
    for section in ("versions", "hardware"):
        old, new = getattr(before, section) or {}, getattr(now, section) or {}
        for name in [name for name in new if name in old and new[name] != old[name]]:
            found.append(f"{name} {old[name] or 'none'} -> {new[name] or 'none'}")
    return found
