"""wandb#9092: the loss that a user or a logger sees is the model's, not the one multiplied by the scale."""

from typing import Any

import lightning.pytorch as L
import pytest

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF
from tests.support.models import TinyRegressor, fused_sgd, sgd
from tests.support.training import amp_fp16, fit, regression_batches


class Logging(TinyRegressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return {"loss": loss, "twice": 2 * loss.detach()}


class ReadsOutputs(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.extras: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.extras.append(float(outputs["twice"]))
        self.logged.append(float(trainer.callback_metrics["loss"]))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make_optimizer", [sgd, fused_sgd])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_outputs_and_logged_values_hold_the_unscaled_loss(
    precision: str, manual: bool, make_optimizer: Any, accumulate: int
) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model, outputs = Logging(make_optimizer, manual=manual, accumulate=accumulate), ReadsOutputs()
    arguments = {} if manual else {"accumulate_grad_batches": accumulate}
    fit(model, plugin, regression_batches(6), callbacks=[outputs], **arguments)
    # As in stock Lightning, automatic optimization hands out the loss divided by the accumulation.
    share = 1 if manual else accumulate
    assert outputs.losses == pytest.approx([loss / share for loss in model.losses])
    assert outputs.extras == pytest.approx([2 * loss for loss in model.losses])
    assert outputs.logged == pytest.approx(model.losses)
    assert max(model.losses) < 10 < 1024


def test_a_skipped_step_shows_its_loss_all_the_same() -> None:
    model, outputs = Logging(faults={1: INF}), ReadsOutputs()
    fit(model, amp_fp16(), regression_batches(3), callbacks=[outputs])
    assert outputs.losses == pytest.approx(model.losses)


def test_the_hook_before_backward_sees_the_scaled_loss_as_in_stock() -> None:
    seen: list[float] = []

    class Hooked(TinyRegressor):
        def on_before_backward(self, loss: Any) -> None:
            seen.append(float(loss.detach()))

    model = Hooked()
    fit(model, amp_fp16(), regression_batches(2))
    assert seen == pytest.approx([1024 * loss for loss in model.losses])
