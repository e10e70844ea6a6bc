"""Number formats against torch's own casts, against an exact reference, and against the published figures."""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lightning_amp_plus.formats import (
    BF16,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    Format,
    ScaleWindow,
    relative_error_bound,
    round_to,
    scale_window,
)

INF = math.inf
NARROW = [BF16, FP16, E4M3, E5M2]
IEEE = [FP32, BF16, FP16, E5M2]
# A loaded machine must not fail a property.
UNTIMED = settings(deadline=None)
FP64_INPUTS = st.floats(allow_nan=False)
FP32_INPUTS = st.floats(width=32, allow_nan=False)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
every_narrow_format = pytest.mark.parametrize("fmt", NARROW, ids=str)


def every_value(fmt: Format) -> torch.Tensor:
    """All bit patterns of a narrow format, in its own dtype."""
    bits = torch.arange(2 ** (1 + fmt.exponent_bits + fmt.fraction_bits))
    storage = torch.int16 if bits.numel() > 256 else torch.uint8
    return bits.to(storage).view(fmt.dtype)


@cache
def positive_finite(fmt: Format) -> list[float]:
    """Zero and the positive finite values in ascending order, read off the bit patterns: position equals pattern."""
    values = every_value(fmt).double()
    not_negative = values[: values.numel() // 2]
    return not_negative[torch.isfinite(not_negative)].tolist()


def round_exactly(x: float, fmt: Format) -> float:
    """Nearest table entry by exact fractions, ties to the even bit pattern: shares nothing with `round_to`."""
    table = positive_finite(fmt)
    magnitude = abs(x)
    last_step = table[-1] - table[-2]
    if magnitude > table[-1]:
        past = INF if fmt.has_inf else table[-1]
        # The pattern after the largest finite one is even in the formats with infinity, so the tie goes up.
        result = past if magnitude >= table[-1] + last_step / 2 else table[-1]
    else:
        below = bisect_right(table, magnitude) - 1
        above = min(below + 1, len(table) - 1)
        to_below = Fraction(magnitude) - Fraction(table[below])
        to_above = Fraction(table[above]) - Fraction(magnitude)
        index = below if to_below < to_above or (to_below == to_above and below % 2 == 0) else above
        result = table[index]
    return math.copysign(result, x)


def assert_identical(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the bit, signs of zeros included; any NaN equals any NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    numbers = ~torch.isnan(expected)
    assert torch.equal(torch.signbit(actual[numbers]), torch.signbit(expected[numbers]))


class TestFigures:
    @pytest.mark.parametrize(
        ("fmt", "exponent", "fraction", "bias", "max_finite", "min_normal", "min_subnormal", "epsilon", "has_inf"),
        [
            (FP32, 8, 23, 127, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23, True),
            (BF16, 8, 7, 127, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7, True),
            (FP16, 5, 10, 15, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, True),
            (E4M3, 4, 3, 7, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, False),
            (E5M2, 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, True),
        ],
        ids=lambda value: str(value) if isinstance(value, Format) else "",
    )
    def test_published_figures(
        self, fmt, exponent, fraction, bias, max_finite, min_normal, min_subnormal, epsilon, has_inf
    ):
        assert (fmt.exponent_bits, fmt.fraction_bits, fmt.bias, fmt.has_inf) == (exponent, fraction, bias, has_inf)
        assert fmt.max_finite == max_finite
        assert fmt.min_normal == min_normal
        assert fmt.min_subnormal == min_subnormal
        assert fmt.epsilon == epsilon
        assert fmt.unit_roundoff == epsilon / 2 == relative_error_bound(fmt)

    @every_format
    def test_figures_agree_with_torch(self, fmt):
        info = torch.finfo(fmt.dtype)
        assert (fmt.max_finite, fmt.min_normal, fmt.epsilon) == (info.max, info.tiny, info.eps)

    @every_narrow_format
    def test_figures_agree_with_the_bit_patterns(self, fmt):
        table = positive_finite(fmt)
        assert fmt.min_subnormal == table[1]
        assert fmt.min_normal == table[2**fmt.fraction_bits]
        assert fmt.max_finite == table[-1]
        assert fmt.max_finite / 2 < 2.0**fmt.max_exponent <= fmt.max_finite
        assert fmt.has_inf == bool(torch.isinf(every_value(fmt).float()).any())

    def test_overflow_and_underflow_edges_of_fp16(self):
        assert FP16.overflow_threshold == 65520.0
        assert FP16.underflow_threshold == 2.0**-25
        assert round_to(65519.0, FP16) == 65504.0
        assert round_to(65520.0, FP16) == INF
        assert round_to(2.0**-25, FP16) == 0.0
        assert round_to(math.nextafter(2.0**-25, 1.0), FP16) == 2.0**-24

    @pytest.mark.parametrize("fmt", IEEE, ids=str)
    def test_overflow_threshold_is_the_first_magnitude_that_becomes_infinite(self, fmt):
        edge = fmt.overflow_threshold
        assert round_to(edge, fmt) == INF
        assert round_to(-edge, fmt) == -INF
        assert round_to(math.nextafter(edge, 0.0), fmt) == fmt.max_finite

    def test_overflow_threshold_of_e4m3_is_the_tie_that_stays_at_448(self):
        assert E4M3.overflow_threshold == 464.0
        # Were 480 a number, 464 would be midway between it and 448, whose fraction is even. A format with the same
        # fraction and one more exponent bit has 480, and shows which way the tie goes.
        wider = Format("E5M3", exponent_bits=5, fraction_bits=3, has_inf=False, dtype=torch.float32)
        assert round_to(464.0, wider) == 448.0
        assert round_to(math.nextafter(464.0, INF), wider) == 480.0

    @every_format
    def test_underflow_threshold_is_the_last_magnitude_that_becomes_zero(self, fmt):
        edge = fmt.underflow_threshold
        assert math.copysign(1.0, round_to(-edge, fmt)) == -1.0
        assert round_to(edge, fmt) == 0.0 == round_to(-edge, fmt)
        assert round_to(math.nextafter(edge, 1.0), fmt) == fmt.min_subnormal


class TestLookup:
    @every_format
    def test_by_dtype_and_by_every_spelling(self, fmt):
        dtype_name = str(fmt.dtype)
        for which in (fmt.dtype, fmt.name, fmt.name.lower(), dtype_name, dtype_name.removeprefix("torch.")):
            assert Format.of(which) is fmt

    @pytest.mark.parametrize("which", ["fp13", "", torch.int8, torch.float8_e4m3fnuz, torch.float64])
    def test_unknown_format_lists_those_that_exist(self, which):
        with pytest.raises(ValueError, match="no number format") as error:
            Format.of(which)
        message = str(error.value)
        assert repr(which) in message
        assert all(fmt.name in message and str(fmt.dtype) in message for fmt in FORMATS)

    def test_a_format_is_a_value(self):
        twin = Format("FP16", 5, 10, True, torch.float16)
        assert twin == FP16
        assert {FP16: "found"}[twin] == "found"
        assert twin != BF16
        with pytest.raises(AttributeError):
            FP16.exponent_bits = 6
        assert str(FP16) == "FP16"

    @pytest.mark.parametrize(
        ("bits", "field"),
        [((1, 3), "exponent_bits"), ((9, 3), "exponent_bits"), ((5, 0), "fraction_bits"), ((5, 24), "fraction_bits")],
    )
    def test_bit_counts_out_of_range_are_refused(self, bits, field):
        with pytest.raises(ValueError, match=f"format odd: {field} is .*, expected"):
            Format("odd", *bits, has_inf=True, dtype=torch.float32)


class TestRoundingAgainstTorchCasts:
    @every_narrow_format
    def test_every_bit_pattern_is_a_fixed_point(self, fmt):
        values = every_value(fmt)
        if not fmt.has_inf:
            assert not torch.isinf(values.float()).any()
        rounded = round_to(values, fmt)
        assert rounded.dtype == torch.float32
        assert_identical(rounded, values.float())
        back = rounded.to(fmt.dtype)
        numbers = ~torch.isnan(values.float())
        storage = torch.int16 if values.element_size() == 2 else torch.uint8
        assert torch.equal(back.view(storage)[numbers], values.view(storage)[numbers])

    @every_narrow_format
    @pytest.mark.parametrize("source", [FP16, BF16], ids=str)
    def test_every_16_bit_value_rounds_as_the_cast(self, source, fmt):
        values = every_value(source)
        assert_identical(round_to(values, fmt), values.to(fmt.dtype).float())

    @every_narrow_format
    def test_every_tie_and_its_two_neighbors_round_as_the_cast(self, fmt):
        table = torch.tensor([*positive_finite(fmt), 2 * fmt.overflow_threshold - fmt.max_finite], dtype=torch.float64)
        table = table[table <= FP32.max_finite]
        ties = (table[1:] / 2 + table[:-1] / 2).float()
        assert torch.equal(ties.double(), table[1:] / 2 + table[:-1] / 2)
        ties = torch.cat([ties, torch.tensor([fmt.overflow_threshold]).float()])
        probes = torch.cat(
            [ties, torch.nextafter(ties, ties.new_tensor(INF)), torch.nextafter(ties, ties.new_tensor(0.0))]
        )
        probes = torch.cat([probes, -probes])
        assert_identical(round_to(probes, fmt), probes.to(fmt.dtype).float())

    @every_narrow_format
    def test_random_fp32_bit_patterns_round_as_the_cast(self, fmt):
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator, dtype=torch.int64)
        values = bits.to(torch.int32).view(torch.float32)
        subnormal = values.ne(0) & (values.abs() < FP32.min_normal)
        assert subnormal.any() and values.isnan().any() and (values.abs() > 1e38).any()
        assert_identical(round_to(values, fmt), values.to(fmt.dtype).float())

    @every_narrow_format
    @UNTIMED
    @given(x=FP32_INPUTS)
    @example(x=0.0)
    @example(x=-0.0)
    @example(x=INF)
    @example(x=-INF)
    @example(x=2.0**-149)
    @example(x=FP32.max_finite)
    def test_any_fp32_number_rounds_as_the_cast(self, fmt, x):
        assert_identical(torch.tensor([round_to(x, fmt)]), torch.tensor([x], dtype=torch.float32).to(fmt.dtype).float())

    @UNTIMED
    @given(x=FP64_INPUTS)
    @example(x=FP32.overflow_threshold)
    @example(x=math.nextafter(FP32.overflow_threshold, 0.0))
    @example(x=2.0**-150)
    @example(x=math.nextafter(2.0**-150, 1.0))
    def test_any_fp64_number_rounds_to_fp32_as_the_cast(self, x):
        wide = torch.tensor([x], dtype=torch.float64)
        assert_identical(round_to(wide, FP32), wide.float().double())


class TestRoundingAgainstTheExactReference:
    @every_narrow_format
    @UNTIMED
    @given(x=FP64_INPUTS)
    def test_any_fp64_number(self, fmt, x):
        assert_identical(torch.tensor([round_to(x, fmt)]), torch.tensor([round_exactly(x, fmt)]))

    @every_narrow_format
    @UNTIMED
    @given(data=st.data())
    def test_numbers_close_to_a_tie(self, fmt, data):
        table = positive_finite(fmt)
        index = data.draw(st.integers(0, len(table) - 2))
        tie = (table[index] + table[index + 1]) / 2
        # Far less than one FP32 step away: a cast through FP32 would see the tie itself.
        offset = data.draw(st.integers(-3, 3)) * math.ulp(tie)
        assert round_to(tie + offset, fmt) == round_exactly(tie + offset, fmt)

    @UNTIMED
    @given(x=st.floats(min_value=-70000, max_value=70000, width=32))
    def test_fp32_to_fp16(self, x):
        assert round_to(x, FP16) == round_exactly(x, FP16)

    def test_double_rounding_is_avoided(self):
        x = 1.0 + 2.0**-8 + 2.0**-26
        assert round_to(x, BF16) == 1.0078125
        assert round_to(torch.tensor(x, dtype=torch.float64), BF16).item() == 1.0078125
        assert round_to(round_to(x, FP32), BF16) == 1.0
        # The reason why torch's cast is no reference for FP64 inputs.
        assert torch.tensor(x, dtype=torch.float64).to(torch.bfloat16).item() == 1.0


class TestRoundingProperties:
    @every_format
    @UNTIMED
    @given(x=FP64_INPUTS, y=FP64_INPUTS)
    def test_monotonic(self, fmt, x, y):
        low, high = sorted((x, y))
        assert round_to(low, fmt) <= round_to(high, fmt)

    @every_format
    @UNTIMED
    @given(x=FP64_INPUTS, saturate=st.booleans())
    def test_idempotent(self, fmt, x, saturate):
        once = round_to(x, fmt, saturate=saturate)
        assert round_to(once, fmt, saturate=saturate) == once

    @every_format
    @UNTIMED
    @given(x=FP64_INPUTS)
    def test_odd(self, fmt, x):
        assert round_to(-x, fmt) == -round_to(x, fmt)
        assert math.copysign(1.0, round_to(x, fmt)) == math.copysign(1.0, x)

    @every_format
    @UNTIMED
    @given(data=st.data())
    def test_relative_error_is_bounded_in_the_normal_range(self, fmt, data):
        x = data.draw(st.floats(min_value=fmt.min_normal, max_value=fmt.max_finite))
        error = abs(Fraction(round_to(x, fmt)) - Fraction(x))
        assert error <= Fraction(relative_error_bound(fmt)) * Fraction(x)

    @every_format
    def test_relative_error_bound_is_not_loose_and_not_for_subnormals(self, fmt):
        bound = relative_error_bound(fmt)
        worst = 1.0 + fmt.unit_roundoff
        assert abs(round_to(worst, fmt) - worst) / worst > 0.8 * bound
        below_normal = 1.5 * fmt.min_subnormal
        assert abs(round_to(below_normal, fmt) - below_normal) / below_normal > bound

    @every_format
    @UNTIMED
    @given(x=FP64_INPUTS)
    @example(x=INF)
    @example(x=-INF)
    def test_saturation_clamps_and_changes_nothing_else(self, fmt, x):
        plain, saturated = round_to(x, fmt), round_to(x, fmt, saturate=True)
        assert math.isfinite(saturated)
        assert saturated == (plain if math.isfinite(plain) else math.copysign(fmt.max_finite, x))

    @every_format
    @pytest.mark.parametrize("saturate", [False, True])
    def test_nan_stays_nan(self, fmt, saturate):
        assert math.isnan(round_to(math.nan, fmt, saturate=saturate))
        tensor = round_to(torch.tensor([1.0, math.nan]), fmt, saturate=saturate)
        assert tensor.isnan().tolist() == [False, True]

    def test_what_overflows_goes_to_infinity_or_to_448(self):
        x = torch.tensor([1e30, -1e30, INF, -INF])
        assert round_to(x, E4M3).tolist() == [448.0, -448.0, 448.0, -448.0]
        assert round_to(x, E5M2).tolist() == [INF, -INF, INF, -INF]
        assert round_to(x, E5M2, saturate=True).tolist() == [57344.0, -57344.0, 57344.0, -57344.0]
        assert round_to(1e308, E5M2) == INF
        assert round_to(1.7976931348623157e308, FP32) == INF


class TestKindOfResult:
    @pytest.mark.parametrize(
        ("dtype", "result"),
        [
            (torch.float64, torch.float64),
            (torch.float32, torch.float32),
            (torch.float16, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float8_e4m3fn, torch.float32),
            (torch.float8_e5m2, torch.float32),
        ],
    )
    def test_tensor_dtypes(self, dtype, result):
        x = torch.tensor([[1.0, -2.5, 0.0]]).to(dtype)
        rounded = round_to(x, E5M2)
        assert rounded.dtype == result
        assert rounded.tolist() == [[1.0, -2.5, 0.0]]

    def test_a_number_gives_a_float(self):
        assert type(round_to(1.1, FP16)) is float
        assert type(round_to(3, FP16)) is float

    def test_input_is_neither_changed_nor_shared_nor_tracked(self):
        x = torch.tensor([1.0 + 2.0**-12, 2.0], dtype=torch.float64, requires_grad=True)
        rounded = round_to(x, FP16)
        assert not rounded.requires_grad
        rounded.zero_()
        assert x.tolist() == [1.0 + 2.0**-12, 2.0]

    def test_strided_empty_and_scalar_tensors(self):
        strided = torch.linspace(0, 7, 24).reshape(4, 6).t()[::2]
        assert not strided.is_contiguous()
        assert_identical(round_to(strided, E4M3), strided.to(E4M3.dtype).float())
        wide = strided.double()
        assert_identical(round_to(wide, E4M3), strided.to(E4M3.dtype).double())
        assert round_to(torch.empty(0, 3), FP16).shape == (0, 3)
        assert round_to(torch.tensor(65520.0), FP16).item() == INF

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_other_dtypes_are_refused(self, dtype):
        with pytest.raises(TypeError, match=f"floating-point tensors; this one is {dtype}"):
            round_to(torch.ones(2, dtype=dtype), FP16)


class TestArithmeticThatUsersMeet:
    def test_summing_ones_one_by_one_stalls_in_bf16_only(self):
        sums = {}
        for fmt in (BF16, FP16):
            total = 256.0
            for _ in range(256):
                total = round_to(total + 1.0, fmt)
            sums[fmt.name] = total
        assert sums == {"BF16": 256.0, "FP16": 512.0}
        assert round_to(512.0, BF16) == 512.0

    def test_an_update_below_half_a_step_vanishes(self):
        assert round_to(1.0 - 1e-3, BF16) == 1.0
        assert round_to(1.0 - 1e-3, FP16) < 1.0

    def test_a_small_gradient_survives_only_when_scaled(self):
        assert round_to(1e-8, FP16) == 0.0
        assert round_to(1e-8 * 1024, FP16) / 1024 == pytest.approx(1.001e-8, rel=1e-3)

    def test_an_outlier_takes_the_resolution_of_the_rest(self):
        scale_inv = 44800.0 / E4M3.max_finite
        assert scale_inv == 100.0
        assert round_to(1.0 / scale_inv, E4M3) * scale_inv == 0.9765625


class TestScaleWindow:
    def test_no_scale_exists(self):
        window = scale_window(1e-8, 1e5, FP16)
        assert window.low == pytest.approx(2.98023224, rel=1e-8)
        assert window.high == pytest.approx(0.65504, rel=1e-12)
        assert not window.low_inclusive
        assert not window.exists
        assert window.largest_power_of_two is None
        assert 1.0 not in window
        text = str(window)
        assert text.startswith("no scale exists: in FP16, gradients of 1e-08 need a scale of")
        assert "more than 2.98023224" in text and "at most 0.65504" in text and "more exponent bits" in text

    def test_a_window_and_its_largest_power_of_two(self):
        window = scale_window(1e-8, 1e-2, FP16)
        assert window.exists
        assert window.largest_power_of_two == 2.0**22
        assert 2.0**22 in window and 2.0 not in window and 2.0**23 not in window
        assert str(window) == (
            "gradients from 1e-08 to 0.01 fit FP16 with a scale in (2.98023224, 6550400]; "
            "largest power of two inside: 4194304"
        )

    def test_the_lower_end_is_open_and_the_upper_end_closed(self):
        window = scale_window(2.0**-30, 65504.0 / 2.0**6, FP16)
        assert (window.low, window.high) == (2.0**5, 2.0**6)
        assert 2.0**5 not in window
        assert 2.0**6 in window and window.largest_power_of_two == 2.0**6

    def test_where_subnormals_are_flushed_the_lower_end_is_closed_and_higher(self):
        window = scale_window(2.0**-30, 0.5, FP16, flush_subnormals=True)
        assert window.low == FP16.min_normal / 2.0**-30 == 2.0**16
        assert window.low_inclusive
        assert 2.0**16 in window and window.largest_power_of_two == 2.0**16
        assert "in [65536, 131008]" in str(window)
        text = str(scale_window(1e-8, 1e5, FP16, flush_subnormals=True))
        assert "no scale exists" in text and "at least 6103.51562" in text and "stay normal" in text

    def test_a_window_of_one_scale_exists_only_when_closed(self):
        g_max = FP16.max_finite / 2.0**16
        closed = scale_window(2.0**-30, g_max, FP16, flush_subnormals=True)
        assert closed.low == closed.high == 2.0**16
        assert closed.exists and closed.largest_power_of_two == 2.0**16
        opened = scale_window(2.0**-41, g_max, FP16)
        assert opened.low == opened.high == 2.0**16
        assert not opened.exists and opened.largest_power_of_two is None

    def test_a_window_between_two_powers_of_two_says_so(self):
        window = scale_window(2.0**-25 / 1.1, 65504.0 / 1.9, FP16)
        assert window.exists and 1.5 in window
        assert window.largest_power_of_two is None
        assert "no power of two inside" in str(window)

    def test_bf16_needs_no_scale_where_fp16_has_none(self):
        assert 1.0 in scale_window(1e-8, 1e5, BF16)

    @every_format
    @settings(UNTIMED, max_examples=50)
    @given(data=st.data())
    def test_inside_means_that_both_ends_survive_the_rounding(self, fmt, data):
        magnitudes = st.floats(min_value=1e-30, max_value=1e30)
        g_min, g_max = sorted((data.draw(magnitudes), data.draw(magnitudes)))
        flush = data.draw(st.booleans())
        window = scale_window(g_min, g_max, fmt, flush_subnormals=flush)
        end = data.draw(st.sampled_from([window.low, window.high]))
        scale = data.draw(st.sampled_from([end, math.nextafter(end, 0.0), math.nextafter(end, INF), 1.0]))
        assume(0.0 < scale < INF)
        smallest, largest = Fraction(scale) * Fraction(g_min), Fraction(scale) * Fraction(g_max)
        survives = smallest >= fmt.min_normal if flush else smallest > fmt.underflow_threshold
        assert (scale in window) == (survives and largest <= fmt.max_finite)
        if scale in window:
            assert window.exists

    @every_format
    @settings(UNTIMED, max_examples=50)
    @given(data=st.data())
    def test_largest_power_of_two_keeps_both_ends(self, fmt, data):
        g_min = data.draw(st.floats(min_value=1e-20, max_value=1e20))
        g_max = g_min * data.draw(st.floats(min_value=1.0, max_value=fmt.max_finite / fmt.min_subnormal / 2))
        power = scale_window(g_min, g_max, fmt).largest_power_of_two
        assert power is not None, "a range of less than half the span of the format always leaves one"
        assert math.frexp(power)[0] == 0.5
        assert round_to(power * g_min, fmt) > 0.0
        assert power * g_max <= fmt.max_finite < 2 * power * g_max

    @pytest.mark.parametrize("bad", [0.0, -1e-8, math.nan, INF])
    def test_magnitudes_that_are_not_positive_and_finite_are_refused(self, bad):
        with pytest.raises(ValueError, match=f"g_min is {bad}; expected a positive, finite"):
            scale_window(bad, 1.0, FP16)
        with pytest.raises(ValueError, match=f"g_max is {bad}; expected a positive, finite"):
            scale_window(1.0, bad, FP16)

    def test_swapped_magnitudes_are_refused(self):
        with pytest.raises(ValueError, match=r"g_min 2\.0 exceeds g_max 1\.0"):
            scale_window(2.0, 1.0, FP16)

    def test_ends_beyond_the_floats_stay_in_order(self):
        lost = scale_window(5e-324, 1.0, FP16)
        assert not lost.exists and lost.largest_power_of_two is None
        assert not scale_window(5e-324, 1.0, FP16, flush_subnormals=True).exists
        tiny = scale_window(5e-324, 5e-324, FP32)
        assert tiny.exists and tiny.largest_power_of_two == 2.0**1023

    def test_a_window_is_a_value(self):
        window = scale_window(1e-8, 1e-2, FP16)
        assert isinstance(window, ScaleWindow)
        assert window == scale_window(1e-8, 1e-2, FP16)
        with pytest.raises(AttributeError):
            window.low = 0.0
