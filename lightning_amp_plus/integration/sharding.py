"""What ranks hold of the model: how often each parameter is held, which FSDP units there are, when they synchronize.

The only place that knows FSDP1's and FSDP2's modules. Used by ``precision``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_amp_plus.casts import DTYPES
from lightning_amp_plus.local_parts import is_dtensor
from lightning_amp_plus.policy import PrecisionPolicy
from lightning_amp_plus.routing import RoutePlan
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.grad_norm import GradNorm, ShardedGradNorm


def grad_norm_of(module: nn.Module, consensus: Consensus, group_named: bool) -> GradNorm:
    """The norm that fits how the model's parameters are laid out over the ranks of ``consensus``.

    Args:
        module: The model, after the strategy has sharded it.
        consensus: The ranks that take the verdict together.
        group_named: Whether the user named them.

    Raises:
        ValueError: If parameters differ in name or layout between ranks (pipeline parallelism) and no group was named.
            Experts that carry the same names on all ranks cannot be told from replicas.
    """
    if consensus.world_size == 1:
        return GradNorm()
    if isinstance(module, DistributedDataParallel):
        return GradNorm()  # replicas, compared by DDP itself
    flat = _flat_parameters(module)
    parameters = dict(module.named_parameters())
    layouts = {name: _layout(parameter, flat) for name, parameter in parameters.items()}
    device = next(iter(parameters.values())).device
    everywhere = _ranks_with(layouts, consensus, group_named, device)
    alike = all(ranks == consensus.world_size for ranks in everywhere.values())
    if alike and not flat and not any(is_dtensor(p) for p in parameters.values()):
        return GradNorm()
    names = {id(parameter): name for name, parameter in parameters.items()}

    def holders(parameter: Tensor) -> int:
        ranks = everywhere[names[id(parameter)]] if id(parameter) in names else consensus.world_size
        if id(parameter) in flat:
            return max(1, ranks // flat[id(parameter)])
        return max(1, ranks // _number_of_shards(parameter))

    return ShardedGradNorm(consensus, holders)


def _number_of_shards(parameter: Tensor) -> int:
    """Into how many different parts a DTensor is cut; 1 for a plain tensor, which every rank holds whole."""
    if not is_dtensor(parameter):
        return 1
    sharded: Any = parameter
    shards = 1
    for dim, placement in enumerate(sharded.placements):
        # Not is_shard(): FSDP2 over tensor parallel has strided shards, which say no to that.
        if not placement.is_replicate() and not placement.is_partial():
            shards *= sharded.device_mesh.size(dim)
    return shards


def _ranks_with(mine: dict[str, Any], consensus: Consensus, group_named: bool, device: torch.device) -> dict[str, int]:
    """Number of ranks that hold a parameter (or a part of it), by name; a collective, at the start of a fit.

    Ranks compare a digest of eight bytes. Only where it differs do they send each other the names themselves.
    """
    text = repr(sorted(mine.items())).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    digests = consensus.gather(torch.tensor([digest], dtype=torch.int64, device=device)).flatten().tolist()
    if len(set(digests)) == 1:
        return dict.fromkeys(mine, consensus.world_size)
    everyone: list[dict[str, Any]] = [{} for _ in range(consensus.world_size)]
    dist.all_gather_object(everyone, mine, group=getattr(consensus, "group", None))
    if not group_named:
        first, other = everyone[0], digests.index(next(d for d in digests if d != digests[0]))
        theirs = everyone[other]
        different = sorted(name for name in first.keys() | theirs.keys() if first.get(name) != theirs.get(name))
        name = different[0]
        raise ValueError(
            f"Ranks hold different parameters: {name!r} is {_said(first.get(name))} on rank 0 and "
            f"{_said(theirs.get(name))} on rank {other} ({len(different)} differ). With pipeline or expert parallelism "
            "the verdict and the norm need the group of ranks that together hold one model: "
            "AmpPrecision(process_group=...)."
        )
    return {name: sum(name in theirs for theirs in everyone) for name in mine}


def _layout(parameter: Tensor, flat: dict[int, int]) -> tuple[Any, ...]:
    """What must be alike on all ranks that hold the same model. FSDP1's parts have another shape on each."""
    if id(parameter) in flat:
        return ("cut by FSDP into parts", (flat[id(parameter)],))
    if not is_dtensor(parameter):
        return ("whole", tuple(parameter.shape))
    sharded: Any = parameter
    mesh = tuple(sharded.device_mesh.shape)
    return ("sharded", tuple(parameter.shape), mesh, tuple(str(placement) for placement in sharded.placements))


def _said(layout: tuple[Any, ...] | None) -> str:
    return "missing" if layout is None else f"{layout[0]} of shape {list(layout[1])}"


def _flat_parameters(module: nn.Module) -> dict[int, int]:
    """Parameters that FSDP1 shards, by id, with the number of parts; FSDP1 shows its parts as plain tensors."""
    found: dict[int, int] = {}
    for unit in _fsdp1_units(module):
        handle = unit._handle
        if handle is None:
            continue
        shards = handle.world_size if handle.uses_sharded_strategy else 1
        flat = handle.flat_param
        for parameter in (flat, *(flat._params or ())):
            found[id(parameter)] = shards
    return found


def _fsdp1_units(module: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return (unit for unit in module.modules() if isinstance(unit, FullyShardedDataParallel))


def is_fsdp1(module: nn.Module) -> bool:
    """Whether the Trainer's strategy shards ``module`` with FSDP1."""
    trainer = getattr(module, "_trainer", None)
    return trainer is not None and isinstance(trainer.strategy, FSDPStrategy)


def fsdp1_config(policy: PrecisionPolicy) -> Any:
    """FSDP1's dtypes, each from its own field of the policy."""
    from torch.distributed.fsdp import MixedPrecision

    return MixedPrecision(
        param_dtype=DTYPES[policy.params],
        reduce_dtype=DTYPES[policy.reduce],
        buffer_dtype=DTYPES[policy.buffers or policy.params],
    )


def fsdp2_config(compute: str, policy: PrecisionPolicy) -> Any:
    """The ``mp_policy`` of an FSDP2 unit that computes in ``compute``; inputs are left to autocast."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=DTYPES[compute], reduce_dtype=DTYPES[policy.reduce], cast_forward_inputs=False
    )


def copy_into_shards(parameters: Iterable[tuple[str, Tensor]], whole: Mapping[str, Tensor]) -> bool:
    """Writes whole tensors into FSDP2's shards of the parameters of the same names. A collective where there are any.

    Returns:
        Whether the parameters are sharded at all; if not, nothing was done.
    """
    sharded = [(name, parameter) for name, parameter in parameters if is_dtensor(parameter)]
    if not sharded:
        return False
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, parameter in sharded:
            target: Any = parameter
            if name in whole:
                source = whole[name].to(target.to_local().device, target.dtype)
                target.copy_(distribute_tensor(source, target.device_mesh, target.placements))
    return True


def fsdp2_units(module: nn.Module) -> dict[str, Any]:
    """Modules to which ``fully_shard`` was applied, by qualified name."""
    if not dist.is_available():
        return {}
    from torch.distributed.fsdp import FSDPModule

    return {name: unit for name, unit in module.named_modules() if isinstance(unit, FSDPModule)}


def check_fsdp2_units(module: nn.Module, plan: RoutePlan) -> list[str]:
    """Holds the mixed-precision policy of each FSDP2 unit against the plan.

    Args:
        module: The model, after ``fully_shard``.
        plan: Its plan.

    Returns:
        Warnings: units without ``param_dtype`` under a 16-bit autocast keep a 16-bit copy of every weight until
            backward.

    Raises:
        ValueError: If a module with parameters computes in another format than its unit gathers, naming both.
    """
    units = fsdp2_units(module)
    copies = 0
    for name, unit in units.items():
        group = unit._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        found = group.mp_policy.param_dtype
        for inner_name, inner in _of_unit(name, unit, units):
            own = [p for p in inner._parameters.values() if p is not None and p.is_floating_point()]
            if not own:
                continue
            compute = plan[inner_name].compute
            wanted = DTYPES["bf16" if compute == "fp8" else compute]
            if found is None or found == torch.float32:
                if plan.policy.is_true:
                    raise ValueError(_unfit_unit(name, found, inner_name, compute))
                if wanted != torch.float32:
                    copies += 2 * sum(p.numel() for p in own)
            elif found != wanted:
                raise ValueError(_unfit_unit(name, found, inner_name, compute))
    if not copies:
        return []
    return [
        "FSDP2 units gather FP32 weights, of which autocast makes 16-bit copies that live until backward: "
        f"{copies:,} bytes a rank. Give fully_shard(module, mp_policy=plugin.fsdp2_policy(module, name)) to gather in 16 "
        "bits instead."
    ]


def _of_unit(name: str, unit: nn.Module, units: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose parameters a unit manages: those below it that no unit further down manages."""
    yield name, unit
    for child_name, child in unit.named_children():
        qualified = f"{name}.{child_name}" if name else child_name
        if qualified not in units:
            yield from _of_unit(qualified, child, units)


def _unfit_unit(unit: str, found: torch.dtype | None, module: str, compute: str) -> str:
    return (
        f"The FSDP2 unit {unit or '(model)'!r} gathers its parameters in {found}, but the plan has "
        f"{module or '(model)'!r} compute in {compute}. Make that module a unit of its own before its parent, "
        "fully_shard(module, mp_policy=plugin.fsdp2_policy(module, name)), or change its rule."
    )


def unsharded_gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients that a rank holds whole while FSDP2's reduction is deferred."""
    total = 0
    for unit in fsdp2_units(module).values():
        group = unit._get_fsdp_state()._fsdp_param_group
        for parameter in () if group is None else group.fsdp_params:
            policy, sharded = group.mp_policy, parameter.sharded_param
            dtype = policy.reduce_dtype or policy.param_dtype or sharded.dtype
            total += sharded.numel() * dtype.itemsize
    return total


def defer_gradient_sync(module: nn.Module, closing: Callable[[], bool]) -> Callable[[], None] | None:
    """What to call before each backward so that FSDP2 reduces gradients once a window, not once a backward.

    Args:
        module: The model, after sharding.
        closing: Whether the backward about to run is the last of its window.

    Returns:
        ``None`` if the model has no FSDP2 unit.
    """
    units = list(fsdp2_units(module).values())
    if not units:
        return None

    def before_backward() -> None:
        last = closing()
        for unit in units:
            unit.set_requires_gradient_sync(last, recurse=False)
            unit.set_is_last_backward(last)

    return before_backward
