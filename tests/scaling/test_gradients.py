"""Gradients as flat lists, and the pass that unscales and checks them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_amp_plus.scaling.gradients import (
    by_device_and_dtype,
    dense_gradients,
    first_nonfinite,
    multiply,
    parameters_with_gradients,
    unscale_and_check,
)

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = [FP32, BF16, FP16, FP64]
BAD = [math.inf, -math.inf, math.nan]


def factor(value: float = 0.125) -> Tensor:
    return torch.tensor(value)


def parameter(gradient: Tensor | None = None, size: int = 4) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(size if gradient is None else gradient.shape, dtype=FP32))
    if gradient is not None and gradient.dtype != FP32:
        p.data = p.data.to(gradient.dtype)
    p.grad = gradient
    return p


def sparse(indices: list[int], values: list[float], dtype: torch.dtype = FP32, size: int = 4) -> Tensor:
    return torch.sparse_coo_tensor([indices], torch.tensor(values, dtype=dtype), (size,), check_invariants=False)


def awkward(dtype: torch.dtype) -> list[Tensor]:
    """Shapes that a fused kernel may stumble over, all of the value 8: none, one, few, strided, transposed."""
    whole = torch.full((6, 4), 8.0, dtype=dtype)
    return [
        torch.empty(0, dtype=dtype),
        torch.tensor(8.0, dtype=dtype),
        torch.full((3,), 8.0, dtype=dtype),
        whole[::2, 1:3],
        torch.full((2, 5), 8.0, dtype=dtype).t(),
    ]


# ---------------------------------------------------------------- unscale_and_check


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_is_unscaled_in_place_and_found_finite(dtype: torch.dtype) -> None:
    gradients = awkward(dtype)
    found = unscale_and_check(gradients, factor())
    assert (found.item(), found.dtype, found.shape) == (0.0, FP32, ())
    for gradient in gradients:
        assert gradient.dtype == dtype
        assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [1, 2, 3, 4])
def test_one_bad_element_anywhere_is_found(dtype: torch.dtype, bad: float, where: int) -> None:
    gradients = awkward(dtype)
    gradients[where][(-1,) * gradients[where].dim()] = bad
    assert unscale_and_check(gradients, factor()).item() == 1.0


def test_what_lies_between_the_elements_of_a_strided_gradient_is_neither_checked_nor_changed() -> None:
    whole = torch.full((6, 4), 8.0)
    whole[1, 0] = math.inf
    assert unscale_and_check([whole[::2]], factor()).item() == 0.0
    assert whole[0].tolist() == [1.0] * 4
    assert whole[1].tolist() == [math.inf, 8.0, 8.0, 8.0]


@pytest.mark.parametrize("bad_at", range(4))
def test_a_bad_element_is_found_in_whatever_dtype_it_comes(bad_at: int) -> None:
    gradients = [torch.full((2,), 8.0, dtype=dtype) for dtype in DTYPES]
    gradients[bad_at][1] = math.nan
    assert unscale_and_check(gradients, factor()).item() == 1.0
    assert [gradient[0].item() for gradient in gradients] == [1.0] * 4


def test_finite_gradients_whose_norm_is_not_are_finite() -> None:
    gradients = [torch.full((4,), 1e25), torch.full((4,), 3e38, dtype=BF16), torch.full((4,), 65504.0, dtype=FP16)]
    assert torch.linalg.vector_norm(gradients[0]).item() == math.inf
    assert unscale_and_check(gradients, factor(1.0)).item() == 0.0


def test_two_overflows_give_one_verdict_of_1_not_2() -> None:
    gradients = [torch.tensor([math.inf, math.nan]), torch.tensor([math.inf], dtype=BF16)]
    assert unscale_and_check(gradients, factor()).item() == 1.0


def test_the_factor_is_not_changed() -> None:
    one = factor()
    unscale_and_check([torch.ones(2), torch.ones(2, dtype=FP16)], one)
    assert one.item() == 0.125


def test_unscaling_a_tensor_that_autograd_tracks_makes_no_graph() -> None:
    gradient = torch.ones(2, requires_grad=True)
    unscale_and_check([gradient], factor())
    assert gradient.is_leaf
    assert gradient.tolist() == [0.125, 0.125]


def test_unscaling_and_checking_transfer_nothing() -> None:
    gradients = [torch.ones(3, dtype=dtype, device="meta") for dtype in DTYPES]
    found = unscale_and_check(gradients, torch.ones((), device="meta"))
    assert found.device.type == "meta"
    assert found.shape == ()


# ---------------------------------------------------------------- multiply


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", [0.125, torch.tensor(0.125), torch.tensor(0.125, dtype=FP64)])
def test_multiply_changes_every_shape_in_place(dtype: torch.dtype, by: float | Tensor) -> None:
    gradients = awkward(dtype)
    multiply(gradients, by)
    for gradient in gradients:
        assert gradient.dtype == dtype
        assert torch.equal(gradient, torch.ones_like(gradient))


def test_multiply_takes_several_dtypes_at_once_and_none_at_all() -> None:
    gradients = [torch.ones(2, dtype=dtype) for dtype in DTYPES]
    multiply(gradients, 4.0)
    assert [gradient.tolist() for gradient in gradients] == [[4.0, 4.0]] * 4
    multiply([], 4.0)


def test_multiplying_transfers_nothing() -> None:
    gradients = [torch.ones(3, dtype=dtype, device="meta") for dtype in DTYPES]
    multiply(gradients, torch.ones((), device="meta"))
    assert all(gradient.device.type == "meta" for gradient in gradients)


# ---------------------------------------------------------------- lists


def test_parameters_with_gradients_come_in_the_order_of_the_groups() -> None:
    a, b, c, d = (parameter(torch.ones(1)) for _ in range(4))
    b.grad = None
    optimizer = torch.optim.SGD([{"params": [c, b]}, {"params": [a, d]}], lr=1.0)
    assert [id(p) for p in parameters_with_gradients(optimizer)] == [id(c), id(a), id(d)]


def test_dense_gradients_are_the_gradients_themselves_without_the_missing_ones() -> None:
    with_gradient, without = parameter(torch.ones(3)), parameter()
    gradients = dense_gradients([without, with_gradient])
    assert len(gradients) == 1
    assert gradients[0] is with_gradient.grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_values_of_a_sparse_gradient_are_unscaled_through_the_list(dtype: torch.dtype) -> None:
    p = parameter(sparse([3, 1], [8.0, 16.0], dtype))
    assert unscale_and_check(dense_gradients([p]), factor()).item() == 0.0
    assert p.grad is not None
    assert p.grad.is_sparse
    assert p.grad.to_dense().tolist() == [0.0, 2.0, 0.0, 1.0]


def test_repeated_indices_of_a_sparse_gradient_are_summed_first() -> None:
    p = parameter(sparse([1, 1, 2], [8.0, 8.0, 8.0]))
    (values,) = dense_gradients([p])
    assert values.tolist() == [16.0, 8.0]
    multiply([values], 0.5)
    assert p.grad is not None
    assert p.grad.is_coalesced()
    assert p.grad.to_dense().tolist() == [0.0, 8.0, 4.0, 0.0]


def test_a_sparse_gradient_whose_parts_are_finite_and_whose_sum_is_not_is_found() -> None:
    p = parameter(sparse([1, 1], [60000.0, 60000.0], FP16))
    assert unscale_and_check(dense_gradients([p]), factor()).item() == 1.0


def test_a_coalesced_sparse_gradient_stays_the_same_object() -> None:
    gradient = sparse([0, 2], [1.0, 1.0]).coalesce()
    p = parameter(gradient)
    dense_gradients([p])
    assert p.grad is gradient


@pytest.mark.parametrize("empty", [sparse([], []), torch.empty(0), torch.empty(3, 0)], ids=["sparse", "flat", "wide"])
def test_a_gradient_without_elements_is_left_out(empty: Tensor) -> None:
    whole = parameter(torch.ones(2))
    (found,) = dense_gradients([parameter(empty), whole])
    assert found is whole.grad
    assert first_nonfinite([("empty", parameter(empty))]) is None


def test_groups_hold_one_device_and_one_dtype_each_and_lose_nothing() -> None:
    tensors = [
        torch.ones(1),
        torch.ones(2, dtype=BF16),
        torch.ones(3, device="meta"),
        torch.ones(4),
        torch.ones(5, dtype=BF16, device="meta"),
    ]
    groups = by_device_and_dtype(tensors)
    assert [[t.numel() for t in group] for group in groups] == [[1, 4], [2], [3], [5]]


# ---------------------------------------------------------------- first_nonfinite


def test_no_bad_gradient_gives_none() -> None:
    assert first_nonfinite([("a", parameter(torch.full((2,), 1e38))), ("b", parameter())]) is None


@pytest.mark.parametrize("bad", BAD)
def test_the_parameter_registered_last_was_hit_first(bad: float) -> None:
    def hit() -> torch.nn.Parameter:
        return parameter(torch.tensor([1.0, bad]))

    named = [("a", parameter(torch.ones(2))), ("b", hit()), ("c", hit()), ("d", hit()), ("e", parameter())]
    assert first_nonfinite(named) == ("d", "b", 3)


def test_a_bad_sparse_gradient_is_named() -> None:
    named = [("a", parameter(torch.ones(2))), ("b", parameter(sparse([1, 1], [60000.0, 60000.0], FP16)))]
    assert first_nonfinite(named) == ("b", "b", 1)
