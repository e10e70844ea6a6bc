"""A Linear layer's computation in FP8, whatever multiplies: shapes, bias and dtypes around the GEMMs."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_amp_plus.fp8.delayed import Slot
from lightning_amp_plus.fp8.recipes import Gemm, Recipe
from lightning_amp_plus.fp8.reference import Fp8Matmul
from lightning_amp_plus.fp8.weights import KeptWeight


def fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    gemms: tuple[Gemm, ...],
    slot: Slot | None = None,
    kept: KeptWeight | None = None,
) -> Tensor:
    """``input @ weight.T + bias`` with FP8 GEMMs, as under an autocast of BF16.

    Args:
        input: ``[..., in_features]``, any floating dtype. It is quantized from BF16, which is what is kept for backward.
        weight: ``[out_features, in_features]``; quantized from the dtype it is stored in.
        bias: ``[out_features]`` or ``None``; added in BF16.
        recipe: How scales are chosen.
        gemms: Which GEMMs run in FP8.
        slot: Where delayed scaling keeps the layer's amax values.
        kept: Where the quantized weight is kept while a window is open.

    Returns:
        BF16, ``[..., out_features]``.
    """
    tokens = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
    with torch.autocast(input.device.type, enabled=False):
        output: Tensor = Fp8Matmul.apply(tokens, weight, recipe, gemms, slot, kept)  # type: ignore[no-untyped-call]
        if bias is not None:
            output = output + bias.to(torch.bfloat16)
    return output.reshape(*input.shape[:-1], weight.shape[0])
