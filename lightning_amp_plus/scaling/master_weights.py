"""FP32 master copies of parameters stored in BF16 or FP16, so that updates below half an ulp are not lost.

The model's own Parameters stay in the optimizer: ``zero_grad``, ``toggle_optimizer``, clipping and checkpoints see one
set of parameters only. For the time of a step each Parameter's ``data`` is its FP32 copy; afterwards it is the rounded
one again, in the same storage. (Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.)
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_amp_plus.scaling.gradients import parameters_of

_LOW = (torch.bfloat16, torch.float16)


def may_be_master(parameter: Tensor) -> bool:
    """Whether a parameter is one that a 16-bit policy stores in 16 bits, and so has a master."""
    return parameter.dtype in (torch.float32, *_LOW)


class MasterWeights:
    """FP32 copies of low-precision Parameters, by Parameter."""

    def __init__(self) -> None:
        self._masters: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self._low: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def capture(self, parameters: Iterable[Tensor]) -> None:
        """Keeps the FP32 values of ``parameters``; call before storage is converted, so that nothing is rounded yet."""
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                self._masters[parameter] = parameter.data

    def attach(self, parameters: Iterable[Tensor]) -> None:
        """Makes sure each low-precision parameter has a copy that rounds to it, on its device.

        A copy that does not (weights were loaded meanwhile) is taken anew from the parameter.
        """
        for parameter in [p for p in self._masters if p.dtype not in _LOW]:
            del self._masters[parameter]
        for parameter in parameters:
            if parameter.dtype not in _LOW:
                continue
            master = self._masters.get(parameter)
            if master is not None and master.shape == parameter.shape:
                master = master.to(parameter.device)
                if torch.equal(master.to(parameter.dtype), parameter.data):
                    self._masters[parameter] = master
                    continue
            self._masters[parameter] = parameter.detach().float()

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Lets a loaded optimizer state keep its FP32: torch casts it to the dtype the Parameter has at that moment."""
        optimizer.register_load_state_dict_pre_hook(self._enter_to_load)
        optimizer.register_load_state_dict_post_hook(lambda opt: self.leave(opt))

    def _enter_to_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        # torch refuses groups of another shape after this hook, and then nothing would lead back out.
        wanted = [len(group["params"]) for group in optimizer.param_groups]
        if [len(group["params"]) for group in state["param_groups"]] == wanted:
            self.enter(optimizer)

    @torch.no_grad()
    def enter(self, optimizer: Optimizer) -> None:
        """Gives the optimizer's Parameters their FP32 data, and their gradients as FP32. Harmless when already done."""
        if id(optimizer) in self._low:
            return
        swapped = self._low[id(optimizer)] = []
        for parameter in parameters_of(optimizer):
            master = self._masters.get(parameter)
            if master is None or parameter.dtype not in _LOW:
                continue
            low, gradient = parameter.data, parameter.grad
            parameter.grad = None
            # Elements that no longer round to what is stored were edited meanwhile (loaded, clamped): the edit counts.
            master.copy_(torch.where(master.to(low.dtype) == low, master, low.float()))
            parameter.data = master
            if gradient is not None:
                parameter.grad = gradient.float()
            swapped.append((parameter, low))

    @torch.no_grad()
    def leave(self, optimizer: Optimizer) -> None:
        """Rounds the FP32 data into the stored Parameters and drops the FP32 gradients."""
        for parameter, low in self._low.pop(id(optimizer), ()):
            master = parameter.data
            self._masters[parameter] = master
            parameter.grad = None
            low.copy_(master)
            parameter.data = low

    def state_dict(self, named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The copies by parameter name."""
        return {name: self._masters[p] for name, p in named_parameters if p in self._masters and p.dtype in _LOW}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor], named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Takes copies saved by ``state_dict``.

        Raises:
            ValueError: If a saved copy belongs to no parameter, has another shape, or a parameter has no saved copy.
        """
        current = {name: p for name, p in named_parameters if p.dtype in _LOW}
        if set(state) != set(current):
            raise ValueError(
                "The checkpoint's master weights do not fit the model: "
                f"without a parameter {sorted(set(state) - set(current))}, without a copy "
                f"{sorted(set(current) - set(state))}."
            )
        for name, parameter in current.items():
            if state[name].shape != parameter.shape:
                raise ValueError(
                    f"Master weight {name!r} has shape {tuple(state[name].shape)} in the checkpoint, "
                    f"{tuple(parameter.shape)} in the model."
                )
        for name, parameter in current.items():
            master = state[name].to(parameter.device, torch.float32, copy=True)
            self._masters[parameter] = master
            parameter.data.copy_(master)

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeights:
        return MasterWeights()  # belongs to one model's Parameters; a copy of the plugin meets other ones

    def __reduce__(self) -> tuple[Any, ...]:
        return (MasterWeights, ())
