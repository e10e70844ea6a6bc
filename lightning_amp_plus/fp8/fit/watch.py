"""Watches layers compute in FP8 and measures how well scales fit what they quantize: :class:`FitWatch`.

For monitors, around single steps. It goes by what a layer takes and hands on, so whatever backend multiplies, and changes
nothing: hooks are there from ``begin`` to ``end`` only and return nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp_plus.fp8.backends.transformer_engine import engine_of
from lightning_amp_plus.fp8.delayed import OPERANDS, AmaxHistory, slot_of
from lightning_amp_plus.fp8.fit.measure import SAMPLE, Fits, fits_of
from lightning_amp_plus.fp8.fit.window import FitWindow
from lightning_amp_plus.fp8.recipes import Gemm, Operand, Recipe
from lightning_amp_plus.fp8.selection import Fp8Route
from lightning_amp_plus.local_parts import is_dtensor, local_part
from lightning_amp_plus.routed import fp8_is_on, route_of
from lightning_amp_plus.watching.aside import NO_TASK, aside, backward_now, out_of_sight

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SERVES: dict[Operand, set[Gemm]] = {
    "input": {"fprop", "wgrad"},
    "weight": {"fprop", "dgrad"},
    "grad_output": {"dgrad", "wgrad"},
}
_NO_UPDATES = -1.0  # where nobody counts; the largest over ranks is taken


class FitWatch:
    """What layers in FP8 quantize in a window that is observed: amax, scale, saturation, underflow and SQNR.

    Inputs, weights and gradients of outputs are measured as fprop and dgrad contract them, from a sample of each (see
    ``measure``); micro-batches and several calls of a layer add up, a weight counts once. What is not quantized is not
    measured: in evaluation, while FP8 is off, for GEMMs that stay in BF16. Neither is what cannot be read: a weight that a
    parametrization makes, or that is gathered in FP8. Of a sharded tensor each rank measures its part, as if it were all.

    Args:
        layers: ``Linear`` layers by name, whose route says recipe and backend.
        device: Where results are kept.
        hidden: Names of those inside compiled regions, which get no hooks: only their weights are measured, as they are
            when the window begins. One compiled by its own ``compile()`` counts among them.
        what_if: Recipes to try on the same tensors, nothing being trained with them. Delayed scaling has histories of its
            own for that, of observed windows only; until there is an entry it scales by the tensor's own amax.
        most: Elements of each tensor to look at, about.

    Raises:
        ValueError: If a recipe is to be tried twice.

    Attributes:
        labels: Names of the recipes that are tried.

    Example::

        watch = FitWatch(layers, device, what_if=[RowwiseScaling()])
        watch.begin()                            # before each micro-batch
        ...                                      # forward and backward
        watch.end()                              # after it, also after an exception
        watch.end_window(applied, reduce_max)    # once the step was taken or skipped, on every rank
        numbers = watch.numbers()                # on the device, to be reduced over ranks as OVER_RANKS says
        watch.fits(numbers.cpu()).own["net.0"]["grad_output"].underflow
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        device: torch.device,
        *,
        hidden: Collection[str] = (),
        what_if: Sequence[Recipe] = (),
        most: int = SAMPLE,
    ) -> None:
        self._names, self._modules, self._device = list(layers), list(layers.values()), device
        self._window = FitWindow(self._names, device, what_if, most)
        self.labels = self._window.labels
        outside = [name not in hidden and module._compiled_call_impl is None for name, module in layers.items()]
        self._hidden = [number for number, seen in enumerate(outside) if not seen]
        self._hooks = [_Hook(self, number) for number, seen in enumerate(outside) if seen]
        self._on_outputs: list[Any] = []
        self._weights: set[int] = set()  # layers whose weight was measured in this window
        self._counted: dict[int, tuple[AmaxHistory, Tensor]] = {}
        self._updates()

    def go_on_from(self, other: FitWatch) -> None:
        """Takes over the histories of the recipes that are tried, of layers that both watch.

        Args:
            other: One with the same recipes, between windows.
        """
        for own, others in zip(self._window.histories, other._window.histories, strict=True):
            if own is not None and others is not None:
                own.load_state_dict(others.state_dict())

    # ---------------------------------------------------------------- hooks

    def begin(self) -> None:
        """A micro-batch of an observed window begins: puts hooks on, and measures the weights of hidden layers."""
        self.end()
        for number in self._hidden:
            fp8 = self._fp8_of(number)
            if fp8 is not None:
                self._see_weight(number, fp8)
        for hook in self._hooks:
            hook.put(self._modules[hook.number])

    def end(self) -> None:
        """Takes all hooks off; again without effect. Runs nothing on the device, which may be unable to."""
        for hook in self._hooks:
            hook.take_off()
        for handle in self._on_outputs:
            handle.remove()
        self._on_outputs.clear()

    def _fp8_of(self, number: int) -> Fp8Route | None:
        """How a layer computes in FP8; ``None`` if it does not just now."""
        module = self._modules[number]
        route = route_of(module)
        return route.fp8 if route is not None and route.fp8 is not None and fp8_is_on(module, route.fp8) else None

    def called(self, number: int, input: Any, output: Any) -> None:
        """A layer has computed; for the hooks."""
        fp8 = self._fp8_of(number)
        if fp8 is None or not isinstance(input, Tensor) or not input.numel():  # without elements it computes in BF16
            return
        if backward_now() == NO_TASK:  # a recomputation quantizes the same once more
            self._see(number, "input", input, fp8)
            self._see_weight(number, fp8)
        # With reentrant checkpointing it is the recomputation whose output has a gradient, else the first computation: of
        # what the other kind recomputes nothing runs backward.
        if isinstance(output, Tensor) and output.requires_grad:
            hook: Any = self._gradient_hook(number, fp8)
            self._on_outputs.append(output.register_hook(hook))  # type: ignore[no-untyped-call]

    def _gradient_hook(self, number: int, fp8: Fp8Route) -> Callable[[Any], None]:
        def hook(gradient: Any) -> None:
            self._see(number, "grad_output", gradient, fp8)

        return hook

    # ---------------------------------------------------------------- looking

    def _see_weight(self, number: int, fp8: Fp8Route) -> None:
        if number not in self._weights:
            module = self._modules[number]
            # FSDP1 keeps what it gathered as a plain attribute. To ask a parametrized layer would be to make its weight.
            weight = module._parameters.get("weight")
            self._see(number, "weight", vars(module).get("weight") if weight is None else weight, fp8)
            self._weights.add(number)

    @torch.no_grad()
    def _see(self, number: int, operand: Operand, tensor: Any, fp8: Fp8Route) -> None:
        if _SERVES[operand].isdisjoint(fp8.gemms):
            return
        with aside():
            x = _matrix(tensor)
            if x is not None:
                self._window.add(number, operand, x, fp8.recipe, self._held(number, operand, x.device))

    def _held(self, number: int, operand: Operand, device: torch.device) -> Tensor | None:
        """Scale that delayed scaling holds for an operand just now; ``None`` with other recipes."""
        module = self._modules[number]
        slot, engine = slot_of(module), engine_of(module)
        if slot is not None:
            return slot.history.in_force(slot.row, operand).to(device)
        return None if engine is None else engine.scale_in_force(operand)

    # ---------------------------------------------------------------- windows

    @torch.no_grad()
    def end_window(self, applied: Tensor | bool, reduce_max: Callable[[Tensor], None] | None = None) -> None:
        """The observed window closed: advances the histories of recipes that are tried.

        Args:
            applied: Whether its step was applied; 0-dim where only the device knows.
            reduce_max: Makes a tensor the largest over ranks, in place; every rank has to call this then.
        """
        with aside():
            self._window.end_window(applied, reduce_max)

    @torch.no_grad()
    def numbers(self) -> Tensor:
        """What was seen since this was asked before, and forgets it; without a transfer.

        Returns:
            ``[(1 + recipes tried) * layers * 3, FIT_COLUMNS and updates]``, of the same size on every rank whatever was
            seen; FP64 where the device has it. ``updates``: how often delayed scaling's scale has changed since this was
            asked before, or since the watch was made, in all windows, observed or not; of a recipe that is tried, in
            observed ones.
        """
        with aside():
            totals = self._window.totals()
            found = torch.cat([totals, self._updates().to(totals.dtype)], dim=1)
        self._weights.clear()
        self._window.forget()
        return found

    def _updates(self) -> Tensor:
        """Changes of scales since the last call, ``[rows of the window, 1]``."""
        before, self._counted = self._counted, {}
        none = torch.full((len(OPERANDS),), _NO_UPDATES, dtype=torch.float32, device=self._device)

        def since(history: AmaxHistory) -> Tensor:
            if id(history) not in self._counted:
                self._counted[id(history)] = (history, history.updates.to(self._device, copy=True))
            now = self._counted[id(history)][1]
            return now - before[id(history)][1] if id(history) in before else now

        slots = [slot_of(module) for module in self._modules]
        found = [none if slot is None else since(slot.history)[slot.row].to(none.dtype) for slot in slots]
        for tried in self._window.histories:
            found += [none] * len(slots) if tried is None else since(tried).to(none.dtype).unbind()
        return torch.cat(found or [none[:0]]).view(-1, 1)

    def fits(self, numbers: Tensor) -> Fits:
        """What :meth:`numbers` say, by layer and operand.

        Args:
            numbers: On the CPU, over all ranks.
        """
        return fits_of(numbers, self._names, self.labels)


class _Hook:
    """A hook on one layer. Copies and pickles of a model made meanwhile hold one that does nothing.

    Args:
        watch: What to show calls to; ``None`` for nothing.
        number: Number of the layer.
    """

    def __init__(self, watch: FitWatch | None = None, number: int = -1) -> None:
        self._watch, self.number = watch, number
        self._handle: Any = None

    def put(self, module: nn.Module) -> None:
        """Hooks up a layer, before other hooks, which may put something else in the place of its output."""
        self._handle = module.register_forward_hook(self.after, with_kwargs=True, prepend=True)

    def take_off(self) -> None:
        """Takes the hook off, if it is on."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The hook after a call."""
        if not out_of_sight() and self._watch is not None:
            self._watch.called(self.number, args[0] if args else kwargs.get("input"), output)

    def __reduce__(self) -> Any:
        return _Hook, ()


def _matrix(value: Any) -> Tensor | None:
    """What this rank holds of an operand as ``[rows, contracted]``; ``None`` if it cannot be read."""
    if not isinstance(value, Tensor):
        return None
    if is_dtensor(value):
        sharded: Any = value
        if any(placement.is_partial() for placement in sharded.placements):  # each rank holds a summand of it
            return None
        value = local_part(value)
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_nested:
        return None
    if value.dtype not in _FLOATS or value.is_meta or not value.numel() or not value.ndim:
        return None
    matrix: Tensor = value.detach().reshape(-1, value.shape[-1])
    return matrix
