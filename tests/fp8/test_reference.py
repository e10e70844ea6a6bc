"""The reference backend against GEMMs in higher precision, against torch's own scaled GEMM, and on awkward input."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lightning_amp_plus.formats import E4M3
from lightning_amp_plus.fp8.linear import fp8_linear
from lightning_amp_plus.fp8.quantize import quantize, sqnr
from lightning_amp_plus.fp8.recipes import GEMMS, BlockScaling, CurrentScaling, MXScaling, Recipe, RowwiseScaling
from lightning_amp_plus.fp8.reference import multiply, prepare

RECIPES = [
    CurrentScaling(),
    CurrentScaling(power_of_two=True),
    RowwiseScaling(),
    RowwiseScaling(power_of_two=False),
    BlockScaling(),
    MXScaling(),
]
every = pytest.mark.parametrize("recipe", RECIPES, ids=repr)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(result: Tensor, reference: Tensor) -> float:
    return float((result.double() - reference.double()).norm() / reference.double().norm())


def run(recipe: Recipe, x: Tensor, w: Tensor, grad: Tensor | None = None, gemms: Any = GEMMS) -> tuple[Tensor, ...]:
    """Output, gradient of the input, gradient of the weight."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp8_linear(x, w, None, recipe, gemms)
    y.backward(torch.ones_like(y) if grad is None else grad)
    assert x.grad is not None and w.grad is not None
    return y.detach(), x.grad, w.grad


# -------------------------------------------------------------------- numbers


@every
@pytest.mark.parametrize("shape", [(8, 32, 16), (33, 200, 48), (1, 16, 16)])
def test_the_product_is_that_of_the_quantized_operands(recipe: Recipe, shape: tuple[int, int, int]) -> None:
    tokens, inner, outer = shape
    x, w = normal(tokens, inner), normal(outer, inner, seed=1)
    exact = [
        quantize(t, recipe.format_of(o), recipe.granularity_of(o), power_of_two=recipe.power_of_two_scales).dequantize()
        for t, o in ((x, "input"), (w, "weight"))  # type: ignore[list-item]
    ]
    reference = exact[0].double() @ exact[1].double().t()
    result = multiply(prepare(x, "input", recipe), prepare(w, "weight", recipe), "fprop")
    # One rounding to BF16, and another one where scales are no powers of two.
    bound = 2.0**-8 * (1.01 if recipe.power_of_two_scales else 2.02)
    assert bool(((result.double() - reference).abs() <= bound * reference.abs() + 1e-5 * reference.abs().max()).all())


def test_power_of_two_scales_give_what_torch_s_scaled_gemm_gives() -> None:
    x, w = normal(64, 256).bfloat16(), normal(128, 256, seed=1)
    recipe = CurrentScaling(power_of_two=True)
    ours = multiply(prepare(x, "input", recipe), prepare(w, "weight", recipe), "fprop")
    left, right = (quantize(t, E4M3, power_of_two=True) for t in (x, w))
    theirs = torch._scaled_mm(
        left.values.to(torch.float8_e4m3fn),
        right.values.to(torch.float8_e4m3fn).t(),
        scale_a=left.scale_inv.reshape(()),
        scale_b=right.scale_inv.reshape(()),
        out_dtype=torch.bfloat16,
    )
    # The order of summation may differ, and with it the last bit now and then.
    assert (ours == theirs).float().mean() > 0.99
    assert error(ours, theirs) < 2**-9


@every
def test_output_and_gradients_are_as_far_from_fp32_as_the_formats_make_them(recipe: Recipe) -> None:
    x, w, g = normal(128, 256), normal(512, 256, seed=1) / 16, normal(128, 512, seed=2) * 1e-6
    y, grad_x, grad_w = run(recipe, x, w, g.bfloat16())
    gradients = 0.075 if recipe.one_scale_a_tensor else 0.045  # E5M2 against E4M3
    assert error(y, x @ w.t()) < 0.045
    assert error(grad_x, g @ w) < gradients and error(grad_w, g.t() @ x) < gradients
    assert error(grad_x, g @ w) > 0.01  # it was quantized at all


@pytest.mark.parametrize("gemm", GEMMS)
@every
def test_a_gemm_that_is_switched_off_is_what_bf16_gives(recipe: Recipe, gemm: Any) -> None:
    x, w, g = normal(32, 64), normal(48, 64, seed=1), normal(32, 48, seed=2).bfloat16()
    others = tuple(other for other in GEMMS if other != gemm)
    high = {
        "fprop": x.bfloat16() @ w.bfloat16().t(),
        "dgrad": (g @ w.bfloat16()).float(),
        "wgrad": (g.t() @ x.bfloat16()).float(),
    }
    in_fp8 = dict(zip(GEMMS, run(recipe, x, w, g), strict=True))
    mixed = dict(zip(GEMMS, run(recipe, x, w, g, others), strict=True))
    assert torch.equal(mixed[gemm], high[gemm]) and not torch.equal(in_fp8[gemm], high[gemm])
    assert all(torch.equal(mixed[other], in_fp8[other]) for other in others)


def test_rows_with_a_scale_of_their_own_survive_an_outlier() -> None:
    x, w = normal(16, 64), normal(32, 64, seed=1)
    x[0] *= 1e6
    reference = x[1:].double() @ w.double().t()
    by_row = run(RowwiseScaling(), x, w)[0][1:]
    by_tensor = run(CurrentScaling(), x, w)[0][1:]
    assert sqnr(reference, by_row) > sqnr(reference, by_tensor) + 10


@pytest.mark.parametrize("recipe", [RowwiseScaling(), RowwiseScaling(power_of_two=False)], ids=repr)
@pytest.mark.parametrize("row", [1e-44, 1e-38, 1e-20, 1.0, 1e20, 1e38, 3e38])
@pytest.mark.parametrize("column", [1e-38, 1e-12, 1.0, 1e12, 1e38])
def test_rows_near_the_ends_of_fp32_give_what_fp64_gives(recipe: Recipe, row: float, column: float) -> None:
    """Finite wherever that is, although a product times one of the two factors may be not."""
    x, w = normal(16, 64).clamp(-1, 1), normal(32, 64, seed=1).clamp(-1, 1)
    x[3] *= row
    w[5] *= column
    exact = [quantize(t, E4M3, "row", power_of_two=recipe.power_of_two_scales) for t in (x, w)]
    left, right = (q.values.double() * q.scale_inv.double() for q in exact)
    reference = left @ right.t()
    result = multiply(prepare(x, "input", recipe), prepare(w, "weight", recipe), "fprop").double()
    ratio = reference.abs() / torch.finfo(torch.bfloat16).max
    fits = ratio < 1 - 2.0**-7  # between the two, rounding decides
    assert result[fits].isfinite().all() and not result[ratio > 1 + 2.0**-7].isfinite().any()
    # Two roundings to BF16, and below its normal numbers a few of its subnormal steps.
    allowed = 2.0**-7 * reference.abs() + 2.0**-130
    assert bool(((result - reference).abs() <= allowed)[fits].all())


def test_a_row_of_zeros_stays_one_where_scales_together_leave_fp32() -> None:
    x, w = normal(16, 64) * 1e37, normal(32, 64, seed=1) * 1e37
    x[3] = 0.0
    result = multiply(*(prepare(t, o, CurrentScaling()) for t, o in ((x, "input"), (w, "weight"))), "fprop")  # type: ignore[arg-type]
    assert not result[3].any() and not result[0].isfinite().any()


# -------------------------------------------------------------------- awkward input


@every
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_goes_on_into_output_and_gradients(recipe: Recipe, bad: float) -> None:
    x, w = normal(16, 32), normal(48, 32, seed=1)
    x[3, 5] = bad
    y, _, grad_w = run(recipe, x, w)
    assert not y[3].isfinite().any() and not grad_w.isfinite().all()
    if not recipe.one_scale_a_tensor:
        assert y[:3].isfinite().all()
    spoiled = torch.ones(16, 48, dtype=torch.bfloat16)
    spoiled[2, 2] = bad
    _, grad_x, grad_w = run(recipe, normal(16, 32), w, spoiled)
    assert not grad_x[2].isfinite().any() and not grad_w.isfinite().all()


@every
def test_shapes_dtypes_and_bias_are_a_linear_s_under_autocast(recipe: Recipe) -> None:
    layer = nn.Linear(32, 64)
    for x in (normal(15, 32), normal(2, 3, 32), normal(32), normal(0, 32), normal(4, 32).half()):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = layer(x)
        found = fp8_linear(x, layer.weight, layer.bias, recipe, GEMMS)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert x.numel() == 0 or error(found, wanted) < 0.1
    assert not run(recipe, normal(0, 32), layer.weight.detach())[2].any()


@every
def test_all_zero_operands_give_zeros(recipe: Recipe) -> None:
    for x, w in ((normal(16, 32), torch.zeros(48, 32)), (torch.zeros(16, 32), normal(48, 32))):
        y, grad_x, grad_w = run(recipe, x, w)
        assert not y.any() and grad_x.isfinite().all() and grad_w.isfinite().all()


@every
def test_a_frozen_weight_and_an_input_without_gradient_get_none(recipe: Recipe) -> None:
    x, w = normal(16, 32).requires_grad_(), normal(48, 32)
    fp8_linear(x, w, None, recipe, GEMMS).sum().backward()
    assert x.grad is not None and w.grad is None
    x, w = normal(16, 32), normal(48, 32).requires_grad_()
    fp8_linear(x, w, None, recipe, GEMMS).sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.float32


def test_a_second_derivative_is_refused_not_wrong() -> None:
    x = normal(16, 32).requires_grad_()
    y = fp8_linear(x, normal(48, 32), None, CurrentScaling(), GEMMS)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not require grad|once_differentiable"):
        gradient.sum().backward()


# -------------------------------------------------------------------- torch's machinery


class Gemms(TorchDispatchMode):
    """Every GEMM that runs: role, formats and engine of those in FP8, the op's name of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.lightning_amp_plus.fp8_gemm.default:
            self.seen.append(args[2:])
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.append((str(func),))
        return func(*args, **(kwargs or {}))


@every
def test_a_dispatch_mode_sees_which_gemms_ran_in_which_formats(recipe: Recipe) -> None:
    gradient = recipe.format_of("grad_output").name.lower()
    with Gemms() as gemms:
        run(recipe, normal(16, 32), normal(48, 32))
    assert gemms.seen == [
        ("fprop", "e4m3 x e4m3", "emulated"),
        ("dgrad", f"{gradient} x e4m3", "emulated"),
        ("wgrad", f"{gradient} x e4m3", "emulated"),
    ]


def test_a_flop_counter_counts_them() -> None:
    with FlopCounterMode(display=False) as flops:
        run(CurrentScaling(), normal(16, 32), normal(48, 32))
    assert flops.get_total_flops() == 3 * 2 * 16 * 32 * 48


@every
def test_a_compiled_layer_has_no_graph_break_and_gives_the_same(recipe: Recipe) -> None:
    x, w = normal(16, 32), normal(48, 32, seed=1).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return fp8_linear(x, w, None, recipe, GEMMS)

    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        w.grad = None
        y = call(x)
        y.sum().backward()
        results.append((y.detach(), w.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])  # type: ignore[arg-type]


@every
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(recipe: Recipe, reentrant: bool) -> None:
    x, w = normal(16, 32).requires_grad_(), normal(48, 32, seed=1).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return fp8_linear(x, w, None, recipe, GEMMS).float().tanh()

    layer(x).sum().backward()
    plain = x.grad, w.grad
    x.grad = w.grad = None
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, plain[0]) and torch.equal(w.grad, plain[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling(), MXScaling()], ids=lambda recipe: recipe.name)
def test_selective_checkpointing_may_keep_its_products(recipe: Recipe) -> None:
    def keeps(context: Any, op: Any, *arguments: Any, **more: Any) -> CheckpointPolicy:
        kept = op is torch.ops.lightning_amp_plus.fp8_gemm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(**how: Any) -> list[Tensor]:
        x, w = normal(32, 48).requires_grad_(), normal(16, 48, seed=1).requires_grad_()

        def layer(x: Tensor) -> Tensor:
            return fp8_linear(x, w, None, recipe, GEMMS).relu()

        output = checkpoint(layer, x, use_reentrant=False, **how) if how else layer(x)
        output.float().square().sum().backward()
        assert x.grad is not None and w.grad is not None
        return [output.detach(), x.grad, w.grad]

    kept = gradients(context_fn=partial(create_selective_checkpoint_contexts, keeps))
    assert all(torch.equal(mine, plain) for mine, plain in zip(kept, gradients(), strict=True))
