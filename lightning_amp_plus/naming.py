"""Names of a model's modules, by every way that reaches them, and globs that meet them. Used wherever modules are named."""

import re
from collections.abc import Iterable, Iterator

from torch import nn

from lightning_amp_plus.routed import is_metric

ROOT = "(model)"  # what the model itself is called for people, whose name is empty

# Segments that wrappers put into qualified names: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """A qualified name without the segments that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def pattern_of(name: str) -> str:
    """A qualified name with ``*`` for its numbers, which those of repeated blocks have in common."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


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
