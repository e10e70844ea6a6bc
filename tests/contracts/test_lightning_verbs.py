"""Where no rule is set, every verb of Lightning's ``Precision`` does what it does in Lightning's own plugins."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import AmpPrecision, LossScale
from tests.support.faults import INF
from tests.support.models import (
    ExactLinear,
    TinyRegressor,
    adamw,
    fused_adamw,
    fused_sgd_momentum,
    sgd_momentum,
)
from tests.support.training import (
    amp_fp16,
    fit,
    make_trainer,
    regression_batches,
    same,
    stock_bf16,
    stock_fp16,
    weights,
)

# ------------------------------------------------------------------ twenty steps, bit for bit

GROWTH = 5  # so that twenty steps see the scale grow


def ours_and_stock(precision: str, check_finite: bool = True) -> tuple[AmpPrecision, Precision | None]:
    """Our plugin and the one of Lightning that it must equal (``None``: Lightning's default, FP32)."""
    if precision == "16-mixed":
        return amp_fp16(growth_interval=GROWTH), stock_fp16(growth_interval=GROWTH)
    loss_scale = None if precision == "16-true" else "auto"
    with pytest.warns(UserWarning, match="loss_scale=None") if precision == "16-true" else nullcontext():
        ours = AmpPrecision(precision, loss_scale=loss_scale, check_finite=check_finite)
    if precision == "32-true":
        return ours, None
    return ours, stock_bf16() if precision == "bf16-mixed" else HalfPrecision(precision)  # type: ignore[arg-type]


TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping by norm": {"gradient_clip_val": 0.1},
    "clipping by norm above the norm": {"gradient_clip_val": 100.0},
    "clipping by value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "accumulation and clipping": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
}
MIXED = ["16-mixed", "bf16-mixed", "32-true"]
ALL = [*MIXED, "bf16-true", "16-true"]


def assert_same_run(
    precision: str, make_optimizer: Any, arguments: dict[str, Any], check_finite: bool = True, faults: Any = None
) -> None:
    plugin, stock = ours_and_stock(precision, check_finite)
    left, right = TinyRegressor(make_optimizer, faults=faults), TinyRegressor(make_optimizer, faults=faults)
    accumulate = arguments.get("accumulate_grad_batches", 1)
    batches = regression_batches(20 * accumulate - (accumulate > 1))  # the last window is a partial one
    a, b = fit(left, plugin, batches, **arguments), fit(right, stock, batches, **arguments)
    assert left.losses == right.losses
    assert same(weights(left), weights(right))
    assert a.global_step == b.global_step == 20
    assert not same(weights(left), weights(TinyRegressor()))
    if precision == "16-mixed":
        assert plugin.scaler is not None and stock is not None
        assert plugin.scaler.get_scale() == stock.scaler.get_scale()  # type: ignore[attr-defined]
        assert plugin.history.growths > 0


def adamw_for_fp16_storage(parameters: Any) -> torch.optim.Optimizer:
    """AdamW's usual epsilon of 1e-8 is 0 in FP16, so that a zero gradient gives 0 / 0."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


@pytest.mark.parametrize("arguments", TRAINERS.values(), ids=TRAINERS.keys())
@pytest.mark.parametrize("make_optimizer", [adamw, sgd_momentum])
@pytest.mark.parametrize("precision", MIXED)
def test_twenty_steps_give_the_losses_and_weights_of_stock_bit_for_bit(
    precision: str, make_optimizer: Any, arguments: dict[str, Any]
) -> None:
    assert_same_run(precision, make_optimizer, arguments)


@pytest.mark.parametrize("name", ["plain", "accumulation", "clipping by norm above the norm", "clipping by value"])
@pytest.mark.parametrize("make_optimizer", [adamw_for_fp16_storage, sgd_momentum])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_models_stored_in_16_bits_do_too(precision: str, make_optimizer: Any, name: str) -> None:
    """Clipping by norm is left out: ours takes the norm in FP32, stock in 16 bits (see fairseq#4555)."""
    assert_same_run(precision, make_optimizer, TRAINERS[name])


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_models_stored_in_16_bits_are_clipped_to_a_norm_nearer_to_the_threshold_than_in_stock(precision: str) -> None:
    def misses(plugin: Any) -> float:
        misses: list[float] = []

        class Model(TinyRegressor):
            def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
                super().configure_gradient_clipping(*args, **kwargs)
                norms = [p.grad.double().norm() for p in self.parameters() if p.grad is not None]
                misses.append(abs(float(torch.stack(norms).norm()) / 0.1 - 1))

        fit(Model(), plugin, gradient_clip_val=0.1)
        assert len(misses) == 20
        return sum(misses)

    ours, stock = ours_and_stock(precision)
    assert misses(ours) < misses(stock)


@pytest.mark.parametrize("arguments", [TRAINERS["plain"], TRAINERS["accumulation"]], ids=["plain", "accumulation"])
@pytest.mark.parametrize("make_optimizer", [fused_adamw, fused_sgd_momentum])
@pytest.mark.parametrize("precision", [*MIXED, "bf16-true"])
def test_fused_optimizers_do_too(precision: str, make_optimizer: Any, arguments: dict[str, Any]) -> None:
    """Without clipping, which stock Lightning refuses in mixed precision with a fused optimizer."""
    assert_same_run(precision, make_optimizer, arguments)


@pytest.mark.parametrize("make_optimizer", [fused_adamw, fused_sgd_momentum])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_fused_optimizers_with_clipping_do_too_where_stock_clips_them(algorithm: str, make_optimizer: Any) -> None:
    arguments = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    assert_same_run("32-true", make_optimizer, arguments)


@pytest.mark.parametrize("arguments", TRAINERS.values(), ids=TRAINERS.keys())
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_skipped_steps_are_skipped_where_stock_fp16_skips_them(make_optimizer: Any, arguments: dict[str, Any]) -> None:
    if make_optimizer is fused_adamw and "gradient_clip_val" in arguments:
        arguments = {"accumulate_grad_batches": 2}
    assert_same_run("16-mixed", make_optimizer, arguments, faults={2: INF, 9: INF})


@pytest.mark.parametrize("arguments", TRAINERS.values(), ids=TRAINERS.keys())
@pytest.mark.parametrize("make_optimizer", [adamw, sgd_momentum, fused_adamw])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "bf16-true"])
def test_without_the_finite_check_it_is_bit_for_bit_stock(
    precision: str, make_optimizer: Any, arguments: dict[str, Any]
) -> None:
    if make_optimizer is fused_adamw and precision == "bf16-mixed" and "gradient_clip_val" in arguments:
        arguments = {"accumulate_grad_batches": 2}
    assert_same_run(precision, make_optimizer, arguments, check_finite=False)


# ------------------------------------------------------------------ the same operations


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class BetweenStartAndEnd(L.Callback):
    """Keeps what was dispatched while training: setup is another matter."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.names: list[str] = []

    def on_train_start(self, *_: Any) -> None:
        self.operations.names.clear()

    def on_train_end(self, *_: Any) -> None:
        self.names = list(self.operations.names)


def operations_of(plugin: Any, make_optimizer: Any, steps: int, arguments: dict[str, Any]) -> list[str]:
    with Operations() as operations:
        recorder = BetweenStartAndEnd(operations)
        fit(TinyRegressor(make_optimizer), plugin, regression_batches(steps), callbacks=[recorder], **arguments)
    return recorder.names


@pytest.mark.parametrize("arguments", TRAINERS.values(), ids=TRAINERS.keys())
@pytest.mark.parametrize("make_optimizer", [adamw, sgd_momentum, fused_adamw])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_without_the_finite_check_it_dispatches_the_operations_of_stock(
    precision: str, make_optimizer: Any, arguments: dict[str, Any]
) -> None:
    if make_optimizer is fused_adamw and precision == "bf16-mixed" and "gradient_clip_val" in arguments:
        arguments = {"accumulate_grad_batches": 2}
    ours, stock = ours_and_stock(precision, check_finite=False)
    left = operations_of(ours, make_optimizer, 4, arguments)
    right = operations_of(stock, make_optimizer, 4, arguments)
    assert len(left) == len(right) > 40
    assert left == right


@pytest.mark.parametrize("arguments", [TRAINERS["plain"], TRAINERS["accumulation"]], ids=["plain", "accumulation"])
@pytest.mark.parametrize("make_optimizer", [adamw, sgd_momentum, fused_adamw, fused_sgd_momentum])
@pytest.mark.parametrize("precision", MIXED)
def test_with_the_check_a_step_costs_at_most_ten_operations_more(
    precision: str, make_optimizer: Any, arguments: dict[str, Any]
) -> None:
    """Between two lengths of run, so that what happens once does not count."""

    def per_step(plugin: Any) -> float:
        few, many = plugin(), plugin()
        return (
            len(operations_of(many, make_optimizer, 12, arguments))
            - len(operations_of(few, make_optimizer, 6, arguments))
        ) / (6 / arguments.get("accumulate_grad_batches", 1))

    ours, stock = (lambda: ours_and_stock(precision)[0]), (lambda: ours_and_stock(precision)[1])
    assert per_step(stock) > 10
    assert per_step(ours) <= per_step(stock) + 10


# ------------------------------------------------------------------ the order of hooks


class HookOrder(ExactLinear):
    """Writes down every hook around the optimizer with the gradient it sees."""

    def __init__(self, make_optimizer: Any, none_at: set[int], step_hooks: bool) -> None:
        self.step_hooks = step_hooks
        self.events: list[tuple[str, Any]] = []
        self.none_at = none_at
        super().__init__(4, make_optimizer)

    def note(self, name: str, value: Any = None) -> None:
        gradient = self.layer.weight.grad
        self.events.append((name, value if value is not None else None if gradient is None else gradient[0].tolist()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.note("training_step")
        return None if batch_idx in self.none_at else self.loss(batch)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.note("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.note("on_before_backward", float(loss.detach()))

    def on_after_backward(self) -> None:
        self.note("on_after_backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.note("on_before_optimizer_step")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.note("before clipping")
        super().configure_gradient_clipping(*args, **kwargs)
        self.note("after clipping")

    def lr_scheduler_step(self, *args: Any) -> None:
        self.note("lr_scheduler_step")
        super().lr_scheduler_step(*args)

    def on_train_batch_start(self, *_: Any) -> None:
        self.note("on_train_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.step_hooks:
            optimizer.register_step_pre_hook(lambda *_: self.note("step pre-hook"))
            optimizer.register_step_post_hook(lambda *_: self.note("step post-hook"))
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


HOOK_BATCHES = [torch.tensor([1.0, 2.0, 2.0, 4.0]) * (i + 1) for i in range(6)]  # norms 5, 10, ...


def order(
    plugin: Any, none_at: frozenset[int] = frozenset(), step_hooks: bool = True, fused: bool = False, **arguments: Any
) -> list[tuple[str, Any]]:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=2.0**-10, fused=fused)

    model = HookOrder(make_optimizer, set(none_at), step_hooks)
    fit(model, plugin, HOOK_BATCHES, **arguments)
    return model.events


ORDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 4},
    "clipping": {"gradient_clip_val": 8.0},
    "both": {"accumulate_grad_batches": 2, "gradient_clip_val": 8.0},
}


@pytest.mark.parametrize("arguments", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("none_at", [frozenset(), frozenset({0}), frozenset({2})])
def test_hooks_run_in_the_order_of_stock_fp16_and_see_the_same_gradients(
    none_at: frozenset[int], arguments: dict[str, Any]
) -> None:
    """A None that closes a window is left out: stock FP16 drops that window (see Lightning#17407)."""
    ours, stock = order(amp_fp16(), none_at, **arguments), order(stock_fp16(), none_at, **arguments)
    if none_at and "accumulate_grad_batches" not in arguments:
        # Here every None closes a window. The step that has no gradient is not made, and no scheduler advances for it.
        stock = _without_scheduler_step_of_batch(stock, min(none_at))
    assert [name for name, _ in ours] == [name for name, _ in stock]
    assert_same_values(ours, stock)


def assert_same_values(left: list[tuple[str, Any]], right: list[tuple[str, Any]], rel: float = 1e-6) -> None:
    for (name, a), (_, b) in zip(left, right, strict=True):
        assert a == (None if b is None else pytest.approx(b, rel=rel)), name


def _without_scheduler_step_of_batch(events: list[tuple[str, Any]], batch: int) -> list[tuple[str, Any]]:
    names = [name for name, _ in events]
    starts = [i for i, name in enumerate(names) if name == "on_train_batch_start"]
    step = names.index("lr_scheduler_step", starts[batch])
    assert len(starts) == batch + 1 or step < starts[batch + 1]
    return events[:step] + events[step + 1 :]


@pytest.mark.parametrize("fused", [False, True])
def test_the_hook_before_the_step_sees_unscaled_unclipped_gradients(fused: bool) -> None:
    events = order(amp_fp16(), fused=fused, accumulate_grad_batches=2, gradient_clip_val=5.0)
    first = {name: value for name, value in reversed(events[: [n for n, _ in events].index("on_train_batch_end", 12)])}
    scaled = [1024 * 1.5 * g for g in (1.0, 2.0, 2.0, 4.0)]
    true = [1.5 * g for g in (1.0, 2.0, 2.0, 4.0)]  # (1 + 2) / 2 of the first batch; norm 7.5
    clipped = [2 / 3 * g for g in true]
    assert [v for n, v in events if n == "on_after_backward"][1] == scaled
    assert first["on_before_optimizer_step"] == true
    assert first["before clipping"] == true
    assert first["after clipping"] == pytest.approx(clipped)
    assert first["step pre-hook"] == pytest.approx(clipped)


@pytest.mark.parametrize("arguments", ORDERS.values(), ids=ORDERS.keys())
def test_a_fused_optimizer_changes_nothing_in_the_order(arguments: dict[str, Any]) -> None:
    fused, plain = order(amp_fp16(), fused=True, **arguments), order(amp_fp16(), **arguments)
    assert [name for name, _ in fused] == [name for name, _ in plain]
    assert_same_values(fused, plain)


def test_stock_shows_other_gradients_to_hooks_with_a_fused_optimizer() -> None:
    assert order(stock_fp16(), fused=True) != order(stock_fp16())


@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize("arguments", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "bf16-true"])
def test_hooks_run_in_the_order_of_stock_without_a_scale(
    precision: str, arguments: dict[str, Any], check_finite: bool
) -> None:
    """With the check, torch's own pre-hook comes after backward, as in FP16; in stock, before it."""
    ours, stock = ours_and_stock(precision, check_finite)
    step_hooks = not check_finite
    left = order(ours, step_hooks=step_hooks, **arguments)
    right = order(stock, step_hooks=step_hooks, **arguments)
    assert [name for name, _ in left] == [name for name, _ in right]
    assert_same_values(left, right, rel=1e-2 if precision == "bf16-true" else 1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_in_a_skipped_step_all_hooks_run_but_those_of_the_step_and_the_scheduler(bad: float) -> None:
    def names(plugin: Any) -> list[str]:
        model = HookOrder(lambda parameters: torch.optim.SGD(parameters, lr=1.0), set(), True)
        fit(model, plugin, [HOOK_BATCHES[0] * bad])
        return [name for name, _ in model.events]

    stock = names(stock_fp16())
    assert "step pre-hook" not in stock
    assert names(amp_fp16()) == [name for name in stock if name != "lr_scheduler_step"]


# ------------------------------------------------------------------ each verb by itself


def plugins() -> dict[str, tuple[AmpPrecision, Precision]]:
    return {name: _pair(name) for name in ALL}


def _pair(precision: str) -> tuple[AmpPrecision, Precision]:
    ours, stock = ours_and_stock(precision)
    return ours, stock if stock is not None else Precision()


def attached(model: TinyRegressor | None = None) -> TinyRegressor:
    """A module that knows a Trainer, which the hooks in some verbs need; nothing is trained."""
    model = model or TinyRegressor()
    model.trainer = make_trainer()
    model.trainer.strategy.connect(model)
    return model


@pytest.mark.parametrize("precision", ALL)
def test_connect_returns_what_it_was_given(precision: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizers, schedulers = [torch.optim.SGD(model.parameters())], [object()]
    for plugin in _pair(precision):
        a, b, c = plugin.connect(model, optimizers, schedulers)
        assert a is model and list(b) == optimizers and list(c) == schedulers


@pytest.mark.parametrize("precision", ALL)
def test_pre_backward_scales_and_calls_the_hook(precision: str) -> None:
    results = []
    for plugin in _pair(precision):
        seen: list[float] = []
        model = attached()
        model.on_before_backward = lambda loss, seen=seen: seen.append(float(loss))  # type: ignore[method-assign]
        results.append((float(plugin.pre_backward(torch.tensor(3.0), model)), seen))
    assert results[0] == results[1]
    assert results[0][0] == (3.0 * 1024 if precision == "16-mixed" else 3.0)


@pytest.mark.parametrize("precision", ALL)
def test_backward_fills_the_gradients_and_takes_its_arguments(precision: str) -> None:
    for plugin in _pair(precision):
        weight = torch.ones(2, requires_grad=True)
        loss = (weight * 3).sum()
        plugin.backward(loss, attached(), None, retain_graph=True)
        plugin.backward(loss, attached(), None)
        assert weight.grad is not None and weight.grad.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("precision", ALL)
def test_post_backward_detaches_and_calls_the_hook(precision: str) -> None:
    for plugin in _pair(precision):
        called: list[bool] = []
        model = attached()
        model.on_after_backward = lambda called=called: called.append(True)  # type: ignore[method-assign]
        loss = torch.ones((), requires_grad=True) * 2
        result = plugin.post_backward(loss, model)
        assert not result.requires_grad and float(result) == 2.0 and called == [True]


@pytest.mark.parametrize("precision", MIXED)
def test_optimizer_step_runs_closure_hook_and_step_and_returns_the_closures_value(precision: str) -> None:
    results = []
    for plugin in _pair(precision):
        model = attached(TinyRegressor())
        model.configure_gradient_clipping = lambda *_, **__: None  # type: ignore[method-assign]
        calls: list[str] = []
        model.on_before_optimizer_step = lambda *_, calls=calls: calls.append("hook")  # type: ignore[method-assign]
        optimizer = sgd_momentum(model.parameters())

        def closure(plugin: Any = plugin, model: Any = model, calls: Any = calls) -> Tensor:
            calls.append("closure")
            loss = model.loss(regression_batches(1)[0])
            plugin.backward(plugin.pre_backward(loss, model), model, None)
            return loss.detach()

        value = plugin.optimizer_step(optimizer, model, closure)
        # With a scaler torch's own step hands out nothing where no closure reaches it.
        results.append((calls, weights(model), None if value is None else float(value)))
    (ours, left, ours_value), (stock, right, stock_value) = results
    assert ours == stock == ["closure", "hook"]
    assert same(left, right)
    assert ours_value == stock_value
    assert not same(left, weights(TinyRegressor()))


@pytest.mark.parametrize("kind", list(GradClipAlgorithmType))
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("value", [0.0, 0.5, 100])
def test_clip_gradients_clips_as_stock_does(value: float, precision: str, kind: GradClipAlgorithmType) -> None:
    results = []
    for plugin in _pair(precision):
        model = TinyRegressor()
        optimizer = sgd_momentum(model.parameters())
        model.loss(regression_batches(1)[0]).backward()
        plugin.clip_gradients(optimizer, value, kind)
        results.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in results[1].items():
        torch.testing.assert_close(results[0][name], gradient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", list(GradClipAlgorithmType))
def test_clip_gradients_after_unscaling_clips_as_stock_fp16_does(kind: GradClipAlgorithmType) -> None:
    results = []
    for plugin in (amp_fp16(), stock_fp16()):
        model = attached()
        optimizer = sgd_momentum(model.parameters())
        plugin.backward(plugin.pre_backward(model.loss(regression_batches(1)[0]), model), model, None)
        plugin.scaler.unscale_(optimizer)  # type: ignore[union-attr]
        plugin.clip_gradients(optimizer, 0.05, kind)
        results.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in results[1].items():
        torch.testing.assert_close(results[0][name], gradient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("precision", ALL)
def test_main_params_are_all_parameters_of_all_groups_in_order(precision: str) -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": list(m.parameters())} for m in (first, second)])
    expected = [*first.parameters(), *second.parameters()]
    for plugin in _pair(precision):
        assert [id(p) for p in plugin.main_params(optimizer)] == [id(p) for p in expected]


CONTEXTS = [
    "forward_context",
    "train_step_context",
    "val_step_context",
    "test_step_context",
    "predict_step_context",
    "tensor_init_context",
    "module_init_context",
]


def surroundings() -> tuple[Any, ...]:
    """What a context can change: autocast and its cache, the default dtype, and what they do to a layer."""
    layer = torch.nn.Linear(2, 2)
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_cache_enabled() if torch.is_autocast_enabled("cpu") else None,
        torch.get_default_dtype(),
        layer.weight.dtype,
        torch.zeros(1).dtype,
        layer(torch.zeros(1, 2)).dtype,
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("precision", ALL)
def test_contexts_surround_as_in_stock_and_leave_nothing_behind(precision: str, context: str) -> None:
    outside = surroundings()
    results = []
    for plugin in _pair(precision):
        with getattr(plugin, context)():
            results.append(surroundings())
        assert surroundings() == outside
        with pytest.raises(KeyError), getattr(plugin, context)():
            raise KeyError
        assert surroundings() == outside
    assert results[0] == results[1]
    if context.endswith("init_context"):
        assert (results[0] == outside) == (not precision.endswith("true") or precision == "32-true")
    else:
        assert (results[0] == outside) == (precision == "32-true")


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_autocast_context_manager_is_the_one_of_stock(precision: str) -> None:
    ours, stock = (plugin.autocast_context_manager() for plugin in _pair(precision))  # type: ignore[attr-defined]
    assert (ours.device, ours.fast_dtype, ours._cache_enabled) == (stock.device, stock.fast_dtype, stock._cache_enabled)


@pytest.mark.parametrize("precision", ALL)
def test_convert_module_returns_the_module_with_the_parameter_dtypes_of_stock(precision: str) -> None:
    results = []
    for plugin in _pair(precision):
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        parameters = list(module.parameters())
        assert plugin.convert_module(module) is module
        assert [id(p) for p in module.parameters()] == [id(p) for p in parameters]
        results.append({name: (value.dtype, value.shape) for name, value in module.state_dict().items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("verb", ["convert_input", "convert_output"])
@pytest.mark.parametrize("precision", ALL)
def test_convert_input_and_output_change_the_dtypes_that_stock_changes(precision: str, verb: str) -> None:
    data = {
        "floats": [torch.ones(1), torch.ones(1, dtype=torch.float64)],
        "half": (torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.bfloat16)),
        "others": [torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool), "text", None, 3],
    }

    def described(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: described(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(described(item) for item in value)
        return value.dtype if isinstance(value, Tensor) else value

    ours, stock = (described(getattr(plugin, verb)(data)) for plugin in _pair(precision))
    assert ours == stock


def test_state_dict_and_load_state_dict_bring_back_the_scale_and_its_progress() -> None:
    for make in (amp_fp16, stock_fp16):
        saved, fresh = make(growth_interval=100), make(growth_interval=100)
        fit(TinyRegressor(faults={1: INF}), saved, regression_batches(5))
        fresh.load_state_dict(saved.state_dict())
        assert saved.scaler is not None and fresh.scaler is not None
        assert fresh.scaler.state_dict() == saved.scaler.state_dict()
        assert (fresh.scaler.get_scale(), fresh.scaler._get_growth_tracker()) == (512.0, 3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_state_dict_without_a_scale_can_be_loaded(precision: str) -> None:
    for make in (lambda: _pair(precision)[0], lambda: _pair(precision)[1]):
        make().load_state_dict(make().state_dict())


@pytest.mark.parametrize("precision", ALL)
def test_teardown_may_be_called_at_any_time_and_again(precision: str) -> None:
    for plugin in _pair(precision):
        assert plugin.teardown() is None
        fit(TinyRegressor(), plugin, regression_batches(1))
        assert plugin.teardown() is None


@pytest.mark.parametrize("precision", ALL)
def test_the_precision_attribute_is_the_lightning_string(precision: str) -> None:
    ours, stock = _pair(precision)
    assert ours.precision == stock.precision == precision


def test_the_scaler_attribute_is_a_grad_scaler_where_stock_has_one() -> None:
    for ours, stock in plugins().values():
        assert isinstance(ours.scaler, torch.amp.GradScaler) == isinstance(
            getattr(stock, "scaler", None), torch.amp.GradScaler
        )


# ------------------------------------------------------------------ nothing of FSDPPrecision


def _owner(kind: type, name: str) -> type:
    return next(base for base in kind.__mro__ if name in vars(base))


OVERRIDABLE = sorted(
    name
    for name, value in vars(FSDPPrecision).items()
    if callable(value) or isinstance(value, (property, classmethod, staticmethod))
)


@pytest.mark.parametrize("name", OVERRIDABLE)
def test_no_method_is_that_of_fsdp_precision(name: str) -> None:
    """FSDPStrategy insists on the class; its methods assume CUDA, drop the scaler and refuse clipping."""
    assert _owner(AmpPrecision, name) is not FSDPPrecision


def test_the_walk_over_fsdp_precision_sees_its_methods() -> None:
    assert {"__init__", "convert_module", "clip_grad_by_norm", "mixed_precision_config", "optimizer_step"} <= set(
        OVERRIDABLE
    )


def test_an_fsdp_strategy_accepts_the_plugin() -> None:
    assert isinstance(amp_fp16(), FSDPPrecision)
    assert not isinstance(stock_fp16(), FSDPPrecision)


# ------------------------------------------------------------------ who stock is


def test_the_peers_are_what_this_file_takes_them_for() -> None:
    assert isinstance(stock_fp16(), MixedPrecision) and stock_fp16().scaler.get_scale() == 1024.0  # type: ignore[union-attr]
    assert isinstance(AmpPrecision("16-mixed", loss_scale=LossScale(init=1024.0)).scaler, torch.amp.GradScaler)
