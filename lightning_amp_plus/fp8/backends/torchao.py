"""Backend ``torchao``: current and rowwise scaling by torchao's ``float8``, on CUDA and, slowly, on a CPU.

torchao's own way is to replace modules. Here a module stays what it is: what torchao's converted layer does in its forward
is done with our module's weight and bias. The conversion is called once a configuration, since it also sets torchao up.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_amp_plus.fp8.backends.base import Backend, Forward, as_output, as_tokens, linear_in_bf16, native_obstacle
from lightning_amp_plus.fp8.obstacle import Obstacle
from lightning_amp_plus.fp8.recipes import GEMMS, CurrentScaling, Gemm, Operand, Recipe, RowwiseScaling

_GATHERED = "_amp_gathered_in_fp8"  # a plain attribute of a layer: FSDP2 gathers its weight in FP8
_TILE = 16  # the weight's gradient contracts tokens, and tensor cores contract multiples of 16


class _Layer:
    """What torchao's forward reads of a layer."""

    __slots__ = ("bias", "config", "linear_mm_config", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, linear_mm_config: Any, config: Any) -> None:
        self.weight = weight
        self.bias = bias
        self.linear_mm_config = linear_mm_config
        self.config = config


class Torchao(Backend):
    """torchao's Float8 training."""

    name: ClassVar[str] = "torchao"

    def obstacle(self, recipe: Recipe, gemms: tuple[Gemm, ...], device_type: str) -> Obstacle | None:
        """It is missing, lacks the recipe, or the GPU is too old. A CPU computes everything that torchao has."""
        if find_spec("torchao") is None:
            return Obstacle("backend", "torchao is not installed (pip install torchao)")
        if not isinstance(recipe, (CurrentScaling, RowwiseScaling)):
            return Obstacle("backend", f"torchao has current and rowwise scaling, and no {recipe.name}")
        return None if device_type == "cpu" else native_obstacle(recipe, device_type)

    def forward_of(self, recipe: Recipe, gemms: tuple[Gemm, ...]) -> Forward:
        """What torchao's converted layer does, on our weight and bias."""
        converted = _converted(recipe, gemms)
        theirs, linear_mm_config, config = type(converted).forward, converted.linear_mm_config, converted.config
        narrow = "fprop" not in gemms or "dgrad" not in gemms  # a GEMM in BF16 takes no FP32 weight

        def forward(module: Any, input: Tensor) -> Tensor:
            weight = module.weight.to(torch.bfloat16) if narrow else module.weight
            if not input.numel():
                return linear_in_bf16(input, weight, module.bias)
            with torch.autocast(input.device.type, enabled=False):  # torchao would cast for CUDA's, on a CPU too
                layer = _Layer(weight, module.bias, linear_mm_config, config)
                output: Tensor = theirs(layer, as_tokens(input, _TILE))
            return as_output(output, input)

        return forward

    def outside_fp8(self, otherwise: Forward) -> Forward:
        """A weight that FSDP2 gathered in FP8 is multiplied as what it stands for, in BF16."""

        def forward(module: Any, input: Tensor) -> Tensor:
            weight = module._parameters.get("weight")  # to ask a parametrized layer would be to make its weight
            if not hasattr(weight, "to_original_precision"):
                return otherwise(module, input)
            return linear_in_bf16(input, weight.to_original_precision(), module.bias)

        return forward


def gather_in_fp8(layer: nn.Linear, recipe: Recipe) -> None:
    """Lets FSDP2 gather a layer's weight in FP8: a quarter of the bytes of FP32, half of BF16's.

    Every rank quantizes its shard by the largest magnitude of all shards, found by one small all-reduce. To be called
    before ``fully_shard``, which puts a new parameter in this one's place anyway.

    Args:
        layer: A Linear that will compute by torchao, all three GEMMs in FP8.
        recipe: Its current scaling; finer scales cannot be gathered.
    """
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    weight = layer.weight
    wrapped = WeightWithDynamicFloat8CastTensor(
        weight.detach(), _converted(recipe, GEMMS).linear_mm_config, recipe.format_of("weight").dtype
    )
    layer.weight = nn.Parameter(wrapped, requires_grad=weight.requires_grad)
    layer.register_state_dict_post_hook(_plain_weight)  # type: ignore[no-untyped-call]
    vars(layer)[_GATHERED] = True


def is_gathered_in_fp8(module: nn.Module) -> bool:
    """Whether :func:`gather_in_fp8` has prepared a layer."""
    return _GATHERED in vars(module)


def _plain_weight(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Puts the plain tensor, which shares its memory, in the place of torchao's class: a checkpoint is for any process."""
    from torch.distributed.tensor import DTensor

    weight = state[f"{prefix}weight"]
    if isinstance(weight, DTensor):
        local: Any = weight.to_local()
        if hasattr(local, "_tensor"):
            state[f"{prefix}weight"] = DTensor.from_local(
                local._tensor,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            )
    elif hasattr(weight, "_tensor"):
        state[f"{prefix}weight"] = weight._tensor


def _converted(recipe: Recipe, gemms: tuple[Gemm, ...]) -> Any:
    """A layer that torchao converted with this recipe."""
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=config_of(recipe, gemms))


def config_of(recipe: Recipe, gemms: tuple[Gemm, ...]) -> Any:
    """The ``Float8LinearConfig`` for a recipe.

    Args:
        recipe: Current or rowwise scaling.
        gemms: Which GEMMs run in FP8.
    """
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType

    fine = isinstance(recipe, RowwiseScaling)

    def cast(operand: Operand, gemm: Gemm) -> Any:
        return CastConfig(
            ScalingType.DYNAMIC if gemm in gemms else ScalingType.DISABLED,
            ScalingGranularity.AXISWISE if fine and gemm in gemms else ScalingGranularity.TENSORWISE,
            recipe.format_of(operand).dtype,
        )

    return Float8LinearConfig(
        cast_config_input=cast("input", "fprop"),
        cast_config_weight=cast("weight", "fprop"),
        cast_config_weight_for_grad_input=cast("weight", "dgrad"),
        cast_config_grad_output=cast("grad_output", "dgrad"),
        cast_config_input_for_grad_weight=cast("input", "wgrad"),
        cast_config_grad_output_for_grad_weight=cast("grad_output", "wgrad"),
        round_scales_to_power_of_2=recipe.power_of_two_scales,
    )
