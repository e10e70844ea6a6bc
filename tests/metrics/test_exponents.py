"""Exponent histograms against math.frexp, and what is read off them."""

from __future__ import annotations

import doctest
import importlib
import math
import pickle

import pytest
import torch
from torch import Tensor

from lightning_amp_plus.metrics import ExponentHistogram, exponent_histogram
from lightning_amp_plus.metrics import exponents as module
from lightning_amp_plus.metrics.exponents import (
    BINADES,
    LOWEST,
    best_power_of_two,
    count_exponents,
    cut_off,
    fitting_scales,
    magnitudes,
    shares_below,
    smallest_kept,
)


def obvious(values: Tensor) -> list[int]:
    counts = [0] * BINADES
    for value in values.flatten().tolist():
        if value and math.isfinite(value):
            counts[min(max(math.frexp(value)[1] - 1 - LOWEST, 0), BINADES - 1)] += 1
    return counts


def varied(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(3000, generator=generator) * torch.exp2(torch.randint(-70, 14, (3000,), generator=generator))
    special = torch.tensor([0.0, -0.0, 1.0, -2.0, 0.75, math.inf, -math.inf, math.nan, 2.0**-56, 2.0**8, 65504.0])
    return torch.cat([spread, special]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_are_those_of_frexp_in_every_dtype(dtype: torch.dtype) -> None:
    values = varied(dtype)
    assert exponent_histogram(values).tolist() == obvious(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_and_nonfinite_elements_are_beside_the_histogram(dtype: torch.dtype) -> None:
    counts = count_exponents(magnitudes(varied(dtype).unsqueeze(0)))
    assert (counts[0, 0].item(), counts[0, -1].item()) == (2, 3)
    assert counts.sum() == 3011


def test_rows_are_counted_apart() -> None:
    matrix = varied(torch.float32)[:3000].view(30, 100)
    counts = count_exponents(magnitudes(matrix))
    assert [row[1:-1].tolist() for row in counts] == [obvious(row) for row in matrix]


@pytest.mark.parametrize("shape", [(1, 9000), (3, 5000), (700, 12)])
def test_an_accelerator_counts_alike_without_asking_for_the_largest_value(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape)
    fields = module._fields(matrix.abs())
    assert torch.equal(module._bins_without_waiting(fields), module._bins_of(fields.clone()))
    found = count_exponents(torch.empty(shape, device="meta"))  # where every transfer raises
    assert found.shape == (shape[0], BINADES + 2)


def test_empty_tensors_have_an_empty_histogram_and_whole_numbers_are_refused() -> None:
    assert exponent_histogram(torch.zeros(0)).tolist() == [0.0] * BINADES
    with pytest.raises(TypeError, match=r"torch\.int64: convert it first"):
        exponent_histogram(torch.ones(3, dtype=torch.int64))


def test_metric_adds_up_and_travels() -> None:
    metric = ExponentHistogram()
    for part in varied(torch.float32).split(500):
        metric.update(part)
    assert metric.compute().tolist() == obvious(varied(torch.float32))
    assert torch.equal(pickle.loads(pickle.dumps(metric)).compute(), metric.compute())
    metric.reset()
    assert metric.counts.sum() == 0


# ---------------------------------------------------------------- the window of scales


def test_outliers_are_left_out_at_the_small_end_only() -> None:
    values = torch.cat([torch.full((1,), 2.0**-40), torch.full((999,), 2.0**-10), torch.full((1,), 4.0)])
    histogram = exponent_histogram(values)
    strict, lenient = fitting_scales(histogram, 4.0), fitting_scales(histogram, 4.0, outliers=0.001)
    assert strict is not None and lenient is not None
    assert (strict.low, strict.high) == (2.0**15, 65504 / 4) and not strict.exists
    assert (lenient.low, lenient.high) == (2.0**-15, 65504 / 4) and lenient.exists


def test_window_of_facts_has_no_scale() -> None:
    window = fitting_scales(exponent_histogram(torch.tensor([1e-8, 1e5])), 1e5)
    assert window is not None and not window.exists and window.high == pytest.approx(0.65504)


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_no_window_of_gradients_that_are_zero_or_not_finite(largest: float) -> None:
    assert fitting_scales(exponent_histogram(torch.ones(3)), largest) is None


def test_a_share_of_outliers_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"outliers=1\.5.*below 1"):
        fitting_scales(torch.ones(BINADES), 1.0, outliers=1.5)


def test_flushed_subnormals_need_more() -> None:
    histogram = exponent_histogram(torch.tensor([0.5, 1.0]))
    window = fitting_scales(histogram, 1.0, flush_subnormals=True)
    assert window is not None and window.low == 2.0**-13 and window.low in window


def test_the_best_scale_fits_most_layers_and_is_the_largest_of_those() -> None:
    smallest = torch.tensor([1e-3, 1e-3, 1e-14], dtype=torch.float64)
    largest = torch.tensor([1.0, 8.0, 1e-2], dtype=torch.float64)
    assert best_power_of_two(smallest[:2], largest[:2], range(-14, 25))[0] == 12  # 8 * 2^12 <= 65504 < 8 * 2^13
    exponent, fits = best_power_of_two(smallest, largest, range(-14, 25))
    assert (exponent, fits.tolist()) == (12, [True, True, False])


def test_shares_below_are_exact_at_powers_of_two() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    histogram = exponent_histogram(values)
    for exponent in (-12, -3, 0, 1):
        assert shares_below(histogram, exponent) == float((values.abs() < 2.0**exponent).double().mean())
    between = float(shares_below(histogram, math.log2(0.7)))
    assert between == pytest.approx(float((values.abs() < 0.7).double().mean()), abs=0.03)
    assert (shares_below(histogram, -99), shares_below(histogram, 99)) == (0.0, 1.0)


def test_smallest_kept_is_the_lower_edge_of_its_binade() -> None:
    histograms = torch.stack([exponent_histogram(torch.tensor(x)) for x in ([3.0, 9.0], [0.3, 0.4])])
    assert smallest_kept(histograms, 0.0).tolist() == [2.0, 0.25]


# ---------------------------------------------------------------- underflow told from other zeros


def judged(values: Tensor) -> tuple[float, float]:
    found = cut_off(exponent_histogram(values), (values == 0).sum())
    return float(found.lowest), float(found.lost)


def in_fp16(values: Tensor, scale: float) -> Tensor:
    """What an FP16 backward leaves of gradients."""
    return (values * scale).half().float() / scale


@pytest.mark.parametrize("deviation", [2.0**-27, 2.0**-25, 2.0**-23, 2.0**-21])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_cut_off_histogram_tells_what_was_lost(deviation: float, scale: float) -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * deviation / scale
    kept = in_fp16(values, scale)
    lowest, lost = judged(kept)
    true = float((kept == 0).double().mean())
    assert lowest == -24 - math.log2(scale)
    if true > 0.6:
        assert 0.4 < lost <= true + 1e-9  # a lower bound where the bulk is gone
    else:
        assert true / 2 < lost <= true + 1e-9


def test_heavy_tails_are_judged_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(torch.randn(200_000, generator=generator) * 4 - 20)
    kept = in_fp16(values, 1.0)
    true = float((kept == 0).double().mean())
    assert 0.05 < true < 0.2 and judged(kept)[1] == pytest.approx(true, rel=0.6)


def healthy(count: int = 100_000) -> Tensor:
    return in_fp16(torch.randn(count, generator=torch.Generator().manual_seed(0)) * 2.0**-8, 1.0)


def test_zeros_with_another_reason_are_not_underflow() -> None:
    rows = healthy().view(1000, 100) * (torch.arange(1000) % 50 == 0).float().unsqueeze(1)  # rows of an embedding
    scattered = healthy() * (torch.arange(100_000) % 3 == 0).float()  # a pruned or masked weight
    for values in (rows, scattered):
        assert float((values == 0).double().mean()) > 0.6
        assert judged(values)[1] < 1e-3


def test_zeros_with_both_reasons_are_counted_once() -> None:
    lost = in_fp16(torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 2.0**-22, 1.0)
    true = float((lost == 0).double().mean())
    masked = torch.cat([lost, torch.zeros(900_000)])
    assert true / 2 < judged(masked)[1] < 3 * true < 0.6


def test_a_tensor_without_zeros_or_all_zero_shows_nothing() -> None:
    assert judged(torch.randn(1000))[1] == 0.0
    assert judged(torch.zeros(1000))[1] == 0.0


def test_docstring_examples_run() -> None:
    result = doctest.testmod(importlib.import_module("lightning_amp_plus.metrics.exponents"))
    assert result.attempted >= 10 and result.failed == 0
