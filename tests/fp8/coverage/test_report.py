"""Coverage as data: shares, reasons, and what people see of it."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from lightning_amp_plus.fp8.coverage.report import (
    REASONS,
    ROLES,
    TIMES,
    Coverage,
    GemmRow,
    Shares,
    percent,
    shares_of,
    short,
    sums,
    time_shares,
)


def row(module: str, flops: int, **other: Any) -> GemmRow:
    """One GEMM in native FP8, unless told otherwise."""
    values: dict[str, Any] = {
        "role": "fprop", "kind": "gemm", "op": "aten._scaled_mm", "format": "e4m3", "engine": "native", "reason": "",
        "region": False, "count": 1,
    }  # fmt: skip
    return GemmRow(module=module, flops=flops, **{**values, **other})


def bf16(module: str, flops: int, reason: str = "rule", **other: Any) -> GemmRow:
    return row(module, flops, **{"op": "aten.mm", "format": "bf16", "reason": reason, **other})


def emulated(module: str, flops: int, **other: Any) -> GemmRow:
    return row(module, flops, **{"op": "lightning_amp_plus.fp8_gemm", "engine": "emulated", **other})


MIXED = Coverage(
    step=7,
    rows=(
        row("blocks.0.up", 300, count=2),
        emulated("blocks.1.up", 200),
        bf16("blocks.0.attention", 250, "op", kind="attention", op="aten.bmm", count=4),
        bf16("head", 150, "rule", role="dgrad"),
        bf16("head", 50, "shape", count=2),
        bf16("blocks.1.up", 50, "demoted", role="recompute"),
        bf16("(optimizer)", 9000, "op", role="optimizer", count=90),
    ),
    time={"gemm": 0.5, "cast": 0.3, "rest": 0.2},
    notes=("Something else.",),
)


# ---------------------------------------------------------------- shares


def test_shares_of_all_work_but_the_optimizers():
    assert MIXED.shares() == Shares(flops=0.5, gemms=3 / 11, native_flops=0.3, native_gemms=2 / 11)


def test_without_attention():
    assert MIXED.shares(attention=False) == Shares(500 / 750, 3 / 7, 300 / 750, 2 / 7)


def test_what_is_emulated_is_fp8_and_not_native():
    only = Coverage(0, (emulated("a", 10), bf16("b", 30)))
    assert only.shares() == Shares(0.25, 0.5, 0.0, 0.0)
    assert only.rows[0].shown_format == "e4m3 (emulated)" and only.rows[0].in_fp8


def test_reasons_in_their_order_as_shares_of_all_flops():
    assert MIXED.fallbacks() == {"rule": 0.15, "shape": 0.05, "op": 0.25, "demoted": 0.05}
    assert list(MIXED.fallbacks()) == ["rule", "shape", "op", "demoted"]
    assert sum(MIXED.fallbacks().values()) + MIXED.shares().flops == 1.0


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_counts(reason):
    found = Coverage(0, (row("a", 3), bf16("b", 1, reason)))
    assert found.fallbacks() == {reason: 0.25} and found.shares().flops == 0.75
    assert f"{reason}: {REASONS[reason]}." in str(found)


def test_by_module():
    assert MIXED.by_module() == {
        "blocks.0.up": Shares(1.0, 1.0, 1.0, 1.0),
        "blocks.1.up": Shares(0.8, 0.5, 0.0, 0.0),
        "blocks.0.attention": Shares(0.0, 0.0, 0.0, 0.0),
        "head": Shares(0.0, 0.0, 0.0, 0.0),
    }


@pytest.mark.parametrize("rows", [(), (bf16("(optimizer)", 10, "op", role="optimizer"),)])
def test_no_work_has_no_share(rows):
    empty = Coverage(0, rows)
    assert all(math.isnan(value) for value in vars(empty.shares()).values())
    assert empty.by_module() == empty.fallbacks() == {}
    assert empty.summary() == "no GEMM ran" and "Step 0: no GEMM ran." in str(empty)


def test_gemms_of_no_known_work_count_as_gemms():
    found = Coverage(0, (bf16("a", 0, "op"), row("b", 0)))
    assert found.shares().gemms == 0.5 and math.isnan(found.shares().flops)
    assert found.fallbacks() == {"op": 0.0}
    assert found.summary() == "no FLOPs, as of batches without elements, in 2 GEMMs, 50 % of them in FP8"


def test_sums_over_ranks_are_divided_after_they_are_added():
    one, other = sums([row("a", 100)]), sums([bf16("a", 300, count=3)])
    together = shares_of(left + right for left, right in zip(one, other, strict=True))
    assert together == Shares(0.25, 0.25, 0.25, 0.25)


def test_shares_of_time():
    assert time_shares([1, 2, 5]) == {"gemm": 0.125, "cast": 0.25, "rest": 0.625}
    assert time_shares([0, 0, 0]) == {}
    assert tuple(time_shares([1, 1, 1])) == TIMES


# ---------------------------------------------------------------- plain types


def test_round_trip_through_json():
    values = json.loads(json.dumps(MIXED.to_dict()))
    assert Coverage.from_dict(values) == MIXED
    assert values["coverage"] == {"flops": 0.5, "gemms": 3 / 11, "native_flops": 0.3, "native_gemms": 2 / 11}
    assert values["coverage_without_attention"]["flops"] == 500 / 750
    assert values["rows"][1]["engine"] == "emulated" and values["step"] == 7


def test_of_no_work_too_in_json_that_every_reader_takes():
    values = json.loads(json.dumps(Coverage(3).to_dict(), allow_nan=False))
    assert Coverage.from_dict(values) == Coverage(3)
    assert values["coverage"]["flops"] is None


# ---------------------------------------------------------------- what people see


def test_the_table_folds_blocks_and_names_what_it_folded():
    lines = str(MIXED).splitlines()
    assert lines[0].split() == ["module", "role", "op", "format", "GEMMs", "FLOPs", "share", "not", "FP8"]
    cells = [re_split(line) for line in lines[2:9]]
    assert cells == [
        ["blocks.0.up", "fprop", "_scaled_mm", "e4m3", "2", "300", "30 %"],
        ["blocks.1.up", "fprop", "fp8_gemm", "e4m3 (emulated)", "1", "200", "20 %"],
        ["blocks.1.up", "recompute", "mm", "bf16", "1", "50", "5 %", "demoted"],
        ["blocks.0.attention", "fprop", "bmm", "bf16", "4", "250", "25 %", "op"],
        ["head", "dgrad", "mm", "bf16", "1", "150", "15 %", "rule"],
        ["head", "fprop", "mm", "bf16", "2", "50", "5 %", "shape"],
        ["(optimizer)", "optimizer", "mm", "bf16", "90", "9 k", "-", "op"],
    ]
    below = "\n".join(lines[9:])
    assert below.startswith(
        "Step 7: 50 % of the FLOPs in FP8, 30 % natively (66.7 % without attention), 27.3 % of 11 GEMMs; not in FP8: rule "
        "15 %, shape 5 %, op 25 %, demoted 5 %.\nTime: GEMMs 50 %, casts and quantization 30 %, the rest 20 %.\n"
    )
    assert below.endswith("Something else.")


def re_split(line: str) -> list[str]:
    return [part.strip() for part in line.split("  ") if part.strip()]


def test_alike_blocks_are_one_line_with_their_roles_in_order():
    rows = [row(f"blocks.{i}.up", 10, role=role) for i in range(3) for role in ("wgrad", "fprop", "dgrad")]
    [line] = str(Coverage(0, tuple(rows))).splitlines()[2:3]
    assert re_split(line) == ["blocks.*.up (3)", "fprop dgrad wgrad", "_scaled_mm", "e4m3", "9", "90", "100 %"]


def test_the_model_itself_and_compiled_regions_have_a_name():
    rows = bf16("", 1, "op"), row("block", 1, region=True), row("", 1, region=True)
    names = [re_split(line)[0] for line in str(Coverage(0, rows)).splitlines()[2:5]]
    assert names == ["(model)", "(model) (compiled)", "block (compiled)"]


def test_one_compiled_block_keeps_its_number_and_its_mark():
    found = str(Coverage(0, (row("blocks.3", 1, region=True),))).splitlines()[2]
    assert re_split(found)[0] == "blocks.3 (compiled)"


def test_every_role_is_shown():
    rows = tuple(row(f"m{i}", 1, role=role) for i, role in enumerate((*ROLES, "optimizer")))
    assert [re_split(line)[1] for line in str(Coverage(0, rows)).splitlines()[2:8]] == [*ROLES, "optimizer"]


@pytest.mark.parametrize(("width", "left_out"), [(60, True), (250, False)])
def test_in_a_terminal_it_fits(width, left_out):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(MIXED)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "FP8 coverage, step 7" in text and ("no room for" in text) == left_out
    assert ("fp8_gemm" in text) != left_out


def test_names_with_markup_are_shown_as_they_are():
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(Coverage(0, (bf16("[bold]x", 1),), notes=("[red]note",)))
    text = console.export_text()
    assert "[bold]x" in text and "[red]note" in text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"), (1.0, "100 %"), (0.5, "50 %"), (0.12345, "12.3 %"), (0.0004, "< 0.1 %"), (0.0005, "0.05 %"),
        (0.001, "0.1 %"), (0.9996, "> 99.9 %"), (0.999, "99.9 %"), (0.9995, "> 99.9 %"), (math.nan, "-"),
    ],
)  # fmt: skip
def test_percent(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (999, "999"), (1000, "1 k"), (1536, "1.54 k"), (1.34e9, "1.34 G"), (2e12, "2 T"), (5e15, "5 P"),
        (999_999, "1 M"), (3_000_000, "3 M"), (1e18, "1 E"), (2.5e21, "2.5 Z"), (999.6, "1 k"), (999.4, "999"),
    ],
)  # fmt: skip
def test_short(number, text):
    assert short(number) == text
