"""fairscale#421: inf on one rank only, after gradients were exchanged; one shard steps and the other does not."""

from typing import Any

import pytest
import torch.distributed as dist

from lightning_amp_plus import AmpPrecision
from tests.support.models import adamw, fused_adamw
from tests.support.ranks import run_on_ranks
from tests.support.sharding import (
    CpuFSDPStrategy,
    GradientFault,
    RankedRegressor,
    WholeWeights,
    fit_on_rank,
    halves,
    outcomes_of,
    stock_fsdp1,
)
from tests.support.training import SCALE, amp_fp16, regression_batches, reports_of, same


def run(plugin: Any, make_optimizer: Any) -> dict[str, Any]:
    trace = WholeWeights()
    reports = reports_of(plugin) if isinstance(plugin, AmpPrecision) else []
    fault = GradientFault({1} if dist.get_rank() == 0 else set())
    batches = halves(regression_batches(3), 2)[dist.get_rank()]
    fit_on_rank(RankedRegressor(make_optimizer), plugin, CpuFSDPStrategy(), batches, callbacks=[fault, trace])
    return {
        "outcomes": [report.outcome for report in reports],
        "scale": plugin.scaler.get_scale(),
        "weights": trace.weights,
    }


def on_a_rank() -> dict[str, Any]:
    return outcomes_of(
        {
            "plain": lambda: run(amp_fp16(), adamw),
            "fused": lambda: run(amp_fp16(), fused_adamw),
            "stock, fused": lambda: run(stock_fsdp1(SCALE), fused_adamw),
        }
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_a_rank, 2)


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_both_ranks_skip_with_equal_scale_and_weights(ranks: list[dict[str, Any]], optimizer: str) -> None:
    first, second = (rank[optimizer] for rank in ranks)
    for rank in (first, second):
        assert rank["outcomes"] == ["applied", "skipped_overflow", "applied"]
        assert rank["scale"] == SCALE / 2
        assert same(rank["weights"][1], rank["weights"][2])
        assert not same(rank["weights"][2], rank["weights"][3])
    assert same(first["weights"][-1], second["weights"][-1])


def test_stock_steps_on_one_rank_and_skips_on_the_other(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stock, fused"]["scale"] for rank in ranks] == [SCALE / 2, SCALE]
