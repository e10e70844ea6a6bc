"""Lightning#19902: FP16 under ModelParallelStrategy is refused."""

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy

from tests.support.faults import INF
from tests.support.ranks import run_on_ranks
from tests.support.sharding import RankedRegressor, fit_on_rank, halves, shard_units, whole_weights
from tests.support.training import SCALE, amp_fp16, make_trainer, regression_batches, reports_of, same


def on_a_rank() -> dict[str, Any]:
    plugin = amp_fp16()
    reports = reports_of(plugin)
    model = RankedRegressor(faults={1: INF} if dist.get_rank() == 1 else None, layout=shard_units)
    seen: list[str] = []
    model.net.first.register_forward_hook(lambda _module, _inputs, output: seen.append(str(output.dtype)))
    fit_on_rank(model, plugin, ModelParallelStrategy(2, 1), halves(regression_batches(3), 2)[dist.get_rank()])
    return {
        "dtypes": set(seen),
        "outcomes": [report.outcome for report in reports],
        "scales": [report.next_scale for report in reports],
        "weights": whole_weights(model),
    }


def test_fp16_trains_under_model_parallel_strategy() -> None:
    first, second = run_on_ranks(on_a_rank, 2)
    for rank in (first, second):
        assert rank["dtypes"] == {"torch.float16"}
        assert rank["outcomes"] == ["applied", "skipped_overflow", "applied"]
        assert rank["scales"] == [SCALE, SCALE / 2, SCALE / 2]
    assert same(first["weights"], second["weights"])


def test_stock_refuses_it() -> None:
    with pytest.raises(ValueError, match="ModelParallelStrategy"):
        make_trainer(precision="16-mixed", strategy=ModelParallelStrategy(), accelerator="auto", devices="auto")
