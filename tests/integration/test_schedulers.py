"""Per-step schedulers stand still after a skipped window; everything else about them is Lightning's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_amp_plus.integration.schedulers import GatedSchedulerConfig, gate_schedulers
from tests.support.faults import INF
from tests.support.models import TinyRegressor, fused_sgd, sgd
from tests.support.training import amp_fp16, fit, regression_batches


def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def config(interval: str = "step", frequency: int = 3, **options: Any) -> LRSchedulerConfig:
    return LRSchedulerConfig(scheduler(), interval=interval, frequency=frequency, **options)


class Switch:
    """Says that the window was skipped while it is on."""

    on = False

    def __call__(self) -> bool:
        return self.on


# ---------------------------------------------------------------- the configuration


def test_the_frequency_is_the_users_until_a_window_is_skipped() -> None:
    switch = Switch()
    (gated,), any_gated = gate_schedulers([config()], switch)
    assert any_gated
    assert gated.frequency == 3
    switch.on = True
    assert not any(batch % gated.frequency == 0 for batch in (*range(1, 100), 2**40))
    switch.on = False
    assert gated.frequency == 3


def test_every_other_field_and_the_scheduler_object_are_kept() -> None:
    original = config(monitor="loss", strict=False, name="named", reduce_on_plateau=True)
    before = set(vars(original.scheduler))
    (gated,), _ = gate_schedulers([original], Switch())
    assert isinstance(gated, LRSchedulerConfig)
    assert gated.scheduler is original.scheduler
    assert set(vars(gated.scheduler)) == before
    fields = ("interval", "monitor", "strict", "name", "reduce_on_plateau")
    assert [getattr(gated, f) for f in fields] == ["step", "loss", False, "named", True]


def test_epoch_schedulers_are_left_as_they_are() -> None:
    original = config("epoch")
    configs, any_gated = gate_schedulers([original], Switch())
    assert configs[0] is original
    assert not any_gated
    assert gate_schedulers([], Switch()) == ([], False)


def test_of_several_schedulers_those_by_step_are_gated_in_place() -> None:
    by_epoch, by_step = config("epoch"), config()
    configs, any_gated = gate_schedulers([by_epoch, by_step], Switch())
    assert configs[0] is by_epoch
    assert isinstance(configs[1], GatedSchedulerConfig)
    assert any_gated


def test_gating_again_keeps_the_users_frequency_even_while_skipped() -> None:
    old, new = Switch(), Switch()
    (once,), _ = gate_schedulers([config()], old)
    old.on = True
    (twice,), any_gated = gate_schedulers([once], new)
    assert any_gated
    assert twice.frequency == 3
    new.on = True
    assert twice.frequency > 10**9


def test_the_users_frequency_can_still_be_set() -> None:
    (gated,), _ = gate_schedulers([config()], Switch())
    gated.frequency = 5
    assert gated.frequency == 5


# ---------------------------------------------------------------- in a Trainer


def halve(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Rates(L.Callback):
    """How often the learning rate was halved by the end of each batch."""

    def __init__(self) -> None:
        self.halvings: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.halvings.append(round(torch.log2(torch.tensor(0.1 / rate)).item()))


class Scheduled(TinyRegressor):
    def __init__(self, make_optimizer: Any = sgd, interval: str = "step", frequency: int = 1, **options: Any) -> None:
        super().__init__(make_optimizer, halve, **options)
        self.interval, self.frequency = interval, frequency

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        configured["lr_scheduler"] |= {"interval": self.interval, "frequency": self.frequency}
        return configured


@pytest.mark.parametrize("make_optimizer", [sgd, fused_sgd])
def test_a_skipped_window_advances_no_step_scheduler(make_optimizer: Any) -> None:
    rates = Rates()
    model = Scheduled(make_optimizer, faults={1: INF, 3: INF})
    trainer = fit(model, amp_fp16(), regression_batches(6), callbacks=[rates])
    assert rates.halvings == [1, 1, 2, 2, 3, 4]
    state = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    assert set(state) == set(halve(torch.optim.SGD(model.parameters(), lr=1.0)).state_dict())


def test_asked_to_a_skipped_window_advances_the_scheduler_as_in_stock() -> None:
    rates = Rates()
    model = Scheduled(faults={1: INF, 3: INF})
    fit(model, amp_fp16(advance_scheduler_on_skip=True), regression_batches(6), callbacks=[rates])
    assert rates.halvings == [1, 2, 3, 4, 5, 6]


def test_the_frequency_counts_batches_as_in_lightning() -> None:
    rates = Rates()
    fit(Scheduled(frequency=2, faults={1: INF}), amp_fp16(), regression_batches(6), callbacks=[rates])
    assert rates.halvings == [0, 0, 0, 1, 1, 2]


def test_a_skip_in_an_accumulated_window_holds_its_scheduler_until_the_next_one_is_applied() -> None:
    rates = Rates()
    model = Scheduled(faults={1: INF})
    fit(model, amp_fp16(), regression_batches(6), callbacks=[rates], accumulate_grad_batches=2)
    assert rates.halvings == [0, 0, 0, 1, 1, 2]


def test_an_epoch_scheduler_goes_on_after_a_skipped_last_window() -> None:
    rates = Rates()
    model = Scheduled(interval="epoch", faults={1: INF})
    trainer = fit(model, amp_fp16(), regression_batches(2), callbacks=[rates], max_epochs=2)
    assert rates.halvings == [0, 1, 1, 2]  # Lightning steps them in the last batch of an epoch
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.025


def test_the_learning_rate_monitor_still_finds_gated_schedulers(tmp_path: Any) -> None:
    monitor = LearningRateMonitor(logging_interval="step")
    model = Scheduled(faults={0: INF})
    fit(
        model,
        amp_fp16(),
        regression_batches(3),
        callbacks=[monitor],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    assert monitor.lrs == {"lr-SGD": [0.1, 0.1, 0.05]}
