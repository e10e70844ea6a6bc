"""What coverage says of Transformer Engine, whose GEMMs nobody sees: by its Python over emulated kernels."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_amp_plus import AmpPrecision, PrecisionPolicy
from lightning_amp_plus.fp8 import CurrentScaling, activation_checkpoint
from lightning_amp_plus.fp8.coverage.fallback import Fallbacks, Layer
from lightning_amp_plus.fp8.coverage.gemm_watcher import GemmWatcher
from lightning_amp_plus.fp8.coverage.report import GemmRow
from lightning_amp_plus.fp8.coverage.tally import Tally
from lightning_amp_plus.fp8.coverage.te_evidence import Matrix, matrices_of
from lightning_amp_plus.fp8.coverage.transformer_engine import UnseenGemms
from lightning_amp_plus.integration.watched_step import watch_step
from lightning_amp_plus.watching.modules import watchable
from tests.fp8.test_training import Regressor, batches
from tests.fp8.test_transformer_engine import DELAYED, as_if_on_a_gpu, policy
from tests.support import transformer_engine_kernels as kernels
from tests.support.training import ResumableLoader, make_trainer, same, weights
from tests.support.transformer_engine import MISSING, check_in_transformer_engine

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

TOKENS = 32
FIRST = 2 * TOKENS * 16 * 64  # FLOPs of one product of the layer from 16 to 64
SECOND = 2 * TOKENS * 64 * 32  # and of the one from 64 to 32
FP8, FP8_GRADIENT = "e4m3", "e5m2 x e4m3"


class Watch(L.Callback):
    """Watches every micro-batch, all into one tally."""

    def __init__(self) -> None:
        self.tally = Tally()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        plugin: Any = trainer.precision_plugin
        routes = {route.name: route.fp8 for route in plugin.plan.routes}
        modules = dict(pl_module.named_modules())
        layers = {name: Layer(modules[name], fp8, "rule") for name, fp8 in routes.items() if name in modules}
        self.watcher = GemmWatcher(watchable(pl_module), Fallbacks(layers, {}), self.tally)
        self.end = watch_step(trainer.strategy, self.watcher, trainer.optimizers)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.end()


class Theirs(L.LightningModule):
    """A model of a user's own layers of Transformer Engine, and a head."""

    def __init__(self, *layers: nn.Module, fp8: bool = True, recipe: Any = None, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1)
        self.fp8, self.recipe = fp8, recipe

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        import transformer_engine.pytorch as te

        with te.autocast(enabled=self.fp8, recipe=self.recipe):
            out = self.inner(batch)
        return nn.functional.mse_loss(self.head(out).float(), batch.sum(1, keepdim=True).detach())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def current(**arguments: Any) -> Any:
    from transformer_engine.common.recipe import Float8CurrentScaling

    return Float8CurrentScaling(**arguments)


def linear(*sizes: int, **arguments: Any) -> Any:
    import transformer_engine.pytorch as te

    return te.Linear(*sizes, device="cpu", **arguments)


def two(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    return [linear(16, 64, params_dtype=dtype), linear(64, 32, params_dtype=dtype)]


@contextmanager
def gemms_of_the_binary() -> Iterator[list[tuple[bool, int]]]:
    """What its GEMM is really called with: whether it was FP8, and FLOPs."""
    binary: Any = sys.modules["transformer_engine_torch"]
    gemm, done = binary.generic_gemm, []

    def elements(operand: Any) -> int:
        values = (
            operand if isinstance(operand, Tensor) else operand._transpose if operand._data is None else operand._data
        )
        return int(values.numel())

    def counted(left: Any, transpose_left: bool, right: Any, *args: Any, **kwargs: Any) -> Any:
        result = gemm(left, transpose_left, right, *args, **kwargs)
        contracted = round((elements(left) * elements(right) / result[0].numel()) ** 0.5)
        done.append((hasattr(left, "_scale_inv"), 2 * result[0].numel() * contracted))
        return result

    binary.generic_gemm = counted
    try:
        yield done
    finally:
        binary.generic_gemm = gemm


def fit(
    model: L.LightningModule, plugin: Any = None, steps: int = 1, believed: bool = True, watch: Watch | None = None
) -> tuple[list[GemmRow], Tally]:
    """Trains under the watch. What was heard of is what the binary was called with, each GEMM in FP8 or not.

    Returns:
        The rows of Transformer Engine's GEMMs, and the tally.
    """
    watch, plugin = watch or Watch(), plugin or AmpPrecision(PrecisionPolicy("bf16"))
    trainer = make_trainer(plugin, max_epochs=-1, max_steps=steps, callbacks=[watch])
    with gemms_of_the_binary() as done:
        trainer.fit(model, ResumableLoader(batches()))
    rows = [row for row in watch.tally.rows() if row.op == "transformer_engine"]
    assert done or not believed
    for fp8 in (True, False) if believed else ():
        mine = [row for row in rows if row.in_fp8 is fp8]
        real = [flops for in_fp8, flops in done if in_fp8 is fp8]
        assert (sum(row.count for row in mine), sum(row.flops for row in mine)) == (len(real), sum(real)), (rows, done)
    assert {row.engine for row in rows} <= {"native"} and not any(row.region for row in rows)
    return rows, watch.tally


def said(rows: list[GemmRow]) -> list[tuple[Any, ...]]:
    return [(row.module, row.role, row.format, row.reason, row.count, row.flops) for row in rows]


# -------------------------------------------------------------------- what is checked there


def our_layers_are_counted_by_what_it_says() -> None:
    as_if_on_a_gpu()
    for recipe in (DELAYED, CurrentScaling()):
        rows, tally = fit(Regressor(), AmpPrecision(policy(recipe)), steps=2)
        assert said(rows) == [
            ("body.0", "fprop", FP8, "", 2, 2 * FIRST),
            ("body.2", "fprop", FP8, "", 2, 2 * SECOND),
            ("body.2", "dgrad", FP8_GRADIENT, "", 2, 2 * SECOND),
            ("body.2", "wgrad", FP8_GRADIENT, "", 2, 2 * SECOND),
            ("body.0", "wgrad", FP8_GRADIENT, "", 2, 2 * FIRST),
        ]
        assert {row.module for row in tally.rows() if row.op != "transformer_engine"} == {"head"} and not tally.notes


def rows_of_zeros_are_work_too() -> None:
    as_if_on_a_gpu()

    class Few(Regressor):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch[:30], batch_idx)

    rows, _ = fit(Few(), AmpPrecision(policy(CurrentScaling())))
    assert said(rows)[0] == ("body.0", "fprop", FP8, "", 1, FIRST)


def a_users_own_layers_are() -> None:
    import transformer_engine.pytorch as te

    for recipe in (None, current()):
        rows, tally = fit(Theirs(te.LayerNormLinear(16, 64, device="cpu"), linear(64, 32), recipe=recipe))
        assert said(rows) == [
            ("net.0", "fprop", FP8, "", 1, FIRST),
            ("net.1", "fprop", FP8, "", 1, SECOND),
            ("net.1", "dgrad", FP8_GRADIENT, "", 1, SECOND),
            ("net.1", "wgrad", FP8_GRADIENT, "", 1, SECOND),
            # The batch has no gradient, but the norm in front of the product has weights.
            ("net.0", "dgrad", FP8_GRADIENT, "", 1, FIRST),
            ("net.0", "wgrad", FP8_GRADIENT, "", 1, FIRST),
        ]
        assert not tally.notes


def an_mlp_is_two_products() -> None:
    import transformer_engine.pytorch as te

    for again in (False, True):
        mlp = te.LayerNormMLP(16, 64, activation="relu", device="cpu", checkpoint=again)
        rows, tally = fit(Theirs(mlp, recipe=current(), width=16))
        expected = [
            ("net.0", role, FP8 if role == "fprop" else FP8_GRADIENT, "", 2, 2 * FIRST)
            for role in ("fprop", "dgrad", "wgrad")
        ]
        expected[1:1] = [("net.0", "recompute", FP8, "", 1, FIRST)] if again else []
        assert said(rows) == expected and not tally.notes


def parts_of_a_split_weight_are_one_product() -> None:
    split = linear(16, 64, parameters_split=("query", "key"))
    rows, _ = fit(Theirs(split, linear(64, 32)))
    assert said(rows)[0] == ("net.0", "fprop", FP8, "", 1, FIRST)


def frozen_weights_have_no_gradient() -> None:
    layers = two()
    layers[1].requires_grad_(False)
    rows, _ = fit(Theirs(*layers))
    assert [(row.module, row.role) for row in rows] == [
        ("net.0", "fprop"), ("net.1", "fprop"), ("net.1", "dgrad"), ("net.0", "wgrad"),
    ]  # fmt: skip


def without_autocast_nobody_asked_for_fp8() -> None:
    rows, _ = fit(Theirs(*two(), fp8=False))
    assert [line[:4] for line in said(rows)] == [
        (f"net.{at}", role, "bf16", "rule")
        for at, role in ((0, "fprop"), (1, "fprop"), (1, "dgrad"), (1, "wgrad"), (0, "wgrad"))
    ]


def one_layer_may_be_left_out_inside() -> None:
    import transformer_engine.pytorch as te

    class Partly(Theirs):
        def inner(self, x: Tensor) -> Tensor:
            out: Tensor = self.net[0](x)
            with te.autocast(enabled=False):
                return self.net[1](out)

    rows, _ = fit(Partly(*two()))
    assert {(row.module, row.format, row.reason) for row in rows} == {
        ("net.0", FP8, ""), ("net.0", FP8_GRADIENT, ""), ("net.1", "bf16", "rule"),
    }  # fmt: skip


def a_recipe_may_leave_backward_in_high_precision() -> None:
    for instead in ("high_precision", "dequantized"):
        rows, tally = fit(Theirs(*two(torch.bfloat16), recipe=current(backward_override=instead)))
        assert {(row.role == "fprop", row.format, row.reason) for row in rows} == {
            (True, FP8, ""),
            (False, "bf16", "rule"),
        }
        assert not tally.notes


def checkpoints_that_know_of_fp8_recompute_in_it() -> None:
    import transformer_engine.pytorch as te

    class Checkpointed(Theirs):
        reentrant = True

        def inner(self, x: Tensor) -> Tensor:
            return te.checkpoint(self.net, x.requires_grad_(), use_reentrant=self.reentrant)

    for recipe in (None, current()):
        for reentrant in (True, False):
            model = Checkpointed(*two(), recipe=recipe)
            model.reentrant = reentrant
            rows, _ = fit(model)
            recomputed = [row for row in rows if row.role == "recompute"]
            assert said(recomputed) == [
                ("net.0", "recompute", FP8, "", 1, FIRST),
                ("net.1", "recompute", FP8, "", 1, SECOND),
            ]
            assert len(rows) == 8 and all(row.in_fp8 and row.count == 1 for row in rows)


def so_do_our_layers_under_any_checkpoint() -> None:
    as_if_on_a_gpu()

    class Checkpointed(Regressor):
        through: Any = None

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            out = self.through(self.body, batch.requires_grad_())
            return nn.functional.mse_loss(self.head(out).float(), batch.sum(1, keepdim=True).detach())

    ways = {
        "ours": activation_checkpoint,
        "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
        "other": lambda f, x: checkpoint(f, x, use_reentrant=False),
    }
    for recipe, names in ((DELAYED, ("ours",)), (CurrentScaling(), tuple(ways))):
        for name in names:
            model = Checkpointed()
            model.through = ways[name]
            rows, _ = fit(model, AmpPrecision(policy(recipe)))
            assert said([row for row in rows if row.role == "recompute"]) == [
                ("body.0", "recompute", FP8, "", 1, FIRST),
                ("body.2", "recompute", FP8, "", 1, SECOND),
            ], name
            assert all(row.in_fp8 and row.count == 1 for row in rows) and len(rows) == 8


def torch_checkpoint_around_a_users_own_is_found_out() -> None:
    class Checkpointed(Theirs):
        def inner(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.net, x.requires_grad_(), use_reentrant=True)
            return out

    rows, _ = fit(Checkpointed(*two()))
    assert {(row.role, row.format, row.reason) for row in rows} == {
        ("fprop", FP8, ""),
        ("recompute", "bf16", "demoted"), ("dgrad", "bf16", "demoted"), ("wgrad", "bf16", "demoted"),
    }  # fmt: skip


def evaluation_mode_is_in_fp8_where_the_policy_says_so() -> None:
    as_if_on_a_gpu()

    class Evaluated(Regressor):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.body.eval()
            return super().training_step(batch, batch_idx)

    rows, _ = fit(Evaluated(), AmpPrecision(policy(fp8_in_evaluation=True)))
    assert len(rows) == 5 and all(row.in_fp8 for row in rows)
    rows, tally = fit(Evaluated(), AmpPrecision(policy()), believed=False)
    assert not rows
    assert {row.reason for row in tally.rows() if row.module.startswith("body")} == {"eval"}


def what_is_seen_is_counted_once() -> None:
    as_if_on_a_gpu()
    binary: Any = sys.modules["transformer_engine_torch"]
    unseen, _ = fit(Regressor(), AmpPrecision(policy()))
    binary.generic_gemm, hidden = kernels.generic_gemm, binary.generic_gemm
    try:
        rows, tally = fit(Regressor(), AmpPrecision(policy()), believed=False)
    finally:
        binary.generic_gemm = hidden
    assert not rows
    seen = [row for row in tally.rows() if row.module.startswith("body")]
    assert {row.op for row in seen} == {"aten._scaled_mm"}
    for name in ("body.0", "body.2"):
        seen_here, unseen_here = ([row for row in rows if row.module == name] for rows in (seen, unseen))
        assert sum(row.flops for row in seen_here) == sum(row.flops for row in unseen_here)
        assert sum(row.count for row in seen_here) == sum(row.count for row in unseen_here)


def a_flag_that_nothing_bears_out_is_not_believed() -> None:
    import transformer_engine.pytorch as te

    class Boasting(te.Linear):  # type: ignore[misc]
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 1:
                return super().forward(x)
            with te.autocast(enabled=False):
                out: Tensor = super().forward(x)
            self.fp8 = True
            return out

    rows, tally = fit(Theirs(Boasting(16, 64, device="cpu"), linear(64, 32)), steps=2)
    assert {(row.role, row.format, row.reason) for row in rows if row.module == "net.0" and not row.in_fp8} == {
        ("fprop", "bf16", "backend"),
        ("wgrad", "bf16", "backend"),
    }
    (note,) = tally.remarks()
    assert note.startswith("net.0: ") and "kept nothing in FP8" in note


def training_stays_the_same_to_the_last_bit() -> None:
    as_if_on_a_gpu()
    watched, plain = Regressor(), Regressor()
    fit(watched, AmpPrecision(policy()), steps=4)
    make_trainer(AmpPrecision(policy()), max_epochs=-1, max_steps=4).fit(plain, ResumableLoader(batches()))
    assert watched.losses == plain.losses and same(weights(watched), weights(plain))


def a_backward_that_comes_later_is_not_counted() -> None:
    class Kept(Theirs):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.kept = super().training_step(batch, batch_idx)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> None:  # a step would change what the other graph has saved
            return

    model, watch = Kept(*two(), recipe=current()), Watch()
    rows, tally = fit(model, believed=False, watch=watch)
    counted = {(row.role, row.count) for row in rows}
    assert counted == {("fprop", 2), ("dgrad", 1), ("wgrad", 1)}
    model.kept.backward()
    assert watch.watcher is not None  # it still lives
    assert [row for row in tally.rows() if row.op == "transformer_engine"] == rows


def a_model_that_keeps_its_loss_can_still_be_freed() -> None:
    tally, layer, x = Tally(), linear(16, 64), torch.randn(TOKENS, 16)
    fallbacks = Fallbacks({"": Layer(layer, None, "rule")}, {})
    unseen = UnseenGemms(watchable(layer), fallbacks, tally, lambda: True)
    output = layer(x)
    unseen.left("", layer, False, ((x,), {}), output)
    layer.kept = output.sum()
    layer.kept.backward(retain_graph=True)
    assert [key[1] for key in tally.work] == ["fprop", "wgrad"]
    freed = weakref.ref(layer)
    del layer, fallbacks, unseen, output
    gc.collect()
    assert freed() is None


def a_grouped_layer_multiplies_each_token_once() -> None:
    import transformer_engine.pytorch as te

    layer, x = te.GroupedLinear(3, 16, 64, device="cpu"), torch.randn(TOKENS, 16)
    one = FIRST // TOKENS
    for splits in ([20, 0, 12], torch.tensor([20, 0, 12])):
        expected = (Matrix(20 * one, False, True), Matrix(12 * one, False, True))
        assert (
            matrices_of(layer, x, ((x, splits), {})) == matrices_of(layer, x, ((x,), {"m_splits": splits})) == expected
        )


def ranks_of_a_sequence_multiply_all_tokens() -> None:
    layer, x = linear(16, 64), torch.randn(TOKENS, 16)
    layer.sequence_parallel, layer.tp_size, layer.parallel_mode = True, 2, "column"
    assert matrices_of(layer, x, ((x,), {}))[0].flops == 2 * FIRST
    layer.parallel_mode = "row"
    assert matrices_of(layer, x, ((x,), {}))[0].flops == FIRST


def what_tells_nothing_is_named() -> None:
    import transformer_engine.pytorch as te

    model = nn.ModuleDict({"a": te.ops.Linear(16, 16, device="cpu"), "b": linear(16, 16)})
    model["c"] = torch.compile(nn.Sequential(linear(16, 16)))
    tally = Tally()
    GemmWatcher(watchable(model), Fallbacks({}, {}), tally)
    (modules,) = tally.notes.values()
    assert list(modules) == ["a", "a.basic_ops.0", "c.0"]
    (note,) = tally.remarks()
    assert note.startswith("a and 2 more modules: ") and "not counted" in note


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        our_layers_are_counted_by_what_it_says,
        rows_of_zeros_are_work_too,
        a_users_own_layers_are,
        an_mlp_is_two_products,
        parts_of_a_split_weight_are_one_product,
        frozen_weights_have_no_gradient,
        without_autocast_nobody_asked_for_fp8,
        one_layer_may_be_left_out_inside,
        a_recipe_may_leave_backward_in_high_precision,
        checkpoints_that_know_of_fp8_recompute_in_it,
        so_do_our_layers_under_any_checkpoint,
        torch_checkpoint_around_a_users_own_is_found_out,
        evaluation_mode_is_in_fp8_where_the_policy_says_so,
        what_is_seen_is_counted_once,
        a_flag_that_nothing_bears_out_is_not_believed,
        training_stays_the_same_to_the_last_bit,
        a_backward_that_comes_later_is_not_counted,
        a_model_that_keeps_its_loss_can_still_be_freed,
        a_grouped_layer_multiplies_each_token_once,
        ranks_of_a_sequence_multiply_all_tokens,
        what_tells_nothing_is_named,
    )
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return check_in_transformer_engine(*CHECKS.values())


@pytest.mark.parametrize("check", CHECKS)
def test_over_emulated_kernels(failures: dict[str, str], check: str) -> None:
    assert check not in failures, failures[check]
