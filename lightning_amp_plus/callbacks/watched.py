"""Which modules can be watched from outside, and hooks that leave no trace: :func:`watchable` and :class:`Watch`.

Hooks put on modules inside a compiled region after it was compiled never fire, and those that are there while it is
being compiled become part of it: taking them away compiles it once more. So nothing inside such a region gets a hook. The
region as a whole is watched where a call of it passes through uncompiled code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_amp_plus.callbacks.sightings import Sightings
from lightning_amp_plus.matching import is_captive
from lightning_amp_plus.naming import clean_name
from lightning_amp_plus.routed import base_class, is_metric

# Asked at every call of every module. In backward a forward is a recomputation.
_compiling = torch.compiler.is_dynamo_compiling
_recomputing = torch._C._current_graph_task_id
_transforming = torch._C._functorch.peek_interpreter_stack

_keys = itertools.count(-1, -1)  # torch's own keys of hooks are positive


@dataclass
class Watchable:
    """The modules of a model, by qualified name as in the plan, parents first.

    Attributes:
        module: Every module with a forward that a hook can be put around; of a compiled one what is called.
        leaves: Names of those without children, and of whole regions that show nothing of their inside.
        hidden: For every module inside such a region, the region's name.
        layers: Modules with parameters of their own, hidden ones included, and the names of these parameters.
    """

    module: dict[str, nn.Module] = field(default_factory=dict)
    leaves: dict[str, None] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)
    layers: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)


def watchable(model: nn.Module) -> Watchable:
    """The modules of a model, those of torchmetrics left out."""
    found = Watchable()
    hidden: set[int] = set()
    listed: set[int] = set()

    def visit(raw: str, module: nn.Module, parent: nn.Module | None, region: str | None) -> None:
        if is_metric(module):
            return
        name = clean_name(raw)
        own = [(module, key) for key, parameter in module._parameters.items() if parameter is not None]
        if own and id(module) not in listed:
            listed.add(id(module))
            found.layers.setdefault(name, []).extend(own)
        if region is not None:
            hidden.add(id(module))
            if name != region:
                found.hidden[name] = region
        elif _is_called(module) and not is_captive(parent, module):
            found.module[name] = module  # of wrappers of one name the innermost
            if closed(module):
                region = name
            if region is not None or isinstance(module, nn.MultiheadAttention) or not any(module._modules.values()):
                found.leaves[name] = None
        for key, child in module._modules.items():
            if child is not None:
                visit(f"{raw}.{key}" if raw else key, child, module, region)

    # torch.compile(LightningModule) compiles whole steps.
    visit("", model, None, "" if _is_compiled(getattr(model, "training_step", None)) else None)
    shown = {name: module for name, module in found.module.items() if id(module) not in hidden}
    first = {id(module): name for name, module in reversed(shown.items())}  # a shared module goes by its first name
    found.module = {name: module for name, module in shown.items() if first[id(module)] == name}
    found.leaves = {name: None for name in found.leaves if name in found.module}
    return found


def _is_called(module: nn.Module) -> bool:
    return "forward" in vars(module) or base_class(module).forward is not nn.Module.forward


def closed(module: nn.Module) -> bool:
    """Whether a module runs as one compiled or scripted piece."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or _is_optimized(module)
        or module._compiled_call_impl is not None
        or _is_compiled(module.forward)
    )


def _is_optimized(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` returns; asked without importing the compiler."""
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def _is_compiled(function: Any) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable")


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
        if module._compiled_call_impl is not None and not _is_optimized(module):
            self._undo = _around(module, self)
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
        if not _compiling() and self._live and _recomputing() == -1 and _transforming() is None:
            self._open.append(self._inputs(args, kwargs))

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The hook after a call."""
        if not _compiling() and self._live and _recomputing() == -1 and _transforming() is None:
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


def _around(module: nn.Module, watch: Watch) -> Callable[[], None]:
    """Watches a module compiled in place (``module.compile()``), whose own hooks are part of what is compiled."""
    compiled: Any = module._compiled_call_impl

    def watched(*args: Any, **kwargs: Any) -> Any:
        watch.enter(module, args, kwargs)
        output = compiled(*args, **kwargs)
        watch.leave(module, args, kwargs, output)
        return output

    def undo() -> None:
        if module._compiled_call_impl is watched:
            module._compiled_call_impl = compiled

    module._compiled_call_impl = watched
    return undo
