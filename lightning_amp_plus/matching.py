"""Which rule decides for which module of a model, and why; `routing.plan` builds routes from it."""

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from lightning_amp_plus.policy import PrecisionPolicy, Rule
from lightning_amp_plus.routed import Routed, base_class, is_metric

# Segments that wrappers put into qualified names: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Decision(NamedTuple):
    """One module's format, the `match` of the deciding rule (or ``""``), why, and whether it is torchmetrics' own."""

    compute: str
    rule: str
    reason: str
    metric: bool


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


def decide(names: ModelNames, policy: PrecisionPolicy) -> tuple[dict[str, Decision], tuple[str, ...]]:
    """Decides for every module, and finds the buffers that rules name.

    A module follows the last rule that matches one of its names, else the module around its first name, else the
    policy.

    Returns:
        A decision for every name, and the qualified names of buffers that keep their format.

    Raises:
        ValueError: If a rule matches nothing or only the whole model, or asks by exact name for what cannot be.
    """
    matched = [_modules_of(rule, names) for rule in policy.rules]
    kept: list[str] = []
    for rule, modules in zip(policy.rules, matched, strict=True):
        if not modules:
            kept += _buffers_of(rule, names)
    decided: dict[int, Decision] = {}
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
        elif rules:
            rule = rules[-1]
            reason = rule.reason or f"matches {rule.match!r}"
            decided[id(module)] = Decision(rule.compute or policy.base_compute, rule.match, reason, False)
        elif parent is not None and parent.rule:
            reason = (
                parent.reason
                if parent.reason.startswith("inherited")
                else f"inherited from {parent_name!r}: {parent.reason}"
            )
            decided[id(module)] = Decision(parent.compute, parent.rule, reason, False)
        else:
            decided[id(module)] = Decision(policy.base_compute, "", "compute of the policy", False)
    return {name: decided[id(module)] for name, module in names.module.items()}, tuple(dict.fromkeys(kept))


def compute_of(module: nn.Module, name: str | None, policy: PrecisionPolicy) -> str:
    """What a module will compute in, asked before the whole model is there to be planned (in ``configure_model``).

    Args:
        module: The module by itself.
        name: Its qualified name, or None if unknown: then only rules on class names can meet it.
        policy: What is wanted.
    """
    parts = name.split(".") if name else []
    compute: str = policy.base_compute
    for depth in range(len(parts) or 1):
        level = ".".join(parts[: depth + 1])
        own = depth == max(0, len(parts) - 1)
        for rule in policy.rules:
            known = own if rule.match.startswith("type:") else bool(parts)
            if rule.compute is not None and known and matches(rule, level, module):
                compute = rule.compute
    return compute


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
