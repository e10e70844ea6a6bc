"""Older checkpoints, ours and Lightning's own, as the manifest of today: one small step for each kind.

Each step takes what was written and gives the document that this version would have written, with ``None`` for what nobody
recorded. Nothing is guessed: where a kind of checkpoint leaves the precision open, it stays open.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, SCHEMA_VERSION, Dtypes
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
        checkpoint: As loaded, or as read with stubs in place of tensors.

    Returns:
        Ours, brought up to date; for a checkpoint of stock Lightning what can be told from it.
    """
    if CHECKPOINT_KEY not in checkpoint:
        return _of_stock(checkpoint)
    document: dict[str, Any] = upgrade(checkpoint[CHECKPOINT_KEY])
    return document


def upgrade(document: Any) -> Any:
    """A document of ours brought up to the present version, step by step; anything else comes back as it is."""
    while isinstance(document, Mapping):
        version = document.get("schema_version")
        if type(version) is not int or version not in _STEPS:
            break
        document = _STEPS[version](document)
    return document


def _from_1(document: Mapping[str, Any]) -> dict[str, Any]:
    """Version 1 had policy, moves, scaler and history, and no word on anything else."""
    policy = document.get("policy")
    masters = document.get("master_weights")
    moves = document.get("moves")
    if isinstance(moves, list):
        moves = [{**move, "step": None} if isinstance(move, Mapping) else move for move in moves]
    return {
        **document,
        "schema_version": 2,
        **({"moves": moves} if "moves" in document else {}),
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
        if key in checkpoint:  # stock saves nothing under it without a scaler, so whatever is there is one's state
            state = checkpoint[key]
            scaler = dict(state) if isinstance(state, Mapping) else {"found": type(state).__name__}
            writer = f"lightning ({key})"
            break
    weights = checkpoint.get("state_dict")
    counts = Counter(dtype for _, dtype in _floating(weights))
    precision = None
    if isinstance(weights, Mapping) and any(_is_extra_state(*item, weights) for item in weights.items()):
        precision, writer = "fp8-mixed", "lightning (TransformerEnginePrecision)"
    elif set(counts) in ({"bf16"}, {"fp16"}, {"fp64"}):
        [dtype] = counts
        precision = {"bf16": "bf16-true", "fp16": "16-true", "fp64": "64-true"}[dtype]
        writer = f"lightning ({'DoublePrecision' if dtype == 'fp64' else 'HalfPrecision'})"
    elif scaler is not None:
        precision = "16-mixed"
    found = Dtypes(parameters=dict(counts), gradients={}, optimizer_state=_state_dtypes(checkpoint))
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
        "dtypes": found.model_dump(),
    }


def _is_extra_state(name: Any, value: Any, weights: Mapping[Any, Any]) -> bool:
    """Whether an entry of a state_dict is Transformer Engine's: other modules use the same name for their own things."""
    module = str(name).removesuffix(_EXTRA_STATE)
    if not str(name).endswith(_EXTRA_STATE) or not any(str(n).startswith(module) and n != name for n in weights):
        return False
    if isinstance(value, io.BytesIO) or getattr(value, "__name__", "").endswith("BytesIO"):
        return True
    return [(dtype, len(shape)) for _, dtype, shape in tensors(value)] == [("uint8", 1)]


def _state_dtypes(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Dtypes of optimizer state that has a shape; step counts say nothing about precision."""
    states = tensors(checkpoint.get("optimizer_states"))
    return dict(Counter(dtype for _, dtype, shape in states if shape))


def _floating(weights: Any) -> list[tuple[str, str]]:
    """Names and short dtypes of the floating tensors in a state_dict, read or loaded."""
    return [(name, dtype) for name, dtype, _ in tensors(weights) if dtype in ("fp32", "bf16", "fp16", "fp64")]


def drop_extra_state(checkpoint: Mapping[str, Any], wanted: Callable[[], set[str]]) -> list[str]:
    """Takes Transformer Engine's ``_extra_state`` entries that the model does not have out of ``state_dict``, in place.

    They hold amax histories of its own modules, which strict loading into plain ones would stumble over.

    Args:
        checkpoint: As loaded.
        wanted: Gives the names in the model's own state_dict; asked only where there is such an entry.

    Returns:
        The names taken out.
    """
    weights = checkpoint.get("state_dict")
    if not isinstance(weights, dict):
        return []
    found = [name for name, value in weights.items() if _is_extra_state(name, value, weights)]
    names = wanted() if found else set()
    dropped = [name for name in found if name not in names]
    for name in dropped:
        del weights[name]
    return dropped
