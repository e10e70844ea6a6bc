"""pytorch#99174: a rank without any gradient made torch's ShardedGradScaler wait for a collective nobody joins."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.support.models import sgd
from tests.support.ranks import run_on_ranks
from tests.support.sharding import CpuFSDPStrategy, RankedRegressor, fit_on_rank, halves, whole_weights
from tests.support.training import SCALE, amp_fp16, regression_batches, reports_of, same


class FirstLayerOnly(RankedRegressor):
    """Only the first layer is trained; rank 0 holds all of its shards, and rank 1 none. One loss is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx == 1 and dist.get_rank() == 1 else loss

    def configure_optimizers(self) -> Any:
        return sgd(self.net.first.parameters())


def collectives_of_stock() -> int:
    """How many collectives torch's scaler enters on this rank, of which rank 1 has no gradient."""
    parameter = nn.Parameter(torch.ones(2))
    scaler = ShardedGradScaler("cpu")
    loss = scaler.scale(parameter.sum())
    if dist.get_rank() == 0:
        loss.backward()
    with patch("torch.distributed.fsdp.sharded_grad_scaler.dist.all_reduce") as all_reduce:
        scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))
    return int(all_reduce.call_count)


def on_a_rank() -> dict[str, Any]:
    stock = collectives_of_stock()
    model, plugin = FirstLayerOnly(), amp_fp16()
    reports = reports_of(plugin)
    fit_on_rank(model, plugin, CpuFSDPStrategy(), halves(regression_batches(3), 2)[dist.get_rank()])
    return {
        "stock": stock,
        "held": sum(p.numel() for p in model.optimizers().param_groups[0]["params"]),
        "next scales": [report.next_scale for report in reports],
        "origins": [report.overflow_origin for report in reports],
        "scaler": plugin.scaler.state_dict(),  # type: ignore[union-attr]
        "outcomes": [report.outcome for report in reports],
        "weights": whole_weights(model),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_a_rank, 2, timeout=60.0)


def test_the_rank_without_gradients_takes_the_same_verdict(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["held"] > 0
    assert second["held"] == 0
    assert first["outcomes"] == ["applied", "skipped_overflow", "applied"]
    assert first["origins"][1] == "forward"
    assert first["next scales"] == second["next scales"] == [SCALE, SCALE / 2, SCALE / 2]
    assert first["scaler"] == second["scaler"]
    assert same(first["weights"], second["weights"])


def test_torch_has_mended_its_side(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stock"] for rank in ranks] == [1, 1]
