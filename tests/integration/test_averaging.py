"""Weight averages stand still after a skipped window."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

from lightning_amp_plus.integration.averaging import gate_averaging
from lightning_amp_plus.integration.instance_hooks import InstanceHooks
from tests.support.faults import INF
from tests.support.models import TinyRegressor, fused_sgd, sgd
from tests.support.training import amp_fp16, fit, loader, make_trainer, regression_batches


class Switch:
    on = False

    def __call__(self) -> bool:
        return self.on


def test_after_a_skipped_window_the_callback_declines_the_step() -> None:
    switch, averaging = Switch(), WeightAveraging()
    assert gate_averaging([averaging], switch, InstanceHooks())
    assert averaging.should_update(step_idx=3)
    switch.on = True
    assert not averaging.should_update(step_idx=3)
    assert not averaging.should_update(3)
    switch.on = False
    assert averaging.should_update(3)


def test_the_decision_of_the_callback_itself_is_kept() -> None:
    averaging = EMAWeightAveraging(update_every_n_steps=2, update_starting_at_epoch=1)
    gate_averaging([averaging], Switch(), InstanceHooks())
    assert [averaging.should_update(step_idx=step) for step in range(4)] == [True, False, True, False]
    assert [averaging.should_update(epoch_idx=epoch) for epoch in range(3)] == [False, True, True]


def test_updates_by_epoch_go_on_after_a_skipped_window() -> None:
    switch, averaging = Switch(), EMAWeightAveraging(update_starting_at_epoch=0)
    gate_averaging([averaging], switch, InstanceHooks())
    switch.on = True
    assert averaging.should_update(epoch_idx=0)


def test_other_callbacks_are_not_touched() -> None:
    other = L.Callback()
    assert not gate_averaging([other], Switch(), InstanceHooks())
    assert vars(other) == {}


def test_the_gate_is_taken_off_again() -> None:
    switch, averaging, hooks = Switch(), WeightAveraging(), InstanceHooks()
    gate_averaging([averaging], switch, hooks)
    switch.on = True
    hooks.undo()
    assert averaging.should_update(step_idx=0)
    assert "should_update" not in vars(averaging)


def test_a_lightning_without_weight_averaging_has_nothing_to_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    averaging = WeightAveraging()
    monkeypatch.delattr(lightning_callbacks, "WeightAveraging")
    assert not gate_averaging([averaging], Switch(), InstanceHooks())


class Updates(EMAWeightAveraging):
    """Notes after which batches the average moved."""

    def __init__(self) -> None:
        super().__init__(decay=0.5)
        self.moved: list[bool] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        assert self._average_model is not None
        before = int(self._average_model.n_averaged)
        super().on_train_batch_end(*args, **kwargs)
        self.moved.append(int(self._average_model.n_averaged) > before)


@pytest.mark.parametrize("make_optimizer", [sgd, fused_sgd])
def test_in_a_run_the_average_moves_with_applied_steps_only(make_optimizer: Any) -> None:
    updates = Updates()
    fit(TinyRegressor(make_optimizer, faults={1: INF, 2: INF}), amp_fp16(), regression_batches(5), callbacks=[updates])
    assert updates.moved == [True, False, False, True, True]


def test_with_accumulation_a_skipped_window_is_not_made_up_for_in_mid_window() -> None:
    updates = Updates()
    model = TinyRegressor(faults={2: INF})
    fit(model, amp_fp16(), regression_batches(8), callbacks=[updates], accumulate_grad_batches=2)
    assert updates.moved == [False, True, False, False, False, True, False, True]


def test_the_average_equals_that_of_a_run_which_never_saw_the_skipped_batch() -> None:
    batches = regression_batches(4)
    averages = []
    for faults, fed in (({1: INF}, batches), ({}, [batches[0], *batches[2:]])):
        model, updates = TinyRegressor(faults=faults), Updates()
        fit(model, amp_fp16(), fed, callbacks=[updates])
        averages.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*averages)


def test_after_the_fit_the_callback_is_as_it_was_and_a_second_fit_gates_it_again() -> None:
    updates = Updates()
    trainer = make_trainer(amp_fp16(), callbacks=[updates])
    for last_epoch, expected in ((1, [True, False, True]), (2, [True, True, True])):
        trainer.fit_loop.max_epochs = last_epoch
        updates.moved.clear()
        trainer.fit(TinyRegressor(faults={1: INF} if last_epoch == 1 else {}), loader(regression_batches(3)))
        assert updates.moved == expected
        assert "should_update" not in vars(updates)
