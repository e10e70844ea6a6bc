"""Which gradients belong to which window, and in which scale they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.ledger import Ledger

CPU = torch.device("cpu")


def record_backward(ledger: Ledger, loss: torch.Tensor | None) -> None:
    """What the step sequence does for each backward; without a finite check the loss is not kept."""
    ledger.backwards += 1
    if loss is not None:
        ledger.record_loss(loss.detach())


def optimizer(*parameters: torch.nn.Parameter) -> Optimizer:
    return torch.optim.SGD(list(parameters) or [torch.nn.Parameter(torch.ones(2))], lr=1.0)


def parameter(gradient: float | None = 1.0) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(2))
    if gradient is not None:
        p.grad = torch.full((2,), gradient)
    return p


def loss(value: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True)


# ---------------------------------------------------------------- backwards


def test_a_window_has_a_backward_from_the_first_one_to_the_step() -> None:
    one = optimizer()
    ledger = Ledger([one])
    assert not ledger.has_backward(one)
    record_backward(ledger, None)
    assert ledger.has_backward(one)
    ledger.close(one)
    assert not ledger.has_backward(one)
    record_backward(ledger, loss())
    assert ledger.has_backward(one)


def test_windows_of_two_optimizers_overlap() -> None:
    a, b = optimizer(), optimizer()
    ledger = Ledger([a, b], manual=True)
    record_backward(ledger, loss(1.0))
    ledger.close(a)
    assert (ledger.has_backward(a), ledger.has_backward(b)) == (False, True)
    record_backward(ledger, loss(2.0))
    ledger.close(b)
    assert (ledger.has_backward(a), ledger.has_backward(b)) == (True, False)


def test_discarding_forgets_every_window() -> None:
    a, b = optimizer(), optimizer()
    ledger = Ledger([a, b], manual=True)
    record_backward(ledger, loss())
    ledger.window_of(a).unscaled = True
    ledger.close(b)
    ledger.discard()
    assert not ledger.has_backward(a)
    assert not ledger.has_backward(b)
    assert ledger.losses_of(a) == ()
    assert ledger.unscaled_early() == []
    assert not ledger.window_of(a).unscaled
    record_backward(ledger, loss())
    assert ledger.has_backward(b)


# ---------------------------------------------------------------- open windows


def test_a_window_stays_the_same_until_it_is_closed() -> None:
    one = optimizer()
    ledger = Ledger([one])
    window = ledger.window_of(one)
    assert (window.found_inf, window.unscaled, window.norm, window.overflowed) == (None, False, None, None)
    assert ledger.window_of(one) is window
    ledger.close(one)
    assert ledger.window_of(one) is not window


def test_reopening_forgets_what_was_found_and_keeps_the_backwards() -> None:
    one = optimizer()
    ledger = Ledger([one])
    record_backward(ledger, loss())
    window = ledger.window_of(one)
    ledger.reopen(one)
    assert ledger.window_of(one) is not window
    assert ledger.has_backward(one)
    assert len(ledger.losses_of(one)) == 1


def test_reopening_and_closing_a_window_that_nobody_opened_is_harmless() -> None:
    one = optimizer()
    ledger = Ledger([one])
    ledger.reopen(one)
    ledger.close(one)
    assert not ledger.has_backward(one)


def test_windows_unscaled_early_are_those_open_and_unscaled() -> None:
    a, b, c = optimizer(), optimizer(), optimizer()
    ledger = Ledger([a, b, c], manual=True)
    ledger.window_of(a).unscaled = ledger.window_of(b).unscaled = True
    assert [id(o) for o in ledger.unscaled_early()] == [id(a), id(b)]
    ledger.close(a)
    assert [id(o) for o in ledger.unscaled_early()] == [id(b)]


# ---------------------------------------------------------------- losses


def test_losses_are_those_since_the_last_step_detached() -> None:
    a, b = optimizer(), optimizer()
    ledger = Ledger([a, b], manual=True)
    record_backward(ledger, loss(1.0))
    ledger.close(a)
    record_backward(ledger, loss(2.0))
    record_backward(ledger, None)
    assert [value.item() for value in ledger.losses_of(a)] == [2.0]
    assert [value.item() for value in ledger.losses_of(b)] == [1.0, 2.0]
    assert not any(value.requires_grad for value in ledger.losses_of(b))


def test_a_single_optimizer_lets_its_losses_go_when_its_window_closes() -> None:
    one = optimizer()
    ledger = Ledger([one])
    record_backward(ledger, loss())
    ledger.close(one)
    assert len(ledger._losses) == 0


def test_of_a_very_long_window_the_newest_1024_losses_are_kept() -> None:
    one = optimizer()
    ledger = Ledger([one])
    for value in range(1030):
        record_backward(ledger, loss(float(value)))
    values = [value.item() for value in ledger.losses_of(one)]
    assert values == [float(value) for value in range(6, 1030)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 2.0], 0.0), ([1.0, math.inf], 1.0), ([math.nan, 1.0], 1.0), ([-math.inf, math.nan], 1.0), ([], 0.0)],
)
def test_a_forward_overflow_is_a_loss_of_the_window_that_is_not_finite(
    values: list[float], expected: float, dtype: torch.dtype
) -> None:
    one = optimizer()
    ledger = Ledger([one])
    for value in values:
        record_backward(ledger, loss(value, dtype))
    found = ledger.forward_overflow(one, CPU)
    assert (found.item(), found.dtype, found.shape) == (expected, torch.float32, ())


def test_a_bad_loss_of_an_earlier_window_is_no_forward_overflow() -> None:
    a, b = optimizer(), optimizer()
    ledger = Ledger([a, b], manual=True)
    record_backward(ledger, loss(math.inf))
    ledger.close(a)
    record_backward(ledger, loss())
    assert ledger.forward_overflow(a, CPU).item() == 0.0
    assert ledger.forward_overflow(b, CPU).item() == 1.0


def test_an_fp64_loss_beyond_the_range_of_fp32_is_finite() -> None:
    one = optimizer()
    ledger = Ledger([one])
    record_backward(ledger, loss(1e39, torch.float64))
    assert ledger.forward_overflow(one, CPU).item() == 0.0


@pytest.mark.parametrize(("bad", "expected"), [(1.0, 0.0), (math.nan, 1.0)])
def test_a_loss_of_several_elements_is_looked_at_too(bad: float, expected: float) -> None:
    one = optimizer()  # manual_backward(losses, gradient=weights)
    ledger = Ledger([one])
    record_backward(ledger, torch.tensor([1.0, bad, 2.0]))
    record_backward(ledger, loss())
    assert ledger.forward_overflow(one, CPU).item() == expected


def test_looking_for_a_forward_overflow_transfers_nothing() -> None:
    one = optimizer()
    ledger = Ledger([one])
    record_backward(ledger, torch.ones((), device="meta"))
    assert ledger.forward_overflow(one, torch.device("meta")).device.type == "meta"


# ---------------------------------------------------------------- consumption


def test_a_gradient_is_fresh_until_it_is_consumed_and_again_once_it_is_written_to() -> None:
    p = parameter()
    ledger = Ledger([optimizer(p)], manual=True)
    assert ledger.is_fresh(p)
    ledger.mark_consumed([p])
    assert not ledger.is_fresh(p)
    (p * 2).sum().backward()
    assert ledger.is_fresh(p)


def test_a_new_gradient_in_the_place_of_a_consumed_one_is_fresh() -> None:
    p = parameter()
    ledger = Ledger([optimizer(p)], manual=True)
    ledger.mark_consumed([p])
    p.grad = torch.ones(2)
    assert ledger.is_fresh(p)


def test_a_parameter_without_a_gradient_is_not_fresh() -> None:
    p = parameter(None)
    ledger = Ledger([optimizer(p)], manual=True)
    ledger.mark_consumed([p])
    assert not ledger.is_fresh(p)


def test_in_automatic_optimization_consumption_is_not_tracked() -> None:
    p = parameter()
    ledger = Ledger([optimizer(p)])
    ledger.mark_consumed([p])
    assert ledger.is_fresh(p)


# ---------------------------------------------------------------- backwards past the plugin


def foreign_backward(p: torch.nn.Parameter) -> None:
    (p * 2).sum().backward()


@pytest.mark.parametrize("which", [0, -1])
def test_a_backward_past_the_plugin_is_noticed_at_the_first_and_the_last_parameter(which: int) -> None:
    parameters = [parameter(None) for _ in range(3)]
    a, b = optimizer(*parameters), optimizer(parameter(None))
    ledger = Ledger([a, b], manual=True)
    ledger.watch_backwards()
    foreign_backward(parameters[which])
    assert ledger.has_foreign_gradient(a)
    assert not ledger.has_foreign_gradient(b)


def test_a_backward_through_the_plugin_is_not_foreign() -> None:
    p = parameter(None)
    a = optimizer(p)
    ledger = Ledger([a], manual=True)
    ledger.watch_backwards()
    ledger.in_backward = True
    foreign_backward(p)
    ledger.in_backward = False
    assert not ledger.has_foreign_gradient(a)


@pytest.mark.parametrize("end", ["zeroed", "replaced", "closed", "discarded"])
def test_a_foreign_gradient_is_forgotten_when_it_is_gone_or_its_window_is(end: str) -> None:
    p = parameter(None)
    a = optimizer(p)
    ledger = Ledger([a], manual=True)
    ledger.watch_backwards()
    foreign_backward(p)
    if end == "zeroed":
        p.grad = None
    elif end == "replaced":
        p.grad = torch.ones(2)
    elif end == "closed":
        ledger.close(a)
    else:
        ledger.discard()
    assert not ledger.has_foreign_gradient(a)


def test_the_window_of_another_optimizer_that_closes_forgets_no_foreign_gradient() -> None:
    mine, theirs = parameter(None), parameter(None)
    a, b = optimizer(mine), optimizer(theirs)
    ledger = Ledger([a, b], manual=True)
    ledger.watch_backwards()
    foreign_backward(theirs)
    ledger.close(a)
    assert ledger.has_foreign_gradient(b)


def test_nothing_is_watched_any_more_once_it_is_ended() -> None:
    p, frozen = parameter(None), parameter(None)
    frozen.requires_grad_(False)
    a = optimizer(p, frozen)
    ledger = Ledger([a], manual=True)
    ledger.watch_backwards()()
    foreign_backward(p)
    assert not ledger.has_foreign_gradient(a)


# ---------------------------------------------------------------- held gradients


def test_gradients_of_another_optimizer_are_held_until_they_are_consumed() -> None:
    mine, theirs, idle = parameter(), parameter(3.0), parameter(None)
    a, b = optimizer(mine), optimizer(theirs, idle)
    ledger = Ledger([a, b], manual=True)
    held = ledger.held_gradients(a)
    assert len(held) == 1
    assert held[0] is theirs.grad
    ledger.mark_consumed([theirs])
    assert ledger.held_gradients(a) == []


def test_gradients_that_were_unscaled_early_are_not_held() -> None:
    a, b = optimizer(parameter()), optimizer(parameter())
    ledger = Ledger([a, b], manual=True)
    ledger.window_of(b)
    assert len(ledger.held_gradients(a)) == 1
    ledger.window_of(b).unscaled = True
    assert ledger.held_gradients(a) == []


def test_a_shared_parameter_is_not_held_against_its_own_optimizer_and_is_counted_once() -> None:
    shared, theirs = parameter(), parameter()
    a, b, c = optimizer(shared), optimizer(shared, theirs), optimizer(theirs)
    ledger = Ledger([a, b, c], manual=True)
    held = ledger.held_gradients(a)
    assert len(held) == 1
    assert held[0] is theirs.grad


@pytest.mark.parametrize(("manual", "count"), [(False, 2), (True, 1)])
def test_nothing_is_held_in_automatic_optimization_or_by_a_single_optimizer(manual: bool, count: int) -> None:
    optimizers = [optimizer(parameter()) for _ in range(count)]
    assert Ledger(optimizers, manual).held_gradients(optimizers[0]) == []


def test_the_values_of_a_held_sparse_gradient_are_given() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    a, b = optimizer(), optimizer(embedding.weight)
    (held,) = Ledger([a, b], manual=True).held_gradients(a)
    assert held.tolist() == [[2.0, 2.0]]


def test_a_coalesced_sparse_gradient_is_consumed_like_any_other() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    ledger = Ledger([optimizer(), optimizer(embedding.weight)], manual=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    assert len(ledger.held_gradients(ledger.optimizers[0])) == 1
    ledger.mark_consumed([embedding.weight])
    assert ledger.held_gradients(ledger.optimizers[0]) == []
    embedding(torch.tensor([2])).sum().backward()
    assert len(ledger.held_gradients(ledger.optimizers[0])) == 1
