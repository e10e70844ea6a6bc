"""The state of the loss scale: moved by verdicts, read, saved, copied, and never moved by hand."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus.scaling.loss_scale import LossScale, to_fp32
from lightning_amp_plus.scaling.scaler import LossScaler
from lightning_amp_plus.step_report import StepReport, Values
from tests.support.models import Wrapping

CPU, META = torch.device("cpu"), torch.device("meta")


def make(init: float = 8.0, growth_interval: int = 2, dynamic: bool = True, **config: Any) -> LossScaler:
    return LossScaler(LossScale(init=init, growth_interval=growth_interval, **config), "cpu", dynamic)


def window(
    scaler: LossScaler, overflow: bool, on_host: bool = True, lowers: bool | None = None, **flags: bool
) -> tuple[float, float]:
    """One window with a loss of 1; returns its scale and the next one."""
    scaled = scaler.scale(torch.ones(()))
    assert isinstance(scaled, Tensor)
    lowers = overflow if lowers is None else lowers
    flags = {"may_grow": True, "overdue": False, **flags}
    if on_host:
        before, after = scaler.take_verdict(overflow, lowers, CPU, **flags)
        assert isinstance(before, float)
        assert isinstance(after, float)
    else:
        before, after = scaler.take_verdict(torch.tensor(float(overflow)), torch.tensor(float(lowers)), CPU, **flags)
        assert isinstance(before, Tensor)
        assert isinstance(after, Tensor)
    assert float(before) == scaled.item()
    return float(before), float(after)


class Transfers(TorchDispatchMode):
    """Counts reads of single values, and of whole tensors by ``tolist``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        original = torch.Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            self.count += 1
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", tolist)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- moving the scale

flags = st.fixed_dictionaries({"may_grow": st.booleans(), "overdue": st.booleans()})
windows = st.lists(st.tuples(st.booleans(), st.booleans(), flags), max_size=25)


@given(
    windows=windows,
    on_host=st.lists(st.booleans(), min_size=25, max_size=25),
    read=st.lists(st.booleans(), min_size=25, max_size=25),
    hysteresis=st.integers(1, 3),
    factors=st.sampled_from([(2.0, 0.5), (4.0, 0.125), (1.5, 0.25)]),
)
@settings(deadline=None)
def test_host_and_device_verdicts_in_any_order_equal_a_run_of_one_kind(
    windows: list[tuple[bool, bool, dict[str, bool]]],
    on_host: list[bool],
    read: list[bool],
    hysteresis: int,
    factors: tuple[float, float],
) -> None:
    config = {"hysteresis": hysteresis, "growth_factor": factors[0], "backoff_factor": factors[1]}
    mixed, host, device = make(**config), make(**config), make(**config)
    for (overflow, lowers, flags), kind, reads in zip(windows, on_host, read, strict=False):
        lowers = overflow and lowers
        expected = window(host, overflow, True, lowers, **flags)
        assert window(device, overflow, False, lowers, **flags) == expected
        assert window(mixed, overflow, kind, lowers, **flags) == expected
        if reads:
            assert mixed.get_scale() == expected[1]
    assert mixed.state_dict() == host.state_dict() == device.state_dict()


ROUND_TRIPS: dict[str, Callable[[LossScaler], LossScaler]] = {
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "deepcopy": copy.deepcopy,
}


def _through_state_dict(scaler: LossScaler) -> LossScaler:
    fresh = LossScaler(scaler.config, "cpu")
    fresh.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    return fresh


ROUND_TRIPS["state_dict"] = _through_state_dict


some_windows = st.lists(st.tuples(st.sampled_from([False, False, True]), st.booleans()), max_size=8)


@given(before=some_windows, after=some_windows, how=st.sampled_from(sorted(ROUND_TRIPS)), in_mid_window=st.booleans())
@settings(deadline=None)
def test_a_copy_taken_at_any_moment_goes_on_as_the_original_would(
    before: list[tuple[bool, bool]], after: list[tuple[bool, bool]], how: str, in_mid_window: bool
) -> None:
    original = make(hysteresis=2, growth_interval=3)
    for overflow, on_host in before:
        window(original, overflow, on_host)
    if in_mid_window:
        original.scale(torch.ones(()))
    clone = ROUND_TRIPS[how](original)
    assert clone is not original
    for overflow, on_host in after:
        assert window(clone, overflow, on_host) == window(original, overflow, on_host)
    assert clone.state_dict() == original.state_dict()


def test_a_copy_does_not_move_with_the_original() -> None:
    original = make()
    window(original, False, on_host=False)
    clone = copy.deepcopy(original)
    window(original, True, on_host=False)
    assert (clone.get_scale(), original.get_scale()) == (8.0, 4.0)


def test_a_copy_forgets_who_unscales() -> None:
    original = make()
    original.unscaler = lambda optimizer: None
    assert copy.deepcopy(original).unscaler is None
    assert original.unscaler is not None


def test_a_host_verdict_before_any_loss_was_scaled_is_not_forgotten_by_the_device() -> None:
    scaler = make(init=8.0)
    scaler.take_verdict(True, True, CPU, may_grow=True, overdue=False)
    assert scaler.get_scale() == 4.0
    assert scaler.scale(torch.ones(())).item() == 4.0


def test_a_clean_host_verdict_before_any_loss_was_scaled_counts_for_the_device_too() -> None:
    scaler = make(init=8.0, growth_interval=2)
    scaler.take_verdict(False, False, CPU, may_grow=True, overdue=False)
    assert window(scaler, False, on_host=False) == (8.0, 16.0)


@pytest.mark.parametrize("then", ["host", "device", "by hand", "resume"])
def test_a_report_keeps_the_scale_of_its_window_although_the_scaler_moved_on(then: str) -> None:
    scaler = make()
    found = torch.tensor(1.0)
    before, after = scaler.take_verdict(found, found, CPU, may_grow=True, overdue=False)
    report = StepReport(0, 0, 0, Values(found, scale=before, next_scale=after))
    if then == "by hand":
        scaler.update(2.0)
    elif then == "resume":
        scaler.load_state_dict({"scale": 2.0, "_growth_tracker": 0})
    else:
        window(scaler, True, on_host=then == "host")
    assert (report.scale, report.next_scale, scaler.get_scale()) == (8.0, 4.0, 2.0)


def test_device_verdicts_and_reads_on_the_device_transfer_nothing() -> None:
    scaler = make(growth_interval=1, hysteresis=2)
    found = torch.ones((), device=META)
    for _ in range(3):
        assert scaler.scale(torch.ones((), device=META)).device == META
        before, after = scaler.take_verdict(found, found, META, may_grow=True, overdue=True)
        assert isinstance(before, Tensor)
        assert isinstance(after, Tensor)
        assert before.device == after.device == scaler.inverse_on(META).device == META
        assert scaler.host_scale() is None


def test_reading_the_scale_costs_one_transfer_after_a_device_verdict_and_none_after_a_host_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaler = make()
    found = torch.tensor(1.0)
    scaler.take_verdict(found, found, CPU, may_grow=True, overdue=False)
    with Transfers(monkeypatch) as transfers:
        assert [scaler.get_scale(), scaler.get_scale(), scaler.host_scale()] == [4.0, 4.0, 4.0]
        assert scaler.state_dict()["scale"] == 4.0
        assert transfers.count == 1
        scaler.take_verdict(True, True, CPU, may_grow=True, overdue=False)
        assert scaler.get_scale() == 2.0
        assert transfers.count == 1


@pytest.mark.parametrize("on_host", [True, False])
def test_the_digest_is_scale_tracker_and_hysteresis(on_host: bool) -> None:
    scaler = make(hysteresis=3)
    for overflow in (True, False):
        window(scaler, overflow, on_host)
    assert scaler.digest() == (8.0, 1.0, 2.0)


def test_a_host_verdict_that_leaves_the_scale_alone_keeps_the_device_tensor() -> None:
    scaler = make()
    tensor = scaler.scale_on(CPU)
    before, after = scaler.take_verdict(False, False, CPU, may_grow=True, overdue=False)
    assert before is after
    assert scaler.scale_on(CPU) is tensor


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("init", [8.0, 3.0, 1000.1])
def test_the_inverse_follows_the_scale(on_host: bool, init: float) -> None:
    scaler = make(init=init, growth_interval=1)
    for overflow in (False, True, True):
        assert scaler.inverse_on(CPU).item() == to_fp32(1 / to_fp32(scaler.get_scale()))
        window(scaler, overflow, on_host)
    assert scaler.inverse_on(CPU).item() == to_fp32(1 / to_fp32(scaler.get_scale()))


@pytest.mark.parametrize("on_host", [True, False])
def test_a_static_scale_never_moves(on_host: bool) -> None:
    scaler = make(growth_interval=1, dynamic=False)
    assert [window(scaler, overflow, on_host) for overflow in (False, True, False)] == [(8.0, 8.0)] * 3
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("on_host", [True, False])
def test_the_floor_holds_for_ever(on_host: bool) -> None:
    scaler = make(min=1.0)
    assert [window(scaler, True, on_host)[1] for _ in range(200)][-197:] == [1.0] * 197


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_16_bit_loss_is_scaled_in_fp32_where_it_cannot_overflow(dtype: torch.dtype) -> None:
    scaled = make(init=2.0**16).scale(torch.full((), 3.0, dtype=dtype))
    assert scaled.item() == 3 * 2**16
    assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_several_losses_are_scaled_alike() -> None:
    assert [loss.item() for loss in make().scale([torch.ones(()), torch.full((), 2.0)])] == [8.0, 16.0]


def test_it_is_what_code_that_looks_for_a_grad_scaler_expects() -> None:
    scaler = make()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 2)
    window(scaler, False, on_host=False)
    assert scaler._get_growth_tracker() == 1


# ---------------------------------------------------------------- by hand


def test_update_by_hand_is_refused_and_changes_nothing() -> None:
    scaler = make()
    window(scaler, False)
    before = scaler.state_dict()
    with pytest.raises(RuntimeError, match=r"scaler\.update\(\).*by hand.*once a window.*Remove the call"):
        scaler.update()
    assert scaler.state_dict() == before


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("new", [64.0, torch.tensor(64.0)], ids=["float", "tensor"])
def test_update_with_a_scale_sets_it_and_keeps_the_counters(on_host: bool, new: float | Tensor) -> None:
    scaler = make(growth_interval=2)
    window(scaler, False, on_host)
    scaler.update(new)
    assert scaler.get_scale() == scaler.scale_on(CPU).item() == 64.0
    assert scaler.inverse_on(CPU).item() == 1 / 64
    assert window(scaler, False, not on_host) == (64.0, 128.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, 1e-50, 1e39])
def test_update_refuses_a_scale_that_is_zero_or_not_finite_in_fp32(value: float) -> None:
    scaler = make()
    with pytest.raises(ValueError, match=r"update\(new_scale=.*finite number above 0"):
        scaler.update(value)
    assert scaler.get_scale() == scaler.scale_on(CPU).item() == 8.0


def test_step_by_hand_is_refused_and_names_the_call_to_use() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(RuntimeError, match=r"scaler\.step\(optimizer\).*optimizer\.step\(\).*self\.optimizers\(\)"):
        make().step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]


def test_unscale_reaches_the_optimizer_inside_lightnings_and_no_further() -> None:
    scaler, seen = make(), []
    scaler.unscaler = seen.append
    for optimizer in (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0), Wrapping([torch.ones(2)])):
        scaler.unscale_(LightningOptimizer(optimizer))  # type: ignore[arg-type]
        scaler.unscale_(optimizer)
        assert [one is optimizer for one in seen] == [True, True]
        seen.clear()


def test_unscale_without_a_step_sequence_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(RuntimeError, match="belongs to no plugin"):
        make().unscale_(optimizer)


@pytest.mark.parametrize(
    ("setter", "value"), [("growth_factor", 4.0), ("backoff_factor", 0.25), ("growth_interval", 7)]
)
def test_factors_set_as_on_a_grad_scaler_take_effect(setter: str, value: float) -> None:
    scaler = make()
    getattr(scaler, f"set_{setter}")(value)
    assert getattr(scaler.config, setter) == getattr(scaler, f"get_{setter}")() == value
    with pytest.raises(ValueError, match=setter):
        getattr(scaler, f"set_{setter}")(-1)


# ---------------------------------------------------------------- the saved state


def test_a_negative_hysteresis_is_a_state_that_occurs_and_is_taken_back() -> None:
    scaler = make(init=64.0, hysteresis=2)
    for _ in range(4):
        window(scaler, True)
    state = scaler.state_dict()
    assert state["_hysteresis"] == -2
    resumed = make(hysteresis=2)
    resumed.load_state_dict(state)
    assert window(resumed, True) == (8.0, 4.0)


def test_the_state_is_plain_and_has_the_keys_of_torch_and_the_hysteresis() -> None:
    scaler = make(hysteresis=3)
    for overflow in (True, False):
        window(scaler, overflow, on_host=False)
    torch_keys = set(torch.amp.GradScaler("cpu").state_dict())
    state = scaler.state_dict()
    assert set(state) == torch_keys | {"_hysteresis"}
    assert state == {
        "scale": 8.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "_growth_tracker": 1,
        "_hysteresis": 2,
    }
    assert {type(value) for value in state.values()} <= {int, float}


@pytest.mark.parametrize("live", [True, False], ids=["after a window", "fresh"])
def test_a_state_saved_in_mid_interval_goes_on_where_it_was(live: bool) -> None:
    saved = make(growth_interval=3)
    for _ in range(2):
        window(saved, False)
    resumed = make(init=2.0, growth_interval=3)
    if live:
        window(resumed, True, on_host=False)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.inverse_on(CPU).item() == 1 / 8
    assert window(resumed, False, on_host=False) == (8.0, 16.0)


def test_the_state_of_a_torch_grad_scaler_is_taken_over_with_full_hysteresis() -> None:
    stock = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for _ in range(2):
        stock.scale(parameter * 1.0).backward()
        stock.step(optimizer)
        stock.update()
    state = stock.state_dict()
    assert state["_growth_tracker"] == 2
    scaler = make(growth_interval=3, hysteresis=2)
    window(scaler, True)  # takes one from the hysteresis, which the loaded state gives back
    scaler.load_state_dict(state)
    assert scaler.state_dict()["_hysteresis"] == 2
    assert window(scaler, False) == (256.0, 512.0)


def test_loading_keeps_the_configuration_of_this_run() -> None:
    scaler = make(growth_interval=2)
    scaler.load_state_dict({**make(growth_interval=100).state_dict(), "growth_factor": 16.0, "scale": 32.0})
    assert [window(scaler, False) for _ in range(2)] == [(32.0, 32.0), (32.0, 64.0)]


def test_a_loaded_scale_is_the_same_number_on_host_and_device() -> None:
    scaler = make()
    scaler.load_state_dict({"scale": 1000.1, "_growth_tracker": 0})
    assert scaler.get_scale() == scaler.scale_on(CPU).item()


@pytest.mark.parametrize("live", [True, False], ids=["after a window", "fresh"])
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, r"lacks \['scale', '_growth_tracker'\].*an empty state"),
        ({"scale": 8.0}, r"lacks \['_growth_tracker'\]; found \['scale'\]"),
        ({"_growth_tracker": 1}, r"lacks \['scale'\]"),
        ({"scale": 0.0, "_growth_tracker": 1}, r"scale=0\.0; expected a finite number above 0"),
        ({"scale": -4.0, "_growth_tracker": 1}, r"scale=-4\.0; expected a finite number above 0"),
        ({"scale": math.nan, "_growth_tracker": 1}, "scale=nan; expected a finite number above 0"),
        ({"scale": math.inf, "_growth_tracker": 1}, "scale=inf; expected a finite number above 0"),
        ({"scale": 1e-50, "_growth_tracker": 1}, r"scale=1e-50; expected a finite number above 0"),
        ({"scale": 1e39, "_growth_tracker": 1}, r"scale=1e\+39; expected a finite number above 0"),
        ({"scale": 32.0, "_growth_tracker": -1}, "_growth_tracker=-1; expected 0 or more"),
        ({"scale": 32.0, "_growth_tracker": math.nan}, "_growth_tracker=nan"),
        ({"scale": 32.0, "_growth_tracker": 1, "_hysteresis": math.nan}, "_hysteresis=nan"),
    ],
)
def test_a_bad_state_is_refused_with_nothing_changed(state: dict[str, Any], words: str, live: bool) -> None:
    scaler = make(hysteresis=2)
    if live:
        window(scaler, False)
        scaler.inverse_on(CPU)
    before = scaler.state_dict()
    try:
        with pytest.raises(ValueError, match=words):
            scaler.load_state_dict(state)
    finally:
        assert scaler.state_dict() == before
        assert scaler.scale_on(CPU).item() == 8.0
        assert scaler.inverse_on(CPU).item() == 1 / 8
