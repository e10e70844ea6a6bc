"""The global gradient norm, judged against FP64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_amp_plus.scaling import grad_norm
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.grad_norm import GradNorm, ShardedGradNorm

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = [FP32, BF16, FP16, FP64]


def total(gradients: list[Tensor], dtype: torch.dtype | None = None, norm: GradNorm | None = None) -> Tensor:
    """The norm of parameters that have these gradients."""
    parameters: list[Tensor] = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.empty_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    norm = GradNorm() if norm is None else norm
    return norm.total(parameters) if dtype is None else norm.total(parameters, dtype)


def truth(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients))


def some(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(40, 30, generator=generator, dtype=FP64).to(dtype)
    return [
        torch.empty(0, dtype=dtype),
        torch.tensor(-3.0, dtype=dtype),
        whole[::2, 1:7],
        torch.randn(50, 20, generator=generator, dtype=FP64).to(dtype).t(),
    ]


@pytest.mark.parametrize("out", [FP32, FP64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_every_dtype_and_shape_is_that_of_fp64(dtype: torch.dtype, out: torch.dtype) -> None:
    gradients = some(dtype)
    norm = total(gradients, out)
    assert (norm.dtype, norm.shape) == (out, ())
    assert norm.item() == pytest.approx(truth(gradients), rel=1e-6 if out == FP32 else 1e-12)


@pytest.mark.parametrize("out", [FP32, FP64])
def test_the_norm_goes_over_several_dtypes(out: torch.dtype) -> None:
    gradients = [g for dtype in (FP32, BF16, FP16) for g in some(dtype)]
    norm = total(gradients, out)
    assert norm.dtype == out
    assert norm.item() == pytest.approx(truth(gradients), rel=1e-6)


def test_the_norm_of_mixed_dtypes_with_fp64_among_them_is_right() -> None:
    gradients = [g for dtype in DTYPES for g in some(dtype)]
    assert total(gradients).item() == pytest.approx(truth(gradients), rel=1e-6)


def test_the_norm_is_fp32_unless_asked_otherwise() -> None:
    assert total([torch.ones(4, dtype=BF16)]).dtype == FP32


@pytest.mark.parametrize("out", [FP32, FP64])
def test_no_gradients_have_norm_zero(out: torch.dtype) -> None:
    norm = total([], out)
    assert (norm.item(), norm.dtype, norm.shape) == (0.0, out, ())


def test_gradients_without_elements_have_norm_zero() -> None:
    assert total([torch.empty(0), torch.empty(0, 3)]).item() == 0.0


def test_16_bit_gradients_are_squared_in_a_wider_format() -> None:
    assert total([torch.full((4,), 60000.0, dtype=FP16)]).item() == 120000.0
    assert total([torch.full((300,), 1.0, dtype=BF16)]).item() == pytest.approx(math.sqrt(300), rel=1e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_elements_of_1e25_overflow_the_fp32_sum_and_not_the_fp64_one(dtype: torch.dtype) -> None:
    gradients = [torch.full((4,), 1e25, dtype=dtype)]
    assert total(gradients).item() == math.inf
    assert total(gradients, FP64).item() == pytest.approx(2e25, rel=1e-2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_element_makes_the_norm_bad(bad: float) -> None:
    assert not math.isfinite(total([torch.tensor([1.0, bad])]).item())


def test_fifteen_million_elements_in_fp32_lose_no_digits() -> None:
    gradient = torch.rand(15_000_000, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.vector_norm(gradient, dtype=FP64).item()
    assert total([gradient]).item() == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_every_element_is_counted_around_the_size_of_a_piece(extra: int) -> None:
    count = 2 * grad_norm._PIECE + extra
    assert total([torch.ones(count)]).item() == pytest.approx(math.sqrt(count), rel=1e-6)


def test_a_large_transposed_gradient_is_measured_whole_and_left_alone() -> None:
    gradient = torch.ones(1024, 300).t()
    assert total([gradient]).item() == pytest.approx(math.sqrt(1024 * 300), rel=1e-6)
    assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("out", [FP32, FP64])
def test_measuring_transfers_nothing(out: torch.dtype) -> None:
    gradients = [torch.ones(3, dtype=dtype, device="meta") for dtype in (FP32, BF16, FP16)]
    gradients.append(torch.ones(grad_norm._PIECE + 1, device="meta"))
    norm = total(gradients, out)
    assert (norm.device.type, norm.dtype) == ("meta", out)


def test_measuring_makes_no_graph() -> None:
    assert not total([torch.ones(2, requires_grad=True)]).requires_grad


def test_the_norm_of_a_sparse_gradient_is_that_of_its_sums() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    idle = torch.nn.Parameter(torch.ones(3))
    assert GradNorm().total([idle, embedding.weight]).item() == pytest.approx(math.sqrt(10.0), rel=1e-6)


# ---------------------------------------------------------------- over ranks


class Ranks(Consensus):
    """This rank and others, which hold ``others`` of the squared norm."""

    def __init__(self, others: float, world_size: int = 2) -> None:
        self.others, self.world_size = others, world_size
        self.asked: list[Tensor] = []

    def agree(self, terms: Tensor) -> Tensor:
        self.asked.append(terms)
        return terms + self.others


def test_parts_are_added_up_over_ranks_in_one_collective() -> None:
    ranks = Ranks(16.0)
    norm = total([torch.full((9,), 1.0)], norm=ShardedGradNorm(ranks, lambda parameter: 1))
    assert norm.item() == 5.0
    assert len(ranks.asked) == 1
    assert ranks.asked[0].dim() == 1


def test_replicas_do_not_inflate_the_norm() -> None:
    whole = [torch.full((4,), 2.0), torch.full((9,), 1.0)]
    norm = ShardedGradNorm(Ranks(0.0), lambda parameter: 4 if parameter.numel() == 4 else 1)
    assert total(whole, norm=norm).item() == pytest.approx(math.sqrt(16 / 4 + 9))


def test_a_rank_without_gradients_enters_the_collective_too() -> None:
    ranks = Ranks(9.0)
    assert ShardedGradNorm(ranks, lambda parameter: 1).total([]).item() == 3.0
    assert len(ranks.asked) == 1


def test_over_ranks_squares_are_added_in_fp64_and_the_result_comes_in_the_dtype_asked_for() -> None:
    norm = ShardedGradNorm(Ranks(0.0), lambda parameter: 1)
    gradients = [torch.full((4,), 1e25), torch.empty(0), torch.full((), 1.0, dtype=BF16)]
    assert total(gradients, norm=norm).item() == pytest.approx(2e25, rel=1e-6)
    assert total(gradients, FP32, norm).dtype == FP32
    assert total(gradients, FP32, norm).item() == pytest.approx(2e25, rel=1e-6)


def test_the_share_of_a_rank_transfers_nothing() -> None:
    norm = ShardedGradNorm(Ranks(0.0), lambda parameter: 2)
    assert total([torch.ones(3, device="meta")], norm=norm).device.type == "meta"
