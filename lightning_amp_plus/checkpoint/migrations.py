"""Older checkpoints, ours and Lightning's own, as the manifest of today: one small step for each kind.

Each step takes what was written and gives the document that this version would have written, with ``None`` for what nobody
recorded. Nothing is guessed: where a kind of checkpoint leaves the precision open, it stays open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, SCHEMA_VERSION
from lightning_amp_plus.checkpoint.reading import tensors
from lightning_amp_plus.policy import PrecisionPolicy

_LEGACY_SCALER = "native_amp_scaling_state"  # what Lightning wrote before 1.6
_WITH_SCALER = ("MixedPrecision", "FSDPPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin",
                "FSDPMixedPrecisionPlugin")  # fmt: skip
_EXTRA_STATE = "_extra_state"

_NO_HISTORY = {"scales": [], "applied": 0, "skipped": 0, "growths": 0, "backoffs": 0, "consecutive_skips": 0}


def document_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a checkpoint as a document of the present version, tensors beside it included.

    Args:
        checkpoint: As loaded, or as read with :class:`TensorStub` in place of tensors.

    Returns:
        Ours, brought up to date; for a checkpoint of stock Lightning what can be told from it.
    """
    ours = checkpoint.get(CHECKPOINT_KEY)
    if ours is None:
        return _of_stock(checkpoint)
    document: dict[str, Any] = upgrade(ours)
    return document


def upgrade(document: Any) -> Any:
    """A document of ours brought up to the present version, step by step; anything else comes back as it is."""
    while isinstance(document, Mapping) and document.get("schema_version") in _STEPS:
        version = document["schema_version"]
        if isinstance(version, bool):
            break
        document = _STEPS[version](document)
    return document


def _from_1(document: Mapping[str, Any]) -> dict[str, Any]:
    """Version 1 had policy, moves, scaler and history, and no word on anything else."""
    policy = document.get("policy")
    masters = document.get("master_weights")
    moves = document.get("moves", [])
    return {
        **document,
        "schema_version": 2,
        "moves": [{**move, "step": None} if isinstance(move, Mapping) else move for move in moves],
        "precision": precision_of(policy),
        "master_weights_kept": masters is not None,
    }


_STEPS: dict[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {1: _from_1}
assert max(_STEPS) == SCHEMA_VERSION - 1


def precision_of(policy: Any) -> str | None:
    """Name of the precision that a policy's plain types describe, or ``None`` if they describe none."""
    try:
        return PrecisionPolicy.from_dict(policy).precision_name
    except (TypeError, ValueError, AttributeError):
        return None


def _of_stock(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of stock Lightning tells: a scaler's state, if there was one, and the weights' dtypes."""
    scaler, writer = None, "lightning"
    for key in (*_WITH_SCALER, _LEGACY_SCALER):
        state = checkpoint.get(key)
        if isinstance(state, Mapping) and "scale" in state:
            scaler, writer = dict(state), f"lightning ({key})"
            break
    weights = checkpoint.get("state_dict")
    counts: dict[str, int] = {}
    for _, stub in _floating(weights):
        counts[stub] = counts.get(stub, 0) + 1
    precision = None
    if any(name.endswith(_EXTRA_STATE) for name in weights or ()):
        precision, writer = "fp8-mixed", "lightning (TransformerEnginePrecision)"
    elif set(counts) == {"bf16"} or set(counts) == {"fp16"}:
        precision = {"bf16": "bf16-true", "fp16": "16-true"}[next(iter(counts))]
        writer = "lightning (HalfPrecision)"
    elif scaler is not None:
        precision = "16-mixed"
    return {
        "schema_version": SCHEMA_VERSION,
        "policy": None,
        "fingerprint": None,
        "moves": [],
        "scaler": scaler,
        "windows": 0,
        "history": dict(_NO_HISTORY),
        "writer": writer,
        "precision": precision,
    }


def _floating(weights: Any) -> list[tuple[str, str]]:
    """Names and short dtypes of the floating tensors in a state_dict, read or loaded."""
    from torch import Tensor

    from lightning_amp_plus.casts import dtype_name

    if not isinstance(weights, Mapping):
        return []
    if any(isinstance(value, Tensor) for value in weights.values()):
        return [(n, dtype_name(t.dtype)) for n, t in weights.items() if isinstance(t, Tensor) and t.is_floating_point()]
    return [(name, stub.dtype) for name, stub in tensors(weights) if stub.dtype in ("fp32", "bf16", "fp16", "fp64")]


def drop_extra_state(checkpoint: Mapping[str, Any], wanted: set[str]) -> list[str]:
    """Takes Transformer Engine's ``_extra_state`` entries that the model does not have out of ``state_dict``, in place.

    They hold amax histories of its own modules, which strict loading into plain ones would stumble over.

    Args:
        checkpoint: As loaded.
        wanted: Names in the model's own state_dict.

    Returns:
        The names taken out.
    """
    weights = checkpoint.get("state_dict")
    if not isinstance(weights, dict):
        return []
    dropped = [name for name in weights if name.endswith(_EXTRA_STATE) and name not in wanted]
    for name in dropped:
        del weights[name]
    return dropped
