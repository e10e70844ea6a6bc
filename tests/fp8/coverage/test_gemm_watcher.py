"""What is seen of a training step: every GEMM with its module, role, format, work and reason, against sums by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks.fp8_coverage import Fp8CoverageMonitor
from lightning_amp_plus.fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, RowwiseScaling
from lightning_amp_plus.fp8.coverage.report import Coverage
from lightning_amp_plus.fp8.coverage.tally import RowKey, Tally
from tests.support.models import sgd
from tests.support.training import loader, make_trainer

Build = Callable[[Any], None]
Step = Callable[[Any, Tensor], Tensor]
BOTH = ("dgrad", "wgrad")
ALL = ("fprop", *BOTH)


class Model(L.LightningModule):
    """What ``build`` puts into it; ``step`` computes what the loss is the mean square of."""

    def __init__(self, build: Build, step: Step) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            build(self)
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


def cover(
    build: Build, step: Step, x: Tensor, policy: PrecisionPolicy | str = "bf16-mixed", **arguments: Any
) -> Coverage:
    monitor = Fp8CoverageMonitor(1)
    trainer = make_trainer(AmpPrecision(policy), callbacks=[monitor], **arguments)
    trainer.fit(Model(build, step), loader([x]))
    assert monitor.last is not None
    return monitor.last


def in_fp8(*names: str, **settings: Any) -> PrecisionPolicy:
    return PrecisionPolicy("bf16", rules=[Rule(name, compute="fp8", **settings) for name in names])


def work(coverage: Coverage, *kinds: str) -> dict[str, dict[str, tuple[int, int]]]:
    """By module and role the number of GEMMs and their FLOPs; of some kinds only, if any are named."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for row in coverage.rows:
        if not kinds or row.kind in kinds:
            roles = found.setdefault(row.module, {})
            count, flops = roles.get(row.role, (0, 0))
            roles[row.role] = count + row.count, flops + row.flops
    return found


def of(values: int, *roles: str) -> dict[str, tuple[int, int]]:
    """One GEMM of so many FLOPs for each role."""
    return dict.fromkeys(roles, (1, values))


def reasons(coverage: Coverage) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in coverage.rows:
        found.setdefault(row.module, set()).add(row.reason)
    return found


def formats(coverage: Coverage, module: str) -> dict[str, str]:
    return {row.role: row.shown_format for row in coverage.rows if row.module == module}


# ---------------------------------------------------------------- linear layers


def two(model: Any) -> None:
    model.a, model.b = nn.Linear(32, 48), nn.Linear(48, 16)


def through_two(model: Any, x: Tensor) -> Tensor:
    return model.b(model.a(x).relu())


@pytest.mark.parametrize(
    ("policy", "format"),
    [("32-true", "fp32"), ("bf16-mixed", "bf16"), ("bf16-true", "bf16"), ("16-mixed", "fp16"), ("16-true", "fp16")],
)
def test_three_gemms_a_layer_and_no_gradient_for_the_models_input(policy, format):
    found = cover(two, through_two, torch.randn(4, 32), policy)
    a, b = 2 * 4 * 32 * 48, 2 * 4 * 48 * 16
    assert work(found) == {"a": of(a, "fprop", "wgrad"), "b": of(b, *ALL)}
    assert {row.format for row in found.rows} == {format} and reasons(found) == {"a": {"rule"}, "b": {"rule"}}
    assert found.shares().flops == found.shares().gemms == 0.0 and found.fallbacks() == {"rule": 1.0}


def square(model: Any) -> None:
    model.a, model.b, model.c = (nn.Linear(16, 16) for _ in range(3))


@pytest.mark.parametrize("policy", ["32-true", "bf16-mixed", "bf16-true", in_fp8("b", backend="torchao")])
def test_roles_are_right_where_all_sizes_are_equal(policy):
    n = 2 * 16**3

    def step(model: Any, x: Tensor) -> Tensor:
        return model.c(model.b(model.a(x)).relu())

    def frozen(model: Any) -> None:
        square(model)
        model.c.weight.requires_grad_(False)

    x = torch.randn(16, 16)
    assert work(cover(square, step, x, policy)) == {"a": of(n, "fprop", "wgrad"), "b": of(n, *ALL), "c": of(n, *ALL)}
    assert work(cover(frozen, step, x, policy))["c"] == of(n, "fprop", "dgrad")


def test_a_layer_called_twice_and_one_that_is_not_called():
    def step(model: Any, x: Tensor) -> Tensor:
        return model.a(model.a(x).relu())

    n = 2 * 4 * 16 * 16
    assert work(cover(square, step, torch.randn(4, 16))) == {
        "a": {"fprop": (2, 2 * n), "dgrad": (1, n), "wgrad": (2, 2 * n)}
    }


def test_a_frozen_weight_has_no_gradient_and_its_layer_hands_one_on():
    def frozen(model: Any) -> None:
        two(model)
        model.b.weight.requires_grad_(False)

    a, b = 2 * 4 * 32 * 48, 2 * 4 * 48 * 16
    found = cover(frozen, through_two, torch.randn(4, 32))
    assert work(found) == {"a": of(a, "fprop", "wgrad"), "b": of(b, "fprop", "dgrad")}


def test_a_weight_that_gets_its_shape_in_the_step():
    def build(model: Any) -> None:
        model.a, model.lazy = nn.Linear(16, 16), nn.LazyLinear(10)

    found = cover(build, lambda model, x: model.lazy(model.a(x)), torch.randn(8, 16), in_fp8("a"))
    assert work(found)["lazy"] == of(2 * 8 * 16 * 10, *ALL)


def test_what_runs_without_gradients_is_forward_work_too():
    def step(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = model.b(x)
        return model.a(x) - teacher

    n = 2 * 4 * 16 * 16
    assert work(cover(square, step, torch.randn(4, 16))) == {"b": of(n, "fprop"), "a": of(n, "fprop", "wgrad")}


def test_tied_weights_count_where_they_multiply():
    def tied(model: Any) -> None:
        model.words, model.a, model.logits = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        model.logits.weight = model.words.weight

    found = cover(tied, lambda model, x: model.logits(model.a(model.words(x))), torch.arange(8))
    assert work(found) == {"a": of(2 * 8 * 16 * 16, *ALL), "logits": of(2 * 8 * 16 * 20, *ALL)}


def parametrized(model: Any) -> None:
    model.a = nn.Linear(16, 16)
    model.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    model.by_hooks = nn.utils.weight_norm(nn.Linear(16, 16))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("tokens", [4, 16])
def test_weights_that_are_made_of_others(tokens):
    found = cover(parametrized, lambda m, x: m.by_hooks(m.normed(m.a(x))), torch.randn(tokens, 16))
    n = 2 * tokens * 16 * 16
    assert work(found) == {"a": of(n, "fprop", "wgrad"), "normed": of(n, *ALL), "by_hooks": of(n, *ALL)}


def test_a_power_iteration_is_work_of_the_parametrization():
    def spectral(model: Any) -> None:
        model.a, model.s = nn.Linear(16, 16), nn.utils.parametrizations.spectral_norm(nn.Linear(16, 24))

    found = work(cover(spectral, lambda model, x: model.s(model.a(x)), torch.randn(4, 16)))
    assert found["s"] == of(2 * 4 * 16 * 24, *ALL)
    # Two products with the matrix for an iteration, and one for the norm.
    assert found["s.parametrizations.weight.0"] == {"fprop": (3, 3 * 2 * 16 * 24)}


class Functional(nn.Module):
    """Parameters that no Linear multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.randn(24, 16))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.rows) @ self.columns


def test_functions_count_for_the_module_that_calls_them():
    def build(model: Any) -> None:
        model.a, model.f = nn.Linear(16, 16), Functional()

    def step(model: Any, x: Tensor) -> Tensor:
        return functional.linear(model.f(model.a(x)), model.a.weight)

    found = cover(build, step, torch.randn(4, 16))
    n, f = 2 * 4 * 16 * 16, 2 * 4 * 16 * 24
    assert work(found) == {"a": of(n, "fprop", "wgrad"), "f": dict.fromkeys(ALL, (2, 2 * f)), "": of(n, *ALL)}
    assert reasons(found) == {"a": {"rule"}, "f": {"op"}, "": {"op"}}


def test_a_gradient_of_a_gradient_is_backward_work_and_no_recomputation():
    def step(model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = model.b(torch.tanh(model.a(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.sum()

    found = work(cover(two, step, torch.randn(4, 32), "32-true"))
    a, b = 2 * 4 * 32 * 48, 2 * 4 * 48 * 16
    # The first backward goes to the input, by both layers, and the second through its graph and then this way again.
    assert found["a"] == {"fprop": (1, a), "dgrad": (2, 2 * a), "wgrad": (1, a)}
    assert found["b"] == {"fprop": (1, b), "dgrad": (2, 2 * b), "wgrad": (1, b)}
    assert found[""].keys() == {"backward"}


@pytest.mark.parametrize("backend", [None, "torchao"])
def test_a_graph_that_backward_goes_through_twice_counts_twice(backend):
    class Twice(Model):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            optimizer.step()

    if backend is not None:
        pytest.importorskip("torchao")
    monitor, model = Fp8CoverageMonitor(1), Twice(square, lambda model, x: model.b(model.a(x)))
    model.automatic_optimization = False
    policy = "bf16-mixed" if backend is None else in_fp8("b", backend=backend)
    make_trainer(AmpPrecision(policy), callbacks=[monitor]).fit(model, loader([torch.randn(16, 16)]))
    assert monitor.last is not None
    n = 2 * 16**3
    assert work(monitor.last) == {
        "a": {"fprop": (1, n), "wgrad": (2, 2 * n)},
        "b": {"fprop": (1, n), "dgrad": (2, 2 * n), "wgrad": (2, 2 * n)},
    }


def test_a_batch_without_elements_is_a_fallback_for_its_shape_where_the_backend_leaves_fp8():
    pytest.importorskip("torchao")
    found = cover(two, through_two, torch.randn(0, 32), in_fp8("a", "b", backend="torchao"))
    assert {row.reason for row in found.rows} == {"shape"} and {row.flops for row in found.rows} == {0}


class Fused(torch.autograd.Function):
    """Two layers in one function, which keeps what is between them itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = x @ first.t()
        ctx.save_for_backward(x, first, second, hidden)
        return hidden @ second.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, first, second, hidden = ctx.saved_tensors
        inner = gradient @ second
        return inner @ first, inner.t() @ x, gradient.t() @ hidden


@pytest.mark.parametrize("tokens", [4, 16])
def test_a_function_of_two_products_with_a_backward_of_its_own(tokens):
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.randn(40, 24))

        def forward(self, x: Tensor) -> Tensor:
            return Fused.apply(x, self.first, self.second)  # type: ignore[no-any-return,no-untyped-call]

    def build(model: Any) -> None:
        model.a, model.layers = nn.Linear(16, 16), Layers()

    found = work(cover(build, lambda model, x: model.layers(model.a(x)), torch.randn(tokens, 16), "32-true"))
    assert found["layers"] == dict.fromkeys(ALL, (2, 2 * tokens * (16 * 24 + 24 * 40)))


# ---------------------------------------------------------------- convolutions, attention, einsum, RNNs


def test_convolutions():
    def build(model: Any) -> None:
        model.first, model.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 2, groups=4)
        model.up, model.head = nn.ConvTranspose2d(16, 4, 2, stride=2), nn.Linear(4, 2)

    def step(model: Any, x: Tensor) -> Tensor:
        return model.head(model.up(model.second(model.first(x))).mean((2, 3)))

    found = cover(build, step, torch.randn(2, 3, 8, 8), "32-true")
    assert work(found) == {
        "first": of(2 * 2 * 36 * 9 * 3 * 8, "fprop", "wgrad"),
        "second": of(2 * 2 * 25 * 4 * 2 * 16, *ALL),
        "up": of(2 * 2 * 25 * 4 * 16 * 4, *ALL),
        "head": of(2 * 2 * 4 * 2, *ALL),
    }
    assert work(found, "conv").keys() == {"first", "second", "up"}
    assert reasons(found) == {"first": {"op"}, "second": {"op"}, "up": {"op"}, "head": {"rule"}}


HEADS, WIDTH, LENGTH, BATCH = 2, 16, 8, 3
SCORES = 2 * BATCH * LENGTH * LENGTH * WIDTH  # one of the two products of attention


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.qkv, self.out = fused, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.transpose(-1, -2)).softmax(-1).to(v.dtype) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fused", [True, False])
def test_attention_fused_and_written_out(fused):
    def build(model: Any) -> None:
        model.attention = Attention(fused)

    found = cover(build, lambda model, x: model.attention(x), torch.randn(BATCH, LENGTH, WIDTH), in_fp8("attention.*"))
    n = 2 * BATCH * LENGTH * WIDTH * WIDTH
    assert work(found, "gemm") == {"attention.qkv": of(3 * n, "fprop", "wgrad"), "attention.out": of(n, *ALL)}
    # A fused kernel computes the scores once more in backward.
    count, products = ((1, 1), (2, 5)) if fused else ((2, 4), (2, 4))
    assert work(found, "attention") == {
        "attention": {"fprop": (count[0], products[0] * SCORES), "dgrad": (count[1], products[1] * SCORES)}
    }
    gemms, attention = 9 * n, sum(products) * SCORES
    assert found.shares().flops == gemms / (gemms + attention)
    assert found.shares().gemms == 5 / (5 + sum(count))
    assert found.shares(attention=False).flops == found.shares(attention=False).gemms == 1.0
    assert found.shares().native_flops == found.shares(attention=False).native_gemms == 0.0
    assert found.fallbacks() == {"op": attention / (gemms + attention)}


@pytest.mark.parametrize("weights_too", [False, True])
def test_torchs_attention_multiplies_with_its_own_weights(weights_too):
    def build(model: Any) -> None:
        model.a, model.m = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def step(model: Any, x: Tensor) -> Tensor:
        h = model.a(x)
        return model.m(h, h, h, need_weights=weights_too)[0]

    found = cover(build, step, torch.randn(BATCH, LENGTH, WIDTH), in_fp8("a"))
    n = 2 * BATCH * LENGTH * WIDTH * WIDTH
    # In and out projection are the module's own; the Linear in it is never called.
    assert work(found, "gemm") == {"a": of(n, "fprop", "wgrad"), "m": dict.fromkeys(ALL, (2, 4 * n))}
    assert work(found, "attention")["m"]["fprop"][1] == 2 * SCORES
    assert reasons(found) == {"a": {""}, "m": {"op"}}


@pytest.mark.parametrize("policy", ["32-true", "bf16-mixed"])
def test_torchs_attention_in_evaluation_is_one_operator_of_three_kinds_of_work(policy):
    def build(model: Any) -> None:
        model.a, model.teacher = nn.Linear(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def step(model: Any, x: Tensor) -> Tensor:
        model.teacher.eval()
        with torch.no_grad():
            target = model.teacher(x)
        return model.a(x) - target

    found = cover(build, step, torch.randn(BATCH, LENGTH, WIDTH), policy)
    n = 2 * BATCH * LENGTH * WIDTH * WIDTH
    assert work(found, "gemm") == {
        "a": of(n, "fprop", "wgrad"),
        "teacher.self_attn": {"fprop": (2, 4 * n)},
        "teacher.linear1": of(2 * n, "fprop"),
        "teacher.linear2": of(2 * n, "fprop"),
    }
    assert work(found, "attention") == {"teacher.self_attn": of(2 * SCORES, "fprop")}


def test_einsum_is_a_gemm_with_weights_and_attention_without():
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.experts = nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(3, 16, 24))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.einsum("bti,io->bto", x, self.weight) + torch.einsum("bti,bio->bto", x, self.experts)
            return torch.einsum("bto,bso->bts", y, y.relu())

    def build(model: Any) -> None:
        model.a, model.sums = nn.Linear(16, 16), Sums()

    found = cover(build, lambda model, x: model.sums(model.a(x)), torch.randn(3, 8, 16))
    n = 2 * 3 * 8 * 16 * 24
    assert work(found, "gemm")["sums"] == dict.fromkeys(ALL, (2, 2 * n))
    pairs = 2 * 3 * 8 * 8 * 24
    assert work(found, "attention") == {"sums": {"fprop": (1, pairs), "dgrad": (2, 2 * pairs)}}


def test_a_copy_of_weights_is_a_weight():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(16, 24, bias=False) for _ in range(3))
            self.down = nn.Parameter(torch.randn(3, 24, 16))  # einsum permutes and copies it

        def forward(self, x: Tensor) -> Tensor:
            stacked = torch.stack([expert.weight for expert in self.up])
            joined = torch.cat([expert.weight.t() for expert in self.up]).view(3, 16, 24)
            y = torch.bmm(x, stacked.transpose(1, 2).contiguous()) + torch.bmm(x, joined)
            return torch.einsum("bti,bio->to", y, self.down)

    def build(model: Any) -> None:
        model.a, model.experts = nn.Linear(16, 16), Experts()

    found = cover(build, lambda model, x: model.experts(model.a(x)), torch.randn(3, 8, 16))
    n = 2 * 3 * 8 * 16 * 24
    assert work(found, "gemm")["experts"] == dict.fromkeys(ALL, (3, 3 * n))
    assert not work(found, "attention")


def test_nested_tensors_and_integers_are_multiplied_too():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 32)
            self.register_buffer("codes", torch.ones(32, 8, dtype=torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            nested = torch.nested.nested_tensor([x[:8], x[8:]], layout=torch.jagged)
            y = self.layer(nested).values()
            return y.sum() + torch._int_mm(y.to(torch.int8), self.codes).sum()

    def build(model: Any) -> None:
        model.odd = Odd()

    found = cover(build, lambda model, x: model.odd(x), torch.randn(24, 16))
    assert work(found) == {
        "odd.layer": of(2 * 24 * 16 * 32, "fprop", "wgrad"),
        "odd": of(2 * 24 * 32 * 8, "fprop"),
    }
    assert formats(found, "odd") == {"fprop": "int8"}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="one operator for an LSTM is oneDNN's")
def test_rnns():
    def build(model: Any) -> None:
        model.a, model.lstm, model.gru = nn.Linear(16, 16), nn.LSTM(16, 8), nn.GRU(8, 8)

    found = work(cover(build, lambda m, x: m.gru(m.lstm(m.a(x))[0])[0], torch.randn(5, 3, 16), "32-true"))
    n, time = 2 * 5 * 3 * 4 * 8 * (16 + 8), 2 * 3 * 3 * 8 * 8
    assert found["lstm"] == of(n, *ALL)
    # A GRU is taken apart: one product for all inputs and one a time step; the first state is given.
    assert found["gru"] == {"fprop": (6, 10 * time), "dgrad": (5, 9 * time), "wgrad": (6, 10 * time)}


# ---------------------------------------------------------------- FP8

RECIPES = [CurrentScaling(), DelayedScaling(), RowwiseScaling(), BlockScaling(), MXScaling()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_of_the_reference_backend_is_emulated(recipe):
    found = cover(two_of_32, through_two, torch.randn(4, 32), in_fp8("a", "b", recipe=recipe))
    a, b = 2 * 4 * 32 * 64, 2 * 4 * 64 * 32
    assert work(found) == {"a": of(a, "fprop", "wgrad"), "b": of(b, *ALL)}
    assert {row.engine for row in found.rows} == {"emulated"} and not found.fallbacks()
    shares = found.shares()
    assert (shares.flops, shares.gemms, shares.native_flops, shares.native_gemms) == (1.0, 1.0, 0.0, 0.0)
    gradient = recipe.format_of("grad_output").name.lower()
    other = "e4m3" if gradient == "e4m3" else f"{gradient} x e4m3"
    assert formats(found, "b") == {
        role: f"{format} (emulated)" for role, format in zip(ALL, ("e4m3", other, other), strict=True)
    }


def two_of_32(model: Any) -> None:
    model.a, model.b = nn.Linear(32, 64), nn.Linear(64, 32)


@pytest.mark.parametrize("gemms", [("fprop",), ("fprop", "dgrad"), ("dgrad", "wgrad")])
@pytest.mark.parametrize("backend", ["reference", "torchao"])
def test_gemms_that_a_rule_leaves_out(gemms, backend):
    if backend == "torchao":
        pytest.importorskip("torchao")
    found = cover(two, through_two, torch.randn(16, 32), in_fp8("b", gemms=gemms, backend=backend))
    assert {row.role: row.reason for row in found.rows if row.module == "b"} == {
        role: "" if role in gemms else "rule" for role in ALL
    }
    assert work(found)["b"] == of(2 * 16 * 48 * 16, *ALL)


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling()], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("how", ["our backend", "their conversion"])
@pytest.mark.parametrize("tokens", [16, 48])
def test_torchao_multiplies_fp8_natively(recipe, how, tokens):
    torchao = pytest.importorskip("torchao.float8")

    def converted(model: Any) -> None:
        two(model)
        if how == "their conversion":
            config = torchao.Float8LinearConfig.from_recipe_name(
                "rowwise" if isinstance(recipe, RowwiseScaling) else "tensorwise"
            )
            torchao.convert_to_float8_training(model, config=config)

    policy = in_fp8("a", "b", recipe=recipe, backend="torchao") if how == "our backend" else "bf16-mixed"
    found = cover(converted, through_two, torch.randn(tokens, 32), policy)
    # torchao computes the input's gradient whether anybody wants it or not.
    assert work(found) == {"a": of(2 * tokens * 32 * 48, *ALL), "b": of(2 * tokens * 48 * 16, *ALL)}
    shares = found.shares()
    assert (shares.flops, shares.gemms, shares.native_flops, shares.native_gemms) == (1.0, 1.0, 1.0, 1.0)
    assert formats(found, "b")["fprop"] == "e4m3"
    assert {row.op for row in found.rows} == {"aten._scaled_mm"} and {row.engine for row in found.rows} == {"native"}


@pytest.mark.parametrize("backend", ["reference", "torchao"])
def test_a_recipe_that_keeps_the_weights_gradient_in_high_precision(backend):
    if backend == "torchao":
        pytest.importorskip("torchao")
    policy = in_fp8("b", recipe=RowwiseScaling(weight_grad="high"), backend=backend)
    found = cover(two, through_two, torch.randn(16, 32), policy)
    assert {row.role: row.reason for row in found.rows if row.module == "b"} == {
        "fprop": "",
        "dgrad": "",
        "wgrad": "rule",
    }


def test_gradients_of_a_layer_that_was_in_evaluation_mode_in_forward_only():
    def step(model: Any, x: Tensor) -> Tensor:
        hidden = model.a(x)
        model.b.eval()
        frozen = model.b(hidden)
        model.b.train()
        return frozen + model.b(hidden)

    found = cover(square, step, torch.randn(8, 16), in_fp8("b"))
    n = 2 * 8 * 16 * 16
    assert found.fallbacks() == {"rule": 2 / 8, "eval": 3 / 8} and found.shares().flops == 3 / 8
    assert work(found)["b"] == {role: (2, 2 * n) for role in ALL}


def test_e4m3_times_bf16_is_not_fp8():
    from lightning_amp_plus.fp8.coverage.gemm_watcher import _of_dtypes

    assert _of_dtypes(torch.float8_e4m3fn, torch.bfloat16) == ("e4m3 x bf16", "native", False)
    assert _of_dtypes(torch.float8_e5m2, torch.float8_e4m3fn) == ("e5m2 x e4m3", "native", True)
    assert _of_dtypes(torch.float8_e8m0fnu, torch.float8_e8m0fnu)[2] is False


# ---------------------------------------------------------------- recomputation

VARIANTS = [False, True]
CHECKPOINTED = pytest.mark.parametrize("reentrant", VARIANTS, ids=["non-reentrant", "reentrant"])


def block(model: Any) -> None:
    model.a = nn.Linear(16, 16)
    model.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


N, WIDE = 2 * 16 * 16 * 16, 2 * 16 * 16 * 32  # FLOPs of a layer, with 16 tokens


@CHECKPOINTED
@pytest.mark.parametrize("policy", ["bf16-mixed", "reference", "torchao"])
def test_a_checkpointed_module_is_recomputed(reentrant, policy):
    if policy == "torchao":
        pytest.importorskip("torchao")
    chosen = policy if policy == "bf16-mixed" else in_fp8("block.0", "block.2", backend=policy)

    def step(model: Any, x: Tensor) -> Tensor:
        return checkpoint(model.block, model.a(x), use_reentrant=reentrant)

    found = cover(block, step, torch.randn(16, 16), chosen)
    # torch's own Linear stops the non-reentrant recomputation before its last product, of which backward needs nothing.
    last = ALL if policy == "bf16-mixed" and not reentrant else (*ALL, "recompute")
    assert work(found) == {
        "a": of(N, "fprop", "wgrad"),
        "block.0": of(WIDE, *ALL, "recompute"),
        "block.2": of(WIDE, *last),
    }
    if policy != "bf16-mixed":
        assert formats(found, "block.0")["recompute"].startswith("e4m3")
        assert found.fallbacks() == {"rule": 2 * N / (2 * N + 8 * WIDE)}


class Inner(nn.Module):
    """Checkpoints a function of its own, which multiplies by itself and calls a layer."""

    def __init__(self, reentrant: bool, own_first: bool) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 32)
        self.reentrant, self.own_first = reentrant, own_first
        self.layer = nn.Linear(16, 32) if own_first else nn.Linear(32, 16)

    def part(self, x: Tensor) -> Tensor:
        if self.own_first:
            return self.layer(functional.linear(x, self.weight))
        return functional.linear(self.layer(x), self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@CHECKPOINTED
@pytest.mark.parametrize("own_first", [True, False])
def test_a_checkpointed_function_belongs_to_its_module(reentrant, own_first):
    def build(model: Any) -> None:
        model.a, model.inner = nn.Linear(16, 16 if own_first else 32), Inner(reentrant, own_first)

    found = work(cover(build, lambda model, x: model.inner(model.a(x)), torch.randn(16, 16)))
    first, last = ("inner", "inner.layer") if own_first else ("inner.layer", "inner")
    of_size = {"inner": N, "inner.layer": WIDE}
    assert found[first] == of(of_size[first], *ALL, "recompute")
    assert found[last] == of(of_size[last], *ALL, *(["recompute"] if reentrant else []))


@CHECKPOINTED
def test_a_checkpoint_in_a_checkpoint(reentrant):
    def inner(model: Any, y: Tensor) -> Tensor:
        return checkpoint(model.block[2], model.block[1](model.block[0](y)), use_reentrant=reentrant)

    def step(model: Any, x: Tensor) -> Tensor:
        return checkpoint(partial(inner, model), model.a(x), use_reentrant=reentrant)

    found = work(cover(block, step, torch.randn(16, 16)))
    assert found["block.0"] == of(WIDE, *ALL, "recompute")
    again = {"recompute": (2, 2 * WIDE)} if reentrant else {}
    assert found["block.2"] == of(WIDE, *ALL) | again


@CHECKPOINTED
def test_a_compiled_region_in_a_checkpoint(reentrant):
    torch._dynamo.reset()

    def step(model: Any, x: Tensor) -> Tensor:
        return checkpoint(model.block, model.a(x), use_reentrant=reentrant)

    found = cover(compiled("wrapped", "aot_eager"), step, torch.randn(16, 16), in_fp8("block.*"))
    assert work(found) == {
        "a": of(N, "fprop", "wgrad"),
        "block": {role: (2, 2 * WIDE) for role in (*ALL, "recompute")},
    }


# ---------------------------------------------------------------- compiled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def compiled(how: str, backend: Any) -> Build:
    def build(model: Any) -> None:
        model.a, model.block = nn.Linear(16, 16), Block()
        if how == "in place":
            model.block.compile(backend=backend, fullgraph=True)
        else:
            model.block = torch.compile(model.block, backend=backend, fullgraph=True)

    return build


def through_block(model: Any, x: Tensor) -> Tensor:
    return model.block(model.a(x))


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize("policy", ["bf16", "reference", "torchao"])
def test_a_compiled_region_is_known_as_such_and_stays_as_it_is(how, policy):
    from torch._dynamo.testing import CompileCounterWithBackend

    if policy == "torchao":
        pytest.importorskip("torchao")
    chosen = PrecisionPolicy("bf16") if policy == "bf16" else in_fp8("block.*", backend=policy)

    def run(watch: bool) -> tuple[int, dict[str, Tensor], Coverage | None]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        counter = CompileCounterWithBackend("aot_eager")
        model = Model(compiled(how, counter), through_block)
        monitor = Fp8CoverageMonitor(2)
        trainer = make_trainer(AmpPrecision(chosen), callbacks=[monitor] if watch else [])
        batches = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0))
        trainer.fit(model, loader(list(batches)))
        assert not torch._dynamo.utils.counters["graph_break"]
        return counter.frame_count, {name: p.detach() for name, p in model.named_parameters()}, monitor.last

    frames, weights, _ = run(watch=False)
    watched_frames, watched_weights, found = run(watch=True)
    assert watched_frames == frames == 1 and found is not None
    assert all(torch.equal(weights[name], watched_weights[name]) for name in weights)
    told = {"reference": of(0, *BOTH)}.get(policy, {"backward": (0, 0)})
    expected = {role: (4 // len(told), 4 // len(told) * WIDE) for role in told}
    assert work(found) == {"a": of(N, "fprop", "wgrad"), "block": {"fprop": (2, 2 * WIDE)} | expected}
    assert {row.module for row in found.rows if row.region} == {"block"}
    share = 0.0 if policy == "bf16" else 6 * WIDE / (2 * N + 6 * WIDE)
    assert found.shares().flops == share
    assert found.shares().native_flops == (share if policy == "torchao" else 0.0)
    assert reasons(found)["block"] == {"rule" if policy == "bf16" else ""}
    assert any("Compiled: 'block'" in note for note in found.notes)


@pytest.mark.parametrize("backend", ["reference", "torchao"])
def test_what_a_rule_leaves_out_inside_a_compiled_region(backend):
    if backend == "torchao":
        pytest.importorskip("torchao")
    torch._dynamo.reset()
    policy = in_fp8("block.*", gemms=("fprop", "dgrad"), backend=backend)
    found = cover(compiled("wrapped", "aot_eager"), through_block, torch.randn(16, 16), policy)
    assert found.fallbacks() == {"rule": (2 * N + 2 * WIDE) / (2 * N + 6 * WIDE)}
    assert found.shares().flops == 4 * WIDE / (2 * N + 6 * WIDE)


@pytest.mark.slow
def test_a_region_compiled_by_inductor():
    torch._dynamo.reset()
    found = cover(compiled("wrapped", "inductor"), through_block, torch.randn(16, 16), in_fp8("block.*"))
    assert work(found)["block"] == {role: (2, 2 * WIDE) for role in ALL}
    assert found.shares().flops == 6 * WIDE / (2 * N + 6 * WIDE)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_a_region_too():
    def build(model: Any) -> None:
        model.a, model.scripted = nn.Linear(16, 16), torch.jit.script(nn.Sequential(nn.Linear(16, 32), nn.ReLU()))

    found = cover(build, lambda model, x: model.scripted(model.a(x)), torch.randn(16, 16), "32-true")
    assert work(found) == {"a": of(N, "fprop", "wgrad"), "scripted": {"fprop": (1, WIDE), "backward": (2, 2 * WIDE)}}
    assert {row.module for row in found.rows if row.region} == {"scripted"}


def test_flexible_attention_in_a_step():
    from torch.nn.attention.flex_attention import flex_attention

    def step(model: Any, x: Tensor) -> Tensor:
        q = torch.randn(1, 2, 8, 16)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is slow where it is not compiled
            flex_attention(q, q, q)
        return model.a(x)

    torch._dynamo.reset()
    found = cover(square, step, torch.randn(4, 16))
    assert work(found, "attention") == {"": of(2 * 2 * 2 * 8 * 8 * 16, "fprop")}


# ---------------------------------------------------------------- adding up


def key(module: str, op: str = "aten.mm", reason: str = "") -> RowKey:
    return RowKey(module, "fprop", "gemm", op, "e4m3", "native", reason, region=False)


def test_a_tally_adds_up_what_is_alike_and_keeps_what_has_no_known_work():
    tally = Tally()
    for flops in (10, None, 30):
        tally.add(key("a"), flops)
    tally.add(key("b", "aten.odd"), None)
    assert [(row.module, row.count, row.flops) for row in tally.rows()] == [("a", 3, 40), ("b", 1, 0)]
    assert tally.unknown == {"aten.mm", "aten.odd"}


def test_notes_are_told_with_the_modules_that_they_are_about():
    tally = Tally()
    for text, modules in (("one", ["a"]), ("two", ["", "b"]), ("three", ["a", "b", "c", "a"])):
        for module in modules:
            tally.note(text, module)
    assert tally.remarks() == ("a: one", "(model) and 1 more module: two", "a and 2 more modules: three")


def test_what_a_layer_in_fp8_does_besides_its_gemms_and_its_bias_is_quantization():
    tally = Tally()
    tally.add(key("fp8"), 1)
    tally.add(key("bf16", reason="rule"), 1)
    tally.add(key("parent"), 1)
    for index, module in enumerate(("fp8", "bf16", "parent")):
        for power, kind in enumerate(("gemm", "cast", "bias", "other")):
            tally.nanoseconds[module, kind] = 4 ** (4 * index + power)
    gemm, cast, bias, other = (sum(4 ** (4 * index + power) for index in range(3)) for power in range(4))
    of_fp8 = 4**3  # the parent holds modules, whose work it does not know
    assert tally.spent(["fp8", "bf16"]) == {"gemm": gemm, "cast": cast + of_fp8, "rest": bias + other - of_fp8}
