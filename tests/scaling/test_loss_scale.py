"""The configuration of the loss scale, and its rule on the host and on the device."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_amp_plus.scaling.loss_scale import LossScale, advance, to_fp32

FP32 = torch.float32


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One window as the rule sees it."""

    overflow: bool = False
    exempt: bool = False  # an overflow that does not count against the scale
    may_grow: bool = True
    overdue: bool = False

    @property
    def lowers(self) -> bool:
        return self.overflow and not self.exempt


CLEAN, OVERFLOW, WAITING = Verdict(), Verdict(overflow=True), Verdict(may_grow=False)
EXEMPT = Verdict(overflow=True, exempt=True)
OVERDUE = Verdict(may_grow=False, overdue=True)


def on_host(config: LossScale, verdicts: Sequence[Verdict]) -> list[tuple[float, float, float]]:
    state = (to_fp32(config.init), 0.0, float(config.hysteresis))
    states = []
    for v in verdicts:
        state = advance(config, *state, float(v.overflow), float(v.lowers), may_grow=v.may_grow, overdue=v.overdue)
        states.append(state)
    return states


def on_device(
    config: LossScale, verdicts: Sequence[Verdict], device: str = "cpu"
) -> list[tuple[Tensor, Tensor, Tensor]]:
    def scalar(value: float) -> Tensor:
        return torch.full((), float(value), dtype=FP32, device=device)

    state = (scalar(config.init), scalar(0), scalar(config.hysteresis))
    states = []
    for v in verdicts:
        state = advance(config, *state, scalar(v.overflow), scalar(v.lowers), may_grow=v.may_grow, overdue=v.overdue)
        states.append(state)
    return states


def as_floats(states: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[float, float, float]]:
    return [(a.item(), b.item(), c.item()) for a, b, c in states]


def scales(config: LossScale, verdicts: Sequence[Verdict]) -> list[float]:
    """The scales after each window, the same on both paths."""
    host = on_host(config, verdicts)
    assert as_floats(on_device(config, verdicts)) == host
    return [scale for scale, _, _ in host]


def spelled_out(config: LossScale, verdicts: Sequence[Verdict]) -> list[tuple[float, int, int]]:
    """The rule once more, written with branches instead of arithmetic."""
    scale, clean, patience = float(config.init), 0, config.hysteresis
    states = []
    for v in verdicts:
        if v.overflow:
            clean = 0
            if v.lowers:
                patience -= 1 if config.hysteresis > 1 else 0
                if config.hysteresis == 1 or patience <= 0:
                    scale = max(config.min, scale * config.backoff_factor)
        else:
            clean += 1
            if (v.may_grow and clean >= config.growth_interval) or (
                not v.may_grow and v.overdue and clean >= 2 * config.growth_interval
            ):
                scale, clean, patience = min(config.max, scale * config.growth_factor), 0, config.hysteresis
        states.append((scale, clean, patience))
    return states


@st.composite
def configs(draw: st.DrawFn, powers_of_two: bool) -> LossScale:
    if powers_of_two:
        growth, backoff = 2.0 ** draw(st.integers(1, 6)), 2.0 ** -draw(st.integers(1, 6))
        low, start, high = sorted(draw(st.lists(st.integers(-20, 30), min_size=3, max_size=3)))
        bounds = (2.0**low, 2.0**start, 2.0**high)
    else:
        growth, backoff = draw(st.floats(1.001, 8.0)), draw(st.floats(0.1, 0.999))
        low_, start_, high_ = sorted(draw(st.lists(st.floats(1e-6, 1e9), min_size=3, max_size=3)))
        bounds = (low_, start_, high_)
    return LossScale(
        init=bounds[1],
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=draw(st.integers(1, 4)),
        min=bounds[0],
        max=bounds[2],
        hysteresis=draw(st.integers(1, 3)),
    )


verdicts_ = st.lists(
    st.builds(Verdict, overflow=st.booleans(), exempt=st.booleans(), may_grow=st.booleans(), overdue=st.booleans()),
    max_size=40,
)


# ---------------------------------------------------------------- host and device


@given(config=configs(powers_of_two=True), verdicts=verdicts_)
@settings(deadline=None)
def test_with_powers_of_two_host_and_device_agree_to_the_last_bit_and_with_the_rule_spelled_out(
    config: LossScale, verdicts: list[Verdict]
) -> None:
    host = on_host(config, verdicts)
    assert host == spelled_out(config, verdicts)
    assert as_floats(on_device(config, verdicts)) == host


@given(config=configs(powers_of_two=False), verdicts=verdicts_)
@settings(deadline=None)
def test_with_any_factors_host_and_device_agree_to_fp32_precision_and_count_alike(
    config: LossScale, verdicts: list[Verdict]
) -> None:
    host, device, truth = (
        on_host(config, verdicts),
        as_floats(on_device(config, verdicts)),
        spelled_out(config, verdicts),
    )
    changes = 1
    before = config.init
    for (a, *host_counters), (b, *device_counters), (c, *counters) in zip(host, device, truth, strict=True):
        changes += a != before
        before = a
        assert host_counters == device_counters == counters
        # One rounding a change; a backoff to a tenth multiplies an error of the factor by ten.
        assert a == pytest.approx(c, rel=changes * 2.0**-23)
        assert b == pytest.approx(a, rel=changes * 2.0**-20)


@pytest.mark.parametrize("factor", [1e-3, 1e-6, 2.0**-26])
def test_a_small_backoff_factor_gives_the_same_scale_on_host_and_device(factor: float) -> None:
    config = LossScale(init=2.0**20, backoff_factor=factor, min=2.0**-100)
    ((host, *_),) = on_host(config, [OVERFLOW])
    ((device, *_),) = as_floats(on_device(config, [OVERFLOW]))
    assert host == pytest.approx(2.0**20 * factor, rel=1e-6)
    assert device == pytest.approx(host, rel=1e-6)


@pytest.mark.parametrize("verdict", [CLEAN, OVERFLOW], ids=["clean", "overflow"])
@pytest.mark.parametrize("growth", [2.0**30, 2.0**127])
def test_a_huge_growth_factor_never_makes_the_scale_nan(growth: float, verdict: Verdict) -> None:
    config = LossScale(growth_factor=growth, growth_interval=2)
    expected = [config.init, config.max] if verdict is CLEAN else [config.init / 2, config.init / 4]
    assert scales(config, [verdict] * 2) == expected


def test_the_device_path_transfers_nothing() -> None:
    verdicts = [CLEAN, OVERFLOW, WAITING, OVERDUE, EXEMPT] * 2
    config = LossScale(growth_interval=1, hysteresis=2)
    for scale, tracker, hysteresis in on_device(config, verdicts, "meta"):
        for value in (scale, tracker, hysteresis):
            assert value.device.type == "meta"
            assert value.shape == ()
            assert value.dtype == FP32


def test_the_device_path_replaces_the_scale_and_leaves_the_old_tensor_alone() -> None:
    old = torch.tensor(8.0)
    one, zero = torch.ones(()), torch.zeros(())
    new, tracker, _ = advance(LossScale(init=8.0), old, zero, one, one, one, may_grow=True, overdue=False)
    assert (old.item(), new.item()) == (8.0, 4.0)
    assert (zero.item(), one.item(), tracker.item()) == (0.0, 1.0, 0.0)


# ---------------------------------------------------------------- the rule


def test_an_overflow_in_the_third_of_five_windows_gives_8_16_8_8_16() -> None:
    config = LossScale(init=8.0, growth_interval=2)
    assert scales(config, [CLEAN, CLEAN, OVERFLOW, CLEAN, CLEAN]) == [8, 16, 8, 8, 16]


def test_an_overflow_at_1_gives_one_half() -> None:
    assert scales(LossScale(init=1.0), [OVERFLOW]) == [0.5]


def test_an_overflow_starts_the_count_of_clean_windows_anew() -> None:
    config = LossScale(init=8.0, growth_interval=3)
    assert scales(config, [CLEAN, CLEAN, OVERFLOW, CLEAN, CLEAN, CLEAN]) == [8, 8, 4, 4, 4, 8]


def test_the_scale_never_falls_below_the_floor_however_long_it_overflows() -> None:
    result = scales(LossScale(), [OVERFLOW] * 400)  # torch's rule reaches zero after 166
    assert result[-1] == 2.0**-14
    assert min(result) == 2.0**-14


def test_at_the_smallest_normal_floor_the_scale_is_never_zero() -> None:
    tiny = torch.finfo(FP32).tiny
    config = LossScale(init=1.0, min=tiny, backoff_factor=2.0**-7)
    assert scales(config, [OVERFLOW] * 60)[-1] == tiny


def test_the_scale_never_exceeds_the_cap_however_long_it_grows() -> None:
    result = scales(LossScale(growth_interval=1), [CLEAN] * 100)
    assert max(result) == result[-1] == 2.0**24


def test_at_the_largest_cap_the_scale_stays_finite() -> None:
    largest = torch.finfo(FP32).max
    assert scales(LossScale(growth_interval=1, max=largest), [CLEAN] * 130)[-1] == largest


def test_one_overflow_leaves_the_cap_at_once() -> None:
    assert scales(LossScale(init=2.0**24), [OVERFLOW]) == [2.0**23]


def test_one_growth_leaves_the_floor_at_once() -> None:
    assert scales(LossScale(init=2.0**-14, growth_interval=1), [CLEAN]) == [2.0**-13]


def test_hysteresis_takes_that_many_overflows_before_the_first_backoff() -> None:
    config = LossScale(init=64.0, hysteresis=3)
    assert scales(config, [OVERFLOW] * 5) == [64, 64, 32, 16, 8]


def test_clean_windows_do_not_refill_the_hysteresis() -> None:
    config = LossScale(init=64.0, hysteresis=2)
    assert scales(config, [OVERFLOW, CLEAN, OVERFLOW, CLEAN, OVERFLOW]) == [64, 64, 32, 32, 16]


def test_growth_refills_the_hysteresis() -> None:
    config = LossScale(init=64.0, hysteresis=2, growth_interval=2)
    assert scales(config, [OVERFLOW, CLEAN, CLEAN, OVERFLOW, OVERFLOW]) == [64, 64, 128, 128, 64]


def test_an_exempt_overflow_ends_the_run_of_clean_windows_without_lowering_the_scale() -> None:
    config = LossScale(init=64.0, growth_interval=2)
    assert scales(config, [CLEAN, EXEMPT, CLEAN, CLEAN]) == [64, 64, 64, 128]


def test_an_exempt_overflow_takes_nothing_from_the_hysteresis() -> None:
    assert scales(LossScale(init=64.0, hysteresis=2), [EXEMPT, EXEMPT, OVERFLOW, OVERFLOW]) == [64, 64, 64, 32]


def test_growth_waits_while_it_may_not_happen_and_is_then_taken_at_once() -> None:
    config = LossScale(init=8.0, growth_interval=2)
    assert scales(config, [CLEAN, WAITING, WAITING, CLEAN, CLEAN, CLEAN]) == [8, 8, 8, 16, 16, 32]


def test_without_overdue_growth_waits_for_ever() -> None:
    assert scales(LossScale(init=8.0, growth_interval=1), [WAITING] * 50)[-1] == 8


def test_overdue_growth_is_taken_after_a_whole_further_interval() -> None:
    config = LossScale(init=8.0, growth_interval=3)
    assert scales(config, [OVERDUE] * 12) == [8] * 5 + [16] * 6 + [32]


def test_backoff_does_not_wait() -> None:
    assert scales(LossScale(init=8.0), [Verdict(overflow=True, may_grow=False)]) == [4]


def test_the_first_scale_of_the_host_is_the_one_the_device_holds() -> None:
    config = LossScale(init=1000.1, growth_interval=2)
    assert scales(config, [CLEAN]) == [to_fp32(1000.1)]


@pytest.mark.parametrize("value", [0.1, 1000.1, 2.0**-140, 1.0, 3.0e38])
def test_to_fp32_rounds_as_a_tensor_does(value: float) -> None:
    assert to_fp32(value) == torch.tensor(value, dtype=FP32).item()


# ---------------------------------------------------------------- the configuration


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert LossScale().describe() == {
        "init": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "min": 2.0**-14,
        "max": 2.0**24,
        "hysteresis": 1,
        "backoff_on_forward_overflow": True,
    }


def test_the_description_is_plain_json_and_gives_the_configuration_back() -> None:
    config = LossScale(init=8.0, hysteresis=2, backoff_on_forward_overflow=False)
    assert LossScale(**json.loads(json.dumps(config.describe()))) == config


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossScale().init = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    list(
        itertools.product(
            ["init", "growth_factor", "backoff_factor", "min", "max"], [0, -1.0, math.inf, math.nan, True, "8", None]
        )
    ),
)
def test_a_number_that_is_not_finite_and_positive_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"LossScale\({name}=.*finite number above 0"):
        LossScale(**{name: value})


@pytest.mark.parametrize("name", ["growth_interval", "hysteresis"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, True, 2**24 + 1, None])
def test_a_count_that_is_not_a_whole_number_in_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"LossScale\({name}=.*whole number from 1 to 16777216"):
        LossScale(**{name: value})


def test_counts_at_their_limits_are_accepted() -> None:
    config = LossScale(growth_interval=2**24, hysteresis=1)
    assert config.growth_interval == 2**24


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_growth_factor_that_does_not_grow_is_refused_and_a_static_scale_suggested(factor: float) -> None:
    with pytest.raises(ValueError, match=r"growth_factor=.*above 1.*never changes.*loss_scale=1024\.0"):
        LossScale(growth_factor=factor)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_backoff_factor_that_does_not_lower_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"backoff_factor=.*between 0 and 1"):
        LossScale(backoff_factor=factor)


@pytest.mark.parametrize("init", [0.5, 32.0])
def test_a_first_scale_outside_the_limits_is_refused(init: float) -> None:
    with pytest.raises(ValueError, match=r"init=.*min=1\.0, max=16\.0.*first scale lies outside"):
        LossScale(init=init, min=1.0, max=16.0)


@pytest.mark.parametrize("limits", [{"max": 1e39}, {"min": 1e-39}, {"growth_factor": 1e300}])
def test_limits_that_fp32_cannot_hold_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="that FP32 can hold"):
        LossScale(**limits)
