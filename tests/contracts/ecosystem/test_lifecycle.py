"""Copies of the plugin, several fits with one plugin, and runs that were broken off."""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy, Rule
from tests.support.faults import INF
from tests.support.models import ExactLinear, TinyRegressor, adamw, fused_adamw
from tests.support.training import (
    amp_fp16,
    fit,
    loader,
    make_trainer,
    outcomes,
    regression_batches,
    reports_of,
    same,
    stock_bf16,
    stock_fp16,
    weights,
)

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda plugin: pickle.loads(pickle.dumps(plugin)),
}
PAIRS = {"16-mixed": (amp_fp16, stock_fp16), "bf16-mixed": (lambda: AmpPrecision("bf16-mixed"), stock_bf16)}


# ------------------------------------------------------------------ copies


@pytest.mark.parametrize("precision", PAIRS)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_made_before_a_fit_trains_as_stock_does(copied: Any, precision: str) -> None:
    ours, stock = TinyRegressor(adamw), TinyRegressor(adamw)
    original = PAIRS[precision][0]()
    fit(ours, copied(original))
    fit(stock, PAIRS[precision][1]())
    assert same(weights(ours), weights(stock))
    assert original.applied_steps == 0


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_made_after_a_fit_goes_on_from_its_scale_and_history_apart_from_the_original(
    copied: Any, make_optimizer: Any
) -> None:
    original = AmpPrecision("16-mixed", loss_scale=LossScale(init=1024.0, growth_interval=5, hysteresis=2))
    fit(TinyRegressor(make_optimizer, faults={3: INF, 4: INF}), original, regression_batches(8))
    twin = copied(original)
    assert twin.state_dict() == original.state_dict()
    before = copy.deepcopy(original.state_dict())

    left, right = TinyRegressor(make_optimizer), TinyRegressor(make_optimizer)
    fit(left, twin)
    assert original.state_dict() == before
    fit(right, original)
    assert same(weights(left), weights(right))
    assert twin.state_dict() == original.state_dict()


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_made_in_mid_window_begins_with_an_empty_one_and_disturbs_nothing(copied: Any) -> None:
    made: list[AmpPrecision] = []

    class Copies(TinyRegressor):
        def on_after_backward(self) -> None:
            if self.seen == 3:
                made.append(copied(self.trainer.precision_plugin))

    plugin, undisturbed = amp_fp16(), TinyRegressor(adamw)
    model = Copies(adamw)
    fit(model, plugin, regression_batches(8), accumulate_grad_batches=2)
    fit(undisturbed, amp_fp16(), regression_batches(8), accumulate_grad_batches=2)
    assert same(weights(model), weights(undisturbed))
    fresh = TinyRegressor(adamw)
    fit(fresh, made[0], regression_batches(8), accumulate_grad_batches=2)
    assert same(weights(fresh), weights(undisturbed))
    assert made[0].applied_steps == 1 + 4


def test_stock_refuses_to_copy_in_mid_window() -> None:
    refusals: list[str] = []

    class Copies(TinyRegressor):
        def on_before_optimizer_step(self, *_: Any) -> None:
            try:
                copy.deepcopy(self.trainer.precision_plugin)
            except AssertionError as error:
                refusals.append(str(error))

    fit(Copies(adamw), stock_fp16(), regression_batches(1))
    assert len(refusals) == 1 and "pickled at the beginning of an iteration" in refusals[0]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_keeps_rules_and_settings(copied: Any) -> None:
    policy = PrecisionPolicy("bf16", rules=[Rule("second", compute="fp32", reason="head")])
    plugin = AmpPrecision(
        policy,
        loss_scale=256.0,
        max_consecutive_skips=7,
        advance_scheduler_on_skip=True,
        partial_window="mean",
    )
    twin = copied(plugin)
    assert twin.policy == policy and repr(twin) == repr(plugin)
    assert (twin.advance_scheduler_on_skip, twin.partial_window, twin.check_finite) == (True, "mean", True)
    seen: list[torch.dtype] = []
    model = TinyRegressor()
    model.second.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    fit(model, twin, regression_batches(1))
    assert seen == [torch.float32]


def test_a_subscription_stays_with_the_original() -> None:
    plugin = amp_fp16()
    reports = reports_of(plugin)
    fit(TinyRegressor(), copy.deepcopy(plugin), regression_batches(2))
    assert reports == []
    fit(TinyRegressor(), plugin, regression_batches(2))
    assert len(reports) == 2


# ------------------------------------------------------------------ several fits


@pytest.mark.parametrize("same_trainer", [True, False])
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("precision", PAIRS)
def test_two_fits_with_one_plugin_are_those_of_stock(precision: str, make_optimizer: Any, same_trainer: bool) -> None:
    results = []
    for make_plugin in PAIRS[precision]:
        plugin = make_plugin()
        first, second = TinyRegressor(make_optimizer), TinyRegressor(make_optimizer, faults={1: INF})
        if precision == "bf16-mixed":
            second.faults = {}
        trainer = fit(first, plugin, regression_batches(5))
        if same_trainer:
            trainer.fit_loop.max_epochs = 2
        else:
            trainer = make_trainer(plugin)
        trainer.fit(second, loader(regression_batches(6)))
        results.append((first.losses, second.losses, weights(first), weights(second)))
        if isinstance(plugin, AmpPrecision):
            skips = len(second.faults)
            assert (plugin.applied_steps, plugin.history.skipped) == (11 - skips, skips)
    ours, stock = results
    assert ours[:2] == stock[:2]
    assert same(ours[2], stock[2]) and same(ours[3], stock[3])
    assert len(ours[1]) == 6


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_routes_do_not_pile_up_when_one_model_is_fitted_twice(precision: str) -> None:
    policy = PrecisionPolicy(
        "fp16" if precision == "16-mixed" else "bf16", rules=[Rule("second", compute="fp32", reason="head")]
    )
    plugin, model = AmpPrecision(policy, loss_scale=256.0), TinyRegressor()
    fit(model, plugin, regression_batches(2))
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    fit(model, plugin, regression_batches(2))
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks

    # A later fit without the plugin runs the model as it was written.
    seen: list[torch.dtype] = []
    model.second.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    fit(model, AmpPrecision("bf16-mixed"), regression_batches(1))
    assert seen == [torch.bfloat16]


class StopsHalfway(ExactLinear):
    """Manual optimization that steps every second batch: a fit over three batches leaves half a window."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer=make_optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


BATCH = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("plugin", [amp_fp16, lambda: AmpPrecision("bf16-mixed"), lambda: AmpPrecision("32-true")])
def test_every_fit_begins_with_an_empty_window(plugin: Any) -> None:
    model, one = StopsHalfway(), plugin()
    fit(model, one, [BATCH * 100, BATCH * 100, BATCH * 1000])
    model.layer.weight.data.zero_()
    fit(model, one, [BATCH, BATCH])
    assert torch.equal(model.moved(), 2 * BATCH)


# ------------------------------------------------------------------ broken off


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Lightning ignores the interrupt signal once it has handled one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted(TinyRegressor):
    """Interrupted in the third micro-batch: by the user in ``where``."""

    def __init__(self, where: str, error: type[BaseException], **kwargs: Any) -> None:
        super().__init__(adamw, **kwargs)
        self.where, self.error, self.armed = where, error, True

    def _at(self, where: str) -> None:
        if self.armed and where == self.where and self.seen == 3:
            self.armed = False
            raise self.error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self._at("training_step")
        return result

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self._at("backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._at("on_before_optimizer_step")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["training_step", "backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_a_fit_after_an_interruption_is_a_fresh_run(
    precision: str, manual: bool, where: str, error: type[BaseException], interrupts: None
) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model = Interrupted(where, error, manual=manual)
    with pytest.raises((error, SystemExit)):
        fit(model, plugin, regression_batches(8))
    # By hand, the step of the third batch is made inside training_step.
    assert plugin.applied_steps == (3 if manual and where == "training_step" else 2)

    again = TinyRegressor(adamw, manual=manual)
    model.load_state_dict(again.state_dict())
    reports = reports_of(plugin)
    fit(model, plugin, regression_batches(8))
    fit(again, amp_fp16() if precision == "16-mixed" else AmpPrecision(precision), regression_batches(8))
    assert same(weights(model), weights(again))
    assert outcomes(reports) == ["applied"] * 8


@pytest.mark.parametrize("where", ["training_step", "backward"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_after_an_interruption_in_mid_window_nothing_of_it_is_left(
    precision: str, where: str, interrupts: None
) -> None:
    """Broken off in the first half of the second window; that half held an overflow."""
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model = Interrupted(where, KeyboardInterrupt, faults={2: INF})
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(model, plugin, regression_batches(8), accumulate_grad_batches=2)
    again = TinyRegressor(adamw)
    model.load_state_dict(again.state_dict())
    fit(model, plugin, regression_batches(8), accumulate_grad_batches=2)
    fit(again, amp_fp16() if precision == "16-mixed" else AmpPrecision(precision), regression_batches(8),
        accumulate_grad_batches=2)  # fmt: skip
    assert same(weights(model), weights(again))
    assert plugin.history.skipped == 0


def test_what_was_wrapped_for_a_run_is_taken_back_after_an_error() -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("broken off")

    trainer = make_trainer(amp_fp16(), callbacks=[Fails()])
    with pytest.raises(ValueError, match="broken off"):
        trainer.fit(TinyRegressor(), loader(regression_batches(2)))
    assert "training_step" not in vars(trainer.strategy)
