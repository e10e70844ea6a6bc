"""Which modules can be watched from outside: :func:`watchable`, and :func:`around` for those compiled in place.

Hooks put on modules inside a compiled region after it was compiled never fire, and those that are there while it is
being compiled become part of it: taking them away compiles it once more. So nothing inside such a region gets a hook. The
region as a whole is watched where a call of it passes through uncompiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_amp_plus.naming import clean_name
from lightning_amp_plus.routed import base_class, is_captive, is_metric


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


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called: a module's own hooks are then part of what is compiled."""
    return module._compiled_call_impl is not None and not _is_optimized(module)


def around(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Callable[[], None]:
    """Watches the calls of a module that was compiled in place.

    Args:
        module: The module.
        enter: Called before, as a forward pre-hook with keywords is.
        leave: Called after, also after an exception (with ``None`` as output), as a forward hook with keywords is.

    Returns:
        The function that ends it.
    """
    compiled: Any = module._compiled_call_impl

    def watched(*args: Any, **kwargs: Any) -> Any:
        enter(module, args, kwargs)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            leave(module, args, kwargs, output)
        return output

    def undo() -> None:
        if module._compiled_call_impl is watched:
            module._compiled_call_impl = compiled

    module._compiled_call_impl = watched
    return undo
