"""Lightning#19803: a custom scaler for FSDP is rejected, by a comparison with a precision that was not set yet."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF
from tests.support.ranks import run_on_ranks
from tests.support.sharding import CpuFSDPStrategy, RankedRegressor, fit_on_rank, halves, outcomes_of
from tests.support.training import regression_batches, reports_of


def scaler_of(kind: Any) -> Any:
    factors = {"init_scale": 256.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    return kind(device="cpu", **factors)


class ForeignScaler(torch.amp.GradScaler):
    pass


def run(kind: Any) -> list[float]:
    plugin = AmpPrecision("16-mixed", loss_scale=scaler_of(kind))
    reports = reports_of(plugin)
    model = RankedRegressor(faults={1: INF} if dist.get_rank() == 1 else None)
    fit_on_rank(model, plugin, CpuFSDPStrategy(), halves(regression_batches(4), 2)[dist.get_rank()])
    return [reports[0].scale, *(report.next_scale for report in reports)]


def on_a_rank() -> dict[str, Any]:
    kinds = (torch.amp.GradScaler, ShardedGradScaler)
    return outcomes_of({kind.__name__: lambda kind=kind: run(kind) for kind in kinds})


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_a_rank, 2)


@pytest.mark.parametrize("kind", ["GradScaler", "ShardedGradScaler"])
def test_the_scale_and_factors_of_a_given_scaler_are_used_on_every_rank(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        assert rank[kind] == [256.0, 256.0, 64.0, 64.0, 256.0]


def test_a_scaler_of_another_class_is_refused_by_name() -> None:
    with pytest.raises(TypeError) as error:
        AmpPrecision("16-mixed", loss_scale=scaler_of(ForeignScaler))
    for words in ("ForeignScaler", "LossScale"):
        assert words in str(error.value)


def test_stock_rejects_it() -> None:
    with pytest.raises(ValueError, match="does not use a scaler"):
        FSDPPrecision("16-mixed", scaler=scaler_of(ShardedGradScaler))
