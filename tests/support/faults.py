"""Non-finite values made on purpose: in the loss, or in the backward pass of a loss that is finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


class _PoisonedBackward(torch.autograd.Function):
    """Passes its input on; its gradient holds nothing but one value."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: float) -> Tensor:
        ctx.value = value
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradient, ctx.value), None


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one micro-batch, and where."""

    where: Literal["forward", "backward"] = "backward"
    value: float = float("inf")

    def on_hidden(self, hidden: Tensor) -> Tensor:
        """For ``backward``: everything below ``hidden`` gets non-finite gradients, what is above keeps finite ones."""
        return _PoisonedBackward.apply(hidden, self.value) if self.where == "backward" else hidden

    def on_loss(self, loss: Tensor) -> Tensor:
        return loss * self.value if self.where == "forward" else loss


NO_FAULT = Fault("forward", 1.0)
INF = Fault("backward", float("inf"))
NAN = Fault("backward", float("nan"))
INF_LOSS = Fault("forward", float("inf"))
NAN_LOSS = Fault("forward", float("nan"))
KINDS = {"inf gradient": INF, "nan gradient": NAN, "inf loss": INF_LOSS, "nan loss": NAN_LOSS}
