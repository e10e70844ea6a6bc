"""The reference backend: FP8 GEMMs in pure torch, every recipe, any device, FP32 accumulation. The oracle for the others.

FP8 numbers are BF16 numbers, subnormals included, so a BF16 GEMM over rounded operands multiplies exactly what FP8 tensor
cores would, and adds up in FP32. Where a tensor or a row shares a scale, the scales are applied to the result; where it
varies along the contracted dimension (blocks, MX), it is a power of two and goes into the operand, again exactly. With
power-of-two scales the result is that of a scaled FP8 GEMM but for the order of summation; with other scales the result is
rounded to BF16 once before and once after scaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lightning_amp_plus.fp8.delayed import Slot
from lightning_amp_plus.fp8.op import fp8_gemm, settled
from lightning_amp_plus.fp8.quantize import STRIPS, amax_of, as_strips, scale_and_round, scale_of
from lightning_amp_plus.fp8.recipes import Gemm, Operand, Recipe
from lightning_amp_plus.fp8.weights import KeptWeight


@dataclass(frozen=True)
class Prepared:
    """One side of a GEMM: a matrix whose rows are contracted, and what its product is to be multiplied by.

    Attributes:
        values: BF16, ``[rows, contracted]``.
        factor: FP32, ``[1, 1]`` or ``[rows, 1]``; NaN where the original was not finite.
        format: Name of the format that ``values`` are numbers of.
        power_of_two: Whether factors are, so that applying one rounds nothing.
    """

    values: Tensor
    factor: Tensor
    format: str
    power_of_two: bool

    def t(self) -> Prepared:
        """The same matrix contracted along the other dimension; only where all of it shares one scale."""
        assert self.factor.numel() == 1
        return Prepared(self.values.t(), self.factor, self.format, self.power_of_two)


def prepare(x: Tensor, operand: Operand, recipe: Recipe, slot: Slot | None = None) -> Prepared:
    """Quantizes one side of a GEMM, by its own magnitudes or by those of earlier windows.

    Args:
        x: ``[rows, contracted]``, FP32 or BF16.
        operand: What it is, which decides its format and granularity.
        recipe: How scales are chosen.
        slot: Where delayed scaling keeps the amax values of the layer.
    """
    format, granularity = recipe.format_of(operand), recipe.granularity_of(operand)
    length = STRIPS.get(granularity)
    x = settled(x)
    columns = x.shape[1]
    if length is not None:
        x = as_strips(x, length)
    amax = amax_of(x, granularity if length is None else "row")
    scale = slot.scale(operand, amax) if slot else scale_of(amax, format, power_of_two=recipe.power_of_two_scales)
    rounded = scale_and_round(x, scale, format)
    # The clamp of an overflow looks healthy. inf - inf and nan - nan are nan, anything else gives 0: what was not finite
    # goes on into the result, and from there into the step's verdict.
    spoiled = amax - amax
    inverse = scale.reciprocal()
    if granularity in ("tensor", "row"):
        return Prepared(rounded, inverse + spoiled, format.name, recipe.power_of_two_scales)
    if length is not None:
        rounded, spoiled = rounded.mul_(inverse).flatten(1)[:, :columns], spoiled.flatten(1)
    else:
        rounded = rounded.mul_(inverse)
    return Prepared(rounded, spoiled.sum(dim=1, keepdim=True) + 1.0, format.name, True)


def multiply(left: Prepared, right: Prepared, role: Gemm) -> Tensor:
    """``left @ right.T`` with both factors applied; BF16 ``[left rows, right rows]``.

    Scales a row hold over all of FP32. With scales a tensor, where both together leave FP32, results below 4e-37 are zero.
    """
    formats = f"{left.format} x {right.format}".lower()
    product = fp8_gemm(left.values, right.values, role, formats)
    if not torch.compiler.is_compiling() and is_in_torch_dispatch_mode(
        include_infra_modes=False
    ):  # selective checkpointing may keep it as it is
        product = product.clone()
    if left.factor.numel() == right.factor.numel() == 1:
        # Bounded by FP32's largest number, since a zero times infinity is no zero.
        return product.mul_((left.factor * right.factor).clamp(max=(2.0 - 2.0**-23) * 2.0**127).reshape(()))
    # The factor of a row near FP32's end would, at once, overflow (or leave nothing) where with the column's it does not. A
    # product is below 2**40, so 2**60 either way is safe, and what remains is 1 but for such rows.
    first = left.factor.clamp(2.0**-60, 2.0**60)
    exact = left.power_of_two and right.power_of_two
    wide = product if exact else product.float()
    return wide.mul_(first).mul_(right.factor.t()).mul_(left.factor / first).to(product.dtype)


class Fp8Matmul(torch.autograd.Function):
    """``input @ weight.T`` with up to three FP8 GEMMs; those switched off run in BF16.

    With one scale a tensor, each operand is quantized once and serves two GEMMs. Finer scales follow the contracted
    dimension, so there each GEMM quantizes its own two operands (as the hardware does). Where the layer is in an
    accumulation window of several micro-batches, its weight is quantized in the first of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        recipe: Recipe,
        gemms: tuple[Gemm, ...],
        slot: Slot | None = None,
        kept: KeptWeight | None = None,
    ) -> Tensor:
        """See the class; ``x`` is ``[tokens, in]``, ``weight`` ``[out, in]``."""
        ctx.recipe, ctx.gemms, ctx.slot, ctx.dtypes = recipe, gemms, slot, (x.dtype, weight.dtype)
        ctx.weight_now = None if kept is None else kept.now(weight)
        once = recipe.one_scale_a_tensor
        # What backward will multiply: quantized here where it can be, else the operand itself.
        ctx.kept_left, ctx.kept_right = once and "wgrad" in gemms, once and "dgrad" in gemms
        left = prepare(x, "input", recipe, slot) if "fprop" in gemms or ctx.kept_left else None
        right = _weight(ctx, weight, "rows", slot) if "fprop" in gemms or ctx.kept_right else None
        saved = _parts(left) if ctx.kept_left else (x,)
        saved += _parts(right) if ctx.kept_right else (weight,)
        ctx.save_for_backward(*saved)
        if "fprop" not in gemms:
            return torch.mm(x.bfloat16(), weight.bfloat16().t())
        assert left is not None and right is not None
        return multiply(left, right, "fprop")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of input and weight, each in its own dtype."""
        (grad,) = gradients
        saved = list(ctx.saved_tensors)
        recipe, gemms = ctx.recipe, ctx.gemms

        def kept(quantized: bool, operand: Operand) -> Any:
            if not quantized:
                return saved.pop(0)
            values, factor = saved.pop(0), saved.pop(0)
            return Prepared(values, factor, recipe.format_of(operand).name, recipe.power_of_two_scales)

        left, right = kept(ctx.kept_left, "input"), kept(ctx.kept_right, "weight")
        shared = None
        if recipe.one_scale_a_tensor and ("dgrad" in gemms or "wgrad" in gemms):
            shared = prepare(grad, "grad_output", recipe, ctx.slot)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            if "dgrad" not in gemms:
                grad_x = torch.mm(grad.bfloat16(), right.bfloat16())
            elif shared is not None:
                grad_x = multiply(shared, right.t(), "dgrad")
            else:
                sides = prepare(grad, "grad_output", recipe), _weight(ctx, right.t(), "columns")
                grad_x = multiply(*sides, "dgrad")
            grad_x = grad_x.to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            if "wgrad" not in gemms:
                grad_weight = torch.mm(grad.bfloat16().t(), left.bfloat16())
            elif shared is not None:
                grad_weight = multiply(shared.t(), left.t(), "wgrad")
            else:
                sides = prepare(grad.t(), "grad_output", recipe), prepare(left.t(), "input", recipe)
                grad_weight = multiply(*sides, "wgrad")
            grad_weight = grad_weight.to(ctx.dtypes[1])
        return grad_x, grad_weight, None, None, None, None


def _weight(ctx: Any, weight: Tensor, contracted: str, slot: Slot | None = None) -> Prepared:
    """The quantized weight, by which of its dimensions is contracted; in a window made once."""
    if ctx.weight_now is None or torch.compiler.is_compiling():
        return prepare(weight, "weight", ctx.recipe, slot)
    made: Prepared = ctx.weight_now.once(contracted, lambda: prepare(weight, "weight", ctx.recipe, slot))
    return made


def _parts(prepared: Prepared | None) -> tuple[Tensor, ...]:
    assert prepared is not None
    return prepared.values, prepared.factor
