"""What stands in for Transformer Engine's binary: the few kernels of its Linear, LayerNorm and LayerNormMLP in PyTorch.

Used by ``tests.support.transformer_engine`` alone. Quantization is per tensor (delayed and current scaling); of the
layouts of an FP8 GEMM a GPU of compute capability 9.0 knows only the one where both operands lie along the contracted
dimension, so quantized tensors carry a transpose, as they do there.

The binary's functions do their work where no dispatch mode sees it, and ``out_of_sight`` makes it so for these.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

DType = enum.IntEnum(
    "DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1", module=__name__, start=0
)
NVTE_Fused_Attn_Backend = enum.IntEnum(  # only compared with a list of the same names
    "NVTE_Fused_Attn_Backend",
    [f"NVTE_{name}" for name in ("No_Backend", "F16_arbitrary_seqlen", "FP8")],
    module=__name__,
    start=-1,
)
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    [f"GEMM{gemm}_{operand}" for gemm in (1, 2, 3) for operand in ("INPUT", "WEIGHT", "OUTPUT")],
    module=__name__,
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors",
    [f"GRAD_{operand}{gemm}" for gemm in (1, 2, 3) for operand in ("OUTPUT", "INPUT")],
    module=__name__,
    start=0,
)


def out_of_sight(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose operations come to no dispatch mode."""

    @functools.wraps(kernel)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return kernel(*args, **kwargs)

    return unseen


def torch_dtype(dtype: Any) -> torch.dtype:
    """The dtype of torch that Transformer Engine means by one of its own."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return TE_DType_To_Torch[int(dtype)]


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Rounds to FP8 by the quantizer's scale (delayed scaling, and notes the amax) or by the tensor's own amax."""
    from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor, Float8TensorStorage

    if noop is not None and noop.item():
        return output
    dtype = torch_dtype(quantizer.dtype)
    largest = torch.finfo(dtype).max
    # The kernel's fmaxf passes NaN over, and finds 0 where there is nothing.
    magnitudes = tensor.detach().float().abs().nan_to_num(nan=0.0, posinf=torch.inf)
    amax = magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())
    if isinstance(quantizer, Float8Quantizer):
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))  # atomicMax: what is there from before stays
        scale = quantizer.scale.reshape(1)
    elif isinstance(quantizer, Float8CurrentScalingQuantizer):
        if quantizer.with_amax_reduction:
            raise NotImplementedError("Reducing the amax of current scaling over ranks is not emulated.")
        amax = amax.clamp(min=quantizer.amax_epsilon)
        scale = torch.where((amax > 0) & amax.isfinite(), largest / amax, 1.0)
        scale = scale.clamp(max=torch.finfo(torch.float32).max).reshape(1)
        if quantizer.force_pow_2_scales:
            scale = scale.log2().floor().exp2()
    else:
        raise NotImplementedError(f"{type(quantizer).__name__} is not emulated.")
    values = (tensor.detach().float() * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    rows = values if quantizer.rowwise_usage else None
    columns = fp8_transpose(values, quantizer.dtype) if quantizer.columnwise_usage else None
    if output is not None:
        output._data, output._transpose, output._transpose_invalid = rows, columns, columns is None
        output._scale_inv.copy_(1 / scale)
        return output
    kind: Any = {"shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}
    return (Float8TensorStorage if quantizer.internal else Float8Tensor)(
        **({"fake_dtype": tensor.dtype} if quantizer.internal else kind),
        data=rows,
        data_transpose=columns,
        fp8_scale_inv=1 / scale,
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
    )


def bgrad_quantize(grad_output: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The bias's gradient, and the output's gradient in FP8."""
    return grad_output.sum(dim=0), quantize(grad_output, quantizer)


def fp8_transpose(values: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """The last dimension first."""
    return values.movedim(-1, 0).contiguous()


def generic_gemm(
    left: Any,
    transpose_left: bool,
    right: Any,
    transpose_right: bool,
    output: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_input: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    alpha: float = 1.0,
    beta: float = 0.0,
    **unused: Any,
) -> tuple[Any, Tensor | None, None, None]:
    """``op(right) @ op(left)``; the bias added, or with ``grad`` the bias's gradient: the sum of ``right``'s rows."""
    if gelu or alpha != 1.0 or beta not in (0.0, 1.0) or any(unused.values()):
        raise NotImplementedError("A GEMM with GELU, factors or communication is not emulated.")
    if hasattr(left, "_scale_inv") != hasattr(right, "_scale_inv"):
        raise RuntimeError("A GEMM with one operand in FP8.")
    dtype = output.dtype if output is not None else torch_dtype(output_dtype)
    bias_grad = None
    if hasattr(left, "_scale_inv"):
        result = _fp8_gemm(left, transpose_left, right, transpose_right, dtype)
    else:
        first = right.reshape(-1, right.shape[-1])
        second = left.reshape(-1, left.shape[-1])
        result = ((first.T if transpose_right else first) @ (second.T if transpose_left else second)).to(dtype)
        if grad and bias is not None:
            bias_grad = first.sum(dim=0).to(bias.dtype)
        result = result.reshape(*right.shape[:-1], -1) if not transpose_right else result
    if bias is not None and not grad:
        result = result + bias.to(dtype)
    if quantizer is not None:
        result = quantize(result, quantizer)
    if output is not None:
        output.copy_(output + result if accumulate else result)
        result = output
    return result, bias_grad, None, None


def _fp8_gemm(left: Any, transpose_left: bool, right: Any, transpose_right: bool, dtype: torch.dtype) -> Tensor:
    first, shape = _along_contraction(right, columnwise=transpose_right)
    second, _ = _along_contraction(left, columnwise=not transpose_left)
    if first.dtype == second.dtype == torch.float8_e5m2:
        raise RuntimeError("A GPU multiplies no E5M2 with E5M2.")
    if first.shape[1] % 16 or second.shape[0] % 8:
        raise RuntimeError(
            f"A GPU has no FP8 GEMM of {tuple(first.shape)} with {tuple(second.shape)} transposed: the contracted "
            "dimension has to be a multiple of 16, the last one of the output a multiple of 8."
        )
    result = torch._scaled_mm(first, second.t(), right._scale_inv, left._scale_inv, out_dtype=dtype)
    return result.reshape(*shape, second.shape[0])


def _along_contraction(operand: Any, columnwise: bool) -> tuple[Tensor, torch.Size]:
    """An operand as a matrix whose last dimension is contracted, and the shape of all the others."""
    values = operand._transpose if columnwise else operand._data
    if values is None:
        raise RuntimeError("An FP8 operand lacks the layout that this GEMM needs.")
    shape = values.shape[:1] if columnwise else values.shape[:-1]
    return values.view(torch_dtype(operand._fp8_dtype)).reshape(shape.numel(), -1), shape


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    output: Tensor | None,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, Tensor, Tensor]:
    """The normalized rows, their means and the inverses of their deviations."""
    variance, mean = torch.var_mean(x.float(), dim=-1, correction=0)
    deviation = torch.rsqrt(variance + eps)
    gamma = weight.float() + 1 if zero_centered_gamma else weight.float()
    result = ((x.float() - mean[:, None]) * deviation[:, None] * gamma + bias.float()).to(torch_dtype(dtype))
    return (result if quantizer is None else quantize(result, quantizer)), mean, deviation


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the weight and the bias."""
    normal = (x.float() - mean[:, None]) * deviation[:, None]
    gamma = weight.float() + 1 if zero_centered_gamma else weight.float()
    inner = grad.float() * gamma
    centered = inner - inner.mean(-1, keepdim=True) - normal * (inner * normal).mean(-1, keepdim=True)
    return (
        (centered * deviation[:, None]).to(x.dtype),
        (grad.float() * normal).sum(0).to(weight.dtype),
        grad.float().sum(0).to(weight.dtype),
    )


def relu(x: Tensor, quantizer: Any) -> Any:
    """The positive part, in FP8 if there is a quantizer."""
    result = x.clamp(min=0)
    return result if quantizer is None else quantize(result, quantizer)


def drelu(grad: Tensor, x: Tensor, quantizer: Any) -> Any:
    """Gradient of ``relu``'s input."""
    result = grad * (x > 0)
    return result if quantizer is None else quantize(result, quantizer)
