"""Models small enough that FP16 on a CPU costs nothing. Every one is the same from one construction to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.support.faults import NO_FAULT, Fault

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sgd_momentum(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def fused_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


def fused_sgd_momentum(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def fused_adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


class Wrapping(torch.optim.SGD):
    """Holds another optimizer over its own parameters, as Lookahead and its like do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.optimizer = torch.optim.SGD(self.param_groups, lr=0.1)


class TinyRegressor(L.LightningModule):
    """Two linear layers on batches of ``(4 features, 1 target)``; its faults are numbered by micro-batch, from 0.

    ``losses`` keeps what ``training_step`` computed. With ``manual=True`` it optimizes by hand, ``accumulate``
    micro-batches to a step, and clips right before the step.
    """

    def __init__(
        self,
        make_optimizer: MakeOptimizer = sgd,
        make_scheduler: MakeScheduler | None = None,
        faults: Mapping[int, Fault] | None = None,
        *,
        manual: bool = False,
        accumulate: int = 1,
        clip: tuple[float, str] | None = None,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.first = torch.nn.Linear(4, 8)
            self.second = torch.nn.Linear(8, 1)
        self.make_optimizer, self.make_scheduler = make_optimizer, make_scheduler
        self.faults = dict(faults or {})
        self.automatic_optimization = not manual
        self.accumulate, self.clip = accumulate, clip
        self.seen = 0
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def loss(self, batch: Any, fault: Fault = NO_FAULT) -> Tensor:
        x, y = batch
        prediction = self.second(torch.tanh(fault.on_hidden(self.first(x))))
        return fault.on_loss(torch.nn.functional.mse_loss(prediction.float(), y.float()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch, self.faults.get(self.seen, NO_FAULT))
        self.losses.append(float(loss.detach()))
        self.seen += 1
        if not self.automatic_optimization:
            self.optimize(loss)
        return loss

    def optimize(self, loss: Tensor) -> None:
        optimizer = self.optimizers()
        self.manual_backward(loss / self.accumulate)
        if self.seen % self.accumulate:
            return
        if self.clip is not None:
            self.clip_gradients(optimizer, self.clip[0], self.clip[1])
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step", "monitor": "loss"},
        }


class ExactLinear(L.LightningModule):
    """One bias-free linear layer whose loss is its output: the gradient of the weight is the batch itself.

    Fed with small whole numbers, every product is exact in FP16 too, so gradients can be compared with ``==``. With SGD
    and a learning rate of 1 a step moves the weight by exactly the gradient that the optimizer saw. Starts at zero.
    """

    def __init__(self, width: int = 4, make_optimizer: MakeOptimizer | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        self.at_step: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return self.layer(batch).float().sum()

    def moved(self) -> Tensor:
        """Sum of all gradients applied so far."""
        return -self.layer.weight.detach()[0]

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        optimizer.register_step_post_hook(lambda *_: self.note_gradient())
        return optimizer

    def note_gradient(self) -> None:
        """What the optimizer has just consumed; asked after the step, since stock may run backward inside it."""
        if self.layer.weight.grad is not None:
            self.at_step.append(self.layer.weight.grad.detach().clone()[0])
