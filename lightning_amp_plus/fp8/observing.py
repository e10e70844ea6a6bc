"""Watches the GEMMs of a training step: :class:`GemmWatcher` sees them, :class:`Tally` adds them up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from lightning_amp_plus.fp8.coverage import TIMES, GemmRow
from lightning_amp_plus.fp8.fallback import Fallbacks
from lightning_amp_plus.fp8.gemms import Product, is_product, products
from lightning_amp_plus.fp8.unseen import UnseenGemms
from lightning_amp_plus.watching.modules import Watchable
from lightning_amp_plus.watching.ops import Op, op_of, place_of, plain_parts, short
from lightning_amp_plus.watching.places import NO_TASK, Frame, Place, Places
from lightning_amp_plus.watching.watcher import Watcher

_Key = tuple[str, str, str, str, str, str, str, bool]
_Sizes = tuple[tuple[int, ...], tuple[int, ...]]
# What a layer in FP8 does besides quantizing and multiplying: it adds a bias, and up the bias's gradient.
_OF_THE_BIAS = ("add", "sum")


@dataclass
class Tally:
    """What the micro-batches of a window have come to.

    Attributes:
        work: Number of GEMMs and FLOPs by what tells rows apart: the fields of a :class:`GemmRow` but for those two.
        nanoseconds: Time in operators by module and kind: ``gemm``, ``cast``, ``bias``, ``other``.
        unknown: Operators whose work has no formula.
        notes: What could not be seen or is not believed, and of which modules, in order.
    """

    work: dict[_Key, list[int]] = field(default_factory=dict)
    nanoseconds: dict[tuple[str, str], int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    notes: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, key: _Key, flops: int | None) -> None:
        """One GEMM more."""
        if flops is None:
            self.unknown.add(key[3])
        known = self.work.setdefault(key, [0, 0])
        known[0] += 1
        known[1] += flops or 0

    def note(self, text: str, module: str) -> None:
        """Something to know of a module."""
        self.notes.setdefault(text, {})[module] = None

    def remarks(self) -> tuple[str, ...]:
        """The notes, a sentence each with the modules in front."""
        told = []
        for text, modules in self.notes.items():
            first, *others = modules
            told.append(f"{first}{f' and {len(others)} more modules' if others else ''}: {text}")
        return tuple(told)

    def rows(self) -> tuple[GemmRow, ...]:
        """All GEMMs, in the order in which each was met first."""
        return tuple(GemmRow(*key, count=count, flops=flops) for key, (count, flops) in self.work.items())

    def spent(self, leaves: Iterable[str]) -> dict[str, int]:
        """Nanoseconds in GEMMs, in casts and quantization, and in the rest, in the order of :data:`coverage.TIMES`.

        Args:
            leaves: Modules without modules inside. Where one of them multiplied in FP8, all that it did besides is
                quantization, but for its bias.
        """
        quantizing = {key[0] for key in self.work if not key[6]} & set(leaves)
        spent = dict.fromkeys(TIMES, 0)
        for (module, kind), time in self.nanoseconds.items():
            if kind == "other" and module in quantizing:
                kind = "cast"
            spent[kind if kind in spent else "rest"] += time
        return spent


class _Call(Frame):
    """A call of a module, and how many products were dispatched in it itself."""

    __slots__ = ("module", "products")

    def __init__(self, name: str, task: int, module: nn.Module, inputs: Any) -> None:
        super().__init__(name, task)
        self.module = module
        self.products = 0


class _Memory:
    """Where a tensor lies. It does not keep it, and knows when another has come to lie there."""

    __slots__ = ("_place", "_reference")

    def __init__(self, tensor: Tensor) -> None:
        self._place = place_of(tensor)
        strided = tensor.layout == torch.strided
        self._reference = StorageWeakRef(tensor.untyped_storage()) if strided else None  # type: ignore[no-untyped-call]

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor lies there; views do too."""
        if place_of(tensor) != self._place:
            return False
        return self._reference is None or not self._reference.expired()  # type: ignore[no-untyped-call]


@dataclass
class _Forward:
    """A product of the forward that gradients will be computed for.

    Attributes:
        module: Name of the module that it ran in.
        sizes: The last two sizes of either operand, in ascending order.
        memory: Where the operands lie.
        weight: Which of the operands is a weight, 0 or 1; ``None`` if neither is.
        inside: Whether it was computed in the forward of a function with a backward of its own.
        wanted: Which of the operands require gradients, as far as that is known here.
        found: Whose gradients have been computed.
        state: Why it was not in FP8, where the layer's state at that time was the reason: its gradients have the same.
    """

    module: str
    sizes: _Sizes
    memory: tuple[_Memory, _Memory]
    weight: int | None
    inside: bool
    wanted: tuple[int, ...]
    found: list[int] = field(default_factory=list)
    state: str = ""

    def gives(self, sizes: tuple[int, ...], operands: tuple[Tensor, Tensor]) -> bool:
        """Whether a product of such sizes is a gradient computed from one of its own operands."""
        for side, memory in enumerate(self.memory):
            if self.sizes[1 - side] == sizes and any(memory.is_of(operand) for operand in operands):
                return True
        return False


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
        # By the backward they were computed in: numbers of nodes, ascending, and the products noted at each.
        self._forwards: dict[int, tuple[list[int], list[list[_Forward]]]] = {}
        self._met: set[tuple[str, _Sizes]] = set()  # products of the forward, by module
        self._weights: dict[int, StorageWeakRef | None] = {}
        for owned in parts.layers.values():
            for module, key in owned:
                for part in plain_parts(module._parameters[key]):  # type: ignore[arg-type]
                    self._weights[place_of(part)] = None

    def watch(self, strategy: Any, optimizers: list[torch.optim.Optimizer]) -> Callable[[], None]:
        """Watches what a strategy computes. Returns the function that ends it."""
        return self.around(strategy, self._parts.module.values(), optimizers)

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
        spot = place.module, kind
        nanoseconds = self._tally.nanoseconds
        nanoseconds[spot] = nanoseconds.get(spot, 0) + spent
        return result

    def _copied(self, op: Op, args: Any, result: Any) -> str:
        """Follows the casts of weights, and says whether it was a cast."""
        source = args[1] if op.base == "copy" and len(args) > 1 else args[0]
        if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.dtype == result.dtype:
            return "other"
        if op.base == "_to_copy" and self._holds_weight(place_of(source)):
            self._weights[place_of(result)] = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
        return "cast"

    def _holds_weight(self, memory: int) -> bool:
        if memory not in self._weights:
            return False
        reference = self._weights[memory]
        if reference is None or not reference.expired():  # type: ignore[no-untyped-call]
            return True
        del self._weights[memory]  # it is another tensor's by now
        return False

    def _multiplied(self, op: Op, place: Place, args: Any, result: Any) -> None:
        frame = place.frame if isinstance(place.frame, _Call) else None
        region = place.module in self._regions
        for product in products(op.base, op.kind, args, result):
            place = self._recomputed_in(product, place)
            role, forward = self._role(product, place, frame, region)
            kind = product.kind
            if kind == "gemm" and op.base in ("bmm", "baddbmm") and forward is not None and forward.weight is None:
                kind = "attention"
            format, engine, in_fp8 = _format(op, args, product)
            product = product._replace(kind=kind)
            reason = "" if in_fp8 else (forward and forward.state) or self._fallbacks.why(product, place.module, role)
            if forward is not None and reason in ("eval", "warmup"):
                forward.state = reason
            self._tally.add((place.module, role, kind, op.name, format, engine, reason, region), product.flops)
        if frame is not None:
            frame.products += 1

    def _recomputed_in(self, product: Product, place: Place) -> Place:
        """The place, of a recomputation outside of any module's call with the module that it is a part of.

        Backward recomputes when it comes to the last node of what was checkpointed, which may be that of a module inside.
        """
        if not place.recomputes or product.left is None or product.right is None:
            return place
        sizes, name = (_sizes(product.left), _sizes(product.right)), place.module
        while (name, sizes) not in self._met:
            if not name:
                return place
            name = name.rpartition(".")[0]
        return place._replace(module=name)

    # ---------------------------------------------------------------- what a product is for

    def _role(self, product: Product, place: Place, frame: _Call | None, region: bool) -> tuple[str, _Forward | None]:
        """The role of a product, and the product of the forward that it is one of or a gradient of."""
        if place.phase in ("optimizer", "step"):
            return "optimizer", None
        recomputes = frame.recomputes if frame is not None else place.recomputes
        recomputes |= place.phase == "backward" and product.role == "fprop"
        if place.phase == "forward" or recomputes:
            forward = self._note(product, place.module, frame)
            return ("recompute" if recomputes else "fprop"), forward
        forwards = self._forwards_of(place)
        if product.role:
            if forwards and forwards[0].weight is not None:
                weight = forwards[0].weight
                forwards[0].found.append(weight if product.role == "wgrad" else 1 - weight)
            return product.role, forwards[0] if forwards else None
        if region:
            return "backward", None
        return self._gradient(product, forwards)

    def _note(self, product: Product, module: str, frame: _Call | None) -> _Forward | None:
        left, right = product.left, product.right
        if left is None or right is None:
            return None
        operands, sizes = (left, right), (_sizes(left), _sizes(right))
        weight = next((side for side in (1, 0) if self._holds_weight(place_of(operands[side]))), None)
        if weight is None and frame is not None:  # a weight that was made or quantized from one is known by its sizes
            own = {tuple(sorted(p.shape)) for p in _weights_of(frame.module)}
            weight = next((side for side in (1, 0) if sizes[side] in own), None)
        wanted = tuple(side for side, operand in enumerate(operands) if operand.requires_grad)
        memory = _Memory(left), _Memory(right)
        forward = _Forward(module, sizes, memory, weight, not torch.is_grad_enabled(), wanted)
        task, number = self.places.next_node()
        if task == NO_TASK:
            self._met.add((module, sizes))
        numbers, forwards = self._forwards.setdefault(task, ([], []))
        if not numbers or numbers[-1] != number - 1:
            numbers.append(number - 1)
            forwards.append([])
        forwards[-1].append(forward)
        return forward

    def _forwards_of(self, place: Place) -> list[_Forward]:
        """The products of the forward that the node which runs in backward was made with."""
        if place.node is None or place.node[0] not in self._forwards:
            return []
        task, number = place.node
        numbers, forwards = self._forwards[task]
        # A function with a backward of its own gets its number first, and functions called in its forward get theirs
        # (torchao's casts do) before it multiplies: then what was noted next in the module is its.
        position = bisect_left(numbers, number)
        if position == len(numbers):
            return []
        exact = numbers[position] == number
        return [known for known in forwards[position] if exact or (known.inside and known.module == place.module)]

    def _gradient(self, product: Product, forwards: list[_Forward]) -> tuple[str, _Forward | None]:
        """Whose gradient it is: an operand's by its sizes, by what it is multiplied with, at last by the order."""
        left, right, result = product.left, product.right, product.result
        if left is None or right is None or result is None:
            return "backward", None
        found = tuple(sorted(result[-2:]))
        if len(forwards) > 1:  # of a function with a backward of its own: at first those that it is computed from
            operands = left, right
            forwards = sorted(forwards, key=lambda known: not known.gives(found, operands))
        for forward in forwards:
            sides = [side for side in (0, 1) if forward.sizes[side] == found]
            if not sides:
                continue
            if forward.weight is None:
                return "dgrad", forward
            side = sides[0] if len(sides) == 1 else self._by_partner(forward, left, right)
            forward.found.append(side)
            return ("wgrad" if side == forward.weight else "dgrad"), forward
        return "backward", None

    def _by_partner(self, forward: _Forward, left: Tensor, right: Tensor) -> int:
        """Whose gradient it is where both operands have its sizes: the one that it is not computed from."""
        assert forward.weight is not None
        if len(forward.wanted) == 1:
            return forward.wanted[0]
        other = 1 - forward.weight
        side = other
        for operand in (left, right):
            if forward.memory[forward.weight].is_of(operand) or self._holds_weight(place_of(operand)):
                break
            if forward.memory[other].is_of(operand):
                side = forward.weight
                break
        # What was recomputed or quantized anew lies elsewhere by now, so it may be a guess. Either is computed as often.
        return 1 - side if forward.found.count(side) > forward.found.count(1 - side) else side

    # ---------------------------------------------------------------- what shows no operation

    def _left(self, frame: Frame, inputs: Any, output: Any) -> None:
        if isinstance(frame, _Call) and not frame.products:  # what was dispatched is the better evidence
            self._unseen.left(frame.name, frame.module, frame.recomputes, inputs, output)


def _weights_of(module: nn.Module) -> Iterator[Tensor]:
    """A module's own parameters, and what those that a parametrization makes are made from."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    made = module._modules.get("parametrizations")
    if made is not None:
        yield from made.parameters()


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(tensor.shape[-2:]))


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
    return format, "native", is_fp8(left) and is_fp8(right)


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype are FP8, of any of its formats; the exponents of MX scales are none."""
    return str(dtype).startswith(("torch.float8_e4m3", "torch.float8_e5m2"))
