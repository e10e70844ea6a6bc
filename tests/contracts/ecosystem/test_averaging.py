"""Callbacks that average weights, in runs without skips: the averages are those of stock."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF
from tests.support.models import TinyRegressor, adamw, fused_adamw, sgd
from tests.support.training import (
    amp_fp16,
    fit,
    loader,
    make_trainer,
    regression_batches,
    same,
    stock_bf16,
    stock_fp16,
    weights,
)

PAIRS = {"16-mixed": (amp_fp16, stock_fp16), "bf16-mixed": (lambda: AmpPrecision("bf16-mixed"), stock_bf16)}
CALLBACKS = {
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=2),
    "WeightAveraging": WeightAveraging,
    "EMA": lambda: EMAWeightAveraging(decay=0.9),
}


class WithBatchNorm(TinyRegressor):
    """SWA runs one epoch more, without backward, to renew the statistics of a batch norm."""

    def __init__(self, make_optimizer: Any, make_scheduler: Any = None, faults: Any = None) -> None:
        super().__init__(make_optimizer, make_scheduler, faults)
        self.first = torch.nn.Sequential(self.first, torch.nn.BatchNorm1d(8))  # type: ignore[assignment]


def by_epoch(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize(
    ("kind", "make_model"),
    [
        ("SWA", TinyRegressor),
        ("WeightAveraging", TinyRegressor),
        ("WeightAveraging", WithBatchNorm),
        ("EMA", TinyRegressor),
        ("EMA", WithBatchNorm),
    ],
)
@pytest.mark.parametrize("precision", PAIRS)
def test_the_averaged_weights_are_those_of_stock(
    precision: str, kind: str, make_model: Any, make_optimizer: Any, accumulate: int
) -> None:
    results = []
    for make_plugin in PAIRS[precision]:
        model = make_model(make_optimizer)
        fit(
            model,
            make_plugin(),
            regression_batches(6),
            max_epochs=5,
            callbacks=[CALLBACKS[kind]()],
            accumulate_grad_batches=accumulate,
        )
        results.append((weights(model), model.losses))
    assert results[0][1] == results[1][1]
    assert same(results[0][0], results[1][0])
    plain = make_model(make_optimizer)
    fit(plain, PAIRS[precision][0](), regression_batches(6), max_epochs=5, accumulate_grad_batches=accumulate)
    assert not same(results[0][0], weights(plain))


def swa_run(plugin: Any, make_optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], L.Trainer]:
    """The weights that a model with a batch norm ends with, and the average they should be."""
    swa, model = (
        StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=2),
        WithBatchNorm(make_optimizer, by_epoch),
    )
    trainer = fit(model, plugin, regression_batches(4), max_epochs=4, callbacks=[swa])
    assert swa._average_model is not None
    ended = {name: p.detach() for name, p in model.named_parameters()}
    average = {name: p.detach() for name, p in swa._average_model.named_parameters()}
    return ended, average, trainer


@pytest.mark.parametrize("make_optimizer", [sgd, adamw, fused_adamw])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_swa_ends_with_the_average_though_an_epoch_without_backward_follows(
    precision: str, make_optimizer: Any
) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    ended, average, trainer = swa_run(plugin, make_optimizer)
    assert same(ended, average)
    assert plugin.applied_steps == 16
    assert type(trainer.lr_scheduler_configs[0].scheduler).__name__ == "SWALR"


def test_stock_steps_away_from_the_average_with_gradients_left_from_the_epoch_before() -> None:
    for plugin in (stock_fp16(), stock_bf16(), None):
        ended, average, _ = swa_run(plugin, sgd)
        assert not same(ended, average)


def test_swa_averages_finite_weights_though_steps_overflow() -> None:
    plugin = AmpPrecision("bf16-mixed")
    model = TinyRegressor(sgd, faults={9: INF, 13: INF})
    fit(model, plugin, regression_batches(4), max_epochs=4, callbacks=[CALLBACKS["SWA"]()])
    assert plugin.history.skipped == 2
    assert all(value.isfinite().all() for value in weights(model).values())


@pytest.mark.parametrize("kind", ["WeightAveraging", "EMA"])
def test_validation_runs_on_the_average_as_in_stock(kind: str) -> None:
    losses = []
    for plugin in (amp_fp16(), stock_fp16()):
        trainer = make_trainer(plugin, max_epochs=2, callbacks=[CALLBACKS[kind]()])
        trainer.fit(TinyRegressor(adamw), loader(regression_batches(6)), loader(regression_batches(3)))
        losses.append(float(trainer.callback_metrics["val_loss"]))
    assert losses[0] == losses[1]
