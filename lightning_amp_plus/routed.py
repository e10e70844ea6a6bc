"""How a module is made to compute in its own format: its class becomes a generated subclass.

`routing.apply` installs routes and `routing.undo` removes them. A subclass, unlike a replaced `forward`, follows
the module through copies and pickles, leaves the instance's attributes, hooks and parameters alone and is seen by
torch.compile.
"""

import copyreg
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_amp_plus.casts import DTYPES, Swap, cast_floating, put_back, refuse_writes, swap_in_fp32
from lightning_amp_plus.fp8.backends import BACKENDS
from lightning_amp_plus.fp8.selection import Fp8Route
from lightning_amp_plus.fp8.weights import forget_weight

FP8_SWITCH = "_amp_fp8_on"  # an attribute of a module in FP8; without it FP8 is on
_METRIC_METHODS = ("forward", "update", "compute")
FUSED_IN_EVALUATION = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
# What the choice of the fused path reads, and nothing else does.
_FUSION_SWITCHES: tuple[tuple[type[nn.Module], str, Any], ...] = (
    (nn.TransformerEncoder, "use_nested_tensor", False),
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class ModuleRoute(NamedTuple):
    """What a generated class does around its functions.

    Attributes:
        compute: Format to compute in.
        autocast: Whether an autocast does it. Without one, floating inputs are cast on entry: for FP32 the 16-bit ones,
            for a 16-bit format those of the other two.
        device_type: Device of the autocast where no input tells.
        cast_parameters: Whether 16-bit parameters are cast to FP32 for the time of a call.
        fp8: How a Linear computes in FP8; ``compute`` is then the format around it.
    """

    compute: str
    autocast: bool
    device_type: str
    cast_parameters: bool
    fp8: Fp8Route | None = None


_generated: dict[tuple[type[nn.Module], ModuleRoute], type[nn.Module]] = {}


class Routed:
    """Mixin of every generated class; what a routed module does beyond its base class."""

    _amp_base: type[nn.Module]
    _amp_route: ModuleRoute

    def __init_subclass__(cls, **keywords: Any) -> None:
        # Ends here: a user's __init_subclass__ (a registry, say) must not hear of generated classes.
        return

    def extra_repr(self) -> str:
        """The base class's description and the route."""
        described: str = super().extra_repr()  # type: ignore[misc]
        route = self._amp_route
        compute = route.compute if route.fp8 is None else f"fp8 ({route.fp8})"
        return ", ".join(part for part in (described, f"compute={compute}") if part)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A generated class cannot be found by its name, so copies and pickles name its base and its route.
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__ and reduced[1][0] is type(self):  # type: ignore[attr-defined]
            return (_new_routed, (self._amp_base, tuple(self._amp_route)), *reduced[2:])
        return reduced


def route_module(module: nn.Module, route: ModuleRoute) -> None:
    """Makes a module compute in its route. Does nothing for a container without functions of its own.

    Raises:
        TypeError: If the module cannot carry a route; the module is then unchanged.
    """
    base = type(module)
    if not _routable_functions(base):
        return
    _set_class(module, _routed_class(base, route))


def unroute_module(module: nn.Module) -> None:
    """Gives a module its own class back.

    Raises:
        RuntimeError: If another class has been put on top of the route since.
    """
    if not isinstance(module, Routed):
        return
    if "_amp_base" not in vars(type(module)):
        raise RuntimeError(
            f"The class of a routed module has been changed to {type(module)!r} since its route was installed, so "
            "the route cannot be removed. Apply routes after the wrapping that changes classes (such as fully_shard), "
            "or undo them before it."
        )
    vars(module).pop(FP8_SWITCH, None)
    forget_weight(module)
    _set_class(module, module._amp_base)


def base_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, without a route."""
    return module._amp_base if isinstance(module, Routed) else type(module)


def route_of(module: nn.Module) -> ModuleRoute | None:
    """The route that is installed on a module, if any."""
    return module._amp_route if isinstance(module, Routed) else None


def fp8_is_on(module: nn.Module, fp8: Fp8Route) -> bool:
    """Whether a module with such a route computes in FP8 just now."""
    return (module.training or fp8.in_evaluation) and fp8_has_begun(module)


def fp8_has_begun(module: nn.Module) -> bool:
    """Whether FP8 is not switched off for the steps before it begins; see ``fp8.switch``."""
    return bool(getattr(module, FP8_SWITCH, True))


def why_not_routable(module: nn.Module) -> str | None:
    """Why a module cannot carry a route; None if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module, whose compiled code fixes its formats"
    if "forward" in vars(module):
        return "its forward was replaced on the instance, where a class cannot reach it"
    return None


def _set_class(module: Any, cls: type[nn.Module]) -> None:
    if not _is_metric(type(module)) or "update" not in vars(module):
        object.__setattr__(module, "__class__", cls)
        return
    # torchmetrics keeps bound copies of update and compute on the instance; its pickling protocol rebuilds them.
    state = module.__getstate__()
    for name in set(vars(module)) - set(state):
        object.__delattr__(module, name)
    object.__setattr__(module, "__class__", cls)
    module.__setstate__(state)


def _routed_class(base: type[nn.Module], route: ModuleRoute) -> type[nn.Module]:
    if (base, route) in _generated:
        return _generated[base, route]
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_amp_base": base,
        "_amp_route": route,
    }
    namespace.update((name, _in_route(function, route)) for name, function in _routable_functions(base).items())
    generate: Any = type(base)
    _generated[base, route] = generate(base.__name__, (Routed, base), namespace)
    return _generated[base, route]


def _new_routed(base: type[nn.Module], route: tuple[Any, ...]) -> nn.Module:
    cls = _routed_class(base, ModuleRoute(*route)) if _routable_functions(base) else base
    return cls.__new__(cls)


def _routable_functions(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The forward, and what a class outside torch adds for others to call."""
    if _is_metric(base):
        return {name: getattr(base, name) for name in _METRIC_METHODS}
    found: dict[str, Callable[..., Any]] = {}
    for owner in reversed(base.__mro__):
        own_work = owner is not object and owner.__module__.partition(".")[0] != "torch"
        for name, value in vars(owner).items():
            if name.startswith("_") or hasattr(nn.Module, name):
                continue
            if own_work and _is_plain(value):
                found[name] = value
            else:
                found.pop(name, None)
    if base.forward is not nn.Module.forward:
        found["forward"] = base.forward
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, FunctionType) and not (
        inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value)
    )


def _is_metric(cls: type) -> bool:
    return any(
        base.__module__.startswith("torchmetrics.") and base.__name__ in ("Metric", "MetricCollection")
        for base in cls.__mro__
    )


def is_metric(module: nn.Module) -> bool:
    """Whether a module is one of torchmetrics, found without importing it."""
    return _is_metric(type(module))


def is_captive(parent: nn.Module | None, module: nn.Module) -> bool:
    """Whether a module is never called, since its parent uses its parameters directly."""
    return isinstance(parent, nn.MultiheadAttention) and parent.out_proj is module


def _in_route(function: _Function, route: ModuleRoute) -> _Function:
    dtype = DTYPES[route.compute]

    @functools.wraps(function)
    def under_autocast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device_type = _device_type(args, route.device_type)
        # Autocast's cache ignores dtypes: a weight that an outer BF16 region used would come back as BF16 in FP16.
        with torch.autocast(device_type, dtype=dtype, enabled=True, cache_enabled=False):
            return _call(function, device_type, self, args, kwargs)

    @functools.wraps(function)
    def without_autocast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device_type = _device_type(args, route.device_type)
        args = cast_floating(args, dtype)
        kwargs = cast_floating(kwargs, dtype)
        with torch.autocast(device_type, enabled=False):
            return _call(function, device_type, self, args, kwargs)

    @functools.wraps(function)
    def with_cast_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        swaps: list[Swap] = []
        try:
            swap_in_fp32(_same_route(self), swaps)
            result = without_autocast(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                refuse_writes(self, swaps)
            return result
        finally:
            put_back(swaps)

    if route.fp8 is not None and function is nn.Linear.forward:
        return _in_fp8(route.fp8, under_autocast if route.autocast else without_autocast)  # type: ignore[return-value]
    if route.autocast:
        return under_autocast  # type: ignore[return-value]
    return with_cast_parameters if route.cast_parameters else without_autocast  # type: ignore[return-value]


def _in_fp8(fp8: Fp8Route, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A Linear's forward in FP8, or ``otherwise`` where it is to be in high precision: in evaluation, or switched off."""
    backend = BACKENDS[fp8.backend]
    in_fp8, outside = backend.forward_of(fp8.recipe, fp8.gemms), backend.outside_fp8(otherwise)

    @functools.wraps(nn.Linear.forward)
    def forward(self: Any, input: Tensor) -> Any:
        if fp8_is_on(self, fp8):
            return in_fp8(self, input)
        return outside(self, input)

    return forward


def _call(
    function: Callable[..., Any], device_type: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a module's function, keeping torch's fused inference path off.

    That path reads the children's weights past the children's routes, and asks for CUDA's autocast whatever the device,
    so that under CPU autocast it would compute in FP32.
    """
    for kind, attribute, value in _FUSION_SWITCHES:
        if isinstance(module, kind):
            before = getattr(module, attribute)
            setattr(module, attribute, value)
            try:
                return function(module, *args, **kwargs)
            finally:
                setattr(module, attribute, before)
    if isinstance(module, nn.MultiheadAttention) and device_type != "cuda" and not torch.is_autocast_enabled("cuda"):
        torch.set_autocast_enabled("cuda", True)  # off CUDA it casts nothing, it only answers the question
        try:
            return function(module, *args, **kwargs)
        finally:
            torch.set_autocast_enabled("cuda", False)
    return function(module, *args, **kwargs)


def _device_type(args: tuple[Any, ...], otherwise: str) -> str:
    for value in args:
        if isinstance(value, Tensor) and value.device.type != "meta":
            return value.device.type
    return otherwise


def _same_route(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all below it whose parameters are cast with its own, without those in routes of other formats."""
    pending = [module]
    while pending:
        part = pending.pop()
        yield part
        for child in part._modules.values():
            route = None if child is None else route_of(child)
            if child is not None and (route is None or route.cast_parameters):
                pending.append(child)
