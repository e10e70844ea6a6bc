"""The skip rate as a function and as a torchmetrics Metric."""

from __future__ import annotations

import doctest
import importlib
import pickle

import pytest
import torch

from lightning_amp_plus.metrics import SkipRate, skip_rate


def test_rate_is_the_share_of_skipped_windows():
    assert skip_rate(3, 12) == 0.25
    assert skip_rate(torch.tensor(3), torch.tensor(12)).item() == 0.25


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_rate_without_windows_is_zero():
    assert skip_rate(0, 0) == 0.0
    assert SkipRate().compute().item() == 0.0


def test_rate_is_elementwise_and_in_fp32():
    rates = skip_rate(torch.tensor([0, 1, 4]), torch.tensor([4, 4, 4]))
    assert rates.dtype == torch.float32
    assert rates.tolist() == [0.0, 0.25, 1.0]


def test_metric_takes_ints_and_tensors_and_sums_elements():
    metric = SkipRate()
    metric.update(1, 10)
    metric.update(torch.tensor(2), torch.tensor(10))
    metric.update(torch.tensor([True, False, True]), torch.ones(3))  # one verdict and one window an element
    assert (metric.skipped.item(), metric.windows.item()) == (5, 23)
    assert metric.compute().item() == pytest.approx(5 / 23)


def test_metric_counts_exactly_beyond_what_fp32_holds():
    metric = SkipRate()
    metric.update(0, 2**24)
    metric.update(0, 1)
    assert metric.windows.item() == 2**24 + 1


def test_states_are_summed_over_ranks():
    metric = SkipRate(
        dist_sync_fn=lambda state, group: [state, state + 4],
        distributed_available_fn=lambda: True,
        sync_on_compute=True,
    )
    metric.update(1, 6)
    assert metric.compute().item() == pytest.approx((1 + 5) / (6 + 10))


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_reset_forgets_and_pickle_keeps():
    metric = SkipRate()
    metric.update(1, 4)
    assert pickle.loads(pickle.dumps(metric)).compute().item() == 0.25
    metric.reset()
    assert metric.compute().item() == 0.0


@pytest.mark.parametrize(("skipped", "windows"), [(2, 1), (-1, 3)])
def test_impossible_counts_are_refused_by_name(skipped, windows):
    with pytest.raises(ValueError, match=rf"skipped={skipped}, windows={windows}.*0 <= skipped <= windows"):
        SkipRate().update(skipped, windows)


def test_update_with_tensors_does_not_look_at_them():
    metric = SkipRate().to("meta")  # every transfer raises there
    metric.update(torch.zeros(3, device="meta"), torch.ones(3, device="meta"))


def test_docstring_examples_run():
    result = doctest.testmod(importlib.import_module("lightning_amp_plus.metrics.skip_rate"))
    assert result.attempted >= 7
    assert result.failed == 0
