"""The tensors beside the manifest: whether they are what the manifest says, asked before any of them is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_amp_plus.casts import dtype_name
from lightning_amp_plus.checkpoint import random_state
from lightning_amp_plus.checkpoint.manifest import Manifest
from lightning_amp_plus.checkpoint.reading import TensorStub

Shapes = dict[str, tuple[int, ...]]


def fault_of_parts(document: Mapping[str, Any], manifest: Manifest) -> str | None:
    """What is wrong with the tensors of a document, loaded or read as stubs; ``None`` if nothing is.

    Args:
        document: The manifest's plain form with the tensors beside it.
        manifest: What it says.
    """
    return (
        _fault_of_random_state(document.get("random_state"), manifest)
        or _fault_of_masters(document, manifest)
        or _fault_of_gradients(document.get("gradients"), manifest)
        or _fault_of_histories(document.get("fp8_histories"), manifest)
        or _fault_of_amax("fp8_scales", document.get("fp8_scales"), "3")
        or _fault_of_amax("fp8_noted", document.get("fp8_noted"), "3")
    )


def shapes_of_masters(document: Mapping[str, Any]) -> Shapes | None:
    """Shapes of the master weights by parameter name, or ``None`` where none are kept."""
    masters = document.get("master_weights")
    if not isinstance(masters, Mapping):
        return None
    return {str(name): described[1] for name, value in masters.items() if (described := _described(value)) is not None}


def sizes_of_gradients(document: Mapping[str, Any]) -> dict[str, int]:
    """Number of elements of the stored gradients of an open window by parameter name, the largest over ranks."""
    gradients = document.get("gradients")
    sizes: dict[str, int] = {}
    for _, name, value in _gradients(gradients["ranks"] if isinstance(gradients, Mapping) else ()):
        described = _described(value)
        sizes[name] = max(sizes.get(name, 0), math.prod(described[1]) if described else 0)
    return sizes


def _described(value: Any) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape of a tensor or of its stub."""
    if isinstance(value, TensorStub):
        return value.dtype, value.shape
    if isinstance(value, Tensor):
        return dtype_name(value.dtype), tuple(value.shape)
    return None


def _fault_of_random_state(states: Any, manifest: Manifest) -> str | None:
    recorded = manifest.random
    if recorded is None:
        return None if states is None else "random states are there, but the manifest does not mention it"
    if not isinstance(states, (list, tuple)) or len(states) != recorded.ranks:
        return f"random states: expected those of {recorded.ranks} ranks; found {_count(states)}"
    sizes = random_state.sizes()
    for rank, of_rank in enumerate(states):
        if not isinstance(of_rank, Mapping) or sorted(map(str, of_rank)) != sorted(recorded.generators):
            return f"random states of rank {rank}: expected the generators {recorded.generators}"
        for name, state in of_rank.items():
            described = _described(state)
            if described is None or described[0] != "uint8" or len(described[1]) != 1:
                return f"random states of rank {rank}, {name}: expected a flat uint8 tensor"
            if name in sizes and described[1] != (sizes[name],):
                return f"random states of rank {rank}, {name}: expected {sizes[name]} bytes; found {described[1][0]}"
    return None


def _fault_of_masters(document: Mapping[str, Any], manifest: Manifest) -> str | None:
    if not manifest.master_weights_kept:
        return None
    masters = document.get("master_weights")
    if not isinstance(masters, Mapping):
        return f"master_weights: the manifest says that they are kept; found {type(masters).__name__}"
    for name, value in masters.items():
        described = _described(value)
        if described is None or described[0] != "fp32":
            return f"master_weights, {name!r}: expected an FP32 tensor; found {described[0] if described else value!r}"
    return None


def _fault_of_gradients(gradients: Any, manifest: Manifest) -> str | None:
    if manifest.window is None or manifest.window.gradients != "stored":
        return None
    if not isinstance(gradients, Mapping) or not {"ranks", "items", "backwards"} <= set(gradients):
        return "gradients: the manifest says that those of the open window are stored, but they are not"
    count = gradients["backwards"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        return f"gradients: expected a number of backwards; found {count!r}"
    world = 1 if manifest.strategy is None else manifest.strategy.world_size
    for part in ("ranks", "items"):
        if not isinstance(gradients[part], (list, tuple)) or len(gradients[part]) != world:
            return f"gradients, {part}: expected one entry for each of {world} ranks; found {_count(gradients[part])}"
    if not all(isinstance(of_rank, Mapping) for of_rank in gradients["ranks"]):
        return "gradients, ranks: expected a mapping of gradients by name for each rank"
    for rank, name, value in _gradients(gradients["ranks"]):
        if _described(value) is None:
            return f"gradients of rank {rank}, {name!r}: expected a tensor"
    for rank, items in enumerate(gradients["items"]):
        if not isinstance(items, (list, tuple)):
            return f"gradients, items of rank {rank}: expected a list"
    return None


def _fault_of_histories(histories: Any, manifest: Manifest) -> str | None:
    lengths = {} if manifest.fp8 is None else {n: m.history_length for n, m in manifest.fp8.modules.items()}
    if not any(length is not None for length in lengths.values()):
        return None
    if histories is None:
        return "fp8_histories: the manifest says that amax histories are kept; found none"
    return _fault_of_amax("fp8_histories", histories, "3, history")


def _fault_of_amax(part: str, by_module: Any, shape: str) -> str | None:
    """What is wrong with numbers of FP8 operands by module: FP32, three in the first dimension."""
    if by_module is None:
        return None
    if not isinstance(by_module, Mapping):
        return f"{part}: expected a tensor for each module; found {type(by_module).__name__}"
    for name, value in by_module.items():
        described = _described(value)
        dtype, sizes = described or ("", ())
        if dtype != "fp32" or len(sizes) != shape.count(",") + 1 or sizes[0] != 3:
            return f"{part}, {name!r}: expected an FP32 tensor of shape [{shape}]"
    return None


def _gradients(ranks: Any) -> Iterator[tuple[int, str, Any]]:
    for rank, of_rank in enumerate(ranks):
        for name, value in of_rank.items():
            yield rank, name, value


def _count(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
