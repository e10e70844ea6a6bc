"""Which rule decides for which module of a model, and why; `routing.plan` builds routes from it."""

import difflib
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_amp_plus.decision import Decision, Wish
from lightning_amp_plus.fp8.recipes import Recipe
from lightning_amp_plus.fp8.selection import better_high, default_recipe, obstacle
from lightning_amp_plus.fp8_choice import Fp8Choice, embedding_weights
from lightning_amp_plus.naming import ModelNames, escape_glob, globs_of
from lightning_amp_plus.policy import PrecisionPolicy, Rule
from lightning_amp_plus.routed import Routed, base_class, is_captive


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
    wishes: dict[int, Wish] = {}
    fp8 = Fp8Choice(names, policy, device_type)
    for name, module in names.module.items():
        if id(module) in decided:
            continue
        rules = [rule for rule, modules in zip(policy.rules, matched, strict=True) if id(module) in modules]
        parent_name = name.rpartition(".")[0]
        parent = decided[id(names.module[parent_name])] if name else None
        if id(module) in names.metrics:
            decided[id(module)] = _of_metric(name, rules, names.aliases[id(module)])
            continue
        around = wishes.get(id(names.module[parent_name])) if parent is not None else None
        wish = _wish(rules, around, parent_name, policy, names.aliases[id(module)])
        if parent is not None and is_captive(names.module[parent_name], module):
            decided[id(module)] = _of_captive(name, rules, names.aliases[id(module)], parent, wish)
        else:
            wishes[id(module)] = wish
            decided[id(module)] = fp8.of(module, wish)
    fp8.refuse_wishes_that_came_to_nothing(dict(zip(policy.rules, matched, strict=True)))
    return {name: decided[id(module)] for name, module in names.module.items()}, tuple(dict.fromkeys(kept))


def _wish(
    rules: list[Rule], around: Wish | None, parent_name: str, policy: PrecisionPolicy, aliases: list[str]
) -> Wish:
    if rules:
        rule = rules[-1]
        # `*.lm_head` names every head; `blocks.*` and `type:Linear` name nothing in particular.
        own = any(alias.rpartition(".")[2] == rule.match.rpartition(".")[2] for alias in aliases)
        return Wish(rule.compute or policy.compute, rule, rule.reason or f"matches {rule.match!r}", own)
    if around is not None and around.rule is not None:
        inherited = around.reason.startswith("inherited")
        reason = around.reason if inherited else f"inherited from {parent_name!r}: {around.reason}"
        return Wish(around.compute, around.rule, reason, False)
    return Wish(policy.compute, None, "compute of the policy", False)


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
    embeddings = embedding_weights(names)
    for inner in names.below(name):
        own, module = _fp8_settings(policy, names, inner), names.module[inner]
        recipe = default_recipe(device_type) if own.get("recipe") is None else Recipe.of(own["recipe"])
        if own == settings or obstacle(module, recipe) is not None:
            continue
        if better_high(names.aliases[id(module)], module, embeddings, name, own=False) is None:
            # As a glob, since a rule with a layer's own name would ask for this very layer.
            moves[f"{escape_glob(inner[:-1])}[{inner[-1]}]"] = own
    return moves


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


def _of_captive(name: str, rules: list[Rule], aliases: list[str], parent: Decision, wish: Wish) -> Decision:
    """For a module that is never called; see :func:`is_captive`."""
    for rule in rules:
        if rule.match in aliases and rule.compute not in (None, parent.compute):
            raise ValueError(
                f"Rule {rule.match!r} asks for compute={rule.compute!r} of {name!r}, but MultiheadAttention never "
                f"calls its out_proj: it computes with the attention, in {parent.compute!r}. Let the rule match the "
                "attention module."
            )
    why = "computes inside its MultiheadAttention, which never calls it"
    return Decision(parent.compute, parent.rule, why, False, left_out="op" if wish.compute == "fp8" else "")
