"""Counts the GEMMs that no dispatch mode sees, Transformer Engine's, by its own evidence: :class:`UnseenGemms`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakMethod

from torch import nn

from lightning_amp_plus.fp8.coverage.fallback import Fallbacks
from lightning_amp_plus.fp8.coverage.gemms import Product
from lightning_amp_plus.fp8.coverage.kernels import confirmed
from lightning_amp_plus.fp8.coverage.report import GemmRow, sums
from lightning_amp_plus.fp8.coverage.tally import RowKey, Tally
from lightning_amp_plus.fp8.coverage.te_evidence import (
    Evidence,
    computes_by_it,
    evidence_of,
    in_fp8,
    is_out_of_reach,
    node_of,
)
from lightning_amp_plus.watching.modules import Watchable

_OP = "transformer_engine"  # in the place of an operator's name
_UNSEEN = "Transformer Engine multiplies there where nothing tells what, so that work is not counted."
_UNBELIEVED = (
    "Transformer Engine says that it ran in FP8, but has kept nothing in FP8 for backward, so it does not count as FP8."
)


class UnseenGemms:
    """Adds to a tally what Transformer Engine multiplies.

    Args:
        parts: What can be watched of the model.
        fallbacks: Says why a GEMM was not in FP8.
        tally: Filled with what is found.
        watching: Whether what runs now is to be counted.
    """

    def __init__(self, parts: Watchable, fallbacks: Fallbacks, tally: Tally, watching: Callable[[], bool]) -> None:
        self._fallbacks = fallbacks
        self._tally = tally
        self._watching = watching
        for name, owned in parts.layers.items():
            if any(is_out_of_reach(module, compiled=name in parts.hidden) for module, _ in owned):
                tally.note(_UNSEEN, name)

    def left(self, name: str, module: nn.Module, recomputes: bool, inputs: Any, output: Any) -> None:
        """A call has ended in which nothing was multiplied where it can be seen.

        Args:
            name: Name of the module.
            module: The module.
            recomputes: Whether backward made the call, to compute anew what the forward did not keep.
            inputs: Positional and named arguments.
            output: What it returned; ``None`` where an exception has ended it.
        """
        # A recomputation ends by an exception as soon as all that was missing is saved, after the layer has multiplied.
        if not computes_by_it(module) or (output is None and not recomputes):
            return
        if is_out_of_reach(module):
            self._tally.note(_UNSEEN, name)
            return
        node = node_of(output)
        said = evidence_of(module, inputs, node)
        if said is None:
            return
        if said.empty:
            self._tally.note(_UNBELIEVED, name)
        for matrix in said.matrices:
            self._heard(name, said, "recompute" if recomputes else "fprop", said.forward, matrix.flops)
        if node is None:
            return
        # The hook goes when the graph does. It must hold no module: a model that keeps a loss would then keep itself alive,
        # since Python cannot see through autograd's nodes.
        reached = WeakMethod(self._reached)

        def before_backward(gradients: Any) -> None:
            if (reach := reached()) is not None:
                reach(name, said)

        node.register_prehook(before_backward)

    def _reached(self, name: str, said: Evidence) -> None:
        """Backward has come to a call that was counted."""
        if not self._watching():
            return
        for matrix in said.matrices:
            if matrix.again:
                self._heard(name, said, "recompute", said.forward, matrix.flops)
            if matrix.dgrad:
                self._heard(name, said, "dgrad", said.backward, matrix.flops)
            if matrix.wgrad:
                self._heard(name, said, "wgrad", said.backward, matrix.flops)

    def _heard(self, name: str, said: Evidence, role: str, format: str, flops: int) -> None:
        reason = "" if in_fp8(format) else self._why(name, said, role, flops)
        self._tally.add(RowKey(name, role, "gemm", _OP, format, "native", reason, region=False), flops)

    def _why(self, name: str, said: Evidence, role: str, flops: int) -> str:
        if said.flag:
            return "backend" if said.empty else "rule"  # a recipe may want FP4, or leave backward in high precision
        if said.ours:
            return self._fallbacks.why(Product("gemm", None, None, None, flops), name, role)
        # Of a user's own layer te.autocast alone says what was wanted, and torch's checkpoint recomputes outside of it.
        before = any(key.module == name and key.op == _OP and not key.reason for key in self._tally.work)
        return "demoted" if before else "rule"


def borne_out(rows: Sequence[GemmRow], kernels: int | None) -> tuple[tuple[GemmRow, ...], str]:
    """Rows as the kernels that a device ran bear them out, and what to know of the difference.

    Args:
        rows: What was seen and heard.
        kernels: How many FP8 GEMM kernels ran; ``None`` if nobody looked.

    Returns:
        The rows, and a note or nothing. Where FP8 is claimed and no such kernel ran, Transformer Engine is not believed;
        what was dispatched is.
    """
    note = confirmed(int(sums(rows).native_gemms), kernels)
    if note and not kernels:
        rows = [replace(row, reason="backend") if row.op == _OP and row.in_fp8 else row for row in rows]
    return tuple(rows), note
