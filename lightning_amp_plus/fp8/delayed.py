"""Delayed scaling: amax histories of all layers in one tensor, advanced once a window, shared by ranks in one collective.

A layer's forward and backward note the amax of each operand; micro-batches of a window are maximized. When the window
closes the notes enter the history and give the scales of the next window. What did not run enters nothing, what was not
finite neither. Until an operand has a history it is scaled by its own amax: with a scale of 1, gradients near 1e-6 would
vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_amp_plus.fp8.quantize import scale_of
from lightning_amp_plus.fp8.recipes import DelayedScaling, Operand, Recipe

OPERANDS: tuple[Operand, ...] = ("input", "weight", "grad_output")
SLOT = "_amp_amax"  # a module's place in a history; a plain attribute, so no state_dict knows of it


class AmaxHistory:
    """Histories of all modules with one recipe.

    Args:
        recipe: Length, what is taken of the history, margin.
        names: Qualified names of the modules.
        device: Where it begins; the default one if not given. It follows what is noted.

    Attributes:
        updates: How often a window's end has changed a scale since this object was made, ``[modules, operands]``, int64;
            the first scale of an operand counts, taking up a saved history does not. No part of the state.
    """

    def __init__(self, recipe: DelayedScaling, names: Iterable[str], device: torch.device | None = None) -> None:
        self.recipe = recipe
        self.names = list(names)
        shape = (len(self.names), len(OPERANDS))
        # FP32 whatever the default dtype is just now: that of a 16-bit model is in force where it trains.
        self._past = torch.zeros(
            *shape, recipe.history, dtype=torch.float32, device=device
        )  # newest first; 0 is nothing
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device)  # 0 where there is no history
        self.updates = torch.zeros(shape, dtype=torch.int64, device=device)
        # A tensor for each operand of each layer: torch.compile guards what one graph notes against what another one does.
        self._noted = [[torch.zeros((), dtype=torch.float32, device=device) for _ in OPERANDS] for _ in self.names]

    def note(self, row: int, operand: Operand, amax: Tensor) -> None:
        """Takes the amax of one operand of one micro-batch; without a transfer."""
        column = OPERANDS.index(operand)
        place = self._noted[row][column]
        if place.device != amax.device:
            place = self._noted[row][column] = place.to(amax.device)
        place.copy_(torch.maximum(place, amax.detach().reshape(())))

    def noted(self) -> Tensor:
        """What was noted in the open window, ``[modules, operands]``."""
        device = next((place.device for row in self._noted for place in row if place.device.type != "cpu"), None)
        for row in self._noted if device is not None else ():
            for column, place in enumerate(row):
                if place.device != device:  # for good: sent there anew in every window, it would wait for the device
                    row[column] = place.to(device)
        return torch.stack([torch.stack(row) for row in self._noted])

    def note_again(self, noted: Mapping[str, Tensor]) -> None:
        """Takes notes of an open window by module name: those of a checkpoint, or of an earlier plan."""
        for row, name in enumerate(self.names):
            if name in noted:
                self._noted[row] = list(noted[name].clone().unbind())

    def scale(self, row: int, operand: Operand, amax: Tensor) -> Tensor:
        """The scale of this window, of the shape of ``amax``; from ``amax`` itself where there is no history."""
        own = scale_of(amax, self.recipe.format_of(operand), margin=self.recipe.margin)
        past = self._scales[row, OPERANDS.index(operand)].to(amax.device)
        return torch.where(past > 0, past, own)

    def in_force(self, row: int, operand: Operand) -> Tensor:
        """A copy of the scale of this window, 0-dim FP32; 0 where there is no history."""
        return self._scales[row, OPERANDS.index(operand)].clone()

    @torch.no_grad()
    def end_window(self, applied: Tensor | bool, reduce_max: Callable[[Tensor], None] | None) -> None:
        """The window closed: what was noted becomes history, where it is finite and the window was applied.

        Args:
            applied: Whether the window's step was applied; 0-dim where only the device knows.
            reduce_max: Makes a tensor the largest over ranks, in place; every rank has to call this then.
        """
        noted = self.noted()
        if reduce_max is not None and self.recipe.reduce_amax:
            noted = noted.nan_to_num(nan=float("inf"))  # a maximum over ranks may lose a NaN
            reduce_max(noted)
        if self._past.device != noted.device:
            self._past, self._scales = self._past.to(noted.device), self._scales.to(noted.device)
            self.updates = self.updates.to(noted.device)
        enters = (
            (noted > 0) & torch.isfinite(noted) & applied
        )  # a plain bool as it is: as a tensor it would be sent there
        older = torch.cat([noted.unsqueeze(-1), self._past[..., :-1]], dim=-1)
        self._past = torch.where(enters.unsqueeze(-1), older, self._past)
        self.discard()
        scales = self._next_scales()
        self.updates += scales != self._scales
        self._scales.copy_(scales)

    def _next_scales(self) -> Tensor:
        newest = self._past[..., 0]
        amax = newest if self.recipe.amax == "most_recent" else self._past.amax(dim=-1)
        scales = [
            scale_of(amax[:, column], self.recipe.format_of(operand), margin=self.recipe.margin)
            for column, operand in enumerate(OPERANDS)
        ]
        return torch.where(newest > 0, torch.stack(scales, dim=1), 0.0)

    def discard(self) -> None:
        """Forgets what was noted in the open window."""
        torch._foreach_zero_([place for row in self._noted for place in row])

    def state_dict(self) -> dict[str, Tensor]:
        """Each module's history by name, ``[3, history]``, newest first; operands in the order of ``OPERANDS``."""
        past = self._past.cpu()
        return {name: past[row].clone() for row, name in enumerate(self.names)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes histories by name. Of a longer one the newest part is kept, a shorter one fills up."""
        for row, name in enumerate(self.names):
            if name in state:
                kept = min(self.recipe.history, state[name].shape[-1])
                self._past[row].zero_()
                self._past[row, :, :kept] = state[name][:, :kept].to(self._past.device)
        self._scales.copy_(self._next_scales())


@dataclass(frozen=True)
class Slot:
    """One module's place in a history.

    Attributes:
        history: The history.
        row: Its row there.
        noting: Whether amax values enter the history; not in evaluation.
    """

    history: AmaxHistory
    row: int
    noting: bool = True

    def scale(self, operand: Operand, amax: Tensor) -> Tensor:
        """Notes an amax and gives the scale to quantize with."""
        if self.noting:
            self.history.note(self.row, operand, amax)
        return self.history.scale(self.row, operand, amax)


def slot_of(module: nn.Module) -> Slot | None:
    """The module's place in a history, if it has one; in evaluation mode one that is read only."""
    slot: Slot | None = vars(module).get(SLOT)
    return slot if slot is None or module.training else replace(slot, noting=False)


def forget_history(module: nn.Module) -> None:
    """Takes a module's place in a history away."""
    vars(module).pop(SLOT, None)


def histories_of(modules: Iterable[nn.Module]) -> list[AmaxHistory]:
    """The histories that modules have their places in, each once."""
    found = {id(slot.history): slot.history for module in modules if (slot := vars(module).get(SLOT)) is not None}
    return list(found.values())


def attach_histories(modules: Mapping[str, nn.Module], recipes: Mapping[str, Recipe]) -> None:
    """Gives every module with delayed scaling its place in a history, keeping what is known from before.

    Args:
        modules: The model's modules by qualified name.
        recipes: Recipe of each module in FP8, by qualified name.
    """
    before = histories_of(modules.values())
    known = {name: past for history in before for name, past in history.state_dict().items()}
    noted = {name: row for history in before for name, row in zip(history.names, history.noted(), strict=True)}
    by_recipe: dict[DelayedScaling, dict[int, str]] = {}
    for module in modules.values():
        forget_history(module)
    for name, recipe in recipes.items():
        if isinstance(recipe, DelayedScaling):
            by_recipe.setdefault(recipe, {}).setdefault(id(modules[name]), name)  # a shared module has one history
    for recipe, names in by_recipe.items():
        same = [old for old in before if old.recipe == recipe and old.names == list(names.values())]
        history = same[0] if same else AmaxHistory(recipe, names.values())
        if not same:
            history.load_state_dict(known)
            history.note_again(noted)
        for row, name in enumerate(names.values()):
            object.__setattr__(modules[name], SLOT, Slot(history, row))
