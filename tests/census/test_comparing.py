"""What is said about a census: against the plan, and against an earlier one. Pure functions on hand-made records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_amp_plus.census import Census
from lightning_amp_plus.census.census import COLUMNS, OpRow
from lightning_amp_plus.census.comparing import (
    MANY_ELEMENTS,
    changes,
    flags_of,
    modules_of,
    plan_columns,
    upgrades,
)
from lightning_amp_plus.census.record import Event, OpKey, Record

ROUTE = {
    "module_type": "Linear",
    "compute": "bf16",
    "params": "fp32",
    "input": "bf16",
    "weight": "bf16",
    "output": "bf16",
    "accumulator": "fp32",
    "optimizer": "fp32",
}
OPEN = {**ROUTE, "input": "-", "output": "-"}  # a module of the user's
FOUND = {
    "parameter": "fp32",
    "input": "bf16",
    "weight": "bf16",
    "output": "bf16",
    "gradient": "fp32",
    "optimizer": "fp32",
    "reduction": "fp32",
}


def record(changed: dict[str, str] | None = None, **parts: Any) -> Record:
    columns = {column: {dtype} for column, dtype in {**FOUND, **(changed or {})}.items()}
    return Record(columns={"a": columns}, **parts)


def judged(seen: Record, route: dict[str, str] = ROUTE, off: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    planned = {"a": plan_columns(route, "fp32")}
    modules = modules_of(seen, {"a": route}, planned)
    return [(flag.kind, flag.op, flag.found) for flag in flags_of(seen, modules, planned, off)]


def test_as_planned_is_nothing_to_say():
    assert judged(record()) == []


@pytest.mark.parametrize("column", ["parameter", "input", "weight", "output", "optimizer", "reduction"])
def test_each_column_is_compared_with_the_route(column):
    found = judged(record({column: "fp16"}))
    assert [(kind, op) for kind, op, _ in found] == [("off plan", column)]
    assert f"fp16, planned {FOUND[column]}" in found[0][2]


@pytest.mark.parametrize("open_", ["-", "as given"])
def test_what_the_plan_leaves_open_is_not_compared(open_):
    route = {**ROUTE, "input": open_, "weight": open_, "output": open_}
    assert judged(record({"input": "fp32", "weight": "fp16", "output": "fp32"}), route) == []


def test_fp8_that_has_not_begun_is_not_off_plan():
    route = {**ROUTE, "compute": "fp8", "input": "e4m3", "weight": "e4m3"}
    assert {op for _, op, _ in judged(record(), route)} == {"input", "weight"}
    assert judged(record(), route, ("a",)) == []


def test_an_accumulator_is_measured_by_the_probe_or_assumed_or_unknown():
    def accumulator(found: dict[str, str], route: dict[str, str]) -> str:
        planned = {"a": plan_columns(route, None)}
        return modules_of(record(found), {"a": route}, planned)["a"]["accumulator"]

    fp8 = {**ROUTE, "compute": "fp8", "weight": "e4m3"}
    assert accumulator({}, ROUTE) == "fp32 measured"
    assert accumulator({"weight": "e4m3"}, fp8) == "fp32 assumed"
    assert accumulator({"weight": "fp16"}, ROUTE) == "-"  # the probe was of another operation
    assert accumulator({}, {**ROUTE, "accumulator": "-"}) == "-"


def key(kind: str, lead: str, dtypes: str, phase: str = "forward", module: str = "a") -> OpKey:
    return OpKey(module, phase, kind, f"aten.{kind}", lead, dtypes)


@pytest.mark.parametrize(
    ("compute", "lead", "flagged"),
    [
        ("bf16", "bf16", False),
        ("bf16", "fp32", True),
        ("bf16", "fp16", True),
        ("fp32", "bf16", True),
        ("fp32", "fp64", False),
        ("fp8", "e4m3", False),
        ("fp8", "bf16", False),
        ("fp8", "fp32", True),
    ],
)
@pytest.mark.parametrize("kind", ["gemm", "attention"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_gemm_in_another_dtype_than_the_route_is_flagged(compute, lead, flagged, kind, phase):
    route = {**ROUTE, "compute": compute, "input": "-", "weight": "-", "output": "-"}
    found = judged(record(rows={key(kind, lead, f"{lead} -> {lead}", phase): [1, 0]}), route)
    assert [kind for kind, _, _ in found] == ["off route"] * flagged


def test_forward_and_backward_are_one_flag():
    rows = {key("gemm", "fp32", "fp32 -> fp32", phase): [1, 0] for phase in ("forward", "backward")}
    assert len(judged(record(rows=rows), {**OPEN, "weight": "-"})) == 1


def test_attention_that_torch_computes_in_fp32_has_a_remedy_of_its_own():
    rows = {
        OpKey("a", "forward", "softmax", "aten._safe_softmax", "fp32", "fp32 -> fp32"): [1, 0],
        key("gemm", "fp32", "fp32 -> fp32"): [1, 0],
    }
    seen, planned = record(rows=rows), {"a": plan_columns(OPEN, None)}
    [flag] = flags_of(seen, modules_of(seen, {"a": OPEN}, planned), planned)
    assert "fused kernels" in flag.remedy


def test_what_a_column_says_no_operation_repeats():
    rows = {key("gemm", "fp32", "fp32 -> fp32"): [1, 0]}
    assert [kind for kind, _, _ in judged(record({"weight": "fp32"}, rows=rows))] == ["off plan"]


@pytest.mark.parametrize(
    ("event", "compute", "kind"),
    [
        ("upcast used", "bf16", "fp32 island"),
        ("promotion", "fp16", "fp32 island"),
        ("upcast used", "fp32", None),
        ("upcast used", "fp8", None),
        ("downcast", "fp32", "cast against route"),
        ("downcast", "bf16", None),
        ("chain", "bf16", "double cast"),
        ("chain", "fp32", "double cast"),
    ],
)
def test_casts_are_judged_by_the_route(event, compute, kind):
    seen = record({}, events={Event(event, "a", "aten.x", "fp32 -> bf16", "b"): None})
    found = judged(seen, {**OPEN, "compute": compute, "weight": "-"})
    assert [k for k, _, _ in found] == ([] if kind is None else [kind])


def test_a_layer_that_computes_as_its_plan_says_casts_as_it_likes():
    events = {Event("upcast used", "a", "aten.mul", "bf16 -> fp32"): None}
    assert judged(record(events=events)) == []
    assert judged(record(events=events), {**ROUTE, "output": "as given"}) == []
    assert judged(record(events=events), OPEN) != []


def test_an_island_is_named_once():
    events = {Event("upcast used", "a", f"aten.{op}", "bf16 -> fp32"): None for op in ("mul", "add", "sub")}
    assert [op for _, op, _ in judged(record(events=events), OPEN)] == ["aten.mul"]


@pytest.mark.parametrize(
    ("dtypes", "elements", "flagged"),
    [
        ("bf16 -> bf16", MANY_ELEMENTS, True),
        ("bf16 -> bf16", MANY_ELEMENTS - 1, False),
        ("bf16 -> fp32", MANY_ELEMENTS, False),
        ("fp32 -> fp32", MANY_ELEMENTS, False),
        ("fp16 -> fp16", 10**6, True),
    ],
)
def test_sums_of_many_elements_in_16_bits_are_flagged(dtypes, elements, flagged):
    seen = record(rows={key("reduction", dtypes[:4], dtypes): [1, elements]})
    assert [kind for kind, _, _ in judged(seen)] == ["16-bit reduction"] * flagged


# ---------------------------------------------------------------- census and census


def census(**changed: Any) -> Census:
    row = {"type": "Linear", "compute": "bf16", **dict.fromkeys(COLUMNS, "bf16")}
    plain: dict[str, Any] = {
        "step": 0,
        "modules": {"": dict(row), "a": dict(row)},
        "ops": (
            OpRow("", "forward", "softmax", "aten._softmax", "fp32 -> fp32", 1),
            OpRow("a", "forward", "attention", "aten._scaled_dot_product_flash_attention", "bf16 -> bf16", 2),
        ),
        "versions": {"torch": "2.12.0", "python": "3.11"},
        "hardware": {"name": "H100", "driver": "CUDA 12.8"},
    }
    return Census(**{**plain, **changed})


def with_column(before: Census, module: str, column: str, dtype: str) -> Census:
    modules = {name: dict(row) for name, row in before.modules.items()}
    modules[module][column] = dtype
    return replace(before, modules=modules)


def test_the_same_census_has_not_changed():
    assert changes(census(), census()) == []
    assert changes(census(), replace(census(), step=9, versions={"torch": "2.13.0"})) == []


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_is_compared_with_the_earlier_census(column):
    [change] = changes(census(), with_column(census(), "a", column, "fp32"))
    assert str(change) == f"a, {column}: was bf16, is fp32"


def test_what_one_census_did_not_see_has_not_changed():
    assert changes(census(), with_column(census(), "a", "optimizer", "-")) == []
    assert changes(with_column(census(), "a", "optimizer", "-"), census()) == []


def test_a_module_that_was_moved_is_meant_to_differ():
    moved = with_column(with_column(census(), "a", "compute", "fp32"), "a", "weight", "fp32")
    assert changes(census(), moved) == []


def test_a_softmax_in_another_dtype_is_a_change_and_a_kernel_of_another_name_is_none():
    ops = census().ops
    [change] = changes(census(), census(ops=(replace(ops[0], dtypes="bf16 -> bf16"), ops[1])))
    assert str(change) == "(model), softmax in the forward: was fp32 -> fp32, is bf16 -> bf16"
    assert changes(census(), census(ops=(ops[0], replace(ops[1], op="aten._cudnn_attention")))) == []


def test_upgrades_name_both_versions():
    later = census(versions={"torch": "2.13.0", "python": "3.11"}, hardware={"name": "H200", "driver": "CUDA 12.8"})
    assert upgrades(census(), later) == ["torch 2.12.0 -> 2.13.0", "name H100 -> H200"]


# ---------------------------------------------------------------- the census itself


def test_a_census_comes_back_from_plain_types():
    assert Census.from_dict(census().to_dict()) == census()


def test_the_fingerprint_is_of_dtypes_and_of_nothing_else():
    fingerprint = census().fingerprint
    assert len(fingerprint) == 64
    ops = census().ops
    same = replace(census(), step=7, versions=None, notes=("x",), ops=(ops[1], replace(ops[0], count=5)))
    assert same.fingerprint == fingerprint
    assert with_column(census(), "a", "weight", "fp32").fingerprint != fingerprint
    assert census(ops=ops[:1]).fingerprint != fingerprint


def test_modules_off_plan_are_counted():
    seen = record({"weight": "fp32", "input": "fp32"})
    planned = {"a": plan_columns(ROUTE, None)}
    modules = modules_of(seen, {"a": ROUTE}, planned)
    flags = flags_of(seen, modules, planned)
    assert Census(0, modules, flags=flags).summary() == "0 of 1 modules as planned, 2 flags"
