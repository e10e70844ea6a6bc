"""Methods wrapped on single objects, and put back as they were."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from lightning_amp_plus.integration.instance_hooks import InstanceHooks


class Greeter:
    def __init__(self, name: str) -> None:
        self.name = name

    def greet(self, mark: str = ".") -> str:
        return f"hello {self.name}{mark}"


def surrounded(by: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    def wrapper(original: Callable[..., str]) -> Callable[..., str]:
        return lambda *args, **kwargs: f"{by}{original(*args, **kwargs)}{by}"

    return wrapper


def test_a_wrapped_method_gets_the_bound_original_with_its_arguments() -> None:
    greeter = Greeter("a")
    InstanceHooks().wrap(greeter, "greet", surrounded("*"))
    assert greeter.greet() == "*hello a.*"
    assert greeter.greet(mark="!") == "*hello a!*"


def test_other_instances_and_the_class_are_not_touched() -> None:
    one, other, method = Greeter("a"), Greeter("b"), Greeter.greet
    InstanceHooks().wrap(one, "greet", surrounded("*"))
    assert other.greet() == "hello b."
    assert Greeter.greet is method


def test_undoing_leaves_no_trace_on_the_instance() -> None:
    greeter, hooks = Greeter("a"), InstanceHooks()
    hooks.wrap(greeter, "greet", surrounded("*"))
    hooks.undo()
    assert vars(greeter) == {"name": "a"}
    assert greeter.greet() == "hello a."


def test_undoing_twice_is_harmless_and_wrapping_again_works() -> None:
    greeter, hooks = Greeter("a"), InstanceHooks()
    for _ in range(2):
        hooks.wrap(greeter, "greet", surrounded("*"))
        assert greeter.greet() == "*hello a.*"
        hooks.undo()
        hooks.undo()
    assert greeter.greet() == "hello a."


def test_several_wrappers_nest_and_are_undone_together() -> None:
    greeter, other, hooks = Greeter("a"), Greeter("b"), InstanceHooks()
    hooks.wrap(greeter, "greet", surrounded("*"))
    hooks.wrap(other, "greet", surrounded("-"))
    hooks.wrap(greeter, "greet", surrounded("+"))
    assert (greeter.greet(), other.greet()) == ("+*hello a.*+", "-hello b.-")
    hooks.undo()
    assert (greeter.greet(), other.greet()) == ("hello a.", "hello b.")
    assert "greet" not in vars(greeter)


def test_what_somebody_else_had_put_on_the_instance_comes_back() -> None:
    greeter, hooks = Greeter("a"), InstanceHooks()

    def theirs(mark: str = ".") -> str:
        return f"theirs{mark}"

    greeter.greet = theirs  # type: ignore[method-assign]
    hooks.wrap(greeter, "greet", surrounded("*"))
    assert greeter.greet() == "*theirs.*"
    hooks.undo()
    assert greeter.greet is theirs


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_what_was_wrapped_several_times_ends_in_any_order_and_leaves_nothing(order: tuple[int, ...]) -> None:
    greeter, marks = Greeter("a"), "*+-"
    hooks = [InstanceHooks() for _ in marks]
    for one, mark in zip(hooks, marks, strict=True):
        one.wrap(greeter, "greet", surrounded(mark))
    assert greeter.greet() == "-+*hello a.*+-"
    left = list(marks)
    for index in order:
        hooks[index].undo()
        left.remove(marks[index])
        around = "".join(left)
        assert greeter.greet() == f"{around[::-1]}hello a.{around}"
    assert vars(greeter) == {"name": "a"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))), ids=str)
def test_what_somebody_else_had_put_there_comes_back_in_any_order(order: tuple[int, ...]) -> None:
    greeter, hooks = Greeter("a"), [InstanceHooks(), InstanceHooks()]

    def theirs(mark: str = ".") -> str:
        return f"theirs{mark}"

    greeter.greet = theirs  # type: ignore[method-assign]
    for one, mark in zip(hooks, "*+", strict=True):
        one.wrap(greeter, "greet", surrounded(mark))
    for index in order:
        hooks[index].undo()
    assert greeter.greet is theirs and vars(greeter).keys() == {"name", "greet"}


def test_what_somebody_else_puts_on_top_stays_and_calls_what_lies_below() -> None:
    greeter, hooks = Greeter("a"), InstanceHooks()
    hooks.wrap(greeter, "greet", surrounded("*"))
    ours = greeter.greet
    greeter.greet = lambda mark=".": f"<{ours(mark)}>"  # type: ignore[method-assign]
    hooks.undo()
    assert greeter.greet() == "<*hello a.*>"  # theirs holds ours, and nothing can take it out of there
    again = InstanceHooks()
    again.wrap(greeter, "greet", surrounded("+"))
    again.undo()
    assert greeter.greet() == "<*hello a.*>"


def test_a_method_wrapped_between_two_ends_of_others_is_called_once() -> None:
    greeter, first, second, third = Greeter("a"), InstanceHooks(), InstanceHooks(), InstanceHooks()
    first.wrap(greeter, "greet", surrounded("1"))
    second.wrap(greeter, "greet", surrounded("2"))
    first.undo()
    third.wrap(greeter, "greet", surrounded("3"))
    second.undo()
    assert greeter.greet() == "3hello a.3"
    third.undo()
    assert vars(greeter) == {"name": "a"}
