"""lerobot PR#4652: a weight average must not move in a step that moved nothing."""

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF, NAN_LOSS
from tests.support.models import TinyRegressor, adamw, fused_adamw
from tests.support.training import amp_fp16, fit, regression_batches, same, stock_fp16, weights

AVERAGING = {
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.5),
    "WeightAveraging": WeightAveraging,
    "EMA of every second step": lambda: EMAWeightAveraging(decay=0.5, update_every_n_steps=2),
}


class AverageTrace(L.Callback):
    """The average and its count at the end of every batch. Must come after the averaging callback."""

    def __init__(self, averaging: WeightAveraging) -> None:
        self.averaging = averaging
        self.averages: list[dict[str, torch.Tensor]] = []
        self.counts: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        model = self.averaging._average_model
        assert model is not None
        self.averages.append(weights(model.module))
        self.counts.append(int(model.n_averaged))


def run(plugin: Any, averaging: WeightAveraging, make_optimizer: Any, faults: Any, **arguments: Any) -> AverageTrace:
    trace = AverageTrace(averaging)
    fit(
        TinyRegressor(make_optimizer, faults=faults),
        plugin,
        regression_batches(6),
        callbacks=[averaging, trace],
        **arguments,
    )
    return trace


@pytest.mark.parametrize("fault", [INF, NAN_LOSS])
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["EMAWeightAveraging", "WeightAveraging"])
def test_the_average_stands_still_across_a_skipped_step(
    kind: str, precision: str, make_optimizer: Any, fault: Any
) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    trace = run(plugin, AVERAGING[kind](), make_optimizer, {2: fault, 3: fault})
    assert trace.counts == [1, 2, 2, 2, 3, 4]
    assert same(trace.averages[1], trace.averages[2]) and same(trace.averages[2], trace.averages[3])
    assert not same(trace.averages[3], trace.averages[4])


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_with_accumulation_a_dropped_window_does_not_move_the_average(make_optimizer: Any) -> None:
    trace = run(amp_fp16(), AVERAGING["EMAWeightAveraging"](), make_optimizer, {2: INF}, accumulate_grad_batches=2)
    assert trace.counts == [0, 1, 1, 1, 1, 2]
    assert same(trace.averages[1], trace.averages[4])


@pytest.mark.parametrize("kind", AVERAGING)
def test_without_skips_the_averages_are_those_of_stock(kind: str) -> None:
    ours = run(amp_fp16(), AVERAGING[kind](), adamw, {})
    stock = run(stock_fp16(), AVERAGING[kind](), adamw, {})
    assert ours.counts == stock.counts
    assert all(same(a, b) for a, b in zip(ours.averages, stock.averages, strict=True))
    assert len(ours.averages) == 6


def test_in_manual_optimization_the_average_stands_still_too() -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    trace = AverageTrace(averaging)
    model = TinyRegressor(adamw, faults={1: INF}, manual=True)
    fit(model, amp_fp16(), regression_batches(3), callbacks=[averaging, trace])
    assert trace.counts == [1, 1, 2]


def test_the_callback_is_left_as_it_was_after_the_fit() -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    run(amp_fp16(), averaging, adamw, {})
    assert "should_update" not in vars(averaging)


def test_stock_averages_the_unmoved_weights_again() -> None:
    trace = run(stock_fp16(), AVERAGING["EMAWeightAveraging"](), adamw, {2: INF})
    assert trace.counts == [1, 2, 3, 4, 5, 6]
    assert not same(trace.averages[1], trace.averages[2])
