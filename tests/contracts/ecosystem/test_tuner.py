"""Lightning's Tuner: the learning-rate finder and the batch-size finder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF
from tests.support.models import TinyRegressor
from tests.support.training import amp_fp16, make_trainer, regression_batches, same, stock_bf16, stock_fp16, weights

PAIRS = {"16-mixed": (amp_fp16, stock_fp16), "bf16-mixed": (lambda: AmpPrecision("bf16-mixed"), stock_bf16)}


class Tunable(TinyRegressor):
    """Has a learning rate and a batch size to be found; out of memory above ``limit`` samples.

    The error comes from backward, in the second micro-batch of a run, so that half a window is left behind.
    """

    def __init__(self, make_optimizer: Any = torch.optim.SGD, limit: int = 10**6, faults: Any = None) -> None:
        super().__init__(faults=faults)
        self.optimizer_type, self.limit = make_optimizer, limit
        self.lr, self.batch_size = 1e-3, 2
        self.tried: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        x, y = (torch.cat(parts) for parts in zip(*regression_batches(16, 8), strict=True))
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size, shuffle=False)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*regression_batches(1)[0]))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.batch_size > self.limit and self.trainer.fit_loop.batch_idx == 1:
            self.tried.append(self.batch_size)
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.")
        super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_type(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fused_adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, fused_adamw])
@pytest.mark.parametrize("precision", PAIRS)
def test_lr_find_sees_the_losses_and_suggests_the_rate_of_stock_and_the_fit_after_it_is_the_same(
    tmp_path: Path, precision: str, make_optimizer: Any
) -> None:
    results = []
    for make_plugin in PAIRS[precision]:
        plugin, model = make_plugin(), Tunable(make_optimizer)
        trainer = make_trainer(plugin, max_steps=20, max_epochs=-1, default_root_dir=tmp_path)
        finder = Tuner(trainer).lr_find(
            model, min_lr=1e-4, max_lr=1.0, num_training=30, early_stop_threshold=None, update_attr=True
        )
        assert finder is not None
        if isinstance(plugin, AmpPrecision):
            # The search is undone: nothing of it is counted, and the scale is where it was.
            assert plugin.applied_steps == 0 and len(plugin.history.scales) == 0
            assert plugin.scaler is None or plugin.scaler.get_scale() == 1024
        model.losses.clear()
        trainer.fit(model)
        results.append((finder.results["lr"], finder.results["loss"], finder.suggestion(), model.lr, model.losses))
        last = weights(model), trainer.lr_scheduler_configs[0].scheduler.last_epoch
        results[-1] = (*results[-1], last[1])
        results.append(last[0])  # type: ignore[arg-type]
    assert results[0] == results[2]
    assert same(results[1], results[3])  # type: ignore[arg-type]
    assert len(results[0][4]) == 20 and results[0][3] != 1e-3


@pytest.mark.parametrize("precision", PAIRS)
def test_the_learning_rate_finder_as_a_callback_leaves_the_gate_on_the_scheduler(
    tmp_path: Path, precision: str
) -> None:
    plugin = PAIRS[precision][0]()
    finder = LearningRateFinder(min_lr=1e-4, max_lr=1e-1, num_training_steps=20)
    trainer = make_trainer(plugin, max_steps=10, max_epochs=-1, callbacks=[finder], default_root_dir=tmp_path)

    class Faulty(Tunable):
        def on_train_start(self) -> None:
            self.faults = {self.seen + 2: INF}

    model = Faulty()
    trainer.fit(model)
    assert plugin.applied_steps == 9
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 9


def test_an_overflow_in_the_search_is_skipped_and_the_search_goes_on(tmp_path: Path) -> None:
    plugin, model = amp_fp16(), Tunable(faults={0: INF, 5: INF})
    trainer = make_trainer(plugin, max_steps=4, max_epochs=-1, default_root_dir=tmp_path)
    finder = Tuner(trainer).lr_find(model, min_lr=1e-4, max_lr=1e-1, num_training=20, early_stop_threshold=None)
    assert finder is not None and len(finder.results["loss"]) == 20
    assert all(value.isfinite().all() for value in weights(model).values())
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 1024


@pytest.mark.parametrize(
    ("mode", "make_optimizer", "accumulate"),
    [("power", torch.optim.SGD, 1), ("power", fused_adamw, 2), ("binsearch", torch.optim.SGD, 2)],
)
@pytest.mark.parametrize("precision", PAIRS)
def test_out_of_memory_in_backward_gives_the_batch_size_of_stock_and_an_untouched_fit_after_it(
    tmp_path: Path, precision: str, mode: str, make_optimizer: Any, accumulate: int
) -> None:
    results = []
    for make_plugin in PAIRS[precision]:
        plugin, model = make_plugin(), Tunable(make_optimizer, limit=12)
        trainer = make_trainer(
            plugin, max_steps=4, max_epochs=-1, accumulate_grad_batches=accumulate, default_root_dir=tmp_path
        )
        size = Tuner(trainer).scale_batch_size(model, mode=mode, steps_per_trial=2, init_val=8, max_trials=4)
        assert model.tried and min(model.tried) > 12
        if isinstance(plugin, AmpPrecision):
            assert plugin.applied_steps == 0 and len(plugin.history.scales) == 0
            assert plugin.scaler is None or plugin.scaler.get_scale() == 1024
        model.losses.clear()
        trainer.fit(model)
        results.append((size, model.batch_size, model.losses, trainer.global_step))
        results.append(weights(model))  # type: ignore[arg-type]
    assert results[0] == results[2]
    assert same(results[1], results[3])  # type: ignore[arg-type]
    assert results[0][0] == results[0][1] and 6 <= results[0][0] <= 12


def test_the_batch_size_finder_as_a_callback_starts_the_real_run_with_an_empty_window(tmp_path: Path) -> None:
    plugin, model = amp_fp16(), Tunable(limit=8)
    finder = BatchSizeFinder(mode="power", steps_per_trial=2, init_val=2)
    trainer = make_trainer(
        plugin,
        max_steps=3,
        max_epochs=-1,
        accumulate_grad_batches=2,
        callbacks=[finder],
        default_root_dir=tmp_path,
    )
    trainer.fit(model)
    assert model.tried == [16] and model.batch_size == 8
    assert plugin.applied_steps == 3
    assert plugin.history.scales == [1024] * 3
