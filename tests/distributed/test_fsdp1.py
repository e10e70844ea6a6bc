"""FSDP1 in particular: optimizers whose parameters lie on one rank only, and large gradients of inner micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.faults import INF
from tests.support.models import MakeOptimizer, fused_adamw, fused_sgd_momentum, sgd, sgd_momentum
from tests.support.ranks import run_on_ranks
from tests.support.sharding import (
    CpuFSDPStrategy,
    RankedRegressor,
    fit_on_rank,
    halves,
    outcomes_of,
    stock_fsdp1,
    whole_weights,
)
from tests.support.training import SCALE, amp_fp16, regression_batches, reports_of, same


class FirstLayerOnly(RankedRegressor):
    """Trains the first layer only, of which rank 0 holds all shards and rank 1 nothing."""

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net.first.parameters())


def first_layer_only(make_optimizer: MakeOptimizer) -> dict[str, Any]:
    model = FirstLayerOnly(make_optimizer, {2: INF} if dist.get_rank() == 1 else None)
    plugin = amp_fp16()
    reports = reports_of(plugin)
    fit_on_rank(
        model, plugin, CpuFSDPStrategy(), halves(regression_batches(4), 2)[dist.get_rank()], log_every_n_steps=4
    )
    return {
        "outcomes": [report.outcome for report in reports],
        "next scales": [report.next_scale for report in reports],
        "ranks": [report.overflow_ranks for report in reports],
        "scaler": plugin.scaler.state_dict(),  # type: ignore[union-attr]
        "weights": whole_weights(model),
    }


class Large(RankedRegressor):
    """Every micro-batch adds 25600 to the gradient of the last layer's bias; the sum of three does not fit FP16."""

    def loss(self, batch: Any) -> Tensor:
        self.seen += 1
        return self.net(batch[0]).float().mean() * 4 * 25600.0  # Lightning divides by the four of a window


def large_gradients(plugin: Any) -> dict[str, Any]:
    model = Large(lambda parameters: torch.optim.SGD(parameters, lr=2.0**-20))
    before = float(model.net.third.bias.detach())
    batches = halves(regression_batches(4), 2)[dist.get_rank()]
    fit_on_rank(model, plugin, CpuFSDPStrategy(), batches, accumulate_grad_batches=4)
    return {"moved": (before - float(whole_weights(model)["net.third.bias"])) * 2.0**20}


def everything() -> dict[str, Any]:
    return outcomes_of(
        {
            "sgd": partial(first_layer_only, sgd),
            "sgd with momentum": partial(first_layer_only, sgd_momentum),
            "fused adamw": partial(first_layer_only, fused_adamw),
            "large": partial(large_gradients, amp_fp16(1.0)),
            "large, stock": partial(large_gradients, stock_fsdp1(1.0)),
        }
    )


def only_fused_momentum() -> dict[str, Any]:
    return first_layer_only(fused_sgd_momentum)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 2)


def both(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    assert [rank.get("error") for rank in found] == [None, None]
    return found


def judge(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["outcomes"] == ["applied", "applied", "skipped_overflow", "applied"]
    assert second["outcomes"] == ["skipped_no_grads"] * 4
    assert first["next scales"] == second["next scales"] == [SCALE, SCALE, SCALE / 2, SCALE / 2]
    assert first["ranks"][2] == (0,)
    assert first["scaler"] == second["scaler"]
    assert same(first["weights"], second["weights"])


@pytest.mark.parametrize("name", ["sgd", "sgd with momentum", "fused adamw"])
def test_an_optimizer_with_all_gradients_on_one_rank_shares_its_verdict(ranks: list[dict[str, Any]], name: str) -> None:
    judge(*both(ranks, name))


def test_fused_sgd_with_momentum_whose_gradients_are_on_one_rank_makes_nobody_wait() -> None:
    judge(*run_on_ranks(only_fused_momentum, 2, timeout=40.0))


def test_gradients_of_inner_micro_batches_add_up_in_fp32(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "large"):
        assert rank["moved"] == pytest.approx(4 * 25600.0, rel=1e-3)


def test_stock_adds_them_up_in_fp16_and_skips_the_window(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "large, stock"):
        assert rank["moved"] == 0.0
