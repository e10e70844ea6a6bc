"""Watches the GEMMs of a training step: :class:`GemmWatcher`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_amp_plus.fp8.coverage.fallback import Fallbacks
from lightning_amp_plus.fp8.coverage.gemms import Product, is_product, products
from lightning_amp_plus.fp8.coverage.roles import Roles
from lightning_amp_plus.fp8.coverage.tally import RowKey, Tally
from lightning_amp_plus.fp8.coverage.transformer_engine import UnseenGemms
from lightning_amp_plus.watching.modules import Watchable
from lightning_amp_plus.watching.ops import Op, op_of, short
from lightning_amp_plus.watching.places import Frame, Place, Places
from lightning_amp_plus.watching.watcher import Watcher

# What a layer in FP8 does besides quantizing and multiplying: it adds a bias, and up the bias's gradient.
_OF_THE_BIAS = ("add", "sum")
_JOINS = ("cat", "stack")


class _Call(Frame):
    """A call of a module, and how many products were dispatched in it itself."""

    __slots__ = ("module", "products")

    def __init__(self, name: str, task: int, module: nn.Module, inputs: Any) -> None:
        super().__init__(name, task)
        self.module = module
        self.products = 0


class GemmWatcher(Watcher):  # type: ignore[no-untyped-call]
    """Watches one micro-batch. It changes no number.

    Args:
        parts: What can be watched of the model.
        fallbacks: Says why a GEMM was not in FP8.
        tally: Filled with what is seen.
    """

    def __init__(self, parts: Watchable, fallbacks: Fallbacks, tally: Tally) -> None:
        super().__init__(Places(parts.module, _Call, self._left))
        self._parts = parts
        self._fallbacks = fallbacks
        self._tally = tally
        # Backward may come again to what was watched once, in another step or a user's own.
        self._unseen = UnseenGemms(parts, fallbacks, tally, lambda: self._depth > 0)
        self._regions = set(parts.hidden.values())
        self._roles = Roles(self.places, parts)

    @property
    @override
    def modules(self) -> Iterable[nn.Module]:
        """All that can be watched, of compiled regions the region."""
        return self._parts.module.values()

    # ---------------------------------------------------------------- one operation

    @override
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, and looks at it."""
        began = perf_counter_ns()
        result = func(*args, **kwargs)
        spent = perf_counter_ns() - began
        known = _seen_ops.get(id(func))  # an operator's own hash takes longer than all the rest here
        op, kind = known if known is not None else _kind_of(func)
        if kind == "nothing":
            return result
        place = self.places.here()
        if kind == "gemm":
            self._multiplied(op, place, args, result)
        elif kind == "cast":
            kind = self._copied(op, args, result)
        elif op.base in _JOINS:
            self._roles.made_of(args[0], result)
        spot = place.module, kind
        nanoseconds = self._tally.nanoseconds
        nanoseconds[spot] = nanoseconds.get(spot, 0) + spent
        return result

    def _copied(self, op: Op, args: Any, result: Any) -> str:
        """Follows the casts and copies of weights, and says whether it was a cast."""
        source = args[1] if op.base == "copy" and len(args) > 1 else args[0]
        if not isinstance(source, Tensor) or not isinstance(result, Tensor):
            return "other"
        if op.base in ("_to_copy", "clone"):
            self._roles.made_of((source,), result)
        return "other" if source.dtype == result.dtype else "cast"

    def _multiplied(self, op: Op, place: Place, args: Any, result: Any) -> None:
        frame = place.frame if isinstance(place.frame, _Call) else None
        region = place.module in self._regions
        for product in products(op.base, op.kind, args, result):
            place = self._roles.recomputed_in(product, place)
            role, forward = self._roles.of(product, place, None if frame is None else frame.module, region)
            if op.base in ("bmm", "baddbmm") and forward is not None and forward.weight is None:
                product = product._replace(kind="attention")
            format, engine, in_fp8 = _format(op, args, product)
            reason = "" if in_fp8 else (forward and forward.state) or self._fallbacks.why(product, place.module, role)
            if forward is not None and reason in ("eval", "warmup"):
                forward.state = reason
            key = RowKey(place.module, role, product.kind, op.name, format, engine, reason, region)
            self._tally.add(key, product.flops)
        if frame is not None:
            frame.products += 1

    # ---------------------------------------------------------------- what shows no operation

    def _left(self, frame: Frame, inputs: Any, output: Any) -> None:
        if isinstance(frame, _Call) and not frame.products:  # what was dispatched is the better evidence
            self._unseen.left(frame.name, frame.module, frame.recomputes, inputs, output)


_seen_ops: dict[int, tuple[Op, str]] = {}  # operators live as long as the process


def _kind_of(func: Any) -> tuple[Op, str]:
    """An operator, and what its time is spent in."""
    op = op_of(func)
    if is_product(op.base, op.kind):
        kind = "gemm"
    elif op.kind in ("nothing", "copy"):
        kind = "cast" if op.kind == "copy" else "nothing"
    else:
        kind = "bias" if op.base in _OF_THE_BIAS else "other"
    if isinstance(func, torch._ops.OpOverload):
        _seen_ops[id(func)] = op, kind
    return op, kind


def _format(op: Op, args: Any, product: Product) -> tuple[str, str, bool]:
    """Format of the operands, what multiplied, and whether it was FP8."""
    if op.base == "fp8_gemm":
        left, _, right = str(args[3]).partition(" x ")
        return (left if left == right else f"{left} x {right}"), str(args[4]), True
    if product.left is None or product.right is None:
        return "-", "native", False
    return _of_dtypes(product.left.dtype, product.right.dtype)


@cache
def _of_dtypes(left: torch.dtype, right: torch.dtype) -> tuple[str, str, bool]:
    format = short(left) if left == right else f"{short(left)} x {short(right)}"
    return format, "native", _is_fp8(left) and _is_fp8(right)


def _is_fp8(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype are FP8, of any of its formats; the exponents of MX scales are none."""
    return str(dtype).startswith(("torch.float8_e4m3", "torch.float8_e5m2"))
