"""Activations as modules hand them on: looked at once each, small ones together. :class:`Sightings`.

What one module returns is often the very object that the next one takes, so a tensor is known again by its identity and
its version counter. Small tensors are held back until enough of one size and dtype are there to be looked at in one
matrix. Since what is held back may be written to before it is looked at, its version is compared then: a number that
would be of another content is left out and counted, and whose tensor it was is looked at on the spot from then on.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from lightning_amp_plus.callbacks.folding import Layout, MicroBatch
from lightning_amp_plus.casts import dtype_name
from lightning_amp_plus.local_parts import is_dtensor, local_part
from lightning_amp_plus.metrics.activation_health import LARGEST, Scratch, health_bits
from lightning_amp_plus.metrics.blocks import CPU_ELEMENTS, GPU_ELEMENTS, Blocks
from lightning_amp_plus.nested import named_tensors
from lightning_amp_plus.watching.aside import aside
from lightning_amp_plus.wide import wide_dtype

_PLAIN = (Tensor, nn.Parameter)
# Elements looked at by one op, more than for sums: whole numbers lose no digits.
_CPU_MATRIX, _GPU_MATRIX = 2**20, 2**24
_MOST_MATRICES = 4  # worth of elements held back, whatever their sizes
_Key = tuple[torch.dtype, int, torch.device]

# A tensor not looked at yet: itself or its local part; its version counter when it was seen (None where there is none to
# go by, then it is looked at on the spot); the number of the sighting; the side that saw it first. Plain, for speed.
_Held = tuple[Tensor, int | None, int, int]


class Sightings:
    """What was seen of the inputs and outputs of modules in one window.

    Modules have numbers, and each has two sides: ``2 * module`` is its inputs, ``2 * module + 1`` its outputs. A call of a
    module has a number too.

    Args:
        modules: Number of modules.
        device: Where results go.

    Attributes:
        order: Modules in the order of their first call in the window.
        unreadable: Why tensors were not looked at, by side, in this window.
    """

    def __init__(self, modules: int, device: torch.device) -> None:
        self._sides, self._device = 2 * modules, device
        self._dtypes: list[set[torch.dtype]] = [set() for _ in range(self._sides)]
        self._at_once: set[int] = set()
        self._scratch = Scratch()
        self._blocks: dict[tuple[_Key, int], Blocks] = {}
        self._layout: Layout | None = None
        self.begin_window()

    def begin_window(self) -> None:
        """Forgets what was seen."""
        self._maxima: Tensor | None = None
        self._sums: Tensor | None = None
        self.order: dict[int, None] = {}
        self.unreadable: dict[int, str] = {}
        self._forget_micro_batch()

    def _forget_micro_batch(self) -> None:
        self._now = MicroBatch()
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._held: dict[_Key, list[_Held]] = {}
        self._held_elements = 0

    # ---------------------------------------------------------------- what modules hand on

    def call(self, module: int) -> int:
        """Number of a call that begins."""
        self.order[module] = None
        now = self._now
        now.calls += 1
        return now.calls - 1

    def see(self, call: int, side: int, value: Any, at_once: bool = False) -> None:
        """Takes what a module was given or returned.

        Args:
            call: Number of the call.
            side: Side of the module.
            value: A tensor, or anything that holds tensors.
            at_once: Whether to look before anything else runs.
        """
        if not isinstance(value, Tensor):
            if value is not None:
                for _, tensor in named_tensors(value, ""):
                    self.see(call, side, tensor, at_once)
            return
        known = self._known.get(id(value))
        if known is None or known[0]() is not value or known[1] != value._version:
            sighting = self._new(side, value, at_once)
            if sighting is None:
                return
        else:
            sighting = known[2]
            if at_once:
                self._look_if_held(sighting, value)
        self._now.pairs.append((call, side, sighting))

    def _new(self, side: int, tensor: Tensor, at_once: bool) -> int | None:
        local = tensor if type(tensor) in _PLAIN else self._plain(side, tensor)
        if local is None or not (elements := local.numel()):
            return None
        dtype = local.dtype
        if dtype not in LARGEST:
            if not dtype.is_complex:
                return None  # indices, masks
            with torch.no_grad():
                local = torch.view_as_real(local.resolve_conj())
            dtype, elements = local.dtype, 2 * elements
        if local.layout is not torch.strided or local.is_nested:
            self.unreadable[side] = f"its layout is {local.layout}"
            return None
        now = self._now
        sighting = len(now.elements)
        now.elements.append(elements)
        now.largest.append(LARGEST[dtype])
        self._dtypes[side].add(dtype)
        try:
            version: int | None = tensor._version if local is tensor else None  # a DTensor and its part count apart
        except RuntimeError:  # under inference_mode
            version = None
        if version is not None:
            self._known[id(tensor)] = (weakref.ref(tensor), version, sighting)
        device = local.device
        key = (dtype, elements, device)
        group = self._held.get(key)
        if group is None:
            group = self._held[key] = []
        group.append((local, version, sighting, side))
        self._held_elements += elements
        most = CPU_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS
        if at_once or version is None or side in self._at_once or len(group) * elements >= most:
            self._look(key)
        elif self._held_elements >= _MOST_MATRICES * most:
            self.look()
        return sighting

    def _plain(self, side: int, tensor: Tensor) -> Tensor | None:
        """A tensor of another class as a plain one that shares its memory, if it has one."""
        if is_dtensor(tensor):
            sharded: Any = tensor
            if not any(placement.is_partial() for placement in sharded.placements):
                return local_part(tensor)
            self.unreadable[side] = "each rank holds a summand of it (a DTensor of Partial placement)"
        elif _python_dispatch.is_traceable_wrapper_subclass(tensor):
            self.unreadable[side] = f"it is a {type(tensor).__name__}, whose numbers lie in tensors of its own"
        else:
            with torch.no_grad():
                return tensor.as_subclass(Tensor)
        return None

    def _look_if_held(self, sighting: int, tensor: Tensor) -> None:
        key = (tensor.dtype, tensor.numel(), tensor.device)
        if any(held[2] == sighting for held in self._held.get(key, ())):
            self._look(key)

    # ---------------------------------------------------------------- looking at them

    def look(self) -> None:
        """Looks at all that is held back."""
        for key in list(self._held):
            self._look(key)

    @torch.no_grad()
    def _look(self, key: _Key) -> None:
        group = self._held.pop(key)
        self._held_elements -= key[1] * len(group)
        tensors, sightings = [], []
        for tensor, version, sighting, side in group:
            # FSDP frees gathered weights, and a module may return a view of its own.
            if (version is None or tensor._version == version) and tensor.untyped_storage().nbytes():
                tensors.append(tensor)
                sightings.append(sighting)
                continue
            changed = tensor.untyped_storage().nbytes() > 0
            self.unreadable[side] = f"{'changed in place' if changed else 'freed'} before it was read"
            self._at_once.add(side)
            self._now.unread.append(sighting)
        if not tensors:
            return
        alike = (key, len(tensors))
        blocks = self._blocks.get(alike)
        if blocks is None:
            if len(self._blocks) > 1000:  # sizes that never come again
                self._blocks.clear()
            blocks = self._blocks[alike] = Blocks(tensors, _CPU_MATRIX if key[2].type == "cpu" else _GPU_MATRIX)
        found, rows = self._now.found.setdefault(key[0], []), self._now.rows.setdefault(key[0], [])
        with aside():
            found += [health_bits(matrix, self._scratch) for matrix in blocks.of(tensors)]
        rows += [sightings[owner] for owners in blocks.owners() for owner in owners]

    def dtypes(self) -> list[str]:
        """Names of the dtypes that each side has seen since the start of the run, joined by ``+``."""
        return ["+".join(sorted(map(dtype_name, dtypes))) for dtypes in self._dtypes]

    # ---------------------------------------------------------------- adding up

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Adds what was seen since the last time to the window's."""
        self.look()
        if self._now.pairs:
            if self._layout is None or not self._layout.fits(self._now):
                self._layout = Layout(self._now, self._sides, self._device)
            maxima, sums = self._layout.fold(self._now.found)
            self._maxima = maxima if self._maxima is None else torch.maximum(self._maxima, maxima)
            self._sums = sums if self._sums is None else self._sums + sums
        self._forget_micro_batch()

    def totals(self) -> tuple[Tensor, Tensor]:
        """The window's ``PEAK FULLNESS NEGATED_SMALLEST`` and ``NOT_FINITE ELEMENTS UNREAD BEGAN_HERE``, by side.

        Returns:
            ``[sides, 3]``, of which the largest over ranks counts, minus infinity where nothing was seen; and
            ``[sides, 4]``, to be added up.
        """
        self.end_micro_batch()
        wide = wide_dtype(self._device)
        if self._maxima is None or self._sums is None:
            nothing = torch.full((self._sides, 3), -torch.inf, dtype=wide, device=self._device)
            return nothing, torch.zeros(self._sides, 4, dtype=wide, device=self._device)
        return self._maxima, self._sums
