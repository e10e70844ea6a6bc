"""The precision state in a checkpoint: its key, its version, and whether a run may continue it. Used by ``precision``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_amp_plus.errors import IncompatiblePrecisionError
from lightning_amp_plus.policy import PrecisionPolicy, Rule

CHECKPOINT_KEY = "lightning_amp_plus"
SCHEMA_VERSION = 1

_REQUIRED = ("policy", "moves", "scaler", "windows", "history")


def describe_run(policy: PrecisionPolicy, moves: Iterable[Rule]) -> dict[str, Any]:
    """The part of the state that says what was trained, as plain types.

    Args:
        policy: The run's policy.
        moves: Modules moved to another format while training.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "policy": policy.to_dict(),
        "fingerprint": policy.fingerprint(),
        "moves": [{"match": move.match, "compute": move.compute, "reason": move.reason} for move in moves],
    }


def refuse_state(state: Mapping[str, Any], policy: PrecisionPolicy, *, scaled: bool, masters: bool) -> None:
    """Raises if a run cannot continue from ``state``. Changes nothing.

    Args:
        state: What a checkpoint holds under :data:`CHECKPOINT_KEY`.
        policy: This run's policy.
        scaled: Whether this run has a loss scale.
        masters: Whether this run keeps master weights.

    Raises:
        IncompatiblePrecisionError: If the state is from another version, or of a run with another kind of loss scale or
            storage.
        ValueError: If it is incomplete.
    """
    version = state.get("schema_version")
    if version != SCHEMA_VERSION:
        raise IncompatiblePrecisionError(
            f"The precision state in the checkpoint has schema_version {version!r}; this version of lightning_amp_plus "
            f"reads {SCHEMA_VERSION}. Resume with the version that wrote it."
        )
    missing = [key for key in _REQUIRED if key not in state]
    if missing:
        raise ValueError(f"The precision state in the checkpoint lacks {missing}; found {sorted(state)}.")
    if (state["scaler"] is not None) != scaled:
        _refuse(
            "with a loss scale, but this run has none",
            "without a loss scale, but this run has one",
            scaled,
            state,
            policy,
        )
    if ("master_weights" in state) != masters:
        _refuse(
            "with master weights, but this run keeps none",
            "without master weights, but this run keeps them",
            masters,
            state,
            policy,
        )


def _refuse(lost: str, gained: str, now: bool, state: Mapping[str, Any], policy: PrecisionPolicy) -> None:
    before = PrecisionPolicy.from_dict(state["policy"]).lightning_precision
    raise IncompatiblePrecisionError(
        f"The checkpoint was saved {gained if now else lost}: it was trained under {before!r}, and this run is "
        f"{policy.lightning_precision!r}. Resume with the policy and loss_scale it was trained with; for the weights "
        "alone, load its state_dict into the model and start a new fit."
    )
