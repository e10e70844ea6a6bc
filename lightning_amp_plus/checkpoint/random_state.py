"""Random states of a rank, as flat byte tensors that a ``weights_only`` checkpoint can hold, and of all ranks together."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

# The Mersenne twister of both Python and NumPy, and the second half of a pair of normal numbers.
_TWISTER = struct.Struct("<625I?d")


def capture(device: torch.device) -> dict[str, Tensor]:
    """This rank's random states, by generator: ``python``, ``torch``, ``numpy``'s global one, and the device's.

    Args:
        device: The device that the rank computes on.

    Returns:
        One-dimensional uint8 tensors on the CPU.
    """
    _, state, gauss = random.getstate()
    states = {
        "python": _bytes(_TWISTER.pack(*state, gauss is not None, gauss or 0.0)),
        "torch": torch.get_rng_state(),
    }
    state_of_numpy = numpy.random.get_state(legacy=False)
    if isinstance(state_of_numpy, dict) and state_of_numpy["bit_generator"] == "MT19937":
        inner = state_of_numpy["state"]
        words = (*(int(key) for key in inner["key"]), int(inner["pos"]))
        states["numpy"] = _bytes(_TWISTER.pack(*words, bool(state_of_numpy["has_gauss"]), state_of_numpy["gauss"]))
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts states captured by :func:`capture` back; a generator that is missing stays as it is."""
    if "python" in states:
        *state, has_gauss, gauss = _TWISTER.unpack(_raw(states["python"]))
        random.setstate((3, tuple(state), gauss if has_gauss else None))
    if "torch" in states:
        torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        *keys, position, has_gauss, second = _TWISTER.unpack(_raw(states["numpy"]))
        numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, int(has_gauss), second))
    if "device" in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"].cpu(), device)


def gather(states: dict[str, Tensor], device: torch.device) -> list[dict[str, Tensor]]:
    """The states of all ranks, by rank; one collective, which every rank of the world has to enter.

    Args:
        states: This rank's.
        device: Where the backend exchanges tensors.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [states]
    flat = torch.cat([states[name] for name in sorted(states)]).to(device)
    lengths = [states[name].numel() for name in sorted(states)]
    everyone = torch.empty(dist.get_world_size() * flat.numel(), dtype=flat.dtype, device=device)
    dist.all_gather_into_tensor(everyone, flat)
    rows = everyone.cpu().view(-1, flat.numel())
    # Copies, or every rank's state would be saved with the storage of all.
    return [{n: s.clone() for n, s in zip(sorted(states), row.split(lengths), strict=True)} for row in rows]


def sizes() -> dict[str, int]:
    """Bytes of each state whose size does not depend on the device."""
    return {"python": _TWISTER.size, "numpy": _TWISTER.size, "torch": torch.get_rng_state().numel()}


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _raw(state: Tensor) -> bytes:
    return bytes(state.tolist())
