"""What Transformer Engine itself says of one call of one of its layers: whether that ran in FP8, and what it multiplied.

Its GEMMs are functions of its binary, which no dispatch mode sees. Evidence is what its layers leave behind: the flag
``fp8`` that a layer sets when it is called, the dtypes of its quantizers, and what its autograd node has saved. Nothing is
imported from it; a class is known by the package that it comes from. Used by ``transformer_engine`` and the
dtype census.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_amp_plus.fp8.backends.transformer_engine import engine_of
from lightning_amp_plus.fp8.selection import is_of_package
from lightning_amp_plus.watching.ops import floating_of_module, short

_THEIRS = "transformer_engine"
# Names of its DType; the quantizers of every recipe have one, but for those that leave a tensor as it is.
_FORMATS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2", "kFloat4E2M1": "e2m1"}
_FP8 = ("e4m3", "e5m2")
_STEPS = 8  # from an output back to the node that made it: a bias added apart, and what puts our padding right


class Matrix(NamedTuple):
    """One weight that tokens are multiplied with.

    Attributes:
        flops: Work of the product in the forward, and of either of its gradients.
        dgrad: Whether backward computes the input's gradient.
        wgrad: Whether it computes the weight's.
        again: Whether backward first computes the product anew, in the layer's own kind of checkpointing.
    """

    flops: int
    dgrad: bool
    wgrad: bool
    again: bool = False


@dataclass(frozen=True)
class Evidence:
    """What one call of a layer has come to.

    Attributes:
        forward: Format of the operands in the forward: ``e4m3``, ``bf16``.
        backward: The same in backward: ``e5m2 x e4m3``, the gradient first.
        matrices: The weights.
        ours: Whether the layer is one of ours, with a route.
        flag: Whether its own flag says that it ran in FP8.
        empty: Whether the node has saved nothing in FP8 where it should have, so that the flag is not believed.
    """

    forward: str
    backward: str
    matrices: tuple[Matrix, ...]
    ours: bool
    flag: bool
    empty: bool


def in_fp8(format: str) -> bool:
    """Whether all operands of a format are FP8; FP4 is none."""
    return all(name in _FP8 for name in format.split(" x "))


def computes_by_it(module: nn.Module) -> bool:
    """Whether a module is Transformer Engine's, of a class derived from one that is, or one of ours that computes by it."""
    return engine_of(module) is not None or is_of_package(module, _THEIRS)


def is_out_of_reach(module: nn.Module, compiled: bool = False) -> bool:
    """Whether a module multiplies by Transformer Engine and nothing tells what: its fused attention and ``te.ops``.

    Args:
        module: The module.
        compiled: Whether it runs inside of compiled code, where no call of it can be watched.
    """
    if compiled and engine_of(module) is not None:
        return True
    if not is_of_package(module, _THEIRS) or (hasattr(module, "fp8_meta") and not compiled):
        return False
    return type(module).__name__ == "FusedAttention" or bool(_weights(module))


def node_of(output: Any) -> Any:
    """Transformer Engine's autograd node behind what a call returned; ``None`` without gradients."""
    waiting, seen = [tensor.grad_fn for tensor in floating_of_module(output)], 0
    while waiting and seen < _STEPS:
        node: Any = waiting.pop(0)
        seen += 1
        if node is None:
            continue
        made_by = getattr(type(node), "_forward_cls", None)
        if made_by is not None and made_by.__module__.partition(".")[0] == _THEIRS:
            return node
        waiting += [before for before, _ in node.next_functions]
    return None


def evidence_of(module: nn.Module, inputs: Any, node: Any) -> Evidence | None:
    """What Transformer Engine says of the call that has just ended.

    Args:
        module: One of its layers, or one of ours that computes by it.
        inputs: Positional and named arguments of the call.
        node: Its autograd node, as :func:`node_of` finds it.

    Returns:
        ``None`` where it has nothing to say.
    """
    engine = engine_of(module)
    layer: Any = module if engine is None else engine.layer
    if layer is None or not is_of_package(layer, _THEIRS) or not hasattr(layer, "fp8_meta"):
        return None
    arrived = next(iter(floating_of_module(inputs)), None)
    tile = 1 if engine is None else engine.recipe.multiple
    matrices = () if arrived is None else matrices_of(layer, arrived, inputs, tile)
    if not matrices:
        return None
    flag = bool(layer.fp8)
    wide = short(layer.activation_dtype)
    forward = backward = wide
    if flag:
        quantizers = layer.quantizers
        forward = _joined(quantizers["scaling_fwd"][:2], wide)
        if _override(layer) is None:
            gradient, weight = quantizers["scaling_bwd"][:1], quantizers["scaling_fwd"][1:2]
            backward = _joined([*gradient, *weight], wide)
    empty = in_fp8(forward) and any(matrix.wgrad for matrix in matrices) and _saved_nothing(layer, node)
    if empty:
        forward = backward = wide
    return Evidence(forward, backward, matrices, engine is not None, flag, empty)


def matrices_of(layer: Any, input: Tensor, inputs: Any, tile: int = 1) -> tuple[Matrix, ...]:
    """The weights of a layer of Transformer Engine, and the work of each.

    Args:
        layer: The layer.
        input: What it was given, ``[..., in_features]``.
        inputs: All arguments of the call.
        tile: Multiple up to which rows of zeros are added to the tokens.
    """
    weights = _weights(layer)
    tokens = input.numel() // input.shape[-1] if input.numel() else 0
    if not weights or not tokens:
        return ()
    tokens += -tokens % tile
    sizes = [weight.numel() for weight in weights.values()]
    wanted = [weight.requires_grad for weight in weights.values()]
    if hasattr(layer, "num_gemms"):  # GroupedLinear: each token meets one of the matrices, which are all alike
        size = sum(sizes) // layer.num_gemms
        return tuple(Matrix(2 * part * size, input.requires_grad, wanted[0]) for part in _parts(inputs, tokens) if part)
    if layer.sequence_parallel and getattr(layer, "parallel_mode", "column") == "column":
        tokens *= layer.tp_size  # those of all ranks are gathered before
    if hasattr(layer, "fc1_weight"):  # LayerNormMLP: of its own checkpointing the first product is the one made anew
        again = bool(layer.checkpoint)
        return tuple(
            Matrix(2 * tokens * size, True, wgrad, again and not at)
            for at, (size, wgrad) in enumerate(zip(sizes, wanted, strict=True))
        )
    # Linear and LayerNormLinear multiply the parts of a split weight (of queries, keys and values) at once. With a norm in
    # front, the product's input has a gradient whether or not the layer's has.
    dgrad = input.requires_grad or "layer_norm_weight" in layer._parameters
    return (Matrix(2 * tokens * sum(sizes), dgrad, any(wanted)),)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Its own parameters that are matrices, by name."""
    owned = module._parameters.items()
    return {name: value for name, value in owned if value is not None and value.ndim > 1 and "weight" in name}


def _parts(inputs: Any, tokens: int) -> Sequence[int]:
    """How many tokens each matrix of a GroupedLinear meets; as if one met all where only the device knows."""
    args, kwargs = inputs
    splits = args[1] if len(args) > 1 else kwargs.get("m_splits")
    if isinstance(splits, Tensor):
        return [tokens] if splits.device.type != "cpu" else [int(part) for part in splits.tolist()]
    return [int(part) for part in splits]


def _override(layer: Any) -> str | None:
    """In what else than FP8 the recipe wants backward."""
    override: str | None = getattr(layer.fp8_meta["recipe"], "backward_override", None)
    return override


def _joined(quantizers: Sequence[Any], wide: str) -> str:
    names = [_FORMATS.get(getattr(getattr(quantizer, "dtype", None), "name", ""), wide) for quantizer in quantizers]
    return " x ".join(dict.fromkeys(names)) or wide


def _saved_nothing(layer: Any, node: Any) -> bool:
    """Whether a node that should have saved something in FP8 has not."""
    # Under hooks for saved tensors to look at one is to run the hook: a checkpoint's would recompute all. And these save
    # their input as it came, to quantize it in backward.
    if node is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    if (
        _override(layer) is not None
        or getattr(layer, "checkpoint", False)
        or getattr(layer, "save_original_input", False)
    ):
        return False
    return not any(saved is not None and saved.dtype == torch.uint8 for saved in node.saved_tensors)
