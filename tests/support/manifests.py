"""Manifests made by hand, every section filled, and small changes of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch

from lightning_amp_plus import PrecisionPolicy
from lightning_amp_plus.checkpoint import random_state
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, SCHEMA_VERSION, Manifest


class _Deleted:
    def __repr__(self) -> str:  # the same in every process, for the ids of tests
        return "DELETED"


_DELETED = _Deleted()
DELETED: Any = _DELETED  # in `changed`: takes the entry out


def changed(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with ``changes``, whose names may be paths with ``__`` between the keys (``strategy__world_size=4``)."""
    result: dict[str, Any] = copy.deepcopy(dict(plain))
    for path, value in changes.items():
        place: Any = result
        *above, last = [path] if path in plain else path.split("__")
        for key in above:
            place = place[key]
        if value is _DELETED:
            del place[last]
        else:
            place[last] = value
    return result


def scaler_state(**changes: Any) -> dict[str, Any]:
    """A sound state of a dynamic loss scale."""
    sound = {
        "scale": 1024.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
        "_hysteresis": 1,
    }
    return changed(sound, changes)


# What is changed in a sound state, and how that is named.
IMPOSSIBLE_SCALERS: dict[str, tuple[dict[str, Any], str]] = {
    "empty": (dict.fromkeys(scaler_state(), DELETED), "empty"),
    "no scale": ({"scale": DELETED}, "lacks scale"),
    "no tracker": ({"_growth_tracker": DELETED}, "lacks _growth_tracker"),
    "neither": ({"scale": DELETED, "_growth_tracker": DELETED}, "lacks scale, _growth_tracker"),
    "zero": ({"scale": 0.0}, "scale=0.0"),
    "negative": ({"scale": -4.0}, "scale=-4.0"),
    "infinite": ({"scale": math.inf}, "scale=inf"),
    "NaN": ({"scale": math.nan}, "scale=nan"),
    "subnormal": ({"scale": 1e-45}, "scale=1e-45"),
    "nearly normal": ({"scale": 1e-40}, "scale=1e-40"),
    "above FP32": ({"scale": 1e39}, "scale=1e+39"),
    "above any float": ({"scale": 10**400}, f"scale=1{'0' * 73}"),
    "text": ({"scale": "1024"}, "scale='1024'"),
    "a flag": ({"scale": True}, "scale=True"),
    "nothing": ({"scale": None}, "scale=None"),
    "a list": ({"scale": [1024.0]}, "scale='<list>'"),
    "growth below 1": ({"growth_factor": 0.5}, "growth_factor=0.5"),
    "growth NaN": ({"growth_factor": math.nan}, "growth_factor=nan"),
    "growth infinite": ({"growth_factor": math.inf}, "growth_factor=inf"),
    "backoff zero": ({"backoff_factor": 0.0}, "backoff_factor=0.0"),
    "backoff one": ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
    "backoff above": ({"backoff_factor": 2.0}, "backoff_factor=2.0"),
    "backoff negative": ({"backoff_factor": -0.5}, "backoff_factor=-0.5"),
    "interval zero": ({"growth_interval": 0}, "growth_interval=0"),
    "interval negative": ({"growth_interval": -3}, "growth_interval=-3"),
    "tracker negative": ({"_growth_tracker": -1}, "_growth_tracker=-1"),
    "tracker half": ({"_growth_tracker": 1.5}, "_growth_tracker=1.5"),
    "tracker NaN": ({"_growth_tracker": math.nan}, "_growth_tracker=nan"),
    "tracker infinite": ({"_growth_tracker": math.inf}, "_growth_tracker=inf"),
    "hysteresis NaN": ({"_hysteresis": math.nan}, "_hysteresis=nan"),
    "hysteresis half": ({"_hysteresis": 0.5}, "_hysteresis=0.5"),
    "hysteresis text": ({"_hysteresis": "1"}, "_hysteresis='1'"),
}


def route(compute: str, params: str = "fp32", optimizer: str = "fp32") -> dict[str, str]:
    """A module's route with every role, as a plan describes it."""
    return {
        "module_type": "Linear",
        "compute": compute,
        "params": params,
        "input": compute,
        "weight": compute,
        "output": compute,
        "accumulator": "fp32",
        "optimizer": optimizer,
        "rule": "",
        "reason": "compute of the policy",
    }


def document(precision: str = "16-mixed", /, **changes: Any) -> dict[str, Any]:
    """The plain document of a run on one device, with every section but ``fp8`` for a precision without FP8.

    Args:
        precision: As ``AmpPrecision`` takes it.
        **changes: Applied with :func:`changed`.
    """
    policy = PrecisionPolicy.from_string(precision)
    scaled = policy.compute == "fp16"
    module = route(policy.compute, policy.params, policy.params)
    fp8 = fp8_start = None
    if policy.uses_fp8:
        recipe = {"recipe": "delayed", "history_length": 16, "backend": "torchao", "amax_group": "world"}
        fp8 = {"modules": {"first": dict(recipe), "second": dict(recipe)}, "amax_clock": "window"}
        fp8_start = {"begun_at": 0, "open_loss": [0.0, 0.0], "observed": []}
    plain: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "policy": policy.to_dict(),
        "fingerprint": policy.fingerprint(),
        "moves": [],
        "scaler": scaler_state() if scaled else None,
        "windows": 12,
        "history": {
            "scales": [[512.0, 4.0], [1024.0, 8.0]],
            "applied": 11,
            "skipped": 1,
            "growths": 1,
            "backoffs": 0,
            "consecutive_skips": 0,
        },
        "save_id": "0123456789abcdef0123456789abcdef",
        "writer": "lightning_amp_plus",
        "precision": policy.precision_name,
        "versions": {
            "python": "3.11.7",
            "torch": "2.13.0",
            "lightning": "2.6.6",
            "lightning_amp_plus": "0.1.0",
            "torchao": "0.18.0",
            "transformer_engine": None,
        },
        "hardware": {
            "device": "cuda",
            "name": "H200",
            "capability": "9.0",
            "driver": "CUDA 13.0",
            "cuda": "13.0",
            "hip": None,
        },
        "device_type": "cuda",
        "routes": {"": {**module, "params": "-", "optimizer": "-"}, "first": dict(module), "second": dict(module)},
        "kept_buffers": ["inv_freq"],
        "dtypes": {
            "parameters": {"fp32": 4},
            "gradients": {"fp32": 4},
            "optimizer_state": {"fp32": 8},
        },
        "optimizers": [{"name": "AdamW", "fused": True, "state_dtypes": {"fp32": 8}}],
        "loss_scale": {
            "kind": "dynamic",
            "init": 512.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "min": 2.0**-14,
            "max": 2.0**24,
            "hysteresis": 1,
            "backoff_on_forward_overflow": True,
        }
        if scaled
        else None,
        "master_weights_kept": False,
        "fp8": fp8,
        "fp8_start": fp8_start,
        "clipping": {"value": 1.0, "algorithm": "norm"},
        "accumulation": {"batches": 4, "partial_window": "lightning", "sync_each_microbatch": True},
        "strategy": {"name": "DDPStrategy", "world_size": 2, "mesh": {"data_parallel": 2}},
        "settings": {"check_finite": True, "max_consecutive_skips": 100, "advance_scheduler_on_skip": False},
        "flags": {"compiled": False, "activation_checkpointing": False},
        "progress": {"epoch": 1, "global_step": 12},
        "window": {"micro_batches": 0, "size": None, "gradients": "none"},
        "data": {"mid_epoch": False, "stateful": True, "moment": "clean"},
        "random": {"ranks": 2, "generators": ["device", "numpy", "python", "torch"]},
        "census": None,
        "weights_only": False,
    }
    return changed(plain, changes)


def census() -> dict[str, Any]:
    """A census with one of everything."""
    columns = ("parameter", "input", "weight", "output", "accumulator", "gradient", "optimizer", "reduction")
    place = {"module": "first", "op": "aten.mul.Tensor"}
    plain = document("16-mixed")
    return {
        "step": 3,
        "fingerprint": "0f" * 32,
        "modules": {"first": {"type": "Linear", "compute": "bf16", **dict.fromkeys(columns, "bf16")}},
        "ops": [{**place, "phase": "forward", "kind": "gemm", "dtypes": "bf16 -> bf16", "count": 2}],
        "flags": [{**place, "kind": "fp32 island", "found": "bf16 -> fp32", "remedy": "Remove the cast."}],
        "notes": ["No optimizer stepped."],
        "versions": plain["versions"],
        "hardware": plain["hardware"],
    }


def manifest(precision: str = "16-mixed", /, **changes: Any) -> Manifest:
    """:func:`document`, as a manifest."""
    return Manifest.from_dict(document(precision, **changes), "the test")


def checkpoint(precision: str = "16-mixed", /, **changes: Any) -> dict[str, Any]:
    """A checkpoint with :func:`document`, and beside it all the tensors that the document speaks of."""
    plain = document(precision, **changes)
    parts: dict[str, Any] = {}
    if plain["random"] is not None:
        captured = random_state.capture(torch.device("cpu"))
        captured["device"] = captured["torch"]  # which device it was of nobody can tell
        of_rank = {name: captured[name] for name in plain["random"]["generators"]}
        parts["random_state"] = [of_rank] * plain["random"]["ranks"]
    if plain["master_weights_kept"]:
        parts["master_weights"] = {"first.weight": torch.zeros(8, 4)}
    if plain["window"]["gradients"] == "stored":
        ranks = plain["strategy"]["world_size"]
        gradients = {"first.weight": torch.zeros(8, 4)}
        parts["gradients"] = {"ranks": [gradients] * ranks, "items": [[]] * ranks, "backwards": 1}
    return {CHECKPOINT_KEY: {**plain, **parts}}
