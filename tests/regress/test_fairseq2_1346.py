"""fairseq2#1346: after a resume, gradients are unscaled before a loss has been scaled in this process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision, LossScale
from tests.support.models import TinyRegressor, adamw, fused_adamw
from tests.support.training import (
    PLAIN_TYPES_ONLY,
    fit,
    loader,
    make_trainer,
    regression_batches,
    same,
    stock_fp16,
    weights,
)

BATCHES = 4


class Impatient(TinyRegressor):
    """Optimizes by hand, and asks for unscaled gradients before each backward pass and after it."""

    def __init__(self, make_optimizer: Any = adamw, early: bool = True) -> None:
        super().__init__(make_optimizer, manual=True)
        self.early = early
        self.norms: list[float] = []

    def optimize(self, loss: Tensor) -> None:
        optimizer: Any = self.optimizers()
        scaler: Any = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        if self.early:
            scaler.unscale_(optimizer)
        self.manual_backward(loss)
        if self.early:
            scaler.unscale_(optimizer)
            self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))
        optimizer.step()
        optimizer.zero_grad()


def plugin() -> AmpPrecision:
    return AmpPrecision("16-mixed", loss_scale=LossScale(init=1024.0, growth_interval=3))


def saved(path: Path, amp: Any, model: TinyRegressor) -> Path:
    fit(model, amp, regression_batches(BATCHES)).save_checkpoint(path)
    return path


def resume(path: Path, amp: Any, model: TinyRegressor) -> None:
    trainer = make_trainer(amp, max_epochs=2)
    trainer.fit(model, loader(regression_batches(BATCHES)), ckpt_path=path, **PLAIN_TYPES_ONLY)


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_unscaling_before_the_first_scaled_loss_works_and_changes_nothing(tmp_path: Path, make_optimizer: Any) -> None:
    path = saved(tmp_path / "run.ckpt", plugin(), Impatient(make_optimizer, early=False))
    patient, impatient, first, second = (
        Impatient(make_optimizer, early=False),
        Impatient(make_optimizer),
        plugin(),
        plugin(),
    )
    resume(path, first, patient)
    resume(path, second, impatient)
    assert impatient.losses == patient.losses and len(impatient.losses) == BATCHES
    assert same(weights(impatient), weights(patient))
    assert first.scaler is not None and second.scaler is not None
    assert second.scaler.state_dict() == first.scaler.state_dict() and second.scaler.get_scale() > 1024.0
    assert max(impatient.norms) < 100.0  # of true gradients, not of those times 1024


def test_stock_fails_there(tmp_path: Path) -> None:
    path = saved(tmp_path / "run.ckpt", stock_fp16(), TinyRegressor(adamw, manual=True))
    with pytest.raises(AssertionError, match="_scale is None"):
        resume(path, stock_fp16(), Impatient())
