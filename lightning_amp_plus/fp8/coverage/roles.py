"""What a product of a step is for: an output, a gradient, an output anew: :class:`Roles`. For ``gemm_watcher``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_amp_plus.fp8.coverage.gemms import Product, sizes_of
from lightning_amp_plus.watching.aside import NO_TASK
from lightning_amp_plus.watching.modules import Watchable
from lightning_amp_plus.watching.ops import place_of, plain_parts
from lightning_amp_plus.watching.places import Place, Places

_Sizes = tuple[tuple[int, ...], tuple[int, ...]]


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
class Forward:
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


class Roles:
    """Knows the products of the forward, and finds whose gradients those of the backward are.

    Args:
        places: Numbers autograd's nodes.
        parts: What can be watched of the model.
    """

    def __init__(self, places: Places, parts: Watchable) -> None:
        self._places = places
        # By the backward they were computed in: numbers of nodes, ascending, and the products noted at each.
        self._forwards: dict[int, tuple[list[int], list[list[Forward]]]] = {}
        self._met: set[tuple[str, _Sizes]] = set()  # products of the forward, by module
        self._weights: dict[int, StorageWeakRef | None] = {}
        for owned in parts.layers.values():
            for module, key in owned:
                parameter = module._parameters[key]
                if parameter is None or nn.parameter.is_lazy(parameter):  # it lies nowhere yet
                    continue
                for part in plain_parts(parameter):
                    self._weights[place_of(part)] = None

    def made_of(self, sources: Sequence[Tensor], target: Tensor) -> None:
        """Tensors were cast, copied or joined: what becomes of weights is one."""
        if all(self._holds_weight(place_of(source)) for source in sources):
            self._weights[place_of(target)] = StorageWeakRef(target.untyped_storage())  # type: ignore[no-untyped-call]

    def _holds_weight(self, memory: int) -> bool:
        if memory not in self._weights:
            return False
        reference = self._weights[memory]
        if reference is None or not reference.expired():  # type: ignore[no-untyped-call]
            return True
        del self._weights[memory]  # it is another tensor's by now
        return False

    def recomputed_in(self, product: Product, place: Place) -> Place:
        """The place, of a recomputation outside of any module's call with the module that it is a part of.

        Backward recomputes when it comes to the last node of what was checkpointed, which may be that of a module inside.
        """
        if not place.recomputes or product.left is None or product.right is None:
            return place
        sizes, name = (sizes_of(product.left.shape), sizes_of(product.right.shape)), place.module
        while (name, sizes) not in self._met:
            if not name:
                return place
            name = name.rpartition(".")[0]
        return place._replace(module=name)

    def of(self, product: Product, place: Place, module: nn.Module | None, region: bool) -> tuple[str, Forward | None]:
        """The role of a product, and the product of the forward that it is one of or a gradient of."""
        if place.phase in ("optimizer", "step"):
            return "optimizer", None
        recomputes = place.frame.recomputes if place.frame is not None else place.recomputes
        recomputes |= place.phase == "backward" and product.role == "fprop"
        if place.phase == "forward" or recomputes:
            forward = self._note(product, place.module, module)
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

    def _note(self, product: Product, name: str, module: nn.Module | None) -> Forward | None:
        left, right = product.left, product.right
        if left is None or right is None:
            return None
        operands, sizes = (left, right), (sizes_of(left.shape), sizes_of(right.shape))
        weight = next((side for side in (1, 0) if self._holds_weight(place_of(operands[side]))), None)
        if weight is None and module is not None:  # a weight that was made or quantized from one is known by its sizes
            own = {tuple(sorted(p.shape)) for p in _weights_of(module)}
            weight = next((side for side in (1, 0) if sizes[side] in own), None)
        wanted = tuple(side for side, operand in enumerate(operands) if operand.requires_grad)
        memory = _Memory(left), _Memory(right)
        forward = Forward(name, sizes, memory, weight, not torch.is_grad_enabled(), wanted)
        task, number = self._places.next_node()
        if task == NO_TASK:
            self._met.add((name, sizes))
        numbers, forwards = self._forwards.setdefault(task, ([], []))
        if not numbers or numbers[-1] != number - 1:
            numbers.append(number - 1)
            forwards.append([])
        forwards[-1].append(forward)
        return forward

    def _forwards_of(self, place: Place) -> list[Forward]:
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

    def _gradient(self, product: Product, forwards: list[Forward]) -> tuple[str, Forward | None]:
        """Whose gradient it is: an operand's by its sizes, by what it is multiplied with, at last by the order."""
        left, right, result = product.left, product.right, product.result
        if left is None or right is None or result is None:
            return "backward", None
        found = sizes_of(result)
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

    def _by_partner(self, forward: Forward, left: Tensor, right: Tensor) -> int:
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


def _weights_of(module: nn.Module) -> Iterator[Tensor]:
    """A module's own parameters, and what those that a parametrization makes are made from."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    made = module._modules.get("parametrizations")
    if made is not None:
        yield from made.parameters()
