"""Which rule decides for which module of a model, and why; `routing.plan` builds routes from it."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from lightning_amp_plus.fp8.backends import BACKENDS, choose
from lightning_amp_plus.fp8.backends.base import Backend
from lightning_amp_plus.fp8.recipes import GEMMS, Gemm, Recipe
from lightning_amp_plus.fp8.selection import Fp8Route, better_high, default_recipe, obstacle, too_small
from lightning_amp_plus.policy import PrecisionPolicy, Rule
from lightning_amp_plus.routed import Routed, base_class, is_metric

# Segments that wrappers put into qualified names: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Decision(NamedTuple):
    """One module's format, the `match` of the deciding rule (or ``""``), why, whether it is torchmetrics' own, and FP8.

    ``left_out``: of a Linear that was to be in FP8 and is not, ``shape``, ``backend``, ``hardware`` or ``other``.
    """

    compute: str
    rule: str
    reason: str
    metric: bool
    fp8: Fp8Route | None = None
    left_out: str = ""


class _Wish(NamedTuple):
    """What is wanted of a module before it is known what it can do; passed on to the modules inside it.

    Attributes:
        compute: The format, FP8 included.
        rule: The deciding rule, if any.
        reason: Why.
        own: Whether the rule names this very module, rather than meeting it by a glob or its class.
    """

    compute: str
    rule: Rule | None
    reason: str
    own: bool


def clean_name(name: str) -> str:
    """A qualified name without the segments that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class ModelNames:
    """A model's modules by every name that reaches them, compiled wrappers left out.

    Attributes:
        module: Module of each name, parents first; the model itself is ``""``.
        aliases: All names of a module, by its id.
        buffers: Qualified names of all buffers.
        metrics: Ids of the modules that belong to torchmetrics, and of all below them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module: dict[str, nn.Module] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.module[clean_name(name)] = module
        self.aliases: dict[int, list[str]] = {}
        self.buffers: list[str] = []
        self.metrics = {id(part) for module in self.module.values() if is_metric(module) for part in module.modules()}
        for name, module in self.module.items():
            self.aliases.setdefault(id(module), []).append(name)
            self.buffers += [f"{name}.{key}" if name else key for key, _ in module._buffers.items()]

    def above(self, name: str) -> Iterator[str]:
        """Names of the modules around one, the nearest first."""
        while name:
            name = name.rpartition(".")[0]
            yield name

    def below(self, name: str) -> list[str]:
        """Names of all modules inside one."""
        return [other for other in self.module if other != name and (not name or other.startswith(f"{name}."))]


def decide(
    names: ModelNames, policy: PrecisionPolicy, device_type: str = "cpu"
) -> tuple[dict[str, Decision], tuple[str, ...]]:
    """Decides for every module, and finds the buffers that rules name.

    A module follows the last rule that matches one of its names, else the module around its first name, else the
    policy. FP8 is for Linear layers; what else is wished into it computes in the format around.

    Args:
        names: The model's modules.
        policy: What is wanted.
        device_type: Where the model will run, which decides the default FP8 recipe.

    Returns:
        A decision for every name, and the qualified names of buffers that keep their format.

    Raises:
        ValueError: If a rule matches nothing or only the whole model, asks by exact name for what cannot be, or asks for
            FP8 and no layer can compute in it.
    """
    matched = [_modules_of(rule, names) for rule in policy.rules]
    kept: list[str] = []
    for rule, modules in zip(policy.rules, matched, strict=True):
        if not modules:
            kept += _buffers_of(rule, names)
    decided: dict[int, Decision] = {}
    wishes: dict[int, _Wish] = {}
    fp8 = _Fp8Choice(names, policy, device_type)
    for name, module in names.module.items():
        if id(module) in decided:
            continue
        rules = [rule for rule, modules in zip(policy.rules, matched, strict=True) if id(module) in modules]
        parent_name = name.rpartition(".")[0]
        parent = decided[id(names.module[parent_name])] if name else None
        if id(module) in names.metrics:
            decided[id(module)] = _of_metric(name, rules, names.aliases[id(module)])
        elif parent is not None and _is_captive(names.module[parent_name], module):
            decided[id(module)] = _of_captive(name, rules, names.aliases[id(module)], parent)
        else:
            around = wishes.get(id(names.module[parent_name])) if parent is not None else None
            wish = wishes[id(module)] = _wish(rules, around, parent_name, policy, names.aliases[id(module)])
            decided[id(module)] = fp8.of(module, wish)
    fp8.refuse_wishes_that_came_to_nothing(dict(zip(policy.rules, matched, strict=True)))
    return {name: decided[id(module)] for name, module in names.module.items()}, tuple(dict.fromkeys(kept))


def _wish(
    rules: list[Rule], around: _Wish | None, parent_name: str, policy: PrecisionPolicy, aliases: list[str]
) -> _Wish:
    if rules:
        rule = rules[-1]
        # `*.lm_head` names every head; `blocks.*` and `type:Linear` name nothing in particular.
        own = any(alias.rpartition(".")[2] == rule.match.rpartition(".")[2] for alias in aliases)
        return _Wish(rule.compute or policy.compute, rule, rule.reason or f"matches {rule.match!r}", own)
    if around is not None and around.rule is not None:
        inherited = around.reason.startswith("inherited")
        reason = around.reason if inherited else f"inherited from {parent_name!r}: {around.reason}"
        return _Wish(around.compute, around.rule, reason, False)
    return _Wish(policy.compute, None, "compute of the policy", False)


def _embedding_weights(names: ModelNames) -> set[int]:
    embeddings = [module for module in names.module.values() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    return {id(weight) for module in embeddings if (weight := module._parameters.get("weight")) is not None}


class _Fp8Choice:
    """Turns wishes into decisions, and remembers which wishes for FP8 came to what."""

    def __init__(self, names: ModelNames, policy: PrecisionPolicy, device_type: str) -> None:
        self._names = names
        self._policy = policy
        self._device_type = device_type
        self._granted: set[int] = set()  # modules
        self._asked: dict[Rule | None, list[str]] = {}  # by what asks, why it was denied
        self._elsewhere: dict[int, Rule | None] = {}  # layers that could, and the rule that keeps them out
        self._embeddings = _embedding_weights(names)

    def of(self, module: nn.Module, wish: _Wish) -> Decision:
        """The decision on one module."""
        rule = wish.rule
        match = "" if rule is None else rule.match
        if wish.compute != "fp8" and not self._policy.uses_fp8:
            return Decision(wish.compute, match, wish.reason, False)
        given = None if rule is None else rule.recipe
        recipe = default_recipe(self._device_type) if given is None else Recipe.of(given)
        aliases = self._names.aliases[id(module)]
        why = obstacle(module, recipe)
        if wish.compute != "fp8":
            if why is None and better_high(aliases, module, self._embeddings, "", own=False) is None:
                self._elsewhere[id(module)] = rule
            return Decision(wish.compute, match, wish.reason, False)
        self._asked.setdefault(rule, [])
        named = rule is not None and rule.match in aliases and not any(True for _ in module.children())
        if why is not None and rule is not None and named and self._policy.fallback == "error":
            raise ValueError(
                f"Rule {rule.match!r} asks for FP8 of {aliases[0]!r}, which cannot compute in it: {why}. Remove the "
                "rule, or set fallback='bf16' in the policy to have it listed and computed in BF16."
            )
        if why is None:
            why = better_high(aliases, module, self._embeddings, match, wish.own)
        if why is not None:
            return self._denial(module, rule, why)
        gemms = tuple(rule.gemms) if rule is not None and rule.gemms is not None else GEMMS
        backend, why = self._backend(rule, recipe, gemms)
        if backend is None:
            return self._denial(module, rule, why)
        small = None if backend.emulated or self._device_type == "cpu" or wish.own else too_small(module, recipe)
        if small is not None:
            return self._denial(module, rule, small)
        self._granted.add(id(module))
        route = Fp8Route(recipe, gemms, backend.name, self._policy.fp8_in_evaluation)
        return Decision("fp8", match, f"{wish.reason}; {why}", False, route)

    def _denial(self, module: nn.Module, rule: Rule | None, why: str) -> Decision:
        if not any(True for _ in module.children()):  # of a container it is what is inside that counts
            name = self._names.aliases[id(module)][0] or "(model)"
            self._asked[rule].append(f"{name}: {why}")
        kind = why.partition(":")[0]
        kind = kind if kind in ("shape", "backend", "hardware") else "other"
        match = "" if rule is None else rule.match
        return Decision(
            self._policy.base_compute, match, why, False, None, kind if isinstance(module, nn.Linear) else ""
        )

    def _backend(self, rule: Rule | None, recipe: Recipe, gemms: tuple[Gemm, ...]) -> tuple[Backend | None, str]:
        """What multiplies, and why that; ``None`` and the obstacle where a rule's own cannot and the policy takes BF16."""
        if rule is None or rule.backend is None:
            return choose(recipe, gemms, self._device_type)
        backend = BACKENDS[rule.backend]
        obstacle = backend.obstacle(recipe, gemms, self._device_type)
        if obstacle is None:
            return backend, f"{backend.name}: as the rule says"
        if self._policy.fallback == "error":
            raise ValueError(
                f"Rule {rule.match!r} asks for backend={rule.backend!r}, which cannot compute it here: "
                f"{obstacle.partition(': ')[2]}. Leave backend out to have one chosen, or set fallback='bf16' in the "
                "policy to have its layers listed and computed in BF16."
            )
        return None, obstacle

    def refuse_wishes_that_came_to_nothing(self, matched: Mapping[Rule, set[int]]) -> None:
        """Raises where FP8 was asked for and nothing will run in it, unless later rules take it away.

        Args:
            matched: Ids of the modules that each rule matches.

        Raises:
            ValueError: Naming what was asked, and why the candidates cannot.
        """
        for rule, reasons in self._asked.items():
            if rule is not None and (rule.compute != "fp8" or self._policy.fallback == "bf16"):
                continue  # of its own it asks for nothing; or it is listed in the plan, as the policy allows
            reached = set(self._names.aliases) if rule is None else self._with_all_inside(matched[rule])
            if reached & self._granted or any(self._elsewhere[key] != rule for key in reached & set(self._elsewhere)):
                continue
            linear = [reason for reason in reasons if "only Linear layers" not in reason]
            asked = "The policy" if rule is None else f"Rule {rule.match!r}"
            found = "; ".join((linear or reasons)[:4]) or "there is no Linear layer in it that is called by itself"
            raise ValueError(
                f"{asked} asks for FP8, but no module would compute in it ({found}). Widen the layers, name one of "
                "them in a rule, or leave FP8 out."
            )

    def _with_all_inside(self, modules: set[int]) -> set[int]:
        return {
            id(module)
            for name, module in self._names.module.items()
            if id(module) in modules
            or any(id(self._names.module[above]) in modules for above in self._names.above(name))
        }


def compute_of(module: nn.Module, name: str | None, policy: PrecisionPolicy) -> str:
    """What a module will compute in, asked before the whole model is there to be planned (in ``configure_model``).

    Args:
        module: The module by itself.
        name: Its qualified name, or None if unknown: then only rules on class names can meet it.
        policy: What is wanted.
    """
    parts = name.split(".") if name else []
    compute: str = policy.base_compute  # around FP8 the weights are gathered in BF16
    for depth in range(len(parts) or 1):
        level = ".".join(parts[: depth + 1])
        own = depth == max(0, len(parts) - 1)
        for rule in policy.rules:
            known = own if rule.match.startswith("type:") else bool(parts)
            if rule.compute is not None and known and matches(rule, level, module):
                compute = "bf16" if rule.compute == "fp8" else rule.compute
    return compute


def fp8_moves(model: nn.Module, policy: PrecisionPolicy, name: str, device_type: str) -> dict[str, dict[str, Any]]:
    """What a module, and each that is inside it, gets from the policy when it is moved into FP8.

    Args:
        model: The model.
        policy: What is wanted.
        name: Qualified name of the module.
        device_type: Where the model runs, which decides the default FP8 recipe.

    Returns:
        Recipe, GEMMs and backend in plain types by glob, the last that matches wins.
    """
    names = ModelNames(model)
    settings = _fp8_settings(policy, names, name)
    moves = {glob: settings for glob in globs_of(name, names.module)}
    embeddings = _embedding_weights(names)
    for inner in names.below(name):
        own, module = _fp8_settings(policy, names, inner), names.module[inner]
        recipe = default_recipe(device_type) if own.get("recipe") is None else Recipe.of(own["recipe"])
        if own == settings or obstacle(module, recipe) is not None:
            continue
        if better_high(names.aliases[id(module)], module, embeddings, name, own=False) is None:
            # As a glob, since a rule with a layer's own name would ask for this very layer.
            moves[f"{escape_glob(inner[:-1])}[{inner[-1]}]"] = own
    return moves


def globs_of(name: str, names: Iterable[str]) -> list[str]:
    """Globs that meet a module and all that is inside it.

    Args:
        name: Qualified name of the module.
        names: Names of all modules.
    """
    escaped = escape_glob(name)
    return [escaped, *([f"{escaped}.*"] if any(other.startswith(f"{name}.") for other in names) else [])]


def escape_glob(name: str) -> str:
    """A glob that matches a name and nothing else."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _fp8_settings(policy: PrecisionPolicy, names: ModelNames, name: str) -> dict[str, Any]:
    """Recipe, GEMMs and backend of the last rule on a module, or on one around it, that names one; plain types."""
    levels = [level for level in (name, *names.above(name)) if level]
    for rule in reversed(policy.rules):
        named = rule.recipe is not None or rule.gemms is not None or rule.backend is not None
        if named and any(matches(rule, level, names.module[level]) for level in levels):
            recipe = None if rule.recipe is None else Recipe.of(rule.recipe).to_dict()
            return {
                "recipe": recipe,
                "gemms": None if rule.gemms is None else list(rule.gemms),
                "backend": rule.backend,
            }
    return {}


def _modules_of(rule: Rule, names: ModelNames) -> set[int]:
    root = names.module[""]
    has_children = any(True for _ in root.children())
    return {
        id(module)
        for name, module in names.module.items()
        if matches(rule, name, module) and not (module is root and has_children)
    }


def matches(rule: Rule, name: str, module: nn.Module) -> bool:
    """Whether a rule names a module, by its qualified name or its class."""
    if rule.match.startswith("type:"):
        return any(fnmatchcase(cls, rule.match.removeprefix("type:")) for cls in _class_names(module))
    return fnmatchcase(name, rule.match)


def _class_names(module: nn.Module) -> list[str]:
    lineage = base_class(module).__mro__
    return [cls.__name__ for cls in lineage if issubclass(cls, nn.Module) and cls not in (nn.Module, Routed)]


def _buffers_of(rule: Rule, names: ModelNames) -> list[str]:
    found = [name for name in names.buffers if fnmatchcase(name, rule.match)]
    if not found:
        raise ValueError(_nothing_matched(rule, names))
    if rule.compute not in (None, "fp32"):
        raise ValueError(
            f"Rule {rule.match!r} matches no module but only buffers ({', '.join(map(repr, found[:3]))}), which "
            f"keep their format and compute nothing: leave out compute={rule.compute!r}, or match a module."
        )
    return found


def _nothing_matched(rule: Rule, names: ModelNames) -> str:
    root = names.module[""]
    if matches(rule, "", root):
        return (
            f"Rule {rule.match!r} matches only the whole model ({base_class(root).__name__}). To set "
            "the format of the whole model, set the policy's compute."
        )
    if rule.match.startswith("type:"):
        what = "class name in the model"
        candidates = sorted({cls for module in names.module.values() for cls in _class_names(module)})
    else:
        what = "module or buffer"
        candidates = [name for name in names.module if name] + names.buffers
    wanted = rule.match.removeprefix("type:")
    close = difflib.get_close_matches(wanted, candidates, n=3, cutoff=0.4) or candidates[:3]
    hint = f" Close to it: {', '.join(map(repr, close))}." if close else " The model has none."
    return f"Rule {rule.match!r} matches no {what}.{hint} Names are case-sensitive and relative to the planned model."


def _of_metric(name: str, rules: list[Rule], aliases: list[str]) -> Decision:
    for rule in rules:
        if rule.match in aliases and rule.compute not in (None, "fp32"):
            raise ValueError(
                f"Rule {rule.match!r} asks for compute={rule.compute!r} of {name!r}, which belongs to a torchmetrics "
                "Metric. Metrics always compute in FP32: remove the rule."
            )
    return Decision("fp32", "", "torchmetrics always compute in FP32", True)


def _is_captive(parent: nn.Module, module: nn.Module) -> bool:
    return isinstance(parent, nn.MultiheadAttention) and parent.out_proj is module


def _of_captive(name: str, rules: list[Rule], aliases: list[str], parent: Decision) -> Decision:
    """For a module that is never called, since its parent uses its parameters directly."""
    for rule in rules:
        if rule.match in aliases and rule.compute not in (None, parent.compute):
            raise ValueError(
                f"Rule {rule.match!r} asks for compute={rule.compute!r} of {name!r}, but MultiheadAttention never "
                f"calls its out_proj: it computes with the attention, in {parent.compute!r}. Let the rule match the "
                "attention module."
            )
    return Decision(parent.compute, parent.rule, "computes inside its MultiheadAttention, which never calls it", False)
