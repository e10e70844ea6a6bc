"""Wraps single methods of single objects for the time of a fit: no class and no module of Lightning is ever changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BELOW = "_amp_below"  # an attribute of a wrapping function: what it calls


class _Below:
    """What a wrapper calls: the method, or what somebody else had wrapped around it before.

    Attributes:
        target: The function.
        was_own: Whether it lay on the instance, rather than being its class's.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.target: Any = getattr(owner, name)
        self.was_own = name in owner.__dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)


class InstanceHooks:
    """Methods wrapped on instances, and how to undo it; several may wrap one method, and end in any order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces ``owner.name`` on the instance by ``wrapper(original bound method)``."""
        below = _Below(owner, name)
        top = wrapper(below)
        setattr(top, _BELOW, below)
        owner.__dict__[name] = top
        self._undo.append(lambda: _unwrap(owner, name, top, below))

    def until_undone(self, end: Callable[[], None]) -> None:
        """Has ``end`` called when everything is put back."""
        self._undo.append(end)

    def undo(self) -> None:
        """Puts everything back, last wrapped first."""
        while self._undo:
            self._undo.pop()()


def _unwrap(owner: Any, name: str, top: Callable[..., Any], below: _Below) -> None:
    above = owner.__dict__.get(name)
    if above is top:
        if below.was_own:
            owner.__dict__[name] = below.target
        else:
            owner.__dict__.pop(name)
        return
    # Somebody has wrapped it again, and goes on: it is to call what lies below this one from now on.
    while (next_below := getattr(above, _BELOW, None)) is not None:
        if next_below.target is top:
            next_below.target, next_below.was_own = below.target, below.was_own
            return
        above = next_below.target
