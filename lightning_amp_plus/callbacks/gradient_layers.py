"""The gradients of one optimizer, and which layers they belong to: :class:`OptimizerGradients`. Used by ``gradient``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp_plus.local_parts import local_part
from lightning_amp_plus.metrics.blocks import Blocks, Rows
from lightning_amp_plus.metrics.gradient_health import GradientSums, Scratch, gradient_health
from lightning_amp_plus.naming import ROOT, clean_name
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.gradients import parameters_of
from lightning_amp_plus.wide import wide_dtype

OUTSIDE = "(outside the model)"


def layer_of_each(module: nn.Module) -> dict[int, str]:
    """The layer of each parameter, by the parameter's id: the module that holds it, wrappers left out.

    A tied parameter belongs to the first module that holds it.
    """
    return {id(parameter): clean_name(name).rpartition(".")[0] or ROOT for name, parameter in module.named_parameters()}


def ids_held(optimizers: Iterable[Optimizer]) -> tuple[int, ...]:
    """The optimizers and what they hold, to notice that it is not what it was."""
    return tuple([id(held) for optimizer in optimizers for held in (optimizer, *parameters_of(optimizer))])


def names_on_all_ranks(names: Sequence[str], consensus: Consensus) -> list[str]:
    """The names that any rank has, on all ranks in the same order. A collective, for the start of a fit.

    Stages of a pipeline hold different layers, but what ranks exchange must have the same rows everywhere.
    """
    if consensus.world_size == 1:
        return list(names)
    everyone: list[list[str]] = [[] for _ in range(consensus.world_size)]
    torch.distributed.all_gather_object(everyone, list(names), group=getattr(consensus, "group", None))
    return list(dict.fromkeys(name for of_rank in everyone for name in of_rank))


@dataclass(frozen=True)
class _Layout:
    """How the gradients of one combination of parameters are stacked and added up."""

    positions: list[int]  # of the gradients that have elements
    blocks: Blocks
    weights: Tensor  # [tensors, 1]: 1 over the number of ranks that hold the same elements
    layers: Rows  # of each tensor


@dataclass(frozen=True)
class LayerSums:
    """Sums of this rank by layer, still on the device; over ranks they add up to those of the whole gradients.

    Attributes:
        layers: A row for each layer of the model, zeros for those without gradient.
        square_sum: This rank's share of the squared norm of the optimizer's gradients, 0-dim.
    """

    layers: GradientSums
    square_sum: Tensor


class OptimizerGradients:
    """Reads the gradients of one optimizer.

    Args:
        optimizer: Whose.
        layer_of: The layer of each parameter, by its id.
        names: All layers, the rows of what is returned, ``OUTSIDE`` among them.
        holders: Number of ranks that hold the same elements of a parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layer_of: Mapping[int, str],
        names: Sequence[str],
        holders: Callable[[Tensor], int],
    ) -> None:
        self.parameters = list({id(p): p for p in parameters_of(optimizer)}.values())
        rows = {name: row for row, name in enumerate(names)}
        # A module that came in mid-training may have a name that nobody had when ranks agreed on rows.
        layers = [layer_of.get(id(p), OUTSIDE) for p in self.parameters]
        self._rows = [rows[layer if layer in rows else OUTSIDE] for layer in layers]
        self._layers = len(names)
        self._holders = holders
        self._layouts: dict[tuple[Any, ...], _Layout] = {}
        self._scratch = Scratch()
        self._looks = 0

    @torch.no_grad()
    def read(
        self, scale: float | Tensor, clip_value: float | None, reported: Set[int] = frozenset()
    ) -> LayerSums | None:
        """Looks at the gradients as they are now, unscaled; ``None`` if this rank has none.

        Args:
            scale: The loss scale that they were divided by.
            clip_value: As in ``gradient_health``.
            reported: Ids of parameters that count in the norm only, since another optimizer has shown their gradients.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        dtypes = [None if gradient is None else gradient.dtype for gradient in gradients]
        local: list[Tensor | None] = gradients
        signature: tuple[Any, ...] = tuple(dtypes)
        if not _plain(gradients, dtypes):
            local = [None if gradient is None else _values(gradient) for gradient in gradients]
            signature = tuple([None if gradient is None else (gradient.dtype, gradient.shape) for gradient in local])
        layout = self._layouts.get(signature)
        if layout is None:
            # Which parameters have a gradient changes little, the rows of sparse ones change at every step.
            if len(self._layouts) >= 4:
                self._layouts.clear()
            layout = self._layouts[signature] = self._layout(local)
        values = [gradient for position in layout.positions if (gradient := local[position]) is not None]
        if not values:
            return None
        found = gradient_health(values, scale, clip_value, layout.blocks, self._scratch, self._looks)
        self._looks += 1
        weighted = found.sums * layout.weights
        square_sum = GradientSums(weighted, found.largest).square_sum.sum()
        if reported:
            shown = [id(self.parameters[position]) not in reported for position in layout.positions]
            weighted = weighted * torch.tensor(shown, device=weighted.device).unsqueeze(1)
        largest = layout.layers.max(found.largest.unsqueeze(1), 0.0)[:, 0]
        return LayerSums(GradientSums(layout.layers.sum(weighted), largest), square_sum)

    def _layout(self, gradients: Sequence[Tensor | None]) -> _Layout:
        kept = [(position, g) for position, g in enumerate(gradients) if g is not None and g.numel()]
        positions, values = [position for position, _ in kept], [gradient for _, gradient in kept]
        device = values[0].device if values else torch.device("cpu")
        weights = [1.0 / self._holders(self.parameters[position]) for position in positions]
        return _Layout(
            positions,
            Blocks(values),
            torch.tensor(weights, dtype=wide_dtype(device), device=device).unsqueeze(1),
            Rows([self._rows[position] for position in positions], self._layers),
        )


def _plain(gradients: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> bool:
    """Whether all are dense tensors of torch's own class and of real numbers, so of the shapes of their parameters."""
    kinds = {type(gradient) for gradient in gradients}
    kinds.discard(type(None))
    if kinds - {Tensor} or any(dtype is not None and dtype.is_complex for dtype in set(dtypes)):
        return False
    return {gradient.layout for gradient in gradients if gradient is not None} <= {torch.strided}


def _values(gradient: Tensor) -> Tensor:
    """The elements of a gradient that this rank holds, as a plain tensor: a shard, or the values of a sparse one."""
    gradient = local_part(gradient)
    if gradient.layout is not torch.strided:
        # Parts of a sparse gradient may be finite where their sum is not.
        gradient = (gradient if gradient.is_coalesced() else gradient.coalesce())._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
