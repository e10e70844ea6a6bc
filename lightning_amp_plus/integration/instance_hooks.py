"""Wraps single methods of single objects for the time of a fit: no class and no module of Lightning is ever changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class InstanceHooks:
    """Methods wrapped on instances, and how to undo it."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces ``owner.name`` on the instance by ``wrapper(original bound method)``."""
        self._undo.append((owner, name, owner.__dict__.get(name)))
        owner.__dict__[name] = wrapper(getattr(owner, name))

    def until_undone(self, end: Callable[[], None]) -> None:
        """Has ``end`` called when everything is put back."""
        self._undo.append((end, "", None))

    def undo(self) -> None:
        """Puts everything back, last wrapped first."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if not name:
                owner()
            elif before is None:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = before
