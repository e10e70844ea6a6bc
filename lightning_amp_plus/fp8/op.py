"""Our ops: one that every emulated FP8 GEMM goes through, so that a dispatch mode can tell what ran, and one for compilers.

``torch.ops.lightning_amp_plus.fp8_gemm(left, right, role, formats, engine)`` is ``left @ right.T`` of two BF16 matrices.
Its three strings are for whoever counts: the GEMM's role (``fprop``, ``dgrad``, ``wgrad``), the formats of its operands
(``e4m3 x e5m2``) and what multiplied (``emulated``). FLOP counters know it. ``settled`` is a copy that no compiler looks
into; it runs in compiled graphs only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import mm_flop, register_flop_formula

EMULATED = "emulated"

_library: Any = torch.library.Library("lightning_amp_plus", "DEF")  # type: ignore[no-untyped-call]
_library.define("fp8_gemm(Tensor left, Tensor right, str role, str formats, str engine) -> Tensor")


def _gemm(left: Tensor, right: Tensor, role: str, formats: str, engine: str) -> Tensor:
    return torch.mm(left, right.t())


# Below autograd: the function around it has its own backward. On the meta device and under torch.compile it is the same mm.
_library.impl("fp8_gemm", _gemm, "CompositeExplicitAutograd")

_library.define("settled(Tensor x) -> Tensor")
_library.impl("settled", torch.clone, "CompositeExplicitAutograd")


@register_flop_formula(torch.ops.lightning_amp_plus.fp8_gemm)
def _flops(left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(mm_flop(left, (right[1], right[0])))


def fp8_gemm(left: Tensor, right: Tensor, role: str, formats: str, engine: str = EMULATED) -> Tensor:
    """``left @ right.T``; see the module."""
    result: Tensor = torch.ops.lightning_amp_plus.fp8_gemm(left, right, role, formats, engine)
    return result


def settled(x: Tensor) -> Tensor:
    """``x`` as what it is in memory: in a compiled graph a BF16 tensor is written out and read again.

    Inductor fuses what makes a tensor with what reads it, and then leaves out the rounding to BF16 in between: operands
    would be quantized from other numbers than in an eager run, and than backward reads. Rounding explicitly, by bits,
    costs it several times what the copy does.
    """
    if x.dtype != torch.bfloat16 or not torch.compiler.is_compiling():
        return x
    written: Tensor = torch.ops.lightning_amp_plus.settled(x)
    return written
