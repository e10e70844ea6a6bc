"""Lightning#4151, PR#21720: the gradient norm that a user reads in ``on_before_optimizer_step``."""

from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_amp_plus import AmpPrecision
from tests.support.models import ExactLinear
from tests.support.training import amp_fp16, fit, stock_fp16

BATCHES = [torch.tensor([1.0, 2.0, 2.0, 4.0]) * (i + 1) for i in range(4)]


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


class ReadsNorm(ExactLinear):
    def __init__(self, make_optimizer: Any = None, manual: bool = False) -> None:
        super().__init__(make_optimizer=make_optimizer)
        self.automatic_optimization = not manual
        self.norms: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = L.utilities.grad_norm(self.layer, norm_type=2)
        self.norms.append(float(norms["grad_2.0_norm_total"]))


class CallbackReadsNorm(L.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(pl_module.layer.weight.grad.norm()))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_the_norm_in_the_hook_is_the_true_unclipped_one(
    precision: str, make_optimizer: Any, accumulate: int, clip: float | None
) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model, reference, callback = ReadsNorm(make_optimizer), ReadsNorm(), CallbackReadsNorm()
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    fit(model, plugin, BATCHES, callbacks=[callback], **settings)
    fit(reference, None, BATCHES, **settings)
    # Lightning's helper rounds to four digits; the callback reads the gradient itself.
    assert model.norms == reference.norms
    assert callback.norms == pytest.approx(reference.norms, rel=1e-4)
    assert reference.norms[0] == (5.0 if accumulate == 1 else 7.5)


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_manual_optimization_reads_the_same(precision: str, make_optimizer: Any) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model = ReadsNorm(make_optimizer, manual=True)
    fit(model, plugin, BATCHES)
    assert model.norms == [5.0, 10.0, 15.0, 20.0]


def test_stock_shows_scaled_gradients_with_a_fused_optimizer() -> None:
    model = ReadsNorm(fused)
    fit(model, stock_fp16(), BATCHES)
    assert model.norms == [n * 1024 for n in (5.0, 10.0, 15.0, 20.0)]
