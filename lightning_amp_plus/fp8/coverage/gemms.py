"""Which operators are GEMMs, what they multiply, and how much work that is. Pure; used by ``gemm_watcher``.

FLOPs are those of the multiplications and additions of a dense product, ``2 m n k``. Attention is counted whole also where
a mask leaves half of it out, as torch's own counter does; its operators on a CPU and the kernels behind RNN layers are
unknown to that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

Kind = Literal["gemm", "conv", "attention"]


class Product(NamedTuple):
    """One product that an operator computes.

    Attributes:
        kind: ``gemm``, ``conv`` or ``attention``.
        left: First operand; of attention the queries, of a backward the gradient.
        right: Second operand: of a convolution and an RNN the weight, of attention the keys.
        result: Shape of what comes out; ``None`` where it does not tell the role.
        flops: Floating-point operations; ``None`` where no formula is known.
        role: ``fprop``, ``dgrad`` or ``wgrad``, where the operator itself says it.
    """

    kind: Kind
    left: Tensor | None
    right: Tensor | None
    result: tuple[int, ...] | None
    flops: int | None
    role: str = ""


def sizes_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The last two sizes in ascending order, which a matrix, its transpose and stacks of either have in common."""
    return tuple(sorted(shape[-2:]))


_Rule = Callable[[Sequence[Any], Any], "list[Product]"]


def _matmul(first: int, transposed: bool = False) -> _Rule:
    """Products of two matrices, or of two stacks of them.

    Args:
        first: Position of the left operand.
        transposed: Whether the right one comes as ``[n, k]``.
    """

    def rule(args: Sequence[Any], result: Any) -> list[Product]:
        left, right = args[first], args[first + 1]
        columns = 1 if right.ndim == 1 else right.shape[-2 if transposed else -1]
        elements = left.numel()
        if left.ndim == 3 and right.ndim == 2 and not transposed:  # grouped by columns: each meets one matrix only
            elements //= max(1, left.shape[0])
        return [Product("gemm", left, right, tuple(result.shape), 2 * elements * columns)]

    return rule


def _any_matmul(args: Sequence[Any], result: Any) -> list[Product]:
    """``matmul`` as a whole, which is dispatched where a tensor class computes with its parts, as nested tensors do."""
    left, right = args[:2]
    if left.ndim == right.ndim == 1:
        return []
    return [Product("gemm", left, right, tuple(result.shape), 2 * result.numel() * left.shape[-1])]


def _fp8_gemm(args: Sequence[Any], result: Any) -> list[Product]:
    left, right, role = args[:3]
    return [Product("gemm", left, right, tuple(result.shape), 2 * left.numel() * right.shape[0], role)]


def _linear_backward(args: Sequence[Any], result: Any) -> list[Product]:
    input, gradient, weight, wanted = args[0], args[1], args[2], args[3]
    return _two_gradients("gemm", gradient, input, weight, wanted, 2 * input.numel() * weight.shape[0])


def _convolution(args: Sequence[Any], result: Any, transposed: bool = False) -> list[Product]:
    shapes = list(args[0].shape), list(args[1].shape), list(result.shape)
    return [Product("conv", args[0], args[1], None, conv_flop_count(*shapes, transposed), "fprop")]


def _any_convolution(args: Sequence[Any], result: Any) -> list[Product]:
    return _convolution(args, result, transposed=bool(args[6]))


def _convolution_backward(args: Sequence[Any], result: Any) -> list[Product]:
    gradient, input, weight, transposed, wanted = args[0], args[1], args[2], bool(args[7]), args[-1]
    flops = conv_flop_count(list(input.shape), list(weight.shape), list(gradient.shape), transposed)
    return _two_gradients("conv", gradient, input, weight, wanted, flops)


def _two_gradients(
    kind: Kind, gradient: Tensor, input: Tensor, weight: Tensor, wanted: Sequence[bool], flops: int
) -> list[Product]:
    """What one operator computes of the input's and the weight's gradient: each is as much work as the forward."""
    products = []
    if wanted[0]:
        products.append(Product(kind, gradient, weight, None, flops, "dgrad"))
    if wanted[1]:
        products.append(Product(kind, gradient, input, None, flops, "wgrad"))
    return products


def _attention(args: Sequence[Any], result: Any) -> list[Product]:
    query, key, value = args[:3]
    flops = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return [Product("attention", query, key, None, flops, "fprop")]


def _attention_backward(args: Sequence[Any], result: Any) -> list[Product]:
    gradient, query, key, value = args[:4]
    shapes = gradient.shape, query.shape, key.shape, value.shape
    flops = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return [Product("attention", gradient, key, None, flops, "dgrad")]


def _attention_layer(args: Sequence[Any], result: Any) -> list[Product]:
    """All of a ``MultiheadAttention`` in evaluation: both projections, and attention between them."""
    query, key, value, width, heads, into, out = *args[:6], args[7]
    if query.is_nested:
        return [Product("attention", query, into, None, None, "fprop")]
    projected = [x.unsqueeze(1).expand(-1, heads, -1, -1)[..., : width // heads] for x in (query, key, value)]
    work = 2 * width * (query.numel() + key.numel() + value.numel())
    return [
        Product("gemm", query, into, None, work, "fprop"),
        *_attention(projected, result),
        Product("gemm", query, out, None, 2 * width * query.numel(), "fprop"),
    ]


def _flex_attention_backward(args: Sequence[Any], result: Any) -> list[Product]:
    return _attention_backward((args[5] if args[5] is not None else args[3], *args[:3]), result)


def _varlen_attention(backward: bool) -> _Rule:
    """The kernels that FlashAttention's own interface reaches, ``[batch, length, heads, width]`` and packed sequences.

    Of packed ones only the device knows the lengths, so there is no count of their work.
    """

    def rule(args: Sequence[Any], result: Any) -> list[Product]:
        tensors = args[: 4 if backward else 3]
        if any(tensor.ndim != 4 for tensor in tensors):
            return [Product("attention", tensors[0], tensors[-2], None, None, "dgrad" if backward else "fprop")]
        swapped = [tensor.transpose(1, 2) for tensor in tensors]
        return (_attention_backward if backward else _attention)(swapped, result)

    return rule


def _rnn(weights: Callable[[Sequence[Any]], list[Tensor]], backward: bool) -> _Rule:
    """All time steps of an RNN in one operator: each multiplies the input and the hidden state by its matrices."""

    def rule(args: Sequence[Any], result: Any) -> list[Product]:
        matrices = [weight for weight in weights(args) if weight.ndim == 2]
        input = args[0]
        flops = 2 * math.prod(input.shape[:-1]) * sum(weight.numel() for weight in matrices)
        roles = ("dgrad", "wgrad") if backward else ("fprop",)
        return [Product("gemm", input, matrices[0], None, flops, role) for role in roles]

    return rule


_ONEDNN_RNN = slice(1, 3)  # the input's and the hidden state's matrix

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("mm", "bmm", "mv", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm"), _matmul(0)),
    "matmul": _any_matmul,
    **dict.fromkeys(("_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _matmul(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), _matmul(1)),
    **dict.fromkeys(("linear", "_linear_pointwise", "mkldnn_linear"), _matmul(0, transposed=True)),
    "linear_backward": _linear_backward,
    "fp8_gemm": _fp8_gemm,
    **dict.fromkeys(
        (
            "_convolution_pointwise", "conv2d", "cudnn_convolution", "miopen_convolution", "_slow_conv2d_forward",
        ),
        _convolution,
    ),
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), _any_convolution),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), _convolution_backward),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps",
            "flex_attention",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
        _attention_backward,
    ),
    "flex_attention_backward": _flex_attention_backward,
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward"), _varlen_attention(False)),
    **dict.fromkeys(("_flash_attention_backward", "_efficient_attention_backward"), _varlen_attention(True)),
    "_native_multi_head_attention": _attention_layer,
    "mkldnn_rnn_layer": _rnn(lambda args: list(args[_ONEDNN_RNN]), False),
    "mkldnn_rnn_layer_backward": _rnn(lambda args: list(args[_ONEDNN_RNN]), True),
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), _rnn(lambda args: list(args[1]), False)),
    **dict.fromkeys(("_cudnn_rnn_backward", "miopen_rnn_backward"), _rnn(lambda args: list(args[1]), True)),
}  # fmt: skip
_NO_WORK = ("dot", "vdot")  # products of two vectors: GEMMs to autocast, but what FP8 has no business with


def is_product(base: str, kind: str) -> bool:
    """Whether an operator counts.

    Args:
        base: Its name, as ``watching.ops.Op`` has it.
        kind: Its kind there.
    """
    return base in _RULES or (kind in ("gemm", "attention") and base not in _NO_WORK)


def products(base: str, kind: str, args: Sequence[Any], result: Any) -> list[Product]:
    """The products that an operator has computed.

    Args:
        base: Its name.
        kind: Its kind.
        args: Its positional arguments.
        result: What it returned.

    Returns:
        One for each; for an operator without a formula one of unknown work.
    """
    rule = _RULES.get(base)
    if rule is None:
        return [Product("attention" if kind == "attention" else "gemm", None, None, None, None)]
    return rule(args, result)
