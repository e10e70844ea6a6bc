"""Accelerate#4289: restoring the optimizer after the scaler, under FSDP2, changed the scaler's state."""

from typing import Any

import lightning.pytorch as L
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.support.faults import INF
from tests.support.models import adamw
from tests.support.ranks import run_on_ranks
from tests.support.sharding import RankedRegressor, fit_on_rank, halves, shard_units
from tests.support.training import amp_fp16, regression_batches


class RestoresOptimizer(L.Callback):
    """Saves both after the second batch, which changed the scale; restores the scaler and then the optimizer later."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        plugin, optimizer = trainer.precision_plugin, trainer.optimizers[0]
        if trainer.global_step == 2:
            self.scaler = plugin.scaler.state_dict()
            self.optimizer = get_optimizer_state_dict(pl_module, optimizer)
        if trainer.global_step == 3:
            plugin.scaler.load_state_dict(self.scaler)
            set_optimizer_state_dict(pl_module, optimizer, self.optimizer)
            self.found = [self.scaler, plugin.scaler.state_dict()]


def on_a_rank() -> dict[str, Any]:
    callback, plugin = RestoresOptimizer(), amp_fp16()
    model = RankedRegressor(adamw, {1: INF} if dist.get_rank() == 0 else None, layout=shard_units)
    batches = halves(regression_batches(5), 2)[dist.get_rank()]
    fit_on_rank(model, plugin, ModelParallelStrategy(2, 1), batches, callbacks=[callback])
    return {"states": callback.found, "end": plugin.scaler.state_dict(), "applied": plugin.applied_steps}  # type: ignore[union-attr]


def test_restoring_the_optimizer_after_the_scaler_leaves_the_scaler_alone() -> None:
    for rank in run_on_ranks(on_a_rank, 2):
        before, after = rank["states"]
        assert before["scale"] == 512.0
        assert after == before
        assert rank["end"]["_growth_tracker"] == before["_growth_tracker"] + 2
        assert rank["applied"] == 4
