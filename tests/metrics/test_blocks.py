"""Blocks: every reduction by tensor equals the obvious one, whatever is stacked or cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus.metrics.blocks import Blocks


def made(shapes: list[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


SHAPES = st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 40))
def test_sum_and_max_by_tensor_are_those_of_each_tensor(shapes: list[tuple[int, ...]], elements: int) -> None:
    tensors = made(shapes)
    blocks = Blocks(tensors, elements)
    matrices = list(blocks.of(tensors))
    assert all(matrix.numel() <= max(elements, 1) or matrix.shape[0] == 1 for matrix in matrices)
    sums = blocks.sum([torch.stack([m.double().sum(1), m.double().square().sum(1)], 1) for m in matrices])
    peaks = blocks.max([m.abs().amax(1, keepdim=True) for m in matrices])
    if not matrices:
        assert sums.shape == peaks.shape == (len(tensors), 0)
        return
    for position, tensor in enumerate(tensors):
        wanted = [tensor.double().sum(), tensor.double().square().sum()]
        assert torch.allclose(sums[position], torch.stack(wanted), rtol=1e-9, atol=1e-9)
        assert peaks[position, 0] == (tensor.abs().amax() if tensor.numel() else 0)


def test_lists_stay_aligned_also_where_memory_is_transposed() -> None:
    weight = torch.randn(6, 4).t()
    state = torch.empty_like(weight).copy_(weight * 2)
    other = (weight * 2).contiguous()
    for second in (state, other):
        blocks = Blocks([weight, weight])
        for left, right in blocks.together([weight, weight], [second, second]):
            assert torch.equal(left * 2, right)


def test_the_largest_passes_nan_on() -> None:
    tensors = [torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), torch.zeros(0)]
    blocks = Blocks(tensors)
    found = blocks.max([m.abs().amax(1, keepdim=True) for m in blocks.of(tensors)], empty=-1.0).flatten()
    assert found[0].isnan() and found[1:].tolist() == [2.0, -1.0]


def test_dtypes_are_not_mixed_and_small_tensors_share_ops() -> None:
    class Count(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops += "view" not in str(func) and "aten" in str(func)
            return func(*args, **(kwargs or {}))

    tensors = [torch.ones(64) for _ in range(200)] + [torch.ones(64, dtype=torch.bfloat16) for _ in range(200)]
    blocks = Blocks(tensors)
    assert len(blocks) == 2
    with Count() as count:
        found = blocks.sum([matrix.double().sum(1, keepdim=True) for matrix in blocks.of(tensors)])
    assert count.ops < 20 and found.flatten().tolist() == [64.0] * 400


@pytest.mark.parametrize("size", [15_000_000])
def test_a_sum_of_squares_of_many_elements_keeps_its_digits(size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).abs() + 0.5
    blocks = Blocks([tensor])
    found = blocks.sum([matrix.square().sum(1, keepdim=True) for matrix in blocks.of([tensor])])
    assert float(found.squeeze()) == pytest.approx(float(tensor.double().square().sum()), rel=1e-6)


def test_a_share_is_the_same_each_time_and_meets_all_columns() -> None:
    weight = torch.arange(512 * 1024).view(512, 1024)
    blocks = Blocks([weight, torch.ones(100), weight.t()], elements=2**14, one_in=16)
    taken = torch.cat([m.flatten() for m in blocks.of([weight, torch.ones(100).long(), weight.t()])])
    assert torch.equal(taken, torch.cat([m.flatten() for m in blocks.of([weight, torch.ones(100).long(), weight.t()])]))
    first = torch.cat([m.flatten() for m in blocks.of([weight, weight[0, :100], weight])])[: 512 * 1024 // 16]
    assert len(set(first.tolist())) == 512 * 1024 // 16 and len(set((first % 1024).tolist())) == 1024
    assert blocks.scales == [16.0, 1.0, 16.0] and blocks.sizes == [512 * 1024, 100, 512 * 1024]
    sums = blocks.sum(
        [m.double().sum(1, keepdim=True) for m in blocks.of([weight, torch.ones(100).long(), weight.t()])]
    )
    assert float(sums[0, 0]) * 16 == pytest.approx(float(weight.double().sum()), rel=0.01)
    assert float(sums[1, 0]) == 100


@settings(deadline=None, max_examples=40)
@given(SHAPES, st.integers(1, 40), st.integers(1, 7), st.integers(1, 60))
def test_rows_of_bounded_length_hold_every_element_once(
    shapes: list[tuple[int, ...]], elements: int, longest: int, stacked: int
) -> None:
    tensors = made(shapes)
    blocks = Blocks(tensors, elements, longest=longest, stacked=stacked)
    matrices = list(blocks.of(tensors))
    numbers = torch.arange(len(tensors), dtype=torch.float64).unsqueeze(1)
    spread = blocks.spread(numbers)
    assert [m.shape[0] for m in matrices] == [rows.shape[0] for rows in spread]
    found = blocks.sum(
        [torch.stack([m.double().sum(1), rows.flatten()], 1) for m, rows in zip(matrices, spread, strict=True)]
    )
    for position, tensor in enumerate(tensors if matrices else []):
        assert float(found[position, 0]) == pytest.approx(float(tensor.double().sum()), abs=1e-9)
        assert float(found[position, 1]) % max(position, 1) == 0


def test_copies_share_no_memory() -> None:
    tensors = [torch.ones(8), torch.ones(8), torch.ones(30)]
    blocks = Blocks(tensors, 16)
    copies = blocks.copies(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert all(bool((copy == 1).all()) for copy in copies)
