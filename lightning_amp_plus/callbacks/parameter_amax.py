"""The largest magnitude in each layer's own parameters, as this rank holds them: :class:`ParameterAmax`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_amp_plus.local_parts import local_part
from lightning_amp_plus.metrics.activation_health import LARGEST, magnitude_bits
from lightning_amp_plus.metrics.blocks import Blocks, Rows
from lightning_amp_plus.wide import wide_dtype


class ParameterAmax:
    """Reads parameters where they are: a wrapper may have put others in their place since.

    Args:
        layers: For each layer the modules and names of its parameters.
        device: Where results go.
    """

    def __init__(self, layers: Sequence[Sequence[tuple[nn.Module, str]]], device: torch.device) -> None:
        self._device = device
        self._places: list[tuple[nn.Module, str]] = []
        places: dict[int, int] = {}  # a tied parameter is read once
        of_layer: list[tuple[int, int]] = []
        for layer, own in enumerate(layers):
            for module, name in own:
                parameter = module._parameters[name]
                if id(parameter) not in places:
                    places[id(parameter)] = len(self._places)
                    self._places.append((module, name))
                of_layer.append((layer, places[id(parameter)]))
        self._rows = Rows([layer for layer, _ in of_layer], len(layers))
        self._source = torch.tensor([place for _, place in of_layer], dtype=torch.long, device=device)
        self._blocks: Blocks | None = None
        self._made_for: list[tuple[int, torch.dtype]] = []

    @torch.no_grad()
    def measure(self) -> Tensor:
        """``[layers, 1]``, of which the largest over ranks counts; 0 where this rank holds nothing of a layer."""
        held = [(module._parameters, name) for module, name in self._places]
        found = [of[name] for of, name in held if name in of]  # a ScriptModule's have no .get()
        tensors: list[Tensor] = [parameter for parameter in found if type(parameter) is nn.Parameter]
        if len(tensors) != len(held) or not LARGEST.keys() >= {tensor.dtype for tensor in tensors}:
            tensors = [_floats(getattr(module, name, None)) for module, name in self._places]
        sizes = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        if self._blocks is None or sizes != self._made_for:
            self._blocks, self._made_for = Blocks(tensors), sizes
        rows = [_amax(matrix) for matrix in self._blocks.of(tensors)]
        if not rows:
            wide = wide_dtype(self._device)
            return torch.zeros(len(self._rows), 1, dtype=wide, device=self._device)
        return self._rows.max(self._blocks.max(rows).to(self._device)[self._source], 0.0)


def _amax(matrix: Tensor) -> Tensor:
    if matrix.dtype in (torch.float32, torch.float64):
        return torch.maximum(matrix.amax(1, keepdim=True), -matrix.amin(1, keepdim=True))  # needs no memory
    return magnitude_bits(matrix).amax(1, keepdim=True).view(matrix.dtype)


def _floats(parameter: Tensor | None) -> Tensor:
    """What to look at of a parameter: its local part, complex numbers as pairs; nothing of one without a float format."""
    if parameter is None or torch.nn.parameter.is_lazy(parameter):
        return torch.empty(0)
    local = local_part(parameter)
    if local.is_complex():
        local = torch.view_as_real(local)
    if local.dtype not in LARGEST or local.layout is not torch.strided:
        return torch.empty(0)
    return local
