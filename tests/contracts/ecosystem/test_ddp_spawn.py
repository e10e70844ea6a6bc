"""``ddp_spawn``: the plugin travels to the processes by pickle, and two gloo ranks train as one process would."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
from torch import Tensor

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF_LOSS
from tests.support.models import TinyRegressor
from tests.support.training import amp_fp16, fit, loader, regression_batches, same, stock_fp16, weights


class ReportsSkips(TinyRegressor):
    """Rank 1 alone meets a bad loss in its second batch. Only metrics and weights come back from the processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.global_rank == 1:
            self.faults = {1: INF_LOSS}
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        plugin = self.trainer.precision_plugin
        assert isinstance(plugin, AmpPrecision) and plugin.scaler is not None
        zero = self.first.weight.new_zeros(())
        self.trainer.callback_metrics["applied"] = zero + plugin.applied_steps
        self.trainer.callback_metrics["skipped"] = zero + plugin.history.skipped
        self.trainer.callback_metrics["scale"] = zero + plugin.scaler.get_scale()


@pytest.mark.slow
@pytest.mark.timeout(110)
def test_two_spawned_ranks_train_as_one_process_and_both_skip_what_one_of_them_met() -> None:
    """Both ranks see the same batches, so the mean over ranks is exactly what one process has."""
    plugin, model = amp_fp16(), ReportsSkips()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_spawn",
        use_distributed_sampler=False,
        plugins=[plugin],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(regression_batches(6)))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {"applied": 5, "skipped": 1, "scale": 512}

    alone = TinyRegressor(faults={1: INF_LOSS})
    fit(alone, stock_fp16(), regression_batches(6))
    assert same(weights(model), weights(alone))
    # The plugin of this process was copied, not used.
    assert plugin.applied_steps == 0 and plugin.scaler is not None and plugin.scaler.get_scale() == 1024
