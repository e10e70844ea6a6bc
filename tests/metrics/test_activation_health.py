"""ActivationHealth: what the bits say equals what FP64 says, in every format and at every length."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_amp_plus.metrics import ActivationHealth, activation_health
from lightning_amp_plus.metrics.activation_health import LARGEST, Scratch, from_bits, health_bits

DTYPES = list(LARGEST)


def obvious(values: Tensor) -> tuple[float, float, float, float]:
    numbers = [abs(value) for value in values.double().flatten().tolist()]
    finite = [number for number in numbers if math.isfinite(number)]
    amax = math.nan if any(map(math.isnan, numbers)) else max(numbers)
    smallest = min((number for number in finite if number), default=math.inf)
    room = (
        math.inf if amax == 0 else math.log2(LARGEST[values.dtype]) - math.log2(amax) if math.isfinite(amax) else -amax
    )
    return amax, smallest, 1 - len(finite) / len(numbers), room


def agree(found: tuple[Tensor, ...], wanted: tuple[float, ...]) -> None:
    for number, other in zip(found, wanted, strict=True):
        assert float(number) == pytest.approx(other, rel=1e-12, abs=1e-12, nan_ok=True)


def mixed(size: int, dtype: torch.dtype) -> Tensor:
    """Numbers over the whole range, zeros of both signs, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(size)
    values = (torch.randn(size, generator=generator) * torch.logspace(-3, 1, size)).to(dtype)
    for start, special in ((5, 0.0), (6, -0.0), (11, math.inf), (12, -math.inf), (23, math.nan)):
        values[start::37] = torch.tensor(special, dtype=torch.float32).to(dtype)
    return values


@pytest.mark.parametrize("size", [1, 2, 3, 60, 127, 128, 1000, 32767, 32768, 40001, 262144, 300001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_what_fp64_says(dtype: torch.dtype, size: int) -> None:
    agree(activation_health(mixed(size, dtype)), obvious(mixed(size, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [0.0, -0.0, math.nan, 1.0])
@pytest.mark.parametrize("size", [1, 4096, 2**18, 2**18 + 1])
def test_tensors_of_one_number(dtype: torch.dtype, special: float, size: int) -> None:
    values = torch.full((size,), special).to(dtype)
    agree(activation_health(values), obvious(values[:1]))


def test_all_infinite_in_a_piece_as_large_as_can_be() -> None:
    values = torch.full((2**18,), -math.inf, dtype=torch.bfloat16)
    agree(activation_health(values), (math.inf, math.inf, 1.0, -math.inf))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_any_fp32_numbers(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    agree(activation_health(values), obvious(values))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40), st.sampled_from([torch.float16, torch.bfloat16]))
def test_any_patterns_of_16_bits(patterns: list[int], dtype: torch.dtype) -> None:
    values = torch.tensor([struct.unpack("<h", struct.pack("<H", p))[0] for p in patterns], dtype=torch.int16)
    agree(activation_health(values.view(dtype)), obvious(values.view(dtype)))


@pytest.mark.parametrize("values", [torch.randn(6, 4).t(), torch.randn(8, 8)[::2, 1:7], torch.randn(2, 3, 4, 5).to(
    memory_format=torch.channels_last)])  # fmt: skip
def test_any_layout_of_memory(values: Tensor) -> None:
    agree(activation_health(values), obvious(values))


def test_15_million_elements() -> None:
    values = torch.randn(15_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[::1000] = math.inf
    health = activation_health(values)
    assert float(health.nonfinite) == 15_000 / 15_000_000
    finite = values[values.isfinite()].double().abs()
    assert float(health.smallest) == float(finite[finite > 0].min())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_that_cannot_be_asked_is_not(dtype: torch.dtype, rows: int) -> None:
    meta = from_bits(health_bits(torch.empty(rows, 40001, dtype=dtype, device="meta"), Scratch()), dtype)
    assert meta.device.type == "meta" and meta.shape == (rows, 3)


def test_metric_over_updates_is_that_of_all_elements_together() -> None:
    metric = ActivationHealth()
    parts = [mixed(60, torch.float16), torch.zeros(7, dtype=torch.float16), mixed(1000, torch.float16)]
    for part in parts:
        metric.update(part)
    agree(tuple(metric.compute().values()), obvious(torch.cat(parts)))


def test_metric_before_the_first_update() -> None:
    assert {name: float(value) for name, value in ActivationHealth().compute().items()} == {
        "amax": 0.0, "smallest": math.inf, "nonfinite": 0.0, "headroom": math.inf}  # fmt: skip


def test_headroom_of_several_formats_is_that_of_the_fullest() -> None:
    metric = ActivationHealth()
    metric.update(torch.tensor([16376.0], dtype=torch.float16))
    metric.update(torch.tensor([1e6], dtype=torch.float32))
    assert float(metric.compute()["headroom"]) == 2.0 and float(metric.compute()["amax"]) == 1e6


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [(torch.ones(3, dtype=torch.int64), TypeError, "floating-point.*int64"), (torch.ones(0, 2), ValueError, r"\(0, 2\)")],
)  # fmt: skip
def test_what_it_cannot_look_at_is_named(values: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        activation_health(values)
    with pytest.raises(error, match=words):
        ActivationHealth().update(values)
