"""Quantization against a direct reference in FP64, on values that hypothesis chooses and on all the awkward ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_amp_plus.formats import E4M3, E5M2, Format, round_to
from lightning_amp_plus.fp8.quantize import amax_of, nonzeros, quantize, round_fp8, saturated, scale_of, sqnr
from tests.support.fp8_contract import TILES

FORMATS = [E4M3, E5M2]
both = pytest.mark.parametrize("format", FORMATS, ids=str)


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())


def grid(format: Format) -> Tensor:
    """Every finite number of the format, in order."""
    numbers = torch.arange(256, dtype=torch.uint8).view(format.dtype).double()
    return numbers[numbers.isfinite()].unique()


# -------------------------------------------------------------------- rounding


@both
def test_rounding_is_right_on_every_number_every_tie_and_the_neighbors_of_ties(format: Format) -> None:
    numbers = grid(format).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    neighbors = [torch.nextafter(ties, torch.tensor(sign * math.inf)) for sign in (-1, 1)]
    extremes = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e38, -1e-45])
    values = torch.cat([numbers, ties, *neighbors, extremes])
    before = values.clone()
    assert same(round_fp8(values, format).double(), round_to(values.double(), format, saturate=True))
    assert same(values, before)


@both
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=64))
@settings(max_examples=200, deadline=None)
def test_rounding_equals_the_reference(format: Format, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    rounded = round_fp8(x, format)
    assert rounded.dtype == torch.bfloat16
    assert same(rounded.double(), round_to(x.double(), format, saturate=True))


@both
def test_the_clamp_is_explicit_where_a_cast_would_go_to_infinity(format: Format) -> None:
    assert round_fp8(torch.tensor([1e6, -math.inf]), format).tolist() == [format.max_finite, -format.max_finite]
    assert torch.tensor(61440.0).to(torch.float8_e5m2).float().isinf()


# -------------------------------------------------------------------- scales


@both
@given(exponent=st.integers(-140, 127), fraction=st.floats(1, 2, exclude_max=True, width=32))
@settings(max_examples=200, deadline=None)
def test_the_scale_brings_amax_to_the_edge_and_never_past_it_as_a_power_of_two(
    format: Format, exponent: int, fraction: float
) -> None:
    amax = torch.tensor(math.ldexp(fraction, exponent), dtype=torch.float32)
    if not amax.isfinite() or amax == 0:
        return
    scale = scale_of(amax, format)
    exact = min(max(format.max_finite / float(amax.double()), 2.0**-126), 2.0**126)
    assert float(scale) == pytest.approx(exact, rel=2**-22)
    power = scale_of(amax, format, power_of_two=True)
    assert math.frexp(float(power))[0] == 0.5
    assert scale / 2 < power <= scale
    assert float(amax.double()) * float(power) <= format.max_finite * (1 + 2**-22)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
@both
def test_an_amax_that_says_nothing_gives_the_scale_one(format: Format, value: float) -> None:
    assert scale_of(torch.tensor(value), format).item() == 1.0


@both
def test_a_subnormal_amax_gives_a_finite_scale_with_a_normal_inverse(format: Format) -> None:
    scale = scale_of(torch.tensor(2.0**-149), format)
    assert scale.item() == 2.0**126 and scale.reciprocal().item() == 2.0**-126


def test_margin_leaves_powers_of_two_above_the_amax() -> None:
    assert scale_of(torch.tensor(1.0), E4M3, margin=3).item() == 56.0


# -------------------------------------------------------------------- amax


def reference_amax(x: Tensor, rows: int, columns: int) -> Tensor:
    out = torch.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            out[i : i + rows, j : j + columns] = x[i : i + rows, j : j + columns].abs().max()
    return out


@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (128, 128), (129, 257), (200, 31)])
@pytest.mark.parametrize("granularity", TILES)
def test_elements_share_the_amax_of_their_tile(granularity: Any, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(amax_of(x, granularity).expand_as(x), reference_amax(x, *TILES[granularity]))


@pytest.mark.parametrize("granularity", TILES)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_an_empty_operand_quantizes_to_an_empty_one(granularity: Any, shape: tuple[int, int]) -> None:
    assert quantize(torch.empty(shape), E4M3, granularity).dequantize().shape == shape


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_amax(bad: float) -> None:
    assert not amax_of(torch.tensor([[1.0, bad], [2.0, 3.0]])).isfinite()


# -------------------------------------------------------------------- both together


@pytest.mark.parametrize("granularity", TILES)
@both
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_element_is_off_by_half_a_step_at_most(format: Format, granularity: Any, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 140))
    seed, spread = data.draw(st.integers(0, 10**6)), data.draw(st.integers(0, 12))
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, spread + 1, (rows, columns), generator=generator)
    x = torch.randn(rows, columns, generator=generator) * 2.0**powers
    quantized = quantize(x, format, granularity)
    scaled = x.double() / quantized.scale_inv.double()
    step = 2.0 ** (scaled.abs().log2().floor().clamp(min=format.min_exponent) - format.fraction_bits)
    error = (quantized.values.double() - scaled).abs()
    assert bool((error <= step / 2 * (1 + 2**-18)).all())


def test_the_outlier_rule() -> None:
    """A value of 44800 in E4M3 leaves 100 as scale_inv, and 1 comes back as 0.9765625."""
    quantized = quantize(torch.tensor([44800.0, 1.0]), E4M3)
    assert quantized.scale_inv.item() == pytest.approx(100.0)
    assert quantized.dequantize()[1].item() == pytest.approx(0.9765625)


def test_a_zero_tensor_stays_zero() -> None:
    assert not quantize(torch.zeros(4, 4), E4M3, "row").dequantize().any()


def test_losses_are_counted() -> None:
    x = torch.tensor([0.0, 1e-9, 1.0, 500.0, -1000.0])
    one = torch.ones(())
    assert saturated(x, one, E4M3).item() == 2
    assert nonzeros(x).item() == 4 and nonzeros(quantize(x, E4M3, scale=one).values).item() == 3


@both
@given(amax=st.floats(2.0**-100, 2.0**100, width=32))
@settings(max_examples=200, deadline=None)
def test_what_a_tensor_s_own_scale_brings_to_the_edge_is_not_counted_as_clipped(format: Format, amax: float) -> None:
    x = torch.tensor([amax, -amax, amax * 1.01])
    assert saturated(x[:2], scale_of(x[0], format), format).item() == 0
    assert saturated(x, scale_of(x[0], format), format).item() == 1


def test_sqnr_of_normal_data_is_what_the_formats_give() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    assert sqnr(x, quantize(x, E4M3, "row").dequantize()) == pytest.approx(31.6, abs=0.2)
    assert sqnr(x, quantize(x, E5M2, "row").dequantize()) == pytest.approx(25.6, abs=0.2)
    assert sqnr(x, x) == math.inf and sqnr(torch.zeros(2), torch.ones(2)) == -math.inf
    assert math.isnan(sqnr(torch.tensor([math.inf]), torch.tensor([448.0])))
