"""From a policy and a model to routes: `plan` decides and touches nothing, `apply` acts, `undo` takes it back.

The plugin plans and applies before training; the manifest, the census and the command line read the plan.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_amp_plus.autocast_probe import UNKNOWN, Probe, Region, probe
from lightning_amp_plus.casts import BITS_16, DTYPES, dtype_name
from lightning_amp_plus.decision import Decision
from lightning_amp_plus.fp8.backends import BACKENDS
from lightning_amp_plus.fp8.delayed import attach_histories, forget_history
from lightning_amp_plus.fp8.obstacle import ObstacleKind
from lightning_amp_plus.fp8.recipes import Operand, Recipe
from lightning_amp_plus.fp8.selection import Fp8Route
from lightning_amp_plus.matching import decide
from lightning_amp_plus.naming import ModelNames, clean_name
from lightning_amp_plus.plan_table import FORMATS_LESS_WANTED, as_text, fitting_table, plural
from lightning_amp_plus.policy import PrecisionPolicy
from lightning_amp_plus.routed import (
    FUSED_IN_EVALUATION,
    ModuleRoute,
    base_class,
    is_captive,
    is_metric,
    route_module,
    unroute_module,
    why_not_routable,
)
from lightning_amp_plus.storage import convert_storage

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_COLUMNS = ("module", "compute", "parameter", "input", "weight", "output", "accumulator", "optimizer", "rule", "reason")
_ABOUT_FP8 = {"fp8", "left_out"}  # fields of a route that are written only where they hold something


@dataclass(frozen=True)
class Route:
    """What one module got. Formats are short names (``bf16``), ``-`` for what does not apply or is not known.

    Attributes:
        name: Qualified name, relative to the model.
        module_type: Name of its class.
        compute: Format it computes in.
        params: Format its own parameters are stored in.
        input: Format its operation reads its input in; ``as given`` where it takes what comes.
        weight: Format its operation reads its weight in.
        output: Format of what it returns.
        accumulator: Format its GEMM sums in, measured.
        optimizer: Format of the optimizer's state for its parameters.
        rule: `match` of the rule that decided; empty if none did.
        reason: Why it got this route.
        fp8: How it computes in FP8, if it does.
        left_out: Of a module that was to compute in FP8 and does not, the kind of its obstacle, as of
            :class:`~lightning_amp_plus.fp8.obstacle.Obstacle`; else empty.
    """

    name: str
    module_type: str
    compute: str
    params: str
    input: str
    weight: str
    output: str
    accumulator: str
    optimizer: str
    rule: str
    reason: str
    fp8: Fp8Route | None = None
    left_out: ObstacleKind | Literal[""] = ""

    def to_dict(self) -> dict[str, Any]:
        """The route in plain types; the keys ``fp8`` and ``left_out`` are there only where they hold something."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["fp8"] = None if self.fp8 is None else self.fp8.to_dict()
        return {key: value for key, value in plain.items() if value or key not in _ABOUT_FP8}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Route":
        """The route that `to_dict` described."""
        fp8 = values.get("fp8")
        return cls(**{**values, "fp8": None if fp8 is None else Fp8Route.from_dict(fp8)})


@dataclass(frozen=True)
class RoutePlan:
    """The routes of a model's modules under a policy. Print it, store it as JSON, or `apply` it.

    Attributes:
        policy: The policy that was planned for.
        device_type: Device that the operations were probed on and autocast is meant for.
        routes: One for every qualified module name, aliases of shared modules included.
        kept_buffers: Qualified names of buffers that keep their format because a rule names them.
        notes: What else the run's owner should know, a sentence each; printed below the routes.
    """

    policy: PrecisionPolicy
    device_type: str
    routes: tuple[Route, ...]
    kept_buffers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    _index: dict[str, Route] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {route.name: route for route in self.routes})

    def __getitem__(self, name: str) -> Route:
        cleaned = clean_name(name)
        if cleaned not in self._index:
            raise KeyError(f"The plan has no module {name!r}. It has {_some(list(self._index))}.")
        return self._index[cleaned]

    def apply(self, model: nn.Module, storage: bool = True) -> None:
        """Installs the routes in a model; see `apply`."""
        apply(self, model, storage)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types."""
        return {
            "policy": self.policy.to_dict(),
            "device_type": self.device_type,
            "routes": [route.to_dict() for route in self.routes],
            "kept_buffers": list(self.kept_buffers),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RoutePlan":
        """The plan that `to_dict` described.

        Raises:
            ValueError: If keys are missing or unknown, naming them.
        """
        _exactly("A plan", values, {"policy", "device_type", "routes", "kept_buffers", "notes"})
        names = {item.name for item in fields(Route)} - _ABOUT_FP8
        for index, route in enumerate(values["routes"]):
            always = {key: value for key, value in route.items() if key not in _ABOUT_FP8}
            _exactly(f"Route {index} of a plan", always, names)
        routes = tuple(Route.from_dict(route) for route in values["routes"])
        policy = PrecisionPolicy.from_dict(values["policy"])
        kept_buffers, notes = tuple(values["kept_buffers"]), tuple(values["notes"])
        return cls(policy, values["device_type"], routes, kept_buffers, notes)

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "RoutePlan":
        """The plan that `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    def describe(self) -> dict[str, Any]:
        """What a manifest keeps of a plan, in plain types: the device, and each module's route by name."""
        fp8 = {route.name: route.fp8.to_dict() for route in self.routes if route.fp8 is not None}
        return {
            "device_type": self.device_type,
            "routes": self._described,
            "kept_buffers": list(self.kept_buffers),
            "fp8": fp8 or None,
        }

    @cached_property
    def _described(self) -> dict[str, dict[str, str]]:
        # Made once: a plan never changes, and checkpoints are written often.
        not_here = {"name", *_ABOUT_FP8}
        return {route.name: {k: v for k, v in route.to_dict().items() if k not in not_here} for route in self.routes}

    def __str__(self) -> str:
        return as_text(self._rows(), self.notes)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        title = f"Routes on {self.device_type}, {self.policy.lightning_precision} around"
        if any(route.fp8 for route in self.routes):
            yield fitting_table(title, self._rows(), self.notes, console, options, FORMATS_LESS_WANTED, least_prose=20)
        else:
            yield fitting_table(title, self._rows(), self.notes, console, options)

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [_COLUMNS, *(_row(route) for route in self.routes)]
        if not any(route.fp8 for route in self.routes):
            return rows
        fp8 = ("fp8", *(str(route.fp8 or UNKNOWN) for route in self.routes))
        return [(*row[:2], cell, *row[2:]) for row, cell in zip(rows, fp8, strict=True)]


def plan(model: nn.Module, policy: PrecisionPolicy | str, hardware: str | torch.device | None = None) -> RoutePlan:
    """Decides what each module of a model computes in, and says why. Changes nothing and draws no random number.

    Args:
        model: The model; names in rules are relative to it. Its weights are not read and may be on the meta device.
        policy: What is wanted: a policy or one of the strings it knows.
        hardware: Device that it will run on, by default that of the first parameter. What operations make of autocast
            is measured there, and left open (``-``) if the device is not present.

    Raises:
        ValueError: If a rule matches nothing, the whole model or a module whose format is fixed.
        TypeError: If a module that needs a route cannot carry one.
    """
    if isinstance(policy, str):
        policy = PrecisionPolicy.from_string(policy)
    device_type = _device_type(model, hardware)
    names = ModelNames(model)
    decisions, kept_buffers = decide(names, policy, device_type)
    # Only for its errors: a plan that could not be applied is no plan.
    _routed_modules(names, {name: decision.compute for name, decision in decisions.items()}, policy)
    routes = tuple(
        _route(name, names.module[name], decision, policy, device_type) for name, decision in decisions.items()
    )
    return RoutePlan(policy, device_type, routes, kept_buffers, _notes(policy, names, decisions))


def _notes(policy: PrecisionPolicy, names: ModelNames, decisions: Mapping[str, Decision]) -> tuple[str, ...]:
    return (*_count_of_fp8(names, decisions), *_start_of_fp8(policy))


def _count_of_fp8(names: ModelNames, decisions: Mapping[str, Decision]) -> tuple[str, ...]:
    """How many Linear layers compute in FP8, and how many that were to do not; a shared one counts once."""
    first = [aliases[0] for aliases in names.aliases.values()]
    layers = [decisions[name] for name in first if _is_called_linear(names, name)]
    kinds = [decision.left_out for decision in layers if decision.left_out]
    left_out = Counter("other" if kind in ("rule", "op") else kind for kind in kinds)
    count = sum(decision.fp8 is not None for decision in layers)
    if not count and not left_out:
        return ()
    why = ", ".join(f"{kind} {number}" for kind, number in sorted(left_out.items()))
    others = f"; {left_out.total()} that were to do not ({why}; see their reasons)" if left_out else ""
    return (f"{plural(count, 'Linear layer')} in FP8{others}.",)


def _is_called_linear(names: ModelNames, name: str) -> bool:
    module, around = names.module[name], names.module[name.rpartition(".")[0]]
    return isinstance(module, nn.Linear) and not is_captive(around, module)


def _start_of_fp8(policy: PrecisionPolicy) -> tuple[str, ...]:
    steps = f"after {policy.fp8_after_steps} applied steps" if policy.fp8_after_steps else ""
    quiet = "once loss and gradient norm are quiet" if policy.fp8_when_stable else ""
    if not steps and not quiet:
        return ()
    when = ", and ".join(part for part in (steps, quiet) if part)
    return (f"FP8 begins {when}; until then its modules compute in BF16. Said when it does.",)


def outline(model: nn.Module, policy: PrecisionPolicy, device_type: str = "cpu") -> dict[str, Any]:
    """The part of :meth:`RoutePlan.describe` that needs no probing.

    Args:
        model: The model.
        policy: What is wanted.
        device_type: Where it will run, which decides the default FP8 recipe.

    Returns:
        ``routes``: ``compute``, ``params`` and ``optimizer`` of every module by name. ``kept_buffers`` and ``fp8``: as in
        a plan's description.

    Raises:
        ValueError: If a rule matches nothing, the whole model or a module whose format is fixed.
    """
    names = ModelNames(model)
    decisions, kept_buffers = decide(names, policy, device_type)
    outlined = {}
    for name, decision in decisions.items():
        params, optimizer = _storage_columns(names.module[name], decision, policy)
        outlined[name] = {"compute": decision.compute, "params": params, "optimizer": optimizer}
    fp8 = {name: decision.fp8.to_dict() for name, decision in decisions.items() if decision.fp8 is not None}
    return {"routes": outlined, "kept_buffers": list(kept_buffers), "fp8": fp8 or None}


def apply(plan: RoutePlan, model: nn.Module, storage: bool = True) -> None:
    """Installs a plan's routes in the model it was made for, taking out earlier ones, and converts its storage.

    Args:
        plan: What `plan` decided for this model.
        model: Changed in place.
        storage: `False` leaves parameters and buffers as they are stored: the strategy casts them for computing.

    Raises:
        ValueError: If the model does not have the plan's modules. Nothing is changed then.
        TypeError: If a module cannot carry its route. Nothing is changed then.
    """
    names = ModelNames(model)
    _check_same_modules(plan, names)
    routed = _routed_modules(names, {route.name: route.compute for route in plan.routes}, plan.policy)
    fp8 = {id(names.module[route.name]): route.fp8 for route in plan.routes}
    for module in model.modules():
        unroute_module(module)  # histories stay, for the new routes to take up
    if storage:
        convert_storage(model, plan)
    _prepare_backends(names, {route.name: route.fp8 for route in plan.routes if route.fp8 is not None})
    for module, compute in routed:
        route_module(module, _module_route(module, compute, plan, fp8[id(module)]))


def undo(model: nn.Module) -> None:
    """Takes all routes out of a model; its classes are then as before. Converted storage stays converted."""
    for module in model.modules():
        unroute_module(module)
        forget_history(module)
        for backend in BACKENDS.values():
            backend.release(module)


def _prepare_backends(names: ModelNames, routes: Mapping[str, Fp8Route]) -> None:
    """Gives every module in FP8 what its backend keeps for it, and takes from the others what they have no use for."""
    by_module = {id(names.module[name]): route.backend for name, route in routes.items()}
    for module in names.module.values():
        for backend in BACKENDS.values():
            if by_module.get(id(module)) != backend.name:
                backend.release(module)
    windowed = {name: route.recipe for name, route in routes.items() if BACKENDS[route.backend].clock == "window"}
    attach_histories(names.module, windowed)
    for name, route in routes.items():
        BACKENDS[route.backend].prepare(names.module[name], route.recipe)


def _route(name: str, module: nn.Module, decision: Decision, policy: PrecisionPolicy, device_type: str) -> Route:
    params, optimizer = _storage_columns(module, decision, policy)
    region = _region(decision.compute, params, policy, device_type)
    seen = Probe() if decision.metric else probe(module, region)
    if decision.fp8 is not None:
        recipe = decision.fp8.recipe
        seen = seen._replace(
            input=_short(recipe, "input"), weight=_short(recipe, "weight"), accumulator="fp32", error=""
        )
    reason = decision.reason
    if seen.error:
        reason += f"; cannot run in {decision.compute} on {device_type}: {seen.error}"
    return Route(
        name=name,
        module_type=base_class(module).__name__,
        compute=decision.compute,
        params=params,
        input=seen.input,
        weight=seen.weight,
        output=seen.output,
        accumulator=seen.accumulator,
        optimizer=optimizer,
        rule=decision.rule,
        reason=reason,
        fp8=decision.fp8,
        left_out=decision.left_out,
    )


def _short(recipe: Recipe, operand: Operand) -> str:
    return recipe.format_of(operand).name.lower()


def _storage_columns(module: nn.Module, decision: Decision, policy: PrecisionPolicy) -> tuple[str, str]:
    found = {dtype_name(parameter.dtype) for parameter in module._parameters.values() if parameter is not None}
    if policy.is_true and not decision.metric:
        found = {policy.params if name in ("fp32", "bf16", "fp16") else name for name in found}
    if not found:
        return UNKNOWN, UNKNOWN
    state = {"fp32" if policy.master_weights and name == policy.params else name for name in found}
    return "+".join(sorted(found)), "+".join(sorted(state))


def _region(compute: str, params: str, policy: PrecisionPolicy, device_type: str) -> Region:
    compute = "bf16" if compute == "fp8" else compute
    stored = params.partition("+")[0]
    stored = stored if stored in DTYPES else policy.params
    if compute == "fp32":
        weight = "fp64" if stored == "fp64" else "fp32"
        return Region(None, (weight,), weight, device_type)
    if policy.is_true and compute == policy.params:
        return Region(None, (compute,), stored, device_type)
    return Region(compute, ("fp32", compute), stored, device_type)


def _module_route(module: nn.Module, compute: str, plan: RoutePlan, fp8: Fp8Route | None) -> ModuleRoute:
    policy = plan.policy
    compute = "bf16" if fp8 is not None else compute
    autocast = compute != "fp32" and not (policy.is_true and compute == policy.params)
    narrow = any(parameter.dtype in BITS_16 for parameter in module.parameters())
    cast_parameters = compute == "fp32" and narrow and not is_metric(module)
    return ModuleRoute(compute, autocast, plan.device_type, cast_parameters, fp8)


def _routed_modules(
    names: ModelNames, computes: Mapping[str, str], policy: PrecisionPolicy
) -> list[tuple[nn.Module, str]]:
    """The modules that cannot rely on their surroundings, each with its format.

    Those of another format than the policy's; those with an ancestor of another format than their own, by any of their
    names; those that could bypass such a module inside them; and where no autocast surrounds a model of several
    formats, all that hold parameters: their inputs come in the formats of others, and nothing but a route casts them.
    """
    base = policy.base_compute
    mixed = (policy.is_true or base == "fp32") and any(
        computes[name] != base for name, module in names.module.items() if id(module) not in names.metrics
    )
    needing: dict[int, str] = {}
    for name, module in names.module.items():
        aliases = names.aliases[id(module)]
        around = {computes[above] for alias in aliases for above in names.above(alias)}
        holds_parameters = mixed and any(parameter is not None for parameter in module._parameters.values())
        if computes[name] != base or around - {computes[name]} or holds_parameters:
            needing.setdefault(id(module), name)
    for name, module in names.module.items():
        inside = names.below(name) if isinstance(module, FUSED_IN_EVALUATION) else []
        if any(id(names.module[inner]) in needing for inner in inside):
            needing.setdefault(id(module), name)
    routed = [(names.module[name], computes[name]) for name in needing.values()]
    for (module, compute), name in zip(routed, needing.values(), strict=True):
        obstacle = why_not_routable(module)
        if obstacle:
            raise TypeError(
                f"Module {name!r} ({type(module).__name__}) needs a route ({compute}), but {obstacle}. "
                "Match it by no rule, or give the plugin the module as it was before."
            )
    return routed


def _check_same_modules(plan: RoutePlan, names: ModelNames) -> None:
    planned = {route.name for route in plan.routes}
    found = set(names.module)
    missing, extra = sorted(planned - found), sorted(found - planned)
    changed = sorted(
        name for name in planned & found if plan[name].module_type != base_class(names.module[name]).__name__
    )
    parts = [
        f"{what}: {_some(which)}"
        for what, which in (("not in the model", missing), ("not in the plan", extra), ("of another class", changed))
        if which
    ]
    if parts:
        raise ValueError(
            f"This plan is not one of this model. Modules {'; '.join(parts)}. Make a new plan of the model."
        )


def _device_type(model: nn.Module, hardware: str | torch.device | None) -> str:
    if hardware is not None:
        return torch.device(hardware).type
    parameter = next(model.parameters(), None)
    # A model on the meta device is to be materialized elsewhere; without better knowledge, here.
    return "cpu" if parameter is None or parameter.device.type == "meta" else parameter.device.type


def _exactly(what: str, values: Mapping[str, Any], known: set[str]) -> None:
    unknown, missing = sorted(set(values) - known), sorted(known - set(values))
    if unknown or missing:
        raise ValueError(f"{what} has unknown keys {unknown} and lacks {missing}.")


def _row(route: Route) -> tuple[str, ...]:
    formats = (route.compute, route.params, route.input, route.weight, route.output, route.accumulator, route.optimizer)
    return (route.name or "(model)", *formats, route.rule, route.reason)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
