"""What a Trainer and its model are like, as sections of the manifest. Looks at names and dtypes only, never at numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp_plus.casts import dtype_name
from lightning_amp_plus.checkpoint.environment import hardware
from lightning_amp_plus.checkpoint.manifest import (
    Clipping,
    Dtypes,
    Flags,
    OptimizerEntry,
    Progress,
    StrategyEntry,
)
from lightning_amp_plus.integration.loops import data_entry
from lightning_amp_plus.optimizers import real_optimizer
from lightning_amp_plus.routed import base_class


def sections_of(trainer: Any) -> dict[str, Any]:
    """The sections that the Trainer and its model fill."""
    module, optimizers = trainer.lightning_module, [real_optimizer(optimizer) for optimizer in trainer.optimizers]
    return {
        "hardware": hardware(trainer.strategy.root_device),
        "dtypes": dtypes_entry(module, optimizers),
        "optimizers": optimizer_entries(optimizers),
        "clipping": clipping_entry(trainer),
        "strategy": strategy_entry(trainer),
        "flags": flags_entry(module),
        "progress": progress_entry(trainer),
        "data": data_entry(trainer),
    }


def strategy_entry(trainer: Any) -> StrategyEntry:
    """How the model lies over ranks."""
    mesh = getattr(trainer.strategy, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None)
    return StrategyEntry(
        name=type(trainer.strategy).__name__,
        world_size=int(trainer.world_size),
        mesh=None if mesh is None or not names else dict(zip(names, mesh.shape, strict=True)),
    )


def clipping_entry(trainer: Any) -> Clipping | None:
    """The Trainer's gradient clipping; ``None`` without."""
    if not trainer.gradient_clip_val or math.isinf(trainer.gradient_clip_val):
        return None
    algorithm = trainer.gradient_clip_algorithm
    return Clipping(
        value=float(trainer.gradient_clip_val), algorithm=str(getattr(algorithm, "value", algorithm or "norm"))
    )


def flags_entry(module: nn.Module) -> Flags:
    """Whether something in the model is compiled or recomputed, as far as modules show it."""
    # torch.compile(LightningModule) leaves the module as it is and remembers the compiled functions.
    compiled, recomputed = getattr(module, "_compiler_ctx", None) is not None, False
    for part in module.modules():
        cls = base_class(part)
        compiled = compiled or cls.__name__ == "OptimizedModule" or part._compiled_call_impl is not None
        recomputed = recomputed or cls.__name__ == "CheckpointWrapper"
        recomputed = recomputed or getattr(part, "gradient_checkpointing", False) is True
    return Flags(compiled=compiled, activation_checkpointing=recomputed)


def progress_entry(trainer: Any) -> Progress:
    """Where the Trainer stands."""
    return Progress(epoch=int(trainer.current_epoch), global_step=int(trainer.global_step))


def dtypes_entry(module: nn.Module, optimizers: Iterable[Optimizer]) -> Dtypes:
    """Dtypes of parameters, gradients and optimizer state, as found."""
    parameters = list(module.parameters())
    state: Counter[str] = Counter()
    for optimizer in optimizers:
        state.update(_state_dtypes(optimizer))
    return Dtypes(
        parameters=dict(Counter(dtype_name(p.dtype) for p in parameters)),
        gradients=dict(Counter(dtype_name(p.grad.dtype) for p in parameters if p.grad is not None)),
        optimizer_state=dict(state),
    )


def optimizer_entries(optimizers: Iterable[Optimizer]) -> list[OptimizerEntry]:
    """One entry for each optimizer."""
    return [
        OptimizerEntry(
            name=type(optimizer).__name__,
            fused=any(bool(group.get("fused")) for group in optimizer.param_groups),
            state_dtypes=_state_dtypes(optimizer),
        )
        for optimizer in optimizers
    ]


def _state_dtypes(optimizer: Optimizer) -> dict[str, int]:
    """Dtypes of the state that has a parameter's shape; step counts say nothing about precision."""
    found: Counter[str] = Counter()
    for state in optimizer.state.values():
        if isinstance(state, dict):
            found.update(dtype_name(v.dtype) for v in state.values() if isinstance(v, Tensor) and v.ndim > 0)
    return dict(found)
