"""What one optimizer step did to its parameters: :class:`AppliedUpdate`. The update ratio of layers is made from it.

What SGD, Adam and AdamW of torch did is computed from their state, block by block and without a copy: see
:mod:`update_formulas`. A parameter stored in 16 bits moves by something else, since its update is rounded: it is copied
before the step, and so is what other optimizers move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_amp_plus.local_parts import local_part
from lightning_amp_plus.metrics import update_kernels as kernels
from lightning_amp_plus.metrics.blocks import Blocks, Scratch
from lightning_amp_plus.metrics.update_formulas import (
    KNOWN,
    GroupSettings,
    coefficients_of,
    formula,
    nesterov_is_in_the_gradients,
)
from lightning_amp_plus.wide import wide_dtype

_EXACT = (torch.float32, torch.float64, torch.complex64, torch.complex128)
# Layouts kept, the newest: which parameters have gradients may change from step to step.
_KEPT = 16


@dataclass(eq=False)
class Layout:
    """Parameters whose update is found in one way, and how they are stacked and cut.

    Attributes:
        parameters: As in the optimizer.
        groups: Index of the parameter group of each.
        blocks: Of this rank's parts of them.
    """

    parameters: tuple[Tensor, ...]
    groups: tuple[int, ...]
    blocks: Blocks
    _indices: dict[torch.device, Tensor] = field(default_factory=dict)
    _scales: dict[torch.device, Tensor] = field(default_factory=dict)

    def group_index(self, device: torch.device) -> Tensor:
        """``groups`` as a tensor."""
        if device not in self._indices:
            self._indices[device] = torch.tensor(self.groups, device=device)
        return self._indices[device]

    def scales(self, device: torch.device) -> Tensor:
        """What sums over a share of the elements are multiplied by, ``[parameters, 1]``."""
        if device not in self._scales:
            self._scales[device] = torch.tensor(self.blocks.scales, dtype=wide_dtype(device), device=device).unsqueeze(
                1
            )
        return self._scales[device]


@dataclass(frozen=True)
class Found:
    """What a step did.

    Attributes:
        layout: To which parameters.
        sums: ``[parameters, 4]``, FP64 where the device has it, over this rank's part of each: squares of the update,
            squares of the parameter, number of elements that moved by nothing since the update was rounded away, and
            whether (above 0) anything but decay moved it.
    """

    layout: Layout
    sums: Tensor


class _Work:
    """What is looked at together: one kind, one device, one dtype."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.lists: tuple[list[Tensor], ...] = ()
        self.steps: list[Tensor] = []

    @property
    def parameters(self) -> list[Tensor]:
        return self.lists[0]

    def take(self, group: int, *lists: list[Tensor]) -> None:
        """Takes parameters of a group and, in further lists, what their updates are made of."""
        self.lists = self.lists or tuple([] for _ in lists)
        for into, tensors in zip(self.lists, lists, strict=True):
            into.extend(tensors)
        self.groups.extend([group] * len(lists[0]))


class AppliedUpdate:
    """Finds what the steps of one optimizer do.

    Args:
        optimizer: Any.
        one_in: Look at one element in so many only, see :class:`Blocks`; sums are scaled up.
        compiled: Compute with one kernel made by ``torch.compile`` where the optimizer is Adam or AdamW.
    """

    def __init__(self, optimizer: Optimizer, one_in: int = 1, compiled: bool = False) -> None:
        self.optimizer = optimizer
        self.one_in = one_in
        self.compiled = compiled
        self._layouts: dict[Any, Layout] = {}
        self._copies: list[tuple[Layout, list[Tensor]]] = []
        self._settings = GroupSettings(optimizer)
        self._scratch = Scratch()

    # ---------------------------------------------------------------- before the step

    @torch.no_grad()
    def before_step(self) -> None:
        """Copies what the optimizer's state will not tell; once a step, later calls do nothing."""
        if self._copies:
            return
        works: dict[Any, _Work] = defaultdict(_Work)
        for index, group in enumerate(self.optimizer.param_groups):
            by_formula = formula(self.optimizer, group) is not None
            parameters = [
                p
                for p in group["params"]
                if (gradient := p.grad) is not None
                and not (by_formula and p.dtype in _EXACT and not gradient.is_sparse)
            ]
            for (device, _), alike in _alike(parameters):
                works[device].take(index, alike)
        for device, work in works.items():
            plain = [plain_part(parameter) for parameter in work.parameters]
            layout = self._layout(("copy", device), work.groups, work.parameters, plain)
            self._copies.append((layout, layout.blocks.copies(plain)))

    def forget(self) -> None:
        """Drops the copies: the step was skipped, or will not come."""
        self._copies.clear()

    # ---------------------------------------------------------------- after it

    @torch.no_grad()
    def after_step(self) -> list[Found]:
        """What the step that the optimizer has just taken did. Gradients and state must be as it left them."""
        found = [self._by_copy(*self._copies.pop()) for _ in range(len(self._copies))]
        copied = {id(parameter) for part in found for parameter in part.layout.parameters}
        works: dict[Any, _Work] = defaultdict(_Work)
        for index, group in enumerate(self.optimizer.param_groups):
            kind = formula(self.optimizer, group)
            if kind is not None:
                self._collect(works, kind, index, group, copied)
        return found + [self._by_formula(key, work) for key, work in works.items() if work.groups]

    def _collect(self, works: dict[Any, _Work], kind: str, index: int, group: dict[str, Any], copied: set[int]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if copied:
            parameters = [p for p in parameters if id(p) not in copied]
        if kind == "nesterov" and nesterov_is_in_the_gradients(group, parameters):
            kind = "gradient"
        for (device, dtype), alike in _alike(parameters):
            work = works[kind, device, dtype]
            if kind == "gradient":
                work.take(index, alike, _gradients(alike))
                continue
            second = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
            last = second if kind == "adam" else "momentum_buffer"
            states = [self.optimizer.state.get(p, _NOTHING) for p in alike]
            if any(state.get(last) is None for state in states):  # the step left it out
                alike = [p for p, state in zip(alike, states, strict=True) if state.get(last) is not None]
                states = [state for state in states if state.get(last) is not None]
            lasts = [state[last] for state in states]
            if kind == "adam":
                work.take(index, alike, [state["exp_avg"] for state in states], lasts)
                work.steps += [state["step"] for state in states]
            elif kind == "momentum":
                work.take(index, alike, lasts)
            else:
                work.take(index, alike, _gradients(alike), lasts)

    def _by_formula(self, key: Any, work: _Work) -> Found:
        kind, device, dtype = key[:3]
        lists = work.lists
        if dtype.is_complex or any(type(p) not in (Tensor, Parameter) for p in work.parameters):
            lists = tuple([plain_part(tensor) for tensor in tensors] for tensors in lists)
        layout = self._layout(key, work.groups, work.parameters, lists[0])
        settings = self._settings.table(device).index_select(0, layout.group_index(device))
        coefficients = coefficients_of(kind, settings, work.steps)
        columns = torch.stack(coefficients, 1).to(lists[0][0].dtype)
        decays = kind != "momentum" and any(
            group["weight_decay"] and (kind != "adam" or group.get("decoupled_weight_decay"))
            for group in (self.optimizer.param_groups[i] for i in set(layout.groups))
        )
        kernel = kernels.compiled_adam if self.compiled and kind == "adam" else kernels.EAGER[kind]
        stacked = layout.blocks.together(*lists, scratch=self._scratch)
        rows = [
            kernel(matrices, at, decays, self._scratch)
            for matrices, at in zip(stacked, layout.blocks.spread(columns), strict=True)
        ]
        self._scratch.release()
        moved, weights, lost = _totals(layout, rows, 3).unbind(1)
        r, s = coefficients[-2:]
        decayed = r.square() * weights
        # Where q is zero throughout, all that is left is r·θ, whose squares were rounded on the way.
        pushed = (moved - decayed).abs() > 1e-5 * decayed
        return Found(layout, torch.stack([moved * s.square(), weights, lost, pushed.to(moved.dtype)], 1))

    def _by_copy(self, layout: Layout, copies: list[Tensor]) -> Found:
        parameters = [plain_part(parameter) for parameter in layout.parameters]
        drives = [plain_part(self._drive(parameter)) for parameter in layout.parameters]
        copies.reverse()
        rows = [kernels.by_copy(copies.pop(), new, drive) for new, drive in layout.blocks.together(parameters, drives)]
        sums = _totals(layout, rows, 4)
        rates = self._settings.table(sums.device).index_select(0, layout.group_index(sums.device))[:, 0]
        sums[:, 2] *= rates != 0  # there, nothing was to be added
        return Found(layout, sums)

    def _drive(self, parameter: Tensor) -> Tensor:
        """What is not zero where an element was to move: the momentum, or the gradient."""
        state = self.optimizer.state.get(parameter, {}) if type(self.optimizer) in KNOWN else {}
        momentum: Tensor | None = state.get("exp_avg", state.get("momentum_buffer"))
        drive = parameter.grad if momentum is None else momentum
        if drive is None:
            return parameter
        return drive.to_dense() if drive.is_sparse else drive

    # ---------------------------------------------------------------- layouts

    def _layout(self, key: Any, groups: list[int], parameters: list[Tensor], plain: list[Tensor]) -> Layout:
        full = (key, tuple(map(id, parameters)), tuple(groups), tuple(map(Tensor.numel, plain)))
        layout = self._layouts.pop(full, None)
        if layout is None:
            fused = self.compiled and key[0] == "adam"
            blocks = kernels.blocks_for(plain, self.one_in, fused)
            layout = Layout(tuple(parameters), tuple(groups), blocks)
            if len(self._layouts) >= _KEPT:
                del self._layouts[next(iter(self._layouts))]
        self._layouts[full] = layout
        return layout


_NOTHING: dict[str, Tensor] = {}


def _alike(parameters: list[Tensor]) -> Iterable[tuple[tuple[torch.device, torch.dtype], list[Tensor]]]:
    """Parameters by device and dtype."""
    devices, dtypes = {p.device for p in parameters}, {p.dtype for p in parameters}
    if len(devices) == len(dtypes) == 1:  # the usual case, without asking each for its group
        return [((devices.pop(), dtypes.pop()), parameters)]
    by: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        by[parameter.device, parameter.dtype].append(parameter)
    return by.items()


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def plain_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself, complex numbers as pairs; shares its storage."""
    local = local_part(tensor)
    return torch.view_as_real(local) if local.is_complex() else local


def _totals(layout: Layout, rows: list[Tensor], columns: int) -> Tensor:
    """What kernels found in rows, norms and counts, as sums of squares and counts by parameter."""
    if not rows:
        device = layout.parameters[0].device
        return torch.zeros(len(layout.parameters), columns, dtype=wide_dtype(device), device=device)
    norms = [row.to(wide_dtype(row.device)) for row in rows]
    squared = [torch.cat([row[:, :2].square(), row[:, 2:]], 1) for row in norms]
    sums = layout.blocks.sum(squared)
    if any(scale != 1.0 for scale in layout.blocks.scales):
        sums *= layout.scales(sums.device)
    return sums
