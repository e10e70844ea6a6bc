"""Backend ``reference``: pure torch on any device, every recipe; see ``fp8.reference`` for what it computes."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from lightning_amp_plus.fp8.backends.base import Backend, Forward
from lightning_amp_plus.fp8.delayed import slot_of
from lightning_amp_plus.fp8.linear import fp8_linear
from lightning_amp_plus.fp8.obstacle import Obstacle
from lightning_amp_plus.fp8.recipes import Gemm, Recipe
from lightning_amp_plus.fp8.weights import kept_weight_of


class Reference(Backend):
    """FP8 numbers multiplied by BF16 GEMMs."""

    name: ClassVar[str] = "reference"
    emulated: ClassVar[bool] = True

    def obstacle(self, recipe: Recipe, gemms: tuple[Gemm, ...], device_type: str) -> Obstacle | None:
        """None, ever."""
        return None

    def forward_of(self, recipe: Recipe, gemms: tuple[Gemm, ...]) -> Forward:
        """See :func:`~lightning_amp_plus.fp8.linear.fp8_linear`."""

        def forward(module: Any, input: Tensor) -> Tensor:
            return fp8_linear(input, module.weight, module.bias, recipe, gemms, slot_of(module), kept_weight_of(module))

        return forward
