"""Lightning#5558, #16228, #18828, pytorch#44511: schedulers and steps that were skipped."""

import warnings
from typing import Any

import pytest
import torch

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF, INF_LOSS, NAN
from tests.support.models import TinyRegressor, adamw, fused_adamw, fused_sgd, sgd_momentum
from tests.support.training import amp_fp16, fit, regression_batches, stock_fp16

SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[3],
    ),
}


class Observed(TinyRegressor):
    """Notes the scheduler's position and the learning rate after each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.positions: list[int] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._note()

    def on_train_end(self) -> None:
        self._note()

    def _note(self) -> None:
        self.positions.append(self.lr_schedulers().last_epoch)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def no_scheduler_warnings(caught: list[warnings.WarningMessage]) -> bool:
    return not [w for w in caught if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw, sgd_momentum, fused_sgd])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_five_overflows_leave_the_scheduler_at_its_start_without_a_warning_and_then_it_goes_on(
    precision: str, make_optimizer: Any, scheduler: Any
) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model = Observed(make_optimizer, scheduler, faults=dict.fromkeys(range(5), INF))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, plugin, regression_batches(9))
    assert model.positions == [0] * 6 + [1, 2, 3, 4]
    assert no_scheduler_warnings(caught)

    undisturbed = Observed(make_optimizer, scheduler)
    fit(undisturbed, amp_fp16() if precision == "16-mixed" else AmpPrecision(precision), regression_batches(4))
    assert model.rates == [undisturbed.rates[0]] * 5 + undisturbed.rates


@pytest.mark.parametrize("fault", [INF, INF_LOSS, NAN])
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_a_skip_in_mid_run_holds_the_scheduler_for_that_step_only(make_optimizer: Any, fault: Any) -> None:
    model = Observed(make_optimizer, SCHEDULERS["OneCycleLR"], faults={2: fault, 4: fault})
    fit(model, amp_fp16(), regression_batches(6))
    assert model.positions == [0, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_reduce_on_plateau_with_a_step_interval_counts_applied_steps_only(make_optimizer: Any) -> None:
    class Plateau(Observed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", 1.0)
            return loss

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)

    model = Plateau(make_optimizer, scheduler, faults=dict.fromkeys(range(5), INF))
    fit(model, amp_fp16(), regression_batches(9))
    assert model.positions == [0] * 6 + [1, 2, 3, 4]
    start = model.rates[0]
    assert model.rates == [start] * 8 + [start / 2] * 2


def test_a_window_without_backward_holds_the_scheduler_too() -> None:
    class SometimesNone(Observed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

    for plugin in (amp_fp16(), AmpPrecision("bf16-mixed")):
        model = SometimesNone(adamw, SCHEDULERS["StepLR"])
        fit(model, plugin, regression_batches(5))
        assert model.positions == [0, 1, 1, 1, 2, 3]


def test_frequency_still_counts_batches() -> None:
    class EverySecond(Observed):
        def configure_optimizers(self) -> Any:
            configuration = super().configure_optimizers()
            configuration["lr_scheduler"]["frequency"] = 2
            return configuration

    model = EverySecond(adamw, SCHEDULERS["StepLR"], faults={1: INF, 4: INF})
    fit(model, amp_fp16(), regression_batches(8))
    assert model.positions == [0, 0, 0, 0, 1, 1, 2, 2, 3]


def test_epoch_schedulers_go_on_whatever_was_skipped() -> None:
    class ByEpoch(Observed):
        def configure_optimizers(self) -> Any:
            configuration = super().configure_optimizers()
            configuration["lr_scheduler"]["interval"] = "epoch"
            return configuration

    model = ByEpoch(adamw, SCHEDULERS["StepLR"], faults={1: INF, 3: INF})
    fit(model, amp_fp16(), regression_batches(2), max_epochs=2)
    assert model.positions == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_stock_behavior_can_be_asked_for(make_optimizer: Any) -> None:
    model = Observed(make_optimizer, SCHEDULERS["LambdaLR"], faults=dict.fromkeys(range(5), INF))
    fit(model, amp_fp16(advance_scheduler_on_skip=True), regression_batches(6))
    assert model.positions == [0, 1, 2, 3, 4, 5, 6]


def test_a_scheduler_stepped_by_hand_is_the_users_own_business() -> None:
    class ByHand(Observed):
        def optimize(self, loss: Any) -> None:
            super().optimize(loss)
            self.lr_schedulers().step()

    model = ByHand(adamw, SCHEDULERS["LambdaLR"], faults={0: INF}, manual=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(model, amp_fp16(), regression_batches(3))
    assert model.positions == [0, 1, 2, 3]


def test_stock_advances_the_scheduler_in_every_skipped_step() -> None:
    model = Observed(sgd_momentum, SCHEDULERS["LambdaLR"], faults=dict.fromkeys(range(5), INF))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, stock_fp16(), regression_batches(5))
    assert model.positions[-1] == 5
    assert not no_scheduler_warnings(caught)
