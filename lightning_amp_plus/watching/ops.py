"""What kind of operation an ATen operator is, and which tensors it computes with. Used by what watches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_amp_plus.casts import dtype_name
from lightning_amp_plus.formats import FORMATS
from lightning_amp_plus.nested import named_tensors

_NO_TENSORS = (int, float, str, type(None), torch.dtype, torch.device)  # the usual rest of an operator's arguments
_NAMES = {known.dtype: known.name.lower() for known in FORMATS}

_GEMM = {
    "mm", "matmul", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "linear_backward",
    "_addmm_activation", "_linear_pointwise", "mkldnn_linear", "convolution", "_convolution",
    "convolution_backward", "convolution_overrideable", "convolution_backward_overrideable",
    "_convolution_pointwise", "conv2d", "cudnn_convolution", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
    "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward", "miopen_convolution", "_scaled_mm",
    "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_grouped_mm", "_slow_conv2d_forward", "_int_mm",
    "fp8_gemm",
}  # fmt: skip
_NORM = {
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
    "_native_batch_norm_legit_functional", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_backward",
    "_fused_rms_norm", "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward",
    "cudnn_batch_norm_backward", "miopen_batch_norm_backward", "_fused_rms_norm_backward", "_fused_layer_norm",
}  # fmt: skip
_SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
_REDUCTION = {
    "sum", "nansum", "mean", "nanmean", "prod", "norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean",
    "logsumexp", "cumsum", "cumprod", "logcumsumexp", "_foreach_norm",
}  # fmt: skip
_LOSS = {
    "mse_loss", "smooth_l1_loss", "huber_loss", "nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy",
    "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss_forward", "_ctc_loss", "_cudnn_ctc_loss",
}  # fmt: skip
_ATTENTION = (
    "_scaled_dot_product_",
    "_flash_attention_",
    "_efficient_attention_",
    "_cudnn_attention_",
    "flex_attention",
    "_native_multi_head_attention",
)
# Nothing is computed: memory is made, moved, or described. FSDP's own copies are among them.
_NOTHING = {
    "detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like",
    "ones", "ones_like", "full", "full_like", "new_zeros", "new_full", "zero_", "fill_", "set_", "resize_", "arange",
    "lift_fresh", "_local_scalar_dense", "_unsafe_view", "scalar_tensor", "_pin_memory", "record_stream",
}  # fmt: skip
_COPY = {"_to_copy", "copy_", "clone", "_foreach_copy_", "wait_tensor", "to"}
_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_REDUCING = ("all_reduce", "allreduce", "reduce_scatter", "reduce_")  # collectives that add up, by parts of their names
# Operators that autocast runs in FP32 on one device or another, besides norms, softmax, losses and reductions.
PREFER_FP32 = {
    "pow", "exp", "expm1", "log", "log2", "log10", "log1p", "rsqrt", "reciprocal", "acos", "asin", "cosh", "sinh", "tan",
    "erfinv", "softplus", "renorm", "dist", "pdist", "cdist", "_cdist_forward",
}  # fmt: skip

LISTED = ("gemm", "attention", "softmax", "norm", "reduction", "loss", "communication", "in place")


class Op(NamedTuple):
    """One operator.

    Attributes:
        name: For people: ``aten.mul.out``, without ``.default``.
        base: Its name alone, in place or not: ``mul``.
        kind: One of :data:`LISTED`, ``copy``, ``other``, or ``nothing`` where nothing is computed.
        adds_up: Whether it is a collective that reduces.
        backward: Whether it is the derivative of another operator.
    """

    name: str
    base: str
    kind: str
    adds_up: bool = False
    backward: bool = False


@cache
def op_of(func: Any) -> Op:
    """What an operator that a dispatch mode met is."""
    if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator, which has no schema
        name = str(func.name())
        return Op(name, name, "attention" if name.startswith(_ATTENTION) else "other")
    space, _, base = str(func._schema.name).partition("::")
    name = str(func).removesuffix(".default")
    kind = _kind(space, base, func)
    adds_up = kind == "communication" and base.lstrip("_").startswith(_REDUCING)
    return Op(name, base.rstrip("_"), kind, adds_up, "backward" in base)


def _kind(space: str, base: str, func: Any) -> str:
    if space in _COMMUNICATION:
        return "communication"
    if space in ("profiler", "fsdp", "prim", "_dtensor") or base in _NOTHING or func.is_view:
        return "nothing"
    if base in _COPY:
        return "copy"
    for kind, names in (
        ("gemm", _GEMM), ("norm", _NORM), ("softmax", _SOFTMAX), ("reduction", _REDUCTION),
        ("loss", _LOSS | {f"{name.removesuffix('_forward')}_backward" for name in _LOSS}),
    ):  # fmt: skip
        if base in names:
            return kind
    if base.startswith(_ATTENTION):
        return "attention"
    return "in place" if func._schema.is_mutable else "other"


def short(dtype: torch.dtype) -> str:
    """``fp32 bf16 fp16 e4m3 e5m2``, torch's own name for any other."""
    return _NAMES.get(dtype) or dtype_name(dtype)


def joined(dtypes: Any) -> str:
    """Several dtypes in one cell, as a plan writes them; ``-`` for none."""
    return "+".join(sorted(set(dtypes))) or "-"


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in an operator's nested arguments, in order; at every operation, so without the names of ``nested``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, Tensor):
                yield item
            elif not isinstance(item, _NO_TENSORS):
                for _, tensor in named_tensors(item, "", (id(value),)):
                    yield tensor
    elif not isinstance(value, _NO_TENSORS):  # what modules take and return
        for _, tensor in named_tensors(value, ""):
            yield tensor


def floating(value: Any) -> list[Tensor]:
    """The floating-point tensors in an operator's nested arguments or results."""
    return [tensor for tensor in tensors(value) if tensor.dtype.is_floating_point]


def floating_of_module(value: Any) -> list[Tensor]:
    """The floating-point tensors in what a module takes or returns, which may be of more kinds than an operator's."""
    return [tensor for _, tensor in named_tensors(value, "") if tensor.dtype.is_floating_point]


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold the numbers: a DTensor's or a quantized tensor's parts, or the tensor itself."""
    if not is_wrapper(type(tensor)) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]  # a DTensor names its mesh too
    return [part for value in held if isinstance(value, Tensor) for part in plain_parts(value)]


@cache
def is_wrapper(cls: type) -> bool:
    """Whether a class of tensors takes operators apart itself; its parts come to a dispatch mode by themselves."""
    plain: Any = torch._C._disabled_torch_dispatch_impl
    return getattr(cls, "__torch_dispatch__", plain) is not plain  # a DeviceMesh is among the types too


def place_of(tensor: Tensor) -> int:
    """Names the memory that a tensor lies in, for as long as that lives; views share it. Sparse tensors have several."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else -id(tensor)


def elements_added(op: Op, operands: list[Tensor], results: list[Tensor], args: tuple[Any, ...]) -> int:
    """How many elements were added up to one: of a sum, a loss or a softmax; 0 for what adds nothing."""
    if op.backward or not operands or not results or op.kind not in ("reduction", "softmax", "loss"):
        return 0
    shape = operands[0].shape
    if op.kind == "softmax" or op.base.endswith(("cumsum", "cumprod", "cumsumexp")):
        along = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
        return int(shape[along]) if shape else 1
    if op.base == "_foreach_norm":
        return max((t.numel() for t in operands), default=0)
    return math.prod(shape) // max(1, results[0].numel())
