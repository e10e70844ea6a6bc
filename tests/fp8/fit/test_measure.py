"""How well scales fit a tensor, against FP64 arithmetic on the formats themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus.formats import E4M3, E5M2, round_to
from lightning_amp_plus.fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Recipe, RowwiseScaling
from lightning_amp_plus.fp8.fit.measure import (
    FIT_COLUMNS,
    OVER_RANKS,
    Batch,
    Fit,
    combined,
    fits_of,
    label_of,
    measured,
    nothing,
    sample_of,
)
from lightning_amp_plus.fp8.quantize import amax_of
from tests.support.fp8_contract import TILES

RECIPES = [
    CurrentScaling(),
    CurrentScaling(power_of_two=True),
    DelayedScaling(margin=1),
    RowwiseScaling(power_of_two=False),
    BlockScaling(),
    MXScaling(),
]
every = pytest.mark.parametrize("recipe", RECIPES, ids=label_of)
operands = pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
ALL = 10**9  # no sample


def normal(*shape: int, seed: int = 0, spread: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, spread + 1, shape, generator=generator)
    return torch.randn(shape, generator=generator) * 2.0**powers


def columns(row: Tensor) -> dict[str, float]:
    return dict(zip(FIT_COLUMNS, row.tolist(), strict=True))


def fit(row: Tensor) -> Fit:
    found = Fit.of([*row.tolist(), -1.0])
    assert found is not None
    return found


def oracle(x: Tensor, operand: Any, recipe: Recipe) -> dict[str, float]:
    """The same by the formats' own rounding in FP64, element by element and tile by tile."""
    x = (x if operand == "weight" else x.bfloat16()).double()
    format, (height, width) = recipe.format_of(operand), TILES[recipe.granularity_of(operand)]
    margin = getattr(recipe, "margin", 0)
    found = dict.fromkeys(FIT_COLUMNS, 0.0) | {"amax": float(x.abs().max()), "scale": math.inf}
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            tile = x[i : i + height, j : j + width]
            amax = float(tile.abs().max())
            scale = float(torch.tensor(format.max_finite / 2**margin / (amax or math.inf), dtype=torch.float32))
            if recipe.power_of_two_scales and amax:
                scale = 2.0 ** math.floor(math.log2(scale))
            scale = scale or math.inf
            quantized = round_to(tile * scale if amax else tile, format, saturate=True)
            found["scale"] = min(found["scale"], scale)
            found["underflowed"] += int(((tile != 0) & (quantized == 0)).sum())
            found["nonzero"] += int((tile != 0).sum())
            found["elements"] += tile.numel()
            found["signal"] += float(tile.square().sum())
            found["noise"] += float((quantized / scale - tile).square().sum())
    return found


# -------------------------------------------------------------------- against the oracle


@every
@operands
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (129, 257), (64, 96)])
def test_all_columns_are_those_of_the_formats(recipe: Recipe, operand: Any, shape: tuple[int, int]) -> None:
    x = normal(*shape, spread=10)
    x[x.abs() < 0.01] = 0.0
    before = x.clone()
    found, wanted = columns(measured(x, operand, recipe, most=ALL)), oracle(x, operand, recipe)
    assert torch.equal(x, before)
    for name in ("underflowed", "nonzero", "elements", "saturated", "amax"):
        assert found[name] == wanted[name], name
    assert found["scale"] == pytest.approx(wanted["scale"], rel=2**-22)
    assert found["signal"] == pytest.approx(wanted["signal"], rel=1e-6)
    assert found["noise"] == pytest.approx(wanted["noise"], rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operands_are_quantized_from_what_backends_take(dtype: torch.dtype) -> None:
    x = normal(16, 64).to(dtype)
    for operand in ("input", "grad_output"):
        assert torch.equal(measured(x, operand, CurrentScaling()), measured(x.bfloat16(), operand, CurrentScaling()))
    wide, narrow = (measured(t, "weight", CurrentScaling()) for t in (x, x.bfloat16()))
    assert torch.equal(wide, narrow) == (dtype == torch.bfloat16)
    assert columns(wide)["signal"] == pytest.approx(float(x.double().square().sum()), rel=1e-12)


def test_with_a_scale_that_is_too_large_the_outer_elements_saturate() -> None:
    x = torch.tensor([[1.0, -2.0, 4.0, 464.0], [0.0, 450.0, -1000.0, 448.0]])
    found = columns(measured(x, "input", DelayedScaling(), torch.tensor(1.0)))
    assert (found["scale"], found["amax"], found["saturated"], found["elements"]) == (1.0, 1000.0, 3.0, 8.0)
    assert found["noise"] == pytest.approx(16**2 + 2**2 + 552**2, rel=1e-12)
    gradient = columns(measured(x, "grad_output", DelayedScaling(), torch.tensor(128.0)))
    assert gradient["saturated"] == 3 and E5M2.max_finite / 128 == 448
    assert fit(measured(x, "input", DelayedScaling(), torch.tensor(1.0))).saturation == 3 / 8


def test_with_a_scale_that_is_too_small_elements_underflow() -> None:
    smallest = E4M3.min_subnormal
    x = torch.tensor([[smallest, smallest / 2, smallest / 4, 0.0, smallest * 0.75, 1.0]])
    found = fit(measured(x, "weight", DelayedScaling(), torch.tensor(1.0)))
    assert found.underflow == 2 / 5  # a tie goes to zero
    assert fit(measured(x, "grad_output", DelayedScaling(), torch.tensor(1.0))).underflow == 0.0  # E5M2 goes on below


def test_a_negative_margin_saturates_by_a_tensor_s_own_scale() -> None:
    x = torch.tensor([[1.0, 0.75, 0.5, 0.25]])
    assert fit(measured(x, "weight", DelayedScaling(margin=-1))).saturation == 0.5
    assert fit(measured(x, "weight", DelayedScaling())).saturation == 0.0


def test_no_scale_held_is_the_tensor_s_own() -> None:
    x = normal(8, 32)
    own = measured(x, "input", DelayedScaling(margin=2))
    assert torch.equal(own, measured(x, "input", DelayedScaling(margin=2), torch.tensor(0.0)))
    assert columns(own)["scale"] == pytest.approx(112 / columns(own)["amax"])


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_sums_neither_vanish_nor_overflow(size: float) -> None:
    plain, scaled = (fit(measured(normal(32, 64) * s, "weight", CurrentScaling())).sqnr for s in (1.0, size))
    assert scaled == pytest.approx(plain, abs=0.3) and plain > 25


def test_normal_data_has_the_sqnr_of_its_format() -> None:
    x = normal(512, 512)
    for operand, decibels in (("input", 31.6), ("grad_output", 25.6)):
        assert fit(measured(x, operand, CurrentScaling(), most=ALL)).sqnr == pytest.approx(decibels, abs=0.3)  # type: ignore[arg-type]


# -------------------------------------------------------------------- awkward tensors


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_sqnr_wherever_it_lies(recipe: Recipe, bad: float) -> None:
    x = normal(2000, 64)
    chosen = sample_of(torch.arange(2000.0).view(-1, 1).expand(2000, 64), most=2**12)[:, 0].long().tolist()
    outside = next(row for row in range(2000) if row not in chosen)
    x[outside, 3] = bad
    row = measured(x, "grad_output", recipe, most=2**12)
    assert math.isnan(fit(row).sqnr) and not math.isfinite(fit(row).amax)
    assert not math.isnan(fit(measured(normal(2000, 64), "grad_output", recipe, most=2**12)).sqnr)


@every
@operands
def test_zeros_fit_exactly(recipe: Recipe, operand: Any) -> None:
    found = fit(measured(torch.zeros(40, 64), operand, recipe))
    assert found == Fit(0.0, 1.0, 0.0, 0.0, math.inf, None)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_an_empty_tensor_gives_zeros_and_no_fit(shape: tuple[int, int]) -> None:
    row = measured(torch.empty(shape), "input", BlockScaling())
    assert row.tolist() == [0.0] * len(FIT_COLUMNS) and Fit.of([*row.tolist(), -1.0]) is None


@every
@operands
def test_nothing_is_asked_of_the_device(recipe: Recipe, operand: Any) -> None:
    x = torch.ones(300, 64, device="meta")  # where whatever asks for a number raises
    with pytest.raises(RuntimeError):
        bool(x[0, 0])
    scale = torch.ones((), device="meta") if isinstance(recipe, DelayedScaling) else None
    assert measured(x, operand, recipe, scale, most=2**10).device.type == "meta"


def test_a_transposed_matrix_is_read_as_it_is() -> None:
    x = normal(48, 160)
    for recipe in RECIPES:
        assert torch.equal(measured(x.t(), "input", recipe), measured(x.t().contiguous(), "input", recipe))


# -------------------------------------------------------------------- samples


@every
@operands
def test_a_sample_tells_what_the_whole_would(recipe: Recipe, operand: Any) -> None:
    x = normal(3000, 160, spread=1) * (1 + torch.arange(3000) % 16).view(-1, 1)
    x[1234, 5] = 3e6
    whole, part = (measured(x, operand, recipe, most=most) for most in (ALL, 2**15))
    assert columns(whole)["amax"] == columns(part)["amax"] and columns(whole)["scale"] == columns(part)["scale"]
    assert 2**13 <= columns(part)["elements"] <= 2**16 < columns(whole)["elements"]
    # An element in a million that decides over a tile's scale, or over the sum of squares, is no matter for a sample.
    one, other = fit(whole), fit(part)
    assert other.underflow == pytest.approx(one.underflow, abs=0.03)
    if recipe.one_scale_a_tensor and not recipe.power_of_two_scales:  # the outlier itself is exact then
        assert one.underflow > 0.05 or operand == "grad_output"
        noises = [columns(row)["noise"] / columns(row)["elements"] for row in (whole, part)]
        assert noises[1] == pytest.approx(noises[0], rel=0.1)
    clean = [fit(measured(x.clamp(-100, 100), operand, recipe, most=most)).sqnr for most in (ALL, 2**15)]
    assert clean[1] == pytest.approx(clean[0], abs=0.3)


@pytest.mark.parametrize("period", [2, 8, 32, 128, 512])
def test_samples_fall_into_step_with_no_period(period: int) -> None:
    rows = sample_of(torch.arange(4096.0).view(-1, 1).expand(4096, 64).contiguous(), most=64 * 128)[:, 0].long()
    assert len(rows) == 128 and torch.equal(rows, rows.unique())
    assert rows.diff().max() < 2 * 32
    seen = torch.bincount(rows % period // max(1, period // 8), minlength=min(8, period))
    assert seen.min() >= 128 // min(8, period) // 2


@pytest.mark.parametrize("count", [300, 384, 1000])
def test_samples_by_tiles_are_of_whole_tiles(count: int) -> None:
    x = torch.arange(float(count)).view(-1, 1).expand(count, 8)
    rows = sample_of(x, tiles=True, most=8 * 128)[:, 0].long().tolist()
    first = rows[0]
    assert first % 128 == 0 and rows == list(range(first, min(first + 128, count)))
    assert sample_of(x, tiles=True, most=ALL).shape == x.shape


def test_of_very_long_rows_there_are_some_still() -> None:
    assert sample_of(torch.zeros(100, 4096), most=1024).shape == (4, 4096)


def test_a_sample_is_a_copy() -> None:
    x = normal(8, 8)
    sample, before = sample_of(x), x.clone()
    x.zero_()
    assert torch.equal(sample, before)


# -------------------------------------------------------------------- together


@every
@operands
@pytest.mark.parametrize("shape", [(130, 96), (128, 160)])
def test_tensors_measured_together_are_measured_as_alone(recipe: Recipe, operand: Any, shape: tuple[int, int]) -> None:
    tensors = [normal(*shape, seed=seed, spread=4) * 10.0**seed for seed in range(3)]
    batch = Batch(tensors, [amax_of(x) for x in tensors], operand)
    alone = torch.stack([measured(x, operand, recipe, most=ALL) for x in tensors])
    assert torch.allclose(batch.measured(recipe), alone, rtol=1e-9, atol=0)
    if isinstance(recipe, DelayedScaling):
        held = torch.tensor([2.0, 0.0, 8.0])
        assert batch.measured(recipe, held)[:, 1].tolist() == [2.0, alone[1, 1].item(), 8.0]


def test_tensors_add_up_as_their_elements_do() -> None:
    parts = [normal(32, 64, seed=seed) for seed in range(2)]
    scale = torch.tensor(50.0)
    rows = [measured(x, "input", DelayedScaling(), scale).unsqueeze(0) for x in parts]
    both = combined(combined(nothing(1, torch.device("cpu")), rows[0]), rows[1])[0]
    assert torch.allclose(both, measured(torch.cat(parts), "input", DelayedScaling(), scale), rtol=1e-9)
    smaller = combined(rows[0], measured(parts[1], "input", DelayedScaling(), scale / 2).unsqueeze(0))
    assert smaller[0, 1].item() == 25.0


def test_ranks_take_together_what_micro_batches_do() -> None:
    rows = torch.rand(2, len(FIT_COLUMNS), dtype=torch.float64)
    over = {"max": rows.amax(0), "min": rows.amin(0), "sum": rows.sum(0)}
    wanted = torch.stack([over[kind][column] for column, kind in enumerate(OVER_RANKS[:-1])])
    assert torch.equal(combined(rows[:1], rows[1:])[0], wanted)
    assert len(OVER_RANKS) == len(FIT_COLUMNS) + 1


def test_numbers_become_fits_by_recipe_layer_and_operand() -> None:
    numbers = torch.cat([nothing(12, torch.device("cpu")), torch.full((12, 1), -1.0, dtype=torch.float64)], dim=1)
    numbers[1] = torch.tensor([2.0, 3.0, 1.0, 2.0, 8.0, 10.0, 100.0, 1.0, -1.0])  # own, a, weight
    numbers[11] = torch.tensor([2.0, 3.0, 0.0, 0.0, 0.0, 10.0, 0.0, 0.0, 4.0])  # tried, b, grad_output
    own, what_if = fits_of(numbers, ["a", "b"], ["mx"])
    assert own == {"a": {"weight": Fit(2.0, 3.0, 0.1, 0.25, pytest.approx(20.0), None)}}
    assert what_if == {"mx": {"b": {"grad_output": Fit(2.0, 3.0, 0.0, 0.0, math.inf, 4)}}}


def test_labels_name_what_is_unusual() -> None:
    assert label_of(DelayedScaling()) == "delayed" and label_of(MXScaling()) == "mx"
    assert label_of(DelayedScaling(history=16, amax="most_recent")) == "delayed(history=16,amax=most_recent)"
