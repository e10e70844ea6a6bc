"""FP8 coverage as a function and as a torchmetrics Metric, over ranks too."""

from __future__ import annotations

import doctest
import importlib
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_amp_plus.metrics import Fp8Coverage, fp8_coverage
from tests.support.ranks import run_on_ranks

FLOPS = torch.tensor([900, 60, 40])
IN_FP8 = torch.tensor([True, False, True])


def test_the_share_of_numbers_and_of_tensors():
    assert fp8_coverage(3, 4) == 0.75 and fp8_coverage(0, 4) == 0.0 and fp8_coverage(5, 5) == 1.0
    shares = fp8_coverage(torch.tensor([3, 0, 5]), torch.tensor([4, 4, 5]))
    assert shares.tolist() == [0.75, 0.0, 1.0] and shares.dtype == torch.float64


def test_no_work_has_no_share():
    assert math.isnan(fp8_coverage(0, 0))
    assert fp8_coverage(torch.tensor([0, 1]), torch.tensor([0, 2])).isnan().tolist() == [True, False]


@pytest.mark.parametrize(("by", "first", "both"), [("flops", 0.94, 940 / 3000), ("gemms", 2 / 3, 2 / 5)])
def test_a_metric_adds_up_work_before_it_divides(by, first, both):
    metric = Fp8Coverage(by)
    metric.update(FLOPS, IN_FP8)
    assert metric.compute().item() == pytest.approx(first, rel=1e-15)
    metric.update(torch.tensor([1500, 500]), torch.tensor([False, False]))
    assert metric.compute().item() == pytest.approx(both, rel=1e-15)
    assert metric.compute().dtype == torch.float64


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_before_the_first_gemm_and_after_a_reset_there_is_none():
    metric = Fp8Coverage()
    assert metric.compute().isnan()
    metric.update(FLOPS, IN_FP8)
    assert pickle.loads(pickle.dumps(metric)).compute().item() == 0.94
    metric.reset()
    assert metric.compute().isnan()
    metric.update(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.bool))
    assert metric.compute().isnan()


def test_it_counts_exactly_beyond_what_floats_hold():
    metric = Fp8Coverage()
    metric.update(torch.tensor([2**60, 1]), torch.tensor([True, False]))
    metric.update(torch.tensor([1]), torch.tensor([True]))
    assert (metric.in_fp8.item(), metric.work.item()) == (2**60 + 1, 2**60 + 2)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"by='bytes'.*'flops' or 'gemms'"):
        Fp8Coverage("bytes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\).*one number of each for every GEMM"):
        Fp8Coverage().update(FLOPS, IN_FP8[:2])


def test_update_does_not_look_at_its_tensors():
    metric = Fp8Coverage().to("meta")  # every transfer raises there
    metric.update(FLOPS.to("meta"), IN_FP8.to("meta"))


def unequal() -> dict[str, Any]:
    """Rank 0 multiplies ten times what rank 1 does, all in FP8; rank 1 nothing in FP8."""
    rank = dist.get_rank()
    found = {}
    for by in ("flops", "gemms"):
        metric = Fp8Coverage(by)  # type: ignore[arg-type]
        metric.update(torch.tensor([[600, 400], [100]][rank]), torch.tensor([[True, True], [False]][rank]))
        found[by] = metric.compute().item()
    return found


def test_over_ranks_of_unequal_work():
    for found in run_on_ranks(unequal, 2):
        assert found == {"flops": 1000 / 1100, "gemms": 2 / 3}  # a mean of the ranks' shares would be a half


def test_docstring_examples_run():
    result = doctest.testmod(importlib.import_module("lightning_amp_plus.metrics.fp8_coverage"))
    assert result.attempted >= 6
    assert result.failed == 0
