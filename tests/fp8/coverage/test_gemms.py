"""The work of every operator that is a GEMM, by hand, and beside torch's own counter where that knows the operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_amp_plus.fp8.coverage.gemms import _RULES, Product, is_product, products
from lightning_amp_plus.fp8.op import fp8_gemm
from lightning_amp_plus.watching.ops import op_of

Found = list[tuple[str, str, int | None, str]]


class Seen(TorchDispatchMode):
    """The products of what is dispatched: operator, kind, FLOPs and role."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[str, Product]] = []

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        op = op_of(func)
        if is_product(op.base, op.kind):
            self.products += [(op.base, product) for product in products(op.base, op.kind, args, result)]
        return result


def seen(compute: Callable[[], Tensor], backward: bool = True) -> Found:
    with Seen() as mode:
        result = compute()
        if backward:
            result.float().sum().backward()
    return [(op, product.kind, product.flops, product.role) for op, product in mode.products]


def leaf(*sizes: int) -> Tensor:
    return torch.randn(*sizes, requires_grad=True)


def gemms(*found: tuple[str, int]) -> Found:
    """Plain GEMMs, which do not say their role themselves."""
    return [(op, "gemm", flops, "") for op, flops in found]


# ---------------------------------------------------------------- matrices

MATRICES: dict[str, tuple[Callable[[], Tensor], Found]] = {
    "mm": (lambda: torch.mm(leaf(3, 4), leaf(4, 5)), gemms(*[("mm", 2 * 3 * 4 * 5)] * 3)),
    "addmm": (
        lambda: torch.addmm(leaf(3, 5), leaf(3, 4), leaf(4, 5)),
        gemms(("addmm", 2 * 3 * 4 * 5), *[("mm", 2 * 3 * 4 * 5)] * 2),
    ),
    "bmm": (lambda: torch.bmm(leaf(2, 3, 4), leaf(2, 4, 5)), gemms(*[("bmm", 2 * 2 * 3 * 4 * 5)] * 3)),
    "baddbmm": (
        lambda: torch.baddbmm(leaf(2, 3, 5), leaf(2, 3, 4), leaf(2, 4, 5)),
        gemms(("baddbmm", 2 * 2 * 3 * 4 * 5), *[("bmm", 2 * 2 * 3 * 4 * 5)] * 2),
    ),
    "addbmm": (
        lambda: torch.addbmm(leaf(3, 5), leaf(2, 3, 4), leaf(2, 4, 5)),
        gemms(("addbmm", 2 * 2 * 3 * 4 * 5), *[("bmm", 2 * 2 * 3 * 4 * 5)] * 2),
    ),
    # The matrix's gradient is an outer product, which torch multiplies element by element: no GEMM.
    "mv": (lambda: torch.mv(leaf(3, 4), leaf(4)), gemms(*[("mv", 2 * 3 * 4)] * 2)),
    "addmv": (lambda: torch.addmv(leaf(3), leaf(3, 4), leaf(4)), gemms(("addmv", 2 * 3 * 4), ("mv", 2 * 3 * 4))),
    "dot": (lambda: torch.dot(leaf(4), leaf(4)), []),
    "linear of a vector": (
        lambda: functional.linear(leaf(4), leaf(3, 4), leaf(3)),
        gemms(("addmm", 2 * 1 * 4 * 3), *[("mm", 2 * 1 * 4 * 3)] * 2),
    ),
    "linear of a matrix": (
        lambda: functional.linear(leaf(7, 4), leaf(3, 4), leaf(3)),
        gemms(("addmm", 2 * 7 * 4 * 3), *[("mm", 2 * 7 * 4 * 3)] * 2),
    ),
    "linear of four dimensions": (
        lambda: functional.linear(leaf(2, 2, 5, 4), leaf(3, 4)),
        gemms(*[("mm", 2 * 20 * 4 * 3)] * 3),
    ),
    "matmul of four dimensions": (
        lambda: leaf(2, 3, 4, 5) @ leaf(2, 3, 5, 6),
        gemms(*[("bmm", 2 * 6 * 4 * 5 * 6)] * 3),
    ),
    "einsum, a batch": (
        lambda: torch.einsum("bij,bjk->bik", leaf(2, 3, 4), leaf(2, 4, 5)),
        gemms(*[("bmm", 2 * 2 * 3 * 4 * 5)] * 3),
    ),
    "einsum, one weight": (
        lambda: torch.einsum("bij,jk->bik", leaf(2, 3, 4), leaf(4, 5)),
        gemms(*[("bmm", 2 * 1 * 6 * 4 * 5)] * 3),
    ),
    "tensordot": (
        lambda: torch.tensordot(leaf(3, 4, 5), leaf(5, 4, 2), dims=([1, 2], [1, 0])),
        gemms(*[("mm", 2 * 3 * 20 * 2)] * 3),
    ),
}


@pytest.mark.parametrize("case", MATRICES)
def test_matrices(case):
    compute, expected = MATRICES[case]
    assert seen(compute) == expected


@pytest.mark.parametrize("tokens", [(), (7,), (2, 5)])
def test_without_a_gradient_a_linear_layer_is_one_product(tokens):
    with torch.no_grad():
        found = seen(lambda: functional.linear(torch.randn(*tokens, 4), torch.randn(3, 4), torch.randn(3)), False)
    rows = {(): 1, (7,): 7, (2, 5): 10}[tokens]
    assert found == gemms(("addmm", 2 * rows * 4 * 3))


@pytest.mark.parametrize("tokens", [(7,), (2, 5)])
def test_linear_as_one_operator_and_its_backward_by_what_is_wanted(tokens):
    """Devices other than a CPU dispatch these two as such."""
    x, weight, rows = torch.randn(*tokens, 4), torch.randn(3, 4), {(7,): 7, (2, 5): 10}[tokens]
    gradient = torch.randn(*tokens, 3)
    [forward] = products("linear", "gemm", (x, weight, None), gradient)
    assert (forward.flops, forward.role) == (2 * rows * 4 * 3, "")
    for wanted, roles in (
        ((True, True, True), ["dgrad", "wgrad"]),
        ((False, True, False), ["wgrad"]),
        ((True, False, False), ["dgrad"]),
        ((False, False, True), []),
    ):
        found = products("linear_backward", "gemm", (x, gradient, weight, wanted), ())
        assert [product.role for product in found] == roles
        assert {product.flops for product in found} <= {2 * rows * 4 * 3}


# ---------------------------------------------------------------- convolutions

CONVOLUTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], dict[str, Any], int]] = {
    # FLOPs: 2 x batch x outputs x kernel x channels in (of a group) x channels out
    "1d": (functional.conv1d, (2, 4, 9), (6, 4, 3), {}, 2 * 2 * 7 * 3 * 4 * 6),
    "2d": (functional.conv2d, (2, 4, 5, 6), (6, 4, 2, 3), {}, 2 * 2 * (4 * 4) * (2 * 3) * 4 * 6),
    "2d, strided": (functional.conv2d, (2, 4, 8, 8), (6, 4, 2, 2), {"stride": 2}, 2 * 2 * 16 * 4 * 4 * 6),
    # As torch does, products with padding are counted: the kernel computes them.
    "2d, padded": (functional.conv2d, (1, 4, 4, 4), (6, 4, 3, 3), {"padding": 1}, 2 * 1 * 16 * 9 * 4 * 6),
    "3d": (functional.conv3d, (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), {}, 2 * 1 * 27 * 8 * 2 * 3),
    "grouped": (functional.conv1d, (2, 4, 9), (6, 2, 3), {"groups": 2}, 2 * 2 * 7 * 3 * 2 * 6),
    "depthwise": (functional.conv1d, (2, 4, 9), (4, 1, 3), {"groups": 4}, 2 * 2 * 7 * 3 * 1 * 4),
    # FLOPs: 2 x batch x inputs x kernel x channels in x channels out (of a group)
    "transposed": (functional.conv_transpose2d, (2, 4, 5, 5), (4, 3, 2, 2), {"stride": 2}, 2 * 2 * 25 * 4 * 4 * 3),
    "transposed, grouped": (functional.conv_transpose1d, (2, 4, 5), (4, 3, 2), {"groups": 2}, 2 * 2 * 5 * 2 * 4 * 3),
    "without a batch": (functional.conv1d, (4, 9), (6, 4, 3), {}, 2 * 1 * 7 * 3 * 4 * 6),
}


@pytest.mark.parametrize(
    ("of_input", "of_weight", "roles"),
    [(True, True, ["dgrad", "wgrad"]), (False, True, ["wgrad"]), (True, False, ["dgrad"])],
)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_and_their_backward_by_what_is_wanted(case, of_input, of_weight, roles):
    convolve, x, weight, settings, flops = CONVOLUTIONS[case]
    found = seen(
        lambda: convolve(
            torch.randn(x, requires_grad=of_input), torch.randn(weight, requires_grad=of_weight), **settings
        )
    )
    assert found == [
        ("convolution", "conv", flops, "fprop"),
        *(("convolution_backward", "conv", flops, role) for role in roles),
    ]


def test_a_convolutions_bias_alone_is_no_gemm():
    found = seen(lambda: functional.conv1d(torch.randn(2, 4, 9), torch.randn(6, 4, 3), leaf(6)))
    assert found == [("convolution", "conv", 2 * 2 * 7 * 3 * 4 * 6, "fprop")]


# ---------------------------------------------------------------- attention


def query(heads: int = 4) -> Tensor:
    return leaf(2, heads, 8, 16)


# Two products of [8, 16] and [16, 8] a head; backward computes the scores once more and four gradients.
PRODUCT = 2 * 2 * 4 * 8 * 16 * 8


@pytest.mark.parametrize(
    ("heads", "settings"), [(4, {}), (4, {"is_causal": True}), (2, {"enable_gqa": True})], ids=["full", "causal", "gqa"]
)
def test_attention_in_one_operator(heads, settings):
    found = seen(lambda: functional.scaled_dot_product_attention(query(), query(heads), query(heads), **settings))
    base = "_scaled_dot_product_flash_attention_for_cpu"
    assert found == [
        (base, "attention", 2 * PRODUCT, "fprop"),
        (f"{base}_backward", "attention", 5 * PRODUCT, "dgrad"),
    ]


def test_attention_to_another_length():
    def compute() -> Tensor:
        return functional.scaled_dot_product_attention(query(), leaf(2, 4, 3, 16), leaf(2, 4, 3, 16))

    assert [flops for _, _, flops, _ in seen(compute)] == [2 * 2 * 2 * 4 * 8 * 16 * 3, 5 * 2 * 2 * 4 * 8 * 16 * 3]


def test_attention_written_out_by_torch():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def compute() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(query(), query(), query())

    assert seen(compute) == gemms(*[("bmm", PRODUCT)] * 6)


@pytest.mark.parametrize("heads", [4, 2])
def test_flexible_attention(heads):
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, heads, 8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is slow where it is not compiled
        found = seen(lambda: flex_attention(q, k, k, enable_gqa=heads < 4), backward=False)
    assert found == [("flex_attention", "attention", PRODUCT, "fprop")]


def test_flash_attentions_own_interface_has_the_heads_last_and_packed_sequences_no_known_work():
    x = torch.randn(2, 8, 4, 16)
    [forward] = products("_flash_attention_forward", "attention", (x, x, x), ())
    [backward] = products("_flash_attention_backward", "attention", (x, x, x, x), ())
    assert (forward.flops, forward.role) == (2 * PRODUCT, "fprop")
    assert (backward.flops, backward.role) == (5 * PRODUCT, "dgrad")
    [packed] = products("_flash_attention_forward", "attention", (x[0], x[0], x[0]), ())
    assert packed.flops is None and packed.left is not None


# ---------------------------------------------------------------- RNNs

LENGTH, BATCH, WIDTH, HIDDEN = 3, 2, 4, 8
LSTM = 2 * LENGTH * BATCH * 4 * HIDDEN * (WIDTH + HIDDEN)  # four gates


def rnn_input(batch_first: bool = False) -> Tensor:
    return leaf(BATCH, LENGTH, WIDTH) if batch_first else leaf(LENGTH, BATCH, WIDTH)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the operator is oneDNN's")
@pytest.mark.parametrize("settings", [{}, {"batch_first": True}, {"bias": False}], ids=str)
def test_an_lstm_in_one_operator(settings):
    lstm = nn.LSTM(WIDTH, HIDDEN, **settings)
    assert seen(lambda: lstm(rnn_input(settings.get("batch_first", False)))[0]) == [
        ("mkldnn_rnn_layer", "gemm", LSTM, "fprop"),
        ("mkldnn_rnn_layer_backward", "gemm", LSTM, "dgrad"),
        ("mkldnn_rnn_layer_backward", "gemm", LSTM, "wgrad"),
    ]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the operator is oneDNN's")
def test_an_lstm_of_two_layers_in_two_directions():
    lstm = nn.LSTM(WIDTH, HIDDEN, num_layers=2, bidirectional=True)
    second = 2 * LENGTH * BATCH * 4 * HIDDEN * (2 * HIDDEN + HIDDEN)  # its inputs are both directions' outputs
    found = [flops for _, _, flops, role in seen(lambda: lstm(rnn_input())[0]) if role == "fprop"]
    assert found == [LSTM, LSTM, second, second]


def test_a_gru_is_taken_apart():
    gru = nn.GRU(WIDTH, HIDDEN)
    input, step = 2 * LENGTH * BATCH * WIDTH * 3 * HIDDEN, 2 * BATCH * HIDDEN * 3 * HIDDEN  # three gates
    found = [flops for _, _, flops, _ in seen(lambda: gru(rnn_input())[0])]
    assert found[:4] == [input, step, step, step]
    # Of the input both gradients; of the hidden state the first step has no gradient to hand on.
    assert sorted(found[4:]) == sorted([input] * 2 + [step] * 3 + [step] * 2)


# ---------------------------------------------------------------- FP8


def test_scaled_mm():
    left = torch.randn(16, 32).to(torch.float8_e4m3fn)
    right = torch.randn(48, 32).to(torch.float8_e5m2).t()
    one = torch.ones(())
    found = seen(
        lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), backward=False
    )
    assert found == gemms(("_scaled_mm", 2 * 16 * 32 * 48))


@pytest.mark.parametrize(
    ("left", "right", "ends", "flops"),
    [
        ((10, 16), (2, 16, 8), [4, 10], 2 * 10 * 16 * 8),  # each row meets one matrix
        ((2, 8, 16), (16, 24), [8, 24], 2 * 8 * 16 * 24),  # each column does
        ((8, 32), (32, 24), [16, 32], 2 * 8 * 32 * 24),  # what is contracted is split
        ((2, 8, 16), (2, 16, 24), None, 2 * 2 * 8 * 16 * 24),
    ],
)
def test_grouped_mm(left, right, ends, flops):
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    sides = torch.randn(left).bfloat16(), torch.randn(right).bfloat16()
    assert seen(lambda: torch._grouped_mm(*sides, offs=offsets), backward=False) == gemms(("_grouped_mm", flops))


def test_an_emulated_fp8_gemm_says_its_role():
    left, right = torch.randn(6, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    found = seen(lambda: fp8_gemm(left, right, "wgrad", "e5m2 x e4m3"), backward=False)
    assert found == [("fp8_gemm", "gemm", 2 * 6 * 4 * 5, "wgrad")]


# ---------------------------------------------------------------- beside torch's counter

KNOWN_TO_TORCH: dict[str, Callable[[], Tensor]] = {
    **{name: MATRICES[name][0] for name in MATRICES if "mv" not in name and name not in ("addbmm", "dot")},
    # torch overcounts the weight's gradient of a grouped one by the number of groups
    **{
        f"convolution, {name}": lambda of=of: of[0](leaf(*of[1]), leaf(*of[2]), **of[3])
        for name, of in CONVOLUTIONS.items()
        if "grouped" not in name and name != "depthwise"
    },
    "emulated FP8": lambda: fp8_gemm(torch.randn(6, 4).bfloat16(), torch.randn(5, 4).bfloat16(), "fprop", "e4m3"),
    "a GRU": lambda: nn.GRU(WIDTH, HIDDEN)(rnn_input())[0],
}


@pytest.mark.parametrize("case", KNOWN_TO_TORCH)
def test_torchs_counter_finds_as_much(case):
    def run() -> None:
        result = KNOWN_TO_TORCH[case]()
        if result.requires_grad:
            result.sum().backward()

    with FlopCounterMode(display=False) as counter:
        run()
    with Seen() as mode:
        run()
    assert sum(product.flops or 0 for _, product in mode.products) == counter.get_total_flops() > 0


def test_an_operator_without_a_formula_counts_with_unknown_work():
    assert is_product("_cudnn_attention_forward", "attention") and not is_product("dot", "gemm")
    [product] = products("_cudnn_attention_forward", "attention", (), ())
    assert (product.kind, product.flops, product.role) == ("attention", None, "")


def test_what_counts_as_a_gemm_here_is_one_for_the_census_too() -> None:
    kinds = {}
    for base in _RULES:
        for space in (torch.ops.aten, torch.ops.mkldnn, torch.ops.lightning_amp_plus):
            packet = getattr(space, base, None)
            for overload in packet.overloads() if packet is not None else ():
                kinds[base] = op_of(getattr(packet, overload)).kind
    assert len(kinds) > 40
    assert {base for base, kind in kinds.items() if kind not in ("gemm", "attention")} == set()
