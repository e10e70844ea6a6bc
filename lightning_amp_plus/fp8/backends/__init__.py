"""What multiplies FP8 numbers: three backends behind one adapter, and which of them a route gets."""

from __future__ import annotations

from lightning_amp_plus.fp8.backends.base import Backend
from lightning_amp_plus.fp8.backends.reference import Reference
from lightning_amp_plus.fp8.backends.torchao import Torchao
from lightning_amp_plus.fp8.backends.transformer_engine import TransformerEngine
from lightning_amp_plus.fp8.recipes import Gemm, Recipe

# In the order in which they are tried on a GPU. torchao first: it is what torch.compile sees through.
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Torchao(), TransformerEngine(), Reference())}


def choose(recipe: Recipe, gemms: tuple[Gemm, ...], device_type: str) -> tuple[Backend, str]:
    """The backend of a route that names none, and why it is that one.

    Args:
        recipe: How scales are chosen.
        gemms: Which GEMMs run in FP8.
        device_type: Where the layer will run.
    """
    reference = BACKENDS["reference"]
    if device_type != "cuda":
        return reference, f"reference: no FP8 GEMM on {device_type} is faster"
    obstacles = []
    for backend in (backend for backend in BACKENDS.values() if backend is not reference):
        obstacle = backend.obstacle(recipe, gemms, device_type)
        if obstacle is None:
            return backend, f"{backend.name}: native"
        obstacles.append(obstacle.text)
    return reference, f"reference: emulated, since {' and '.join(dict.fromkeys(obstacles))}"
