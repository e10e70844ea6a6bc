"""What the plugin has to know about the Trainer's strategy: its device, its ranks, and which ones cannot work."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_amp_plus.scaling.consensus import Consensus, GroupConsensus


def refuse_strategy(strategy: Any) -> None:
    """Raises for strategies that do the precision's work themselves.

    Args:
        strategy: A Lightning strategy, or its name.

    Raises:
        ValueError: For DeepSpeed and XLA.
    """
    name = strategy.lower() if isinstance(strategy, str) else ""
    if isinstance(strategy, DeepSpeedStrategy) or "deepspeed" in name:
        raise ValueError(
            f"AmpPrecision does not work with {strategy!r}: DeepSpeed's engine scales, unscales and skips by its own "
            "configuration and never calls the plugin. Use strategy='ddp', FSDPStrategy or ModelParallelStrategy, or "
            "DeepSpeed with Lightning's own precision='16-mixed'."
        )
    if isinstance(strategy, (XLAStrategy, SingleDeviceXLAStrategy)) or "xla" in name:
        raise ValueError(
            f"AmpPrecision does not work with {strategy!r}: XLA strategies take Lightning's XLAPrecision only. "
            "Use Lightning's own precision='bf16-true' there."
        )


def device_type(strategy: Any) -> str:
    """Type of the device the strategy trains on; not the accelerator's name, which an instance does not have."""
    return str(strategy.root_device.type)


def consensus_of(strategy: Any, process_group: Any) -> Consensus:
    """Who takes the verdict together: the ranks of ``process_group``, else all ranks of a parallel strategy."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if process_group is None and not (distributed and isinstance(strategy, ParallelStrategy)):
        return Consensus()
    if not distributed:
        raise ValueError("AmpPrecision(process_group=...) was given, but torch.distributed is not initialized.")
    consensus = GroupConsensus(as_group(process_group))
    return consensus if consensus.world_size > 1 else Consensus()


def as_group(group: Any) -> Any:
    """The process group over all ranks of a DeviceMesh, or the group itself."""
    if not hasattr(group, "get_group") or not hasattr(group, "ndim"):
        return group
    return group.get_group() if group.ndim == 1 else group._flatten().get_group()


def ranks_of(process_group: Any) -> str | None:
    """The ranks of the group that a user named, for people to read; ``None`` where that is all of them."""
    if process_group is None:
        return None
    return f"ranks {torch.distributed.get_process_group_ranks(as_group(process_group))}"


def refuse_second_precision(precision: Any, plugins: list[Any]) -> None:
    """Raises if the precision is given more than once.

    Raises:
        ValueError: Naming both.
    """
    others = [plugin for plugin in plugins if isinstance(plugin, Precision)]
    if others:
        raise ValueError(
            f"The precision is given twice: precision={precision!r} and plugins={others!r}. Keep one of the two."
        )
