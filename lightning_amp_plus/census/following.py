"""Follows what tensors become: casts that are computed with or cast again, and gradients that ranks have exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_amp_plus.census.record import Event
from lightning_amp_plus.watching.ops import PREFER_FP32, Op, joined, place_of, short
from lightning_amp_plus.watching.places import Frame

NARROW = (torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)

# FP32 is what these are for, wherever they run; what autocast casts for them it casts for each of them anew.
_FINE_IN_FP32 = ("softmax", "norm", "reduction", "loss")


class _Alive:
    """Whether the memory of a tensor still lives: another one would be known by the same name."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        return not self._reference.expired()


class _Cast(NamedTuple):
    """A cast whose result is as the cast left it."""

    alive: _Alive
    before: torch.dtype
    after: torch.dtype
    module: str
    moment: int


class Casts:
    """Casts inside of modules, in the forward.

    Args:
        events: Filled with what was seen.
    """

    def __init__(self, events: dict[Event, None]) -> None:
        self._events = events
        self._casts: dict[int, _Cast] = {}
        self._used: set[int] = set()
        self._moment = 0  # counts computations: casts that autocast makes for one of them come right before it

    def cast(self, op: Op, frame: Frame, source: Tensor, target: Tensor) -> None:
        """A tensor was cast to another dtype."""
        before, after = source.dtype, target.dtype
        earlier = self._casts.get(place_of(source))
        if earlier is not None and earlier.alive:
            chain = f"{short(earlier.before)} -> {short(before)} -> {short(after)}"
            self._note("chain", frame.name, op.name, chain, earlier.module)
        if before in WIDE and after in NARROW:
            self._note("downcast", frame.name, op.name, f"{short(before)} -> {short(after)}")
        memory = place_of(target)
        self._used.discard(memory)
        self._casts[memory] = _Cast(_Alive(target), before, after, frame.name, self._moment)

    def written(self, tensors: Iterable[Tensor]) -> None:
        """Tensors hold something else than what a cast gave."""
        for tensor in tensors:
            self._casts.pop(place_of(tensor), None)

    def computed(self, op: Op, frame: Frame | None, operands: list[Tensor], results: list[Tensor]) -> None:
        """An operation that is no copy ran."""
        for tensor in operands if frame is not None else ():
            self._used_by(op, frame, tensor)
        if op.kind == "in place":
            self.written(results)
        self._moment += 1

    def promoted(self, op: Op, frame: Frame, operands: list[Tensor]) -> None:
        """A 16-bit tensor met an FP32 parameter or buffer of the module, and became FP32."""
        self._note("promotion", frame.name, op.name, f"{joined(short(t.dtype) for t in operands)} -> fp32")

    def _used_by(self, op: Op, frame: Frame | None, tensor: Tensor) -> None:
        memory = place_of(tensor)
        cast = self._casts.get(memory)
        if frame is None or cast is None or not cast.alive or cast.module != frame.name:
            return
        if cast.before not in NARROW or cast.after not in WIDE:
            return
        # What autocast casts for one operation nobody else can read; what is read again was cast by the model itself.
        once = cast.moment == self._moment and memory not in self._used
        self._used.add(memory)
        if not (once and (op.kind in _FINE_IN_FP32 or op.base in PREFER_FP32)):
            self._note("upcast used", frame.name, op.name, f"{short(cast.before)} -> {short(tensor.dtype)}")

    def _note(self, kind: str, module: str, op: str, dtypes: str, other: str = "") -> None:
        self._events[Event(kind, module, op, dtypes, other)] = None


class Exchanges:
    """In which dtype ranks have added up what gradients are made of, by memory.

    Attributes:
        dtypes: All that were seen.
    """

    def __init__(self) -> None:
        self.dtypes: set[str] = set()
        self._found: dict[int, tuple[str, _Alive]] = {}

    def exchanged(self, operands: list[Tensor], results: list[Tensor]) -> None:
        """A collective added up."""
        dtype = joined(short(tensor.dtype) for tensor in operands)
        self.dtypes.add(dtype)
        self._note(operands + results, dtype)

    def follow(self, op: Op, operands: list[Tensor], results: list[Tensor]) -> None:
        """Gradients are copies and views of what was exchanged, or have it added."""
        if not self._found or not (op.kind in ("copy", "in place") or op.base in ("add", "mul", "div")):
            return
        for tensor in operands:
            dtype = self.of(tensor)
            if dtype is not None:
                self._note(results, dtype)
                return

    def of(self, tensor: Tensor) -> str | None:
        """The dtype in which what a tensor holds was exchanged; ``None`` if that was not seen."""
        known = self._found.get(place_of(tensor))
        return None if known is None or not known[1] else known[0]

    def _note(self, tensors: Iterable[Tensor], dtype: str) -> None:
        for tensor in tensors:
            if tensor.layout == torch.strided:
                self._found[place_of(tensor)] = (dtype, _Alive(tensor))
