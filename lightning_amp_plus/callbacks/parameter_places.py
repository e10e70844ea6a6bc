"""Which number of a monitor a parameter belongs to: layers, parameters or parameter groups by name. :class:`Places`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp_plus.callbacks.gradient_layers import ids_held
from lightning_amp_plus.naming import ROOT, clean_name

Per = Literal["layer", "parameter", "group"]


class Places:
    """The rows of a monitor's numbers: their names, and the row of each parameter.

    Args:
        module: The LightningModule.
        optimizers: All of the run.
        per: ``layer``: a module with parameters of its own; ``parameter``; or ``group``: a parameter group of an optimizer,
            by its ``name`` if it has one, else by its index. A parameter that several modules share belongs to the first.

    Attributes:
        names: Of the rows.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], per: Per) -> None:
        self.optimizers = optimizers
        self._module, self._per = module, per
        self._read()

    def _read(self) -> None:
        self._row_of: dict[int, int] = {}
        self.names: list[str] = []
        self._in_row: list[list[Tensor]] = []
        self._ids = ids_held(self.optimizers)
        if self._per == "group":
            self._add_groups()
            return
        rows: dict[str, int] = {}
        for qualified, parameter in self._module.named_parameters():
            name = clean_name(qualified)
            if self._per == "layer":
                name = name.rpartition(".")[0] or ROOT
            row = rows.setdefault(name, len(rows))
            if row == len(self.names):
                self.names.append(name)
                self._in_row.append([])
            self._row_of[id(parameter)] = row
            self._in_row[row].append(parameter)

    def _add_groups(self) -> None:
        for number, optimizer in enumerate(self.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                name = str(group.get("name", f"group_{index}"))
                self.names.append(name if len(self.optimizers) == 1 else f"optimizer_{number}/{name}")
                self._in_row.append(list(group["params"]))
                for parameter in group["params"]:
                    self._row_of[id(parameter)] = len(self.names) - 1

    def refresh(self) -> bool:
        """Takes parameters that optimizers were given while training; says whether there were any."""
        if ids_held(self.optimizers) == self._ids:
            return False
        self._read()
        return True

    def index(self, parameters: Iterable[Tensor], device: torch.device) -> Tensor:
        """The row of each parameter; the one behind the last for those that the model does not have."""
        rows = [self._row_of.get(id(parameter), len(self.names)) for parameter in parameters]
        return torch.tensor(rows, device=device)

    def why_not_stepped(self, rows: Iterable[int], stepped: Callable[[int], bool]) -> dict[int, str]:
        """Of rows whose parameters no optimizer moved: ``frozen``, or ``unused`` where their optimizer moved others.

        Args:
            rows: Which.
            stepped: Whether the parameters of a row were moved.

        Returns:
            By row; those are left out whose optimizer skipped, of which nothing is known.
        """
        held = {
            id(parameter): number
            for number, optimizer in enumerate(self.optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        active = {
            held[id(parameter)]
            for row, inside in enumerate(self._in_row)
            if stepped(row)
            for parameter in inside
            if id(parameter) in held
        }
        found = {}
        for row in rows:
            owners = {held[id(parameter)] for parameter in self._in_row[row] if id(parameter) in held}
            if not owners:
                found[row] = "frozen"
            elif owners & active:
                found[row] = "unused"
        return found
