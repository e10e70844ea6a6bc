"""Hooks that show the activations of a module and leave no trace: :class:`Watch`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_amp_plus.callbacks.sightings import Sightings
from lightning_amp_plus.routed import base_class
from lightning_amp_plus.watching.aside import NO_TASK, backward_now, out_of_sight
from lightning_amp_plus.watching.modules import around, is_compiled_in_place

_keys = itertools.count(-1, -1)  # torch's own keys of hooks are positive


class Watch:
    """Shows the calls of a module to :class:`Sightings`, from :meth:`begin` to :meth:`end`.

    It goes quiet where nothing may be done: while a compiler traces, in what backward recomputes, inside ``torch.func``.
    Copies and pickles of a model made meanwhile hold a watch that does nothing.

    Args:
        module: The module.
        number: Its number.
        seen: What to show its calls to.
    """

    def __init__(self, module: nn.Module, number: int, seen: Sightings) -> None:
        self.module, self._number, self._seen = module, number, seen
        self._key, self._live = next(_keys), False
        self._open: list[int] = []  # calls that have begun
        self._places: list[dict[Any, Any]] = []
        self._undo: Callable[[], None] | None = None
        # torch's own modules write to their inputs only if told to; for all others a second hook looks in before.
        own = "forward" in vars(module) or not base_class(module).__module__.startswith("torch.nn.modules.")
        self._looks_before = own

    def begin(self) -> None:
        """Puts hooks on the module."""
        self.end()
        module = self.module
        self._live = True
        self._in_place = bool(vars(module).get("inplace", False))
        if is_compiled_in_place(module):
            self._undo = around(module, self.enter, self.leave)
            return
        # register_forward_hook() and its handle take five times as long, for each module at each log point.
        if self._looks_before or self._in_place:
            self._put(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, self.enter)
        self._put(module._forward_hooks, module._forward_hooks_with_kwargs, self.leave)

    def _put(self, hooks: dict[Any, Any], with_kwargs: dict[Any, bool], hook: Callable[..., None]) -> None:
        hooks[self._key] = hook
        with_kwargs[self._key] = True
        self._places += (hooks, with_kwargs)

    def end(self) -> None:
        """Takes them away; again without effect."""
        self._live = False
        for place in self._places:
            place.pop(self._key, None)
        self._places.clear()
        if self._undo is not None:
            self._undo()
            self._undo = None
        self._open.clear()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook before a call."""
        if not out_of_sight() and self._live and backward_now() == NO_TASK:
            self._open.append(self._inputs(args, kwargs))

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The hook after a call."""
        if not out_of_sight() and self._live and backward_now() == NO_TASK:
            call = self._open.pop() if self._open else self._inputs(args, kwargs)
            self._seen.see(call, 2 * self._number + 1, output)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        seen, side = self._seen, 2 * self._number
        call = seen.call(self._number)
        for value in args:
            seen.see(call, side, value, self._in_place)
        for value in kwargs.values():
            seen.see(call, side, value, self._in_place)
        return call

    def __reduce__(self) -> Any:
        return (_without_effect, ())

    def __deepcopy__(self, memo: Any) -> Watch:
        return _without_effect()


def _without_effect() -> Watch:
    """What copies of a watched module have in the place of its watch."""
    watch = Watch.__new__(Watch)
    watch._live = False
    return watch
