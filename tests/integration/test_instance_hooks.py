"""Methods wrapped on single objects, and put back as they were."""

from __future__ import annotations

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


@pytest.mark.parametrize("first", [0, 1])
def test_wrappers_of_one_method_end_in_any_order(first: int) -> None:
    greeter, both = Greeter("a"), (InstanceHooks(), InstanceHooks())
    for hooks, by in zip(both, "*+", strict=True):
        hooks.wrap(greeter, "greet", surrounded(by))
    assert greeter.greet() == "+*hello a.*+"
    both[first].undo()
    assert greeter.greet() == ("+hello a.+", "*hello a.*")[first]
    both[1 - first].undo()
    assert vars(greeter) == {"name": "a"}


@pytest.mark.parametrize("first", [0, 1])
def test_whichever_wrapper_ends_last_puts_back_what_was_on_the_instance(first: int) -> None:
    greeter, both = Greeter("a"), (InstanceHooks(), InstanceHooks())
    greeter.greet = own = lambda: "own"  # type: ignore[method-assign, assignment, misc]
    for hooks in both:
        hooks.wrap(greeter, "greet", surrounded("*"))
    both[first].undo()
    both[1 - first].undo()
    assert greeter.greet is own  # type: ignore[comparison-overlap]
