"""The report on a window: what it says, and what reading it costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus.step_report import StepReport, Values, Verdictless, resolve


def scalar(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(float(value), dtype=dtype)


def on_device(overflow: bool = False, scale: float = 8.0, after: float = 8.0, **values: Any) -> StepReport:
    return StepReport(3, 2, 1, Values(scalar(overflow), scale=scalar(scale), next_scale=scalar(after), **values))


def on_host(overflow: bool = False, scale: float = 8.0, after: float = 8.0, **values: Any) -> StepReport:
    return StepReport(3, 2, 1, Values(overflow, scale=scale, next_scale=after, **values))


BOTH = pytest.mark.parametrize("make", [on_device, on_host])


class _Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Reads]:
    """Counts what leaves the device: single values (item, bool, float) and whole tensors (tolist, cpu, numpy)."""
    reads = _Reads()

    def counted(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads.count += 1
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, call)

    for name in ("tolist", "cpu", "numpy"):
        counted(name)
    with reads:
        yield reads


# ---------------------------------------------------------------- what it says


@BOTH
def test_an_applied_window(make: Any) -> None:
    report = make(scale=8.0, after=16.0, grad_norm=scalar(3.5), losses=(scalar(1.0),))
    assert (report.step, report.window, report.optimizer) == (3, 2, 1)
    assert report.outcome == "applied"
    assert (report.scale, report.next_scale, report.grad_norm) == (8.0, 16.0, 3.5)
    assert report.overflow_origin is None
    assert report.overflow_ranks == ()


@BOTH
@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_an_overflow_with_a_bad_loss_began_in_forward(make: Any, loss: float) -> None:
    report = make(True, after=4.0, losses=(scalar(1.0), scalar(loss), scalar(1.0)))
    assert report.outcome == "skipped_overflow"
    assert report.overflow_origin == "forward"
    assert report.overflow_ranks == (0,)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_an_overflow_with_finite_losses_began_in_backward(make: Any, dtype: torch.dtype) -> None:
    report = make(True, losses=(scalar(1.0, dtype), scalar(torch.finfo(dtype).max, dtype)))
    assert report.overflow_origin == "backward"


@BOTH
@pytest.mark.parametrize(("forward", "origin"), [(0.0, "backward"), (2.0, "forward")])
def test_what_all_ranks_agreed_on_decides_the_origin(make: Any, forward: float, origin: str) -> None:
    report = make(True, forward_overflow=scalar(forward), ranks=(1, 3))
    assert report.overflow_origin == origin
    assert report.overflow_ranks == (1, 3)


@BOTH
def test_the_ranks_of_an_overflow_are_none_until_all_ranks_were_asked(make: Any) -> None:
    report = make(True, found_here=scalar(1.0))
    assert report.overflow_ranks == ()
    report.values.ranks = (0, 2)
    assert report.overflow_ranks == (0, 2)


@BOTH
def test_an_overflow_of_which_no_loss_is_known_counts_as_backward(make: Any) -> None:
    assert make(True).overflow_origin == "backward"


@pytest.mark.parametrize("verdictless", ["skipped_no_grads", "skipped_no_backward"])
def test_a_window_without_a_verdict_says_why(verdictless: Verdictless) -> None:
    report = StepReport(0, 0, 0, Values(), verdictless)
    assert report.outcome == verdictless
    assert report.applied is False
    assert (report.overflow_origin, report.overflow_ranks) == (None, ())
    assert (report.scale, report.next_scale, report.grad_norm) == (1.0, 1.0, None)


@pytest.mark.parametrize("overflow", [False, True])
def test_whether_it_was_applied_is_told_without_a_transfer(transfers: _Reads, overflow: bool) -> None:
    on_the_device, known = on_device(overflow).applied, on_host(overflow).applied
    assert transfers.count == 0
    assert isinstance(on_the_device, Tensor) and on_the_device.shape == () and known is not overflow
    assert bool(on_the_device) is not overflow
    assert StepReport(0, 0, 0, Values(scalar(0.0)), "skipped_no_grads").applied is False


def test_a_device_verdict_above_1_is_an_overflow() -> None:
    report = StepReport(0, 0, 0, Values(scalar(2.0)))
    assert report.outcome == "skipped_overflow"


def test_values_come_out_as_plain_types() -> None:
    report = on_device(True, grad_norm=scalar(1.0), losses=(scalar(1.0),))
    assert [type(v) for v in (report.scale, report.next_scale, report.grad_norm)] == [float, float, float]
    assert report.values.found_inf is True
    assert report.values.forward_overflow is False


def test_an_fp64_norm_keeps_its_digits() -> None:
    value = 1 + 2.0**-40
    report = on_device(scale=3.0, grad_norm=scalar(value, torch.float64), losses=(scalar(1.0, torch.float16),))
    assert (report.grad_norm, report.scale) == (value, 3.0)


def test_an_fp64_norm_beyond_fp32_is_not_infinite() -> None:
    assert on_device(grad_norm=scalar(2e45, torch.float64)).grad_norm == 2e45


def test_scalars_of_one_element_in_any_shape_are_read() -> None:
    report = StepReport(0, 0, 0, Values(torch.ones(1), scale=torch.full((1, 1), 8.0), losses=(torch.ones(1),)))
    assert (report.outcome, report.scale, report.overflow_origin) == ("skipped_overflow", 8.0, "backward")


def test_a_norm_that_nobody_measured_is_measured_when_first_read_and_once() -> None:
    calls = []

    def measure() -> Tensor:
        calls.append(1)
        return scalar(2.5, torch.float64)

    report = on_host(late_norm=measure)
    assert report.outcome == "applied"
    assert calls == []
    assert (report.grad_norm, report.grad_norm) == (2.5, 2.5)
    assert calls == [1]


def test_a_norm_asked_for_too_late_is_none_and_stays_none() -> None:
    answers = iter([None, scalar(2.5)])
    report = on_host(late_norm=lambda: next(answers))
    assert (report.grad_norm, report.grad_norm) == (None, None)


def test_a_report_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        on_host().step = 5  # type: ignore[misc]


def test_losses_are_let_go_once_the_origin_is_known() -> None:
    report = on_device(True, losses=(scalar(1.0),))
    assert report.outcome == "skipped_overflow"
    assert report.values.losses == ()


def test_a_report_in_one_line() -> None:
    assert str(on_host(True, 8.0, 4.0, losses=(scalar(math.nan),), scaled=True)) == (
        "step 3, window 2, optimizer 1: skipped_overflow, overflow in the forward pass, loss scale 8 -> 4"
    )
    assert str(on_device(grad_norm=scalar(0.123456), scaled=True)) == (
        "step 3, window 2, optimizer 1: applied, loss scale 8 -> 8, gradient norm 0.1235"
    )


@BOTH
def test_without_a_loss_scale_the_line_names_none(make: Any) -> None:
    assert str(make(scale=1.0, after=1.0)) == "step 3, window 2, optimizer 1: applied"


# ---------------------------------------------------------------- what reading costs


def fifty() -> list[StepReport]:
    return [
        on_device(i % 3 == 0, 8.0 + i, 9.0 + i, grad_norm=scalar(i, torch.float64), losses=(scalar(1.0), scalar(i)))
        for i in range(50)
    ]


def test_fifty_reports_cost_one_transfer_together_and_none_after_that(transfers: _Reads) -> None:
    reports = fifty()
    transfers.count = 0
    resolve(reports)
    assert transfers.count == 1
    read = [
        (r.outcome, r.scale, r.next_scale, r.grad_norm, r.overflow_origin, r.overflow_ranks, str(r)) for r in reports
    ]
    assert transfers.count == 1
    assert [row[1] for row in read] == [8.0 + i for i in range(50)]
    assert [row[2] for row in read] == [9.0 + i for i in range(50)]
    assert [row[3] for row in read] == [float(i) for i in range(50)]
    assert [row[0] == "skipped_overflow" for row in read] == [i % 3 == 0 for i in range(50)]
    assert [row[4] for row in read if row[4]] == ["backward"] * 17


def test_reports_that_the_host_knows_cost_nothing(transfers: _Reads) -> None:
    reports = [on_host(grad_norm=1.0, losses=(scalar(1.0),)) for _ in range(50)]
    resolve(reports)
    assert [r.outcome for r in reports] == ["applied"] * 50
    assert [r.overflow_origin for r in reports] == [None] * 50
    assert transfers.count == 0


def test_no_reports_cost_nothing(transfers: _Reads) -> None:
    resolve([])
    assert transfers.count == 0


def test_one_report_read_whole_costs_one_transfer(transfers: _Reads) -> None:
    report = on_device(True, grad_norm=scalar(1.0), losses=(scalar(1.0),))
    assert (report.scale, report.outcome, report.overflow_origin) == (8.0, "skipped_overflow", "backward")
    assert "overflow in the backward pass" in str(report)
    assert transfers.count == 1


def test_the_origin_of_overflows_that_the_host_knows_costs_one_transfer_together(transfers: _Reads) -> None:
    reports = [on_host(True, losses=(scalar(1.0), scalar(math.nan))) for _ in range(5)]
    resolve(reports, everything=True)
    assert transfers.count == 1
    assert [r.overflow_origin for r in reports] == ["forward"] * 5
    assert transfers.count == 1


def test_the_origin_is_not_looked_for_in_windows_that_did_not_overflow(transfers: _Reads) -> None:
    report = on_host(losses=(scalar(1.0),), forward_overflow=scalar(0.0))
    assert (report.outcome, report.overflow_origin, report.overflow_ranks) == ("applied", None, ())
    resolve([report], everything=True)
    assert transfers.count == 0


def test_the_outcome_of_an_overflow_that_the_host_knows_leaves_its_origin_on_the_device(transfers: _Reads) -> None:
    report = on_host(True, losses=(scalar(math.nan),))
    assert report.outcome == "skipped_overflow"
    assert transfers.count == 0
    assert report.overflow_origin == "forward"
    assert transfers.count == 1


def test_a_report_moves_nothing_before_it_is_read() -> None:
    nowhere = torch.ones((), device="meta")
    report = StepReport(0, 0, 0, Values(nowhere, scale=nowhere, next_scale=nowhere, losses=(nowhere,)))
    assert "StepReport(step=0" in repr(report)
    assert report == StepReport(0, 0, 0, Values())
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        _ = report.outcome
