"""Update ratio: how far one optimizer step moved weights, over how large they are; and what of it rounding lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_amp_plus.formats import Format, round_to
from lightning_amp_plus.metrics.blocks import Blocks

# Added to the norm of the weights, so that weights which stay at zero give 0.
EPSILON = 1e-12

Weights = Tensor | Sequence[Tensor]


@torch.no_grad()
def update_ratio(before: Weights, after: Weights) -> Tensor:
    """``‖Δθ‖₂ / (‖θ‖₂ + 1e-12)`` of weights before and after a step, ``Δθ = after - before`` and ``θ = after``.

    The weights after the step are those whose norm counts: of weights that start at zero, the first step then gives 1 and
    not a trillion. The measure itself is old practice: about 1e-3 is what a well chosen learning rate gives (A. Karpathy,
    CS231n notes, "Ratio of weights:updates").

    Args:
        before: A tensor, or several that are one layer; of any shape and floating dtype.
        after: The same tensors after the step.

    Returns:
        0-dim tensor, FP64 where the device has it.

    Raises:
        ValueError: If there are not as many tensors in both, or shapes differ.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import update_ratio
        >>> update_ratio(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        tensor(0.1000, dtype=torch.float64)
    """
    return _ratio(*_squares(before, after))


@torch.no_grad()
def rounded_away(weights: Tensor, update: Tensor) -> Tensor:
    """Share of the elements to which adding their update changes nothing, since it is below half an ulp of them.

    Args:
        weights: In the dtype in which they are stored: FP32, BF16, FP16 or FP64; of any shape.
        update: What is added, of the same shape, in any floating dtype. Elements that are 0 lose nothing.

    Returns:
        0-dim tensor of FP64; 0 for an empty tensor.

    Raises:
        ValueError: If shapes differ, or there is no such format.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import rounded_away
        >>> rounded_away(torch.ones(4, dtype=torch.bfloat16), torch.tensor([0.0, 0.0001, -0.001, 0.01]))
        tensor(0.5000, dtype=torch.float64)
    """
    if weights.shape != update.shape:
        raise ValueError(
            f"rounded_away: weights of shape {tuple(weights.shape)}, update of {tuple(update.shape)}: expected the same."
        )
    exact = weights.double() + update.double()
    rounded = exact if weights.dtype == torch.float64 else round_to(exact, Format.of(weights.dtype))
    lost = (rounded == weights.double()) & (update != 0)
    return lost.double().sum() / max(1, lost.numel())


class UpdateRatio(Metric):
    """The update ratio over all updates and all ranks: root mean square of the changes over that of the weights.

    Ranks that hold replicas, and ranks that each hold a part, come to the same: squares are added up on both sides.

    Raises:
        ValueError: In ``update``, as in :func:`update_ratio`.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import UpdateRatio
        >>> metric = UpdateRatio()
        >>> metric.update(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        >>> metric.update(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))
        >>> metric.compute()
        tensor(0.0707, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    changes: Tensor
    weights: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("changes", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weights", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, before: Weights, after: Weights) -> None:
        """Adds the squares of one step: the weights before and after it."""
        changes, weights = _squares(before, after)
        self.changes += changes
        self.weights += weights

    @override
    def compute(self) -> Tensor:
        """The ratio, an FP64 scalar; 0 before the first update."""
        return _ratio(self.changes, self.weights)


def _ratio(changes: Tensor, weights: Tensor) -> Tensor:
    return changes.sqrt() / (weights.sqrt() + EPSILON)


@torch.no_grad()
def _squares(before: Weights, after: Weights) -> tuple[Tensor, Tensor]:
    old, new = ([weights] if isinstance(weights, Tensor) else list(weights) for weights in (before, after))
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (old, new)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"update_ratio: shapes {shapes[0]} before the step, {shapes[1]} after it: expected the same.")
    blocks = Blocks(new)
    rows = [
        torch.stack([(b.double() - a.double()).square().sum(1), b.double().square().sum(1)], 1)
        for a, b in blocks.together(old, new)
    ]
    if not rows:
        return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    changes, weights = blocks.sum(rows).sum(0).unbind()
    return changes, weights
