"""What a backend is to the rest of the house: can it do this, and one Linear's computation. Backends are stateless."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_amp_plus.fp8.obstacle import Obstacle
from lightning_amp_plus.fp8.recipes import Gemm, Recipe

Forward = Callable[[Any, Tensor], Tensor]


class Backend(ABC):
    """An adapter to what multiplies FP8 numbers.

    Attributes:
        name: Its name in rules, plans and manifests.
        emulated: Whether its GEMMs run in another format than FP8.
        clock: What advances its amax histories under delayed scaling: the ``window`` or the ``micro_batch``.
    """

    name: ClassVar[str]
    emulated: ClassVar[bool] = False
    clock: ClassVar[str] = "window"

    @abstractmethod
    def obstacle(self, recipe: Recipe, gemms: tuple[Gemm, ...], device_type: str) -> Obstacle | None:
        """Why it cannot compute so on that device, or ``None`` if it can.

        The obstacle is of the kind ``backend`` (not there, or it lacks the recipe) or ``hardware``.
        """

    @abstractmethod
    def forward_of(self, recipe: Recipe, gemms: tuple[Gemm, ...]) -> Forward:
        """The function that stands for an ``nn.Linear``'s forward; asked once, when a route is installed.

        It takes the layer and ``[..., in_features]`` of any floating dtype, also without elements, and returns BF16
        ``[..., out_features]``. It reads ``weight`` and ``bias`` at every call, since FSDP2 exchanges them.

        Args:
            recipe: How scales are chosen.
            gemms: Which of the layer's GEMMs run in FP8; the others in BF16.
        """

    def outside_fp8(self, otherwise: Forward) -> Forward:
        """The forward in evaluation, or while FP8 is off; here just ``otherwise``, the one around FP8."""
        return otherwise

    def prepare(self, module: nn.Module, recipe: Recipe) -> None:
        """Gives a module what the backend keeps for it, when a route is installed; here nothing."""
        return

    def release(self, module: nn.Module) -> None:
        """Takes that away again; here nothing. A module that has nothing stays as it is."""
        return


def native_obstacle(recipe: Recipe, device_type: str) -> Obstacle | None:
    """Why FP8 tensor cores are out of reach, or ``None``; for backends that want a GPU."""
    if device_type != "cuda":
        return Obstacle("hardware", f"it needs a GPU, and this runs on {device_type}")
    if torch.version.hip is not None:
        return Obstacle(
            "hardware",
            "ROCm's FP8 formats on MI300 (e4m3fnuz, e5m2fnuz) have other ranges and one zero less, and are not supported "
            "until somebody can test them",
        )
    if not torch.cuda.is_available():
        return Obstacle("hardware", "no CUDA driver, or no GPU that it can see")
    found = torch.cuda.get_device_capability()
    if found < recipe.capability:
        have, need = (".".join(map(str, version)) for version in (found, recipe.capability))
        name = torch.cuda.get_device_name()
        return Obstacle("hardware", f"{name} has compute capability {have}, and {recipe.name} needs {need}")
    return None


def as_tokens(input: Tensor, tile: int) -> Tensor:
    """``[..., features]`` as a BF16 matrix, with rows of zeros up to a multiple of ``tile``.

    Rows of zeros change no amax and add nothing to a weight's gradient, so the padding is exact.
    """
    tokens = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
    missing = -tokens.shape[0] % tile
    return nn.functional.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def as_output(tokens: Tensor, input: Tensor) -> Tensor:
    """Rows of a padded result in the shape of the input that they belong to."""
    count = input.shape[:-1].numel()
    return tokens[:count].reshape(*input.shape[:-1], tokens.shape[-1])


def linear_in_bf16(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer without FP8, for a batch without elements."""
    wide = None if bias is None else bias.to(torch.bfloat16)
    return nn.functional.linear(input.to(torch.bfloat16), weight.to(torch.bfloat16), wide)
