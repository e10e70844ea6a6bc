"""Other callbacks of Lightning that change the model, the window or what is read off the plugin."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    ModelPruning,
    ModelSummary,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import summarize

from lightning_amp_plus import AmpPrecision, PrecisionPolicy
from tests.support.faults import INF
from tests.support.models import TinyRegressor, adamw, fused_adamw, fused_sgd_momentum, sgd, sgd_momentum
from tests.support.training import (
    WeightTrace,
    amp_fp16,
    fit,
    loader,
    make_trainer,
    outcomes,
    regression_batches,
    reports_of,
    same,
    stock_bf16,
    stock_fp16,
    weights,
)

PAIRS = {"16-mixed": (amp_fp16, stock_fp16), "bf16-mixed": (lambda: AmpPrecision("bf16-mixed"), stock_bf16)}
OPTIMIZERS = [adamw, fused_adamw, sgd_momentum, fused_sgd_momentum]


def assert_as_in_stock(precision: str, make_model: Any, make_callback: Any, epochs: int = 3, **arguments: Any) -> None:
    results = []
    for make_plugin in PAIRS[precision]:
        model = make_model()
        trainer = fit(
            model,
            make_plugin(),
            regression_batches(7),
            max_epochs=epochs,
            callbacks=[make_callback(model)],
            **arguments,
        )
        results.append((weights(model), model.losses, trainer.global_step))
    assert results[0][1:] == results[1][1:]
    assert same(results[0][0], results[1][0])
    assert not same(results[0][0], weights(make_model()))


# ------------------------------------------------------------------ accumulation that changes


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PAIRS)
def test_gradient_accumulation_scheduler_trains_as_in_stock(precision: str, make_optimizer: Any) -> None:
    assert_as_in_stock(
        precision,
        lambda: TinyRegressor(make_optimizer),
        lambda _: GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}),
    )


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_windows_follow_the_accumulation_of_their_epoch(make_optimizer: Any) -> None:
    plugin, trace = amp_fp16(), WeightTrace()
    reports = reports_of(plugin)
    # Windows close at micro-batches 0-3, then 6 and 7 (three and one); the fault sits in the window of three.
    model = TinyRegressor(make_optimizer, faults={5: INF})
    fit(
        model,
        plugin,
        regression_batches(4),
        max_epochs=2,
        callbacks=[GradientAccumulationScheduler({0: 1, 1: 3}), trace],
    )
    assert outcomes(reports) == ["applied"] * 4 + ["skipped_overflow", "applied"]
    assert trace.moved() == [True] * 4 + [False] * 3 + [True]


def test_partial_window_mean_weights_the_last_window_by_its_own_size() -> None:
    """Seven micro-batches, three to a window: the last one is a window by itself."""
    ours, alone = TinyRegressor(sgd), TinyRegressor(sgd)
    batches = regression_batches(7)
    fit(ours, AmpPrecision("32-true", partial_window="mean"), batches[6:], accumulate_grad_batches=3)
    fit(alone, AmpPrecision("32-true"), batches[6:])
    for left, right in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
    stock = TinyRegressor(sgd)
    fit(stock, None, batches[6:], accumulate_grad_batches=3)
    assert not torch.allclose(stock.second.bias, alone.second.bias, rtol=1e-3)


# ------------------------------------------------------------------ parameters that come later


class WithBackbone(TinyRegressor):
    def __init__(self, make_optimizer: Any = sgd) -> None:
        super().__init__(make_optimizer)
        self.backbone = self.first

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


def unfreeze_in_epoch_1(_: Any) -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, backbone_initial_lr=0.01)


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulation"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PAIRS)
def test_backbone_finetuning_trains_as_in_stock(precision: str, make_optimizer: Any, arguments: dict[str, Any]) -> None:
    assert_as_in_stock(precision, lambda: WithBackbone(make_optimizer), unfreeze_in_epoch_1, **arguments)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_an_overflow_right_after_unfreezing_is_skipped_without_a_trace(make_optimizer: Any) -> None:
    """The first step of the new parameter group is the one that overflows."""
    plugin, trace = amp_fp16(), WeightTrace()
    model = WithBackbone(make_optimizer)
    model.faults = {3: INF}
    fit(model, plugin, regression_batches(3), max_epochs=2, callbacks=[unfreeze_in_epoch_1(None), trace])
    assert trace.moved() == [True] * 3 + [False] + [True] * 2
    assert all(value.isfinite().all() for value in weights(model).values())
    assert not torch.equal(model.first.weight, TinyRegressor().first.weight)


def test_master_weights_move_parameters_that_were_unfrozen_later() -> None:
    plugin = AmpPrecision(PrecisionPolicy("bf16", params="bf16", master_weights=True))
    model = WithBackbone()
    trace = WeightTrace()
    fit(model, plugin, regression_batches(3), max_epochs=2, callbacks=[unfreeze_in_epoch_1(None), trace])
    first = [w["first.weight"] for w in trace.weights]
    assert torch.equal(first[0], first[3]) and not torch.equal(first[3], first[6])
    assert model.first.weight.dtype == torch.bfloat16


# ------------------------------------------------------------------ pruning


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PAIRS)
def test_pruning_trains_as_in_stock(precision: str, make_optimizer: Any) -> None:
    assert_as_in_stock(
        precision,
        lambda: TinyRegressor(make_optimizer),
        lambda model: ModelPruning("l1_unstructured", amount=0.25, parameters_to_prune=[(model.first, "weight")]),
    )


def test_pruned_elements_are_zero_in_the_end() -> None:
    model = TinyRegressor(adamw)
    pruning = ModelPruning("l1_unstructured", amount=0.25, parameters_to_prune=[(model.first, "weight")])
    fit(model, amp_fp16(), regression_batches(4), max_epochs=2, callbacks=[pruning])
    assert (model.first.weight == 0).sum() >= 8


# ------------------------------------------------------------------ what is shown


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true", "bf16-true"])
def test_the_model_summary_is_that_of_stock(precision: Any) -> None:
    class Keeps(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, *arguments: Any, **kwargs: Any) -> None:
            shown.append((summary_data, *arguments))

    class WithExample(TinyRegressor):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(2, 4, dtype=torch.bfloat16 if precision == "bf16-true" else None)

    shown: list[Any] = []
    kwargs = {"precision": precision} if precision != "16-mixed" else {"plugins": [stock_fp16()]}
    for trainer in (
        make_trainer(AmpPrecision(precision), callbacks=[Keeps(max_depth=-1)], enable_model_summary=True),
        L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[Keeps(max_depth=-1)],
            **kwargs,
        ),
    ):
        trainer.fit(WithExample(), loader(regression_batches(1)))
    ours, stock = shown
    assert ours == stock
    assert "[2, 1]" in str(ours)


def test_the_summary_of_a_model_in_training_counts_every_parameter() -> None:
    model = TinyRegressor()
    before = summarize(model, max_depth=-1).total_parameters
    fit(model, amp_fp16(), regression_batches(1))
    assert summarize(model, max_depth=-1).total_parameters == before == 4 * 8 + 8 + 8 + 1


FLOPS = {torch.float32: 1000, torch.bfloat16: 2000, torch.float16: 3000}


@pytest.fixture
def peak_flops_by_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no entry in Lightning's table of peaks; give it one for each dtype."""

    def available(device: Any, dtype: torch.dtype) -> int:
        return FLOPS[dtype]

    monkeypatch.setattr("lightning.pytorch.callbacks.throughput_monitor.get_available_flops", available)
    monkeypatch.setattr("lightning_amp_plus.integration.throughput.get_available_flops", available)


class WithFlops(TinyRegressor):
    flops_per_batch = 100


def throughput() -> ThroughputMonitor:
    return ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)


DTYPES = {
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}


@pytest.mark.parametrize("precision", DTYPES)
def test_throughput_monitor_measures_against_the_peak_of_the_compute_dtype(
    precision: str, tmp_path: Any, peak_flops_by_dtype: None
) -> None:
    monitor = throughput()
    plugin = AmpPrecision(precision, loss_scale=64.0 if precision == "16-true" else "auto")
    trainer = make_trainer(plugin, callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=2)
    trainer.fit(WithFlops(), loader(regression_batches(6)))
    assert monitor.available_flops == FLOPS[DTYPES[precision]]
    assert all(t.available_flops == FLOPS[DTYPES[precision]] for t in monitor._throughputs.values())
    assert "train/device/mfu" in trainer.logged_metrics


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_it_does_so_in_evaluation_too(precision: str, entry: str, tmp_path: Any, peak_flops_by_dtype: None) -> None:
    monitor = throughput()
    trainer = make_trainer(AmpPrecision(precision), callbacks=[monitor], logger=CSVLogger(tmp_path))
    getattr(trainer, entry)(WithFlops(), loader(regression_batches(3)))
    assert monitor.available_flops == FLOPS[DTYPES[precision]]


def test_stock_does_not_know_the_compute_dtype_of_an_fsdp_plugin(peak_flops_by_dtype: None) -> None:
    """Why the correction is needed: the monitor takes the reduction's dtype for a plugin of that class."""
    from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype

    assert _plugin_to_compute_dtype(AmpPrecision("bf16-mixed")) == torch.float32
    assert _plugin_to_compute_dtype(stock_bf16()) == torch.bfloat16
