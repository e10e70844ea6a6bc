"""The arithmetic of :mod:`applied_update` on matrices of parameters and optimizer state, in as few passes as torch takes.

A kernel takes matrices of one dtype, ``[rows, elements]``, the first of them the parameter after the step, and
coefficients, ``[rows, numbers]``, of which the last two are ``r`` and ``s`` of ``Δθ = -s·(q + r·θ)``. It gives, for each
row, the norms of ``q + r·θ`` and of ``θ``, and the number of elements whose update is below half an ulp of them. That
number is an estimate from the first elements of each row, since counting takes as many passes as all the rest; the
compiled kernel counts all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp_plus.metrics.blocks import GPU_ELEMENTS, Blocks, Scratch

Kernel = Callable[[tuple[Tensor, ...], Tensor, bool, Scratch], Tensor]

# Elements an op works on, on a CPU: of large tensors more than suits the cache best, but with half as many ops (1.1 ns
# instead of 1.25); of small ones, which are copied together, few enough that their memory is at hand.
_CPU_ELEMENTS, _CPU_STACKED = 2**20, 2**17
# What the compiled kernel works on: it needs no memory beside its result, and each call costs as much as many ops.
_COMPILED_CPU_ELEMENTS, _COMPILED_GPU_ELEMENTS = 2**22, 2**28
# Elements of a row, whose squares are added up in FP32: on a CPU in 16 sums, which 300 000 equal elements put off by 1e-4,
# on a GPU in many more.
_CPU_ROW, _GPU_ROW = 2**12, 2**16
_Q = -1  # the slot of what kernels write to, beside those of the stacked lists
# One in so many elements of a row is counted, and this many at least.
_COUNTED, _LEAST_COUNTED = 64, 64


def blocks_for(tensors: Sequence[Tensor], one_in: int = 1, compiled: bool = False) -> Blocks:
    """Blocks of the sizes that suit the kernels."""
    if tensors and tensors[0].device.type == "cpu":
        elements = _COMPILED_CPU_ELEMENTS if compiled else _CPU_ELEMENTS
        return Blocks(tensors, elements, one_in, longest=_CPU_ROW, stacked=_CPU_STACKED)
    elements = _COMPILED_GPU_ELEMENTS if compiled else GPU_ELEMENTS
    return Blocks(tensors, elements, one_in, longest=_GPU_ROW, stacked=GPU_ELEMENTS)


def adam(matrices: tuple[Tensor, ...], coefficients: Tensor, decays: bool, scratch: Scratch) -> Tensor:
    """``q = m / (√v + e)``, from the parameter and the two moments; coefficients ``e, r, s``."""
    weights, first, second = matrices
    e, r, s = coefficients.chunk(3, 1)
    q = torch.sqrt(second, out=scratch.like(_Q, weights.shape, weights))
    q.add_(e)
    torch.div(first, q, out=q)
    if decays:
        q.addcmul_(weights, r)
    return _row_sums(q, weights, s)


def gradient(matrices: tuple[Tensor, ...], coefficients: Tensor, decays: bool, scratch: Scratch) -> Tensor:
    """``q`` is the gradient, or a momentum buffer; coefficients ``r, s``."""
    weights, q = matrices
    r, s = coefficients.chunk(2, 1)
    return _row_sums(torch.addcmul(q, weights, r, out=scratch.like(_Q, q.shape, q)) if decays else q, weights, s)


def nesterov(matrices: tuple[Tensor, ...], coefficients: Tensor, decays: bool, scratch: Scratch) -> Tensor:
    """``q`` is the gradient plus momentum times the buffer; coefficients ``momentum, r, s``."""
    weights, gradient, buffer = matrices
    momentum, r, s = coefficients.chunk(3, 1)
    q = torch.addcmul(gradient, buffer, momentum, out=scratch.like(_Q, weights.shape, weights))
    if decays:
        q.addcmul_(weights, r)
    return _row_sums(q, weights, s)


EAGER: dict[str, Kernel] = {"adam": adam, "gradient": gradient, "momentum": gradient, "nesterov": nesterov}


def compiled_adam(matrices: tuple[Tensor, ...], coefficients: Tensor, decays: bool, scratch: Scratch) -> Tensor:
    """:func:`adam` in one pass. Single rows are left to ops: ``torch.compile`` would make a kernel of its own for them."""
    if matrices[0].shape[0] == 1 or matrices[0].shape[1] == 1:
        return adam(matrices, coefficients, decays, scratch)
    # Neither views of Parameters nor of one another: torch.compile would look at their bases and make more kernels.
    columns = (column.clone() for column in coefficients.chunk(3, 1))
    found: Tensor = _fused_adam()(*(matrix.detach() for matrix in matrices), *columns)
    return found


@functools.cache
def _fused_adam() -> Any:
    return torch.compile(_adam_in_one, dynamic=True)


def _adam_in_one(weights: Tensor, first: Tensor, second: Tensor, e: Tensor, r: Tensor, s: Tensor) -> Tensor:
    q = first / (second.sqrt() + e) + r * weights
    change = q * s
    lost = ((weights + change == weights) & (change != 0)).to(weights.dtype)
    return torch.stack([(q * q).sum(1).sqrt(), (weights * weights).sum(1).sqrt(), lost.sum(1)], 1)


def by_copy(old: Tensor, new: Tensor, drive: Tensor) -> Tensor:
    """What a step changed, found from the parameter before it.

    Args:
        old: The parameter before the step, which is overwritten where it is in 32 bits or more.
        new: The parameter.
        drive: Not zero where an element was to move.

    Returns:
        ``[rows, 4]``: the norms of the change and of the parameter, the number of elements that did not change although
        they were to, and the number of those that were to.
    """
    if old.dtype.itemsize < 4:
        old, new = old.float(), new.float()
    change = old.sub_(new)
    driven = drive != 0
    moved = driven.sum(1)
    driven &= change == 0
    kept = change.dtype
    return torch.stack([_norms(change), _norms(new), driven.sum(1).to(kept), moved.to(kept)], 1)


def _row_sums(q: Tensor, weights: Tensor, s: Tensor) -> Tensor:
    length = q.shape[1]
    counted = min(length, max(_LEAST_COUNTED, length // _COUNTED))
    some = weights[:, :counted]
    change = q[:, :counted] * s
    lost = (change != 0).logical_and_(some + change == some).sum(1, dtype=q.dtype)
    if counted < length:
        lost *= length / counted
    return torch.stack([_norms(q), _norms(weights), lost], 1)


def _norms(matrix: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms
