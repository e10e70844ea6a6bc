"""FP32 copies of 16-bit parameters: swapped in for the step, rounded back after it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.scaling.master_weights import MasterWeights

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
LOW = [BF16, FP16]


@contextmanager
def entered(masters: MasterWeights, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A step's ``enter`` and ``leave`` around a block."""
    masters.enter(optimizer)
    try:
        yield
    finally:
        masters.leave(optimizer)


def stored(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Retypes the model's FP32 parameters in place, as the conversion of storage does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def prepared(model: torch.nn.Module, dtype: torch.dtype = BF16) -> MasterWeights:
    """``model`` in ``dtype`` with copies that were taken before it was rounded."""
    masters = MasterWeights()
    masters.capture(model.parameters())
    stored(model, dtype)
    masters.attach(model.parameters())
    return masters


def scalar_model(value: float = 1.0) -> torch.nn.Module:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full((1,), value))
    return model


def step(optimizer: Optimizer, masters: MasterWeights | None, gradient: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, gradient)
    if masters is None:
        optimizer.step()
        return
    with entered(masters, optimizer):
        optimizer.step()


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def fused_adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def momentum(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


# ---------------------------------------------------------------- what it is for


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_adamw_moves_a_bf16_weight_as_it_moves_an_fp32_one(make_optimizer: Callable[..., Optimizer]) -> None:
    exact, plain, kept = scalar_model(), stored(scalar_model(), BF16), scalar_model()
    masters = prepared(kept)
    for model, copies in ((exact, None), (plain, None), (kept, masters)):
        optimizer = make_optimizer(model.parameters())
        for _ in range(100):
            step(optimizer, copies)
    assert plain.weight.item() == 1.0  # every update was below half an ulp
    assert exact.weight.item() == pytest.approx(0.90, abs=5e-3)
    assert masters.state_dict(kept.named_parameters())["weight"].item() == exact.weight.item()
    assert torch.equal(kept.weight, exact.weight.to(BF16))


@pytest.mark.parametrize("dtype", LOW)
def test_training_equals_fp32_training_of_the_same_gradients_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = torch.nn.Linear(3, 2)
    kept = copy.deepcopy(exact)
    masters = prepared(kept, dtype)
    optimizers = [momentum(exact.parameters()), momentum(kept.parameters())]
    for _ in range(5):
        for a, b in zip(exact.parameters(), kept.parameters(), strict=True):
            b.grad = torch.randn_like(b)
            a.grad = b.grad.float()
        optimizers[0].step()
        with entered(masters, optimizers[1]):
            optimizers[1].step()
    copies = masters.state_dict(kept.named_parameters())
    for name, parameter in exact.named_parameters():
        assert torch.equal(copies[name], parameter.detach())
        assert torch.equal(kept.get_parameter(name), parameter.detach().to(dtype))


# ---------------------------------------------------------------- enter and leave


@pytest.mark.parametrize("dtype", LOW)
def test_inside_a_step_data_and_gradients_are_fp32_and_outside_they_are_not(dtype: torch.dtype) -> None:
    model = scalar_model()
    masters = prepared(model, dtype)
    optimizer = adamw(model.parameters())
    model.weight.grad = torch.full((1,), 0.1, dtype=dtype)
    expected = model.weight.grad.float()
    masters.enter(optimizer)
    assert (model.weight.dtype, model.weight.grad.dtype) == (FP32, FP32)
    assert torch.equal(model.weight.grad, expected)
    masters.leave(optimizer)
    assert model.weight.dtype == dtype
    assert model.weight.grad is None


def test_entering_twice_and_leaving_twice_is_harmless() -> None:
    model = scalar_model(1 + 2.0**-12)
    masters = prepared(model)
    optimizer = adamw(model.parameters())
    masters.enter(optimizer)
    masters.enter(optimizer)
    with torch.no_grad():
        model.weight += 1.0
    masters.leave(optimizer)
    masters.leave(optimizer)
    assert (model.weight.item(), model.weight.dtype) == (2.0, BF16)
    assert masters.state_dict(model.named_parameters())["weight"].item() == 2 + 2.0**-12


def test_identity_storage_hooks_and_requires_grad_survive_a_step() -> None:
    model = scalar_model()
    masters = prepared(model)
    parameter, pointer = model.weight, model.weight.data_ptr()
    view = model.weight.data
    parameter.mark = "kept"  # type: ignore[attr-defined]
    calls: list[Tensor] = []
    parameter.register_hook(calls.append)
    optimizer = adamw(model.parameters())
    step(optimizer, masters)
    assert model.weight is parameter is optimizer.param_groups[0]["params"][0]
    assert (parameter.data_ptr(), parameter.mark, parameter.requires_grad) == (pointer, "kept", True)
    step(optimizer, masters, 1e3)
    assert torch.equal(view, parameter.data)  # whoever holds the storage sees the new weights
    (parameter * 2).sum().backward()
    assert len(calls) == 1
    assert parameter.grad is not None
    assert parameter.grad.dtype == BF16


def test_tied_weights_stay_tied_and_are_updated_once() -> None:
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.a.weight)
    model.b.weight = model.a.weight
    masters = prepared(model)
    step(torch.optim.SGD(model.parameters(), lr=2.0**-10), masters)
    assert model.a.weight is model.b.weight
    (copied,) = masters.state_dict(model.named_parameters()).values()
    assert torch.equal(copied, torch.full((2, 2), 1 - 2.0**-10))


@pytest.mark.parametrize("part", ["step", "between enter and leave"])
def test_an_exception_in_a_step_leaves_the_stored_dtype_behind(part: str) -> None:
    model = scalar_model(1 + 2.0**-12)
    masters = prepared(model)
    optimizer = adamw(model.parameters())

    def broken() -> None:
        raise ArithmeticError("broken step")

    with pytest.raises(ArithmeticError, match="broken step"):
        if part == "step":
            with entered(masters, optimizer):
                broken()
        else:
            masters.enter(optimizer)
            try:
                broken()
            finally:
                masters.leave(optimizer)
    assert (model.weight.dtype, model.weight.item()) == (BF16, 1.0)
    assert masters.state_dict(model.named_parameters())["weight"].item() == 1 + 2.0**-12
    step(optimizer, masters)  # and the next step works
    assert masters.state_dict(model.named_parameters())["weight"].item() < 1.0


def test_parameters_that_are_not_16_bit_are_left_alone_in_a_step() -> None:
    model = torch.nn.Module()
    model.low = torch.nn.Parameter(torch.ones(2))
    model.high = torch.nn.Parameter(torch.ones(2))
    model.exact = torch.nn.Parameter(torch.ones(2, dtype=FP64))
    masters = MasterWeights()
    masters.capture(model.parameters())
    model.low.data = model.low.data.bfloat16()
    masters.attach(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = {name: p.data_ptr() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    high, exact = model.high.grad, model.exact.grad
    with entered(masters, optimizer):
        assert {p.dtype for p in (model.low, model.high)} == {FP32}
        assert model.high.grad is high
        optimizer.step()
    assert [p.dtype for p in model.parameters()] == [BF16, FP32, FP64]
    assert [p.tolist() for p in model.parameters()] == [[0.5, 0.5]] * 3
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == data
    assert model.high.grad is high
    assert model.exact.grad is exact
    assert list(masters.state_dict(model.named_parameters())) == ["low"]


def test_a_parameter_without_a_gradient_keeps_none_and_does_not_move() -> None:
    model = scalar_model()
    masters = prepared(model)
    optimizer = adamw(model.parameters())
    with entered(masters, optimizer):
        assert model.weight.grad is None
        optimizer.step()
    assert model.weight.item() == 1.0


def test_a_parameter_of_two_optimizers_is_swapped_by_the_one_that_came_first() -> None:
    model = scalar_model()
    masters = prepared(model)
    first, second = adamw(model.parameters()), momentum(model.parameters())
    model.weight.grad = torch.ones(1, dtype=BF16)
    masters.enter(first)
    masters.enter(second)
    masters.leave(second)
    assert model.weight.dtype == FP32
    assert model.weight.grad is not None  # the first one has yet to consume it
    masters.leave(first)
    assert model.weight.dtype == BF16


def test_a_sparse_gradient_reaches_the_copy() -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.ones_(model.weight)
    masters = prepared(model)
    model(torch.tensor([1, 1])).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    with entered(masters, optimizer):
        optimizer.step()
    copied = masters.state_dict(model.named_parameters())["weight"]
    assert copied[:, 0].tolist() == [1.0, 1 - 2.0**-9, 1.0, 1.0]


def test_empty_0_dim_and_transposed_parameters_take_part() -> None:
    model = torch.nn.Module()
    model.empty = torch.nn.Parameter(torch.empty(0, 3))
    model.point = torch.nn.Parameter(torch.tensor(1.0))
    model.turned = torch.nn.Parameter(torch.ones(2, 3).t())
    masters = prepared(model, FP16)
    step(torch.optim.SGD(model.parameters(), lr=0.25), masters)
    assert (model.empty.shape, model.empty.dtype) == ((0, 3), FP16)
    assert (model.point.shape, model.point.item()) == ((), 0.75)
    assert torch.equal(model.turned, torch.full((3, 2), 0.75, dtype=FP16))
    assert model.turned.stride() == (1, 3)


def test_entering_and_leaving_transfer_nothing() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    masters = MasterWeights()
    masters.capture(model.parameters())
    stored(model, BF16)
    optimizer = momentum(model.parameters())
    step(optimizer, masters)
    assert {p.dtype for p in model.parameters()} == {BF16}


# ---------------------------------------------------------------- capture and attach


@pytest.mark.parametrize("dtype", LOW)
def test_a_copy_taken_before_rounding_keeps_the_digits(dtype: torch.dtype) -> None:
    model = scalar_model(1 + 2.0**-20)
    masters = prepared(model, dtype)
    assert model.weight.item() == 1.0
    assert masters.state_dict(model.named_parameters())["weight"].item() == 1 + 2.0**-20


def test_a_parameter_that_was_never_captured_gets_a_copy_of_its_own() -> None:
    model = stored(scalar_model(1.5), BF16)
    masters = MasterWeights()
    masters.attach(model.parameters())
    (copied,) = masters.state_dict(model.named_parameters()).values()
    assert (copied.item(), copied.dtype) == (1.5, FP32)
    assert copied.data_ptr() != model.weight.data_ptr()


def test_weights_loaded_meanwhile_replace_the_copy() -> None:
    model = scalar_model()
    masters = prepared(model)
    model.load_state_dict({"weight": torch.full((1,), 3.0)})
    masters.attach(model.parameters())
    assert masters.state_dict(model.named_parameters())["weight"].item() == 3.0


def test_attaching_anew_keeps_copies_that_still_fit() -> None:
    model = scalar_model(1 + 2.0**-20)
    masters = prepared(model)
    before = masters.state_dict(model.named_parameters())["weight"]
    masters.attach(iter(list(model.parameters())))
    assert masters.state_dict(model.named_parameters())["weight"] is before


def test_a_parameter_of_another_shape_than_its_copy_gets_a_new_one() -> None:
    model = scalar_model()
    masters = prepared(model)
    model.weight.data = torch.ones(3, dtype=BF16)
    masters.attach(model.parameters())
    assert masters.state_dict(model.named_parameters())["weight"].shape == (3,)


def test_the_copy_of_a_parameter_that_stayed_fp32_is_dropped() -> None:
    model = scalar_model()
    masters = MasterWeights()
    masters.capture(model.parameters())
    masters.attach(model.parameters())
    stored(model, BF16)
    assert masters.state_dict(model.named_parameters()) == {}


def test_copies_do_not_keep_a_parameter_alive() -> None:
    model = scalar_model()
    masters = prepared(model)
    assert len(masters._masters) == 1
    del model
    gc.collect()
    assert len(masters._masters) == 0


# ---------------------------------------------------------------- the optimizer's state


def test_a_loaded_optimizer_state_stays_fp32() -> None:
    model = scalar_model()
    masters = prepared(model)
    optimizer = adamw(model.parameters())
    masters.attach_optimizer(optimizer)
    step(optimizer, masters, 0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    exact = saved["state"][0]["exp_avg"].clone()
    assert exact.dtype == FP32

    other = scalar_model()
    others = prepared(other)
    resumed = adamw(other.parameters())
    others.attach_optimizer(resumed)
    resumed.load_state_dict(saved)
    state = resumed.state[other.weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == FP32
    assert torch.equal(state["exp_avg"], exact)
    assert other.weight.dtype == BF16
    assert others.state_dict(other.named_parameters())["weight"].item() == 1.0


def test_an_optimizer_state_that_is_refused_leaves_the_stored_dtype_behind() -> None:
    model = scalar_model()
    masters = prepared(model)
    optimizer = adamw(model.parameters())
    masters.attach_optimizer(optimizer)
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert model.weight.dtype == BF16


# ---------------------------------------------------------------- checkpoint and copies


def test_copies_survive_a_safe_round_trip_bit_for_bit() -> None:
    model = scalar_model(1 + 2.0**-20)
    masters = prepared(model)
    file = io.BytesIO()
    torch.save(masters.state_dict(model.named_parameters()), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    other = scalar_model(7.0)
    others = prepared(other)
    pointer = other.weight.data_ptr()
    others.load_state_dict(state, other.named_parameters())
    assert others.state_dict(other.named_parameters())["weight"].item() == 1 + 2.0**-20
    assert (other.weight.item(), other.weight.data_ptr()) == (1.0, pointer)


def test_loaded_copies_are_not_the_tensors_of_the_checkpoint() -> None:
    model = scalar_model()
    masters = prepared(model)
    state = {"weight": torch.full((1,), 2.0)}
    masters.load_state_dict(state, model.named_parameters())
    step(torch.optim.SGD(model.parameters(), lr=1.0), masters)
    assert state["weight"].item() == 2.0
    assert model.weight.item() == 1.0


def wide_and_narrow() -> tuple[torch.nn.Module, MasterWeights]:
    model = torch.nn.Module()
    model.narrow, model.wide = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(2))
    return model, prepared(model)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"narrow": torch.zeros(1), "stranger": torch.zeros(1)},
            r"do not fit the model: without a parameter \['stranger'\], without a copy \['wide'\]",
        ),
        ({}, r"without a copy \['narrow', 'wide'\]"),
        (
            {"narrow": torch.zeros(1), "wide": torch.zeros(3)},
            r"'wide' has shape \(3,\) in the checkpoint, \(2,\) in the model",
        ),
    ],
)
def test_copies_that_do_not_fit_are_refused_by_name_with_nothing_changed(state: dict[str, Any], words: str) -> None:
    model, masters = wide_and_narrow()
    with pytest.raises(ValueError, match=words):
        masters.load_state_dict(state, model.named_parameters())
    assert [p.tolist() for p in model.parameters()] == [[1.0], [1.0, 1.0]]
    assert masters.state_dict(model.named_parameters())["narrow"].item() == 1.0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_duplicate_is_empty_since_it_meets_other_parameters(duplicate: Callable[..., MasterWeights]) -> None:
    model = scalar_model()
    masters = prepared(model)
    twin = duplicate(masters)
    assert isinstance(twin, MasterWeights)
    assert twin is not masters
    assert twin.state_dict(model.named_parameters()) == {}
    assert len(masters.state_dict(model.named_parameters())) == 1
