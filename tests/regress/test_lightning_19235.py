"""Lightning#19235, pytorch#170862: clipping by norm under FSDP1 is refused, under FSDP2 each rank took its own norm."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_amp_plus import AmpPrecision
from tests.support.ranks import run_on_ranks
from tests.support.sharding import (
    CpuFSDPStrategy,
    RankedRegressor,
    fit_on_rank,
    halves,
    outcomes_of,
    shard_units,
    stock_fsdp1,
    whole_weights,
)
from tests.support.training import SCALE, regression_batches, reports_of, weights

CLIP = 0.25


def unit_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def run(layout: str, plugin: Any) -> dict[str, Any]:
    model = RankedRegressor(unit_sgd, layout=shard_units if layout == "fsdp2" else None)
    start = weights(model)
    strategy = CpuFSDPStrategy() if layout == "fsdp1" else ModelParallelStrategy(2, 1)
    reports = reports_of(plugin) if isinstance(plugin, AmpPrecision) else []
    batches = halves(regression_batches(1), 2)[dist.get_rank()]
    fit_on_rank(model, plugin, strategy, batches, gradient_clip_val=CLIP)
    end = {name.removeprefix("_fsdp_wrapped_module."): value for name, value in whole_weights(model).items()}
    moved = math.sqrt(sum(float((end[name] - start[name]).double().square().sum()) for name in start))
    return {"norm": reports[0].grad_norm, "moved": moved}


def on_a_rank() -> dict[str, Any]:
    return outcomes_of(
        {
            "fsdp1": lambda: run("fsdp1", AmpPrecision("32-true")),
            "fsdp2": lambda: run("fsdp2", AmpPrecision("32-true")),
            "stock fsdp1": lambda: run("fsdp1", stock_fsdp1(SCALE)),
        }
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_a_rank, 2)


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_the_total_norm_is_that_of_one_process_and_the_step_is_clipped_by_it(
    ranks: list[dict[str, Any]], layout: str
) -> None:
    model = RankedRegressor()
    model.loss(regression_batches(1)[0]).backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert norm > CLIP
    for rank in ranks:
        assert rank[layout]["norm"] == pytest.approx(norm, rel=1e-6)
        assert rank[layout]["moved"] == pytest.approx(CLIP, rel=1e-5)


def test_stock_refuses_under_fsdp1(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "not supported for `FSDPPrecision`" in rank["stock fsdp1"]["error"]
