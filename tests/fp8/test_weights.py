"""Quantized weights of a window: made once, the same numbers as made each time, seen to be stale, and let go of."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule, plan
from lightning_amp_plus.fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    Recipe,
    RowwiseScaling,
    reference,
)
from lightning_amp_plus.fp8.delayed import histories_of
from lightning_amp_plus.fp8.weights import KEPT, WindowWeights
from lightning_amp_plus.routing import undo
from tests.fp8.test_training import Regressor, batches, fit
from tests.support.training import ResumableLoader, make_trainer, same, weights

RECIPES = [CurrentScaling(), DelayedScaling(history=4), RowwiseScaling(), BlockScaling(), MXScaling()]
every = pytest.mark.parametrize("recipe", RECIPES, ids=repr)


def policy(recipe: Recipe, **arguments: Any) -> PrecisionPolicy:
    return PrecisionPolicy("bf16", rules=[Rule("body.*", compute="fp8", recipe=recipe)], **arguments)


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """How often weights were quantized, by shape."""
    count: Counter[tuple[int, ...]] = Counter()
    plain = reference.prepare

    def counting(x: Tensor, operand: Any, *arguments: Any) -> Any:
        count[tuple(x.shape)] += operand == "weight"
        return plain(x, operand, *arguments)

    monkeypatch.setattr(reference, "prepare", counting)
    return count


def kept(model: nn.Module) -> int:
    """Number of quantized weights that a model's layers hold."""
    return sum(len(vars(module)[KEPT].entries) for module in model.modules() if KEPT in vars(module))


def with_and_without(
    monkeypatch: pytest.MonkeyPatch, train: Callable[[], tuple[Any, Any]]
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """What ``train`` returns with weights kept, and with every micro-batch quantizing its own."""
    first = train()
    with monkeypatch.context() as patch:
        patch.setattr(WindowWeights, "begin", lambda self, several: self.end())
        return first, train()


def equal_runs(found: tuple[tuple[Any, Any], tuple[Any, Any]]) -> bool:
    (_, one), (_, other) = found
    histories = [{n: p for h in histories_of(m.modules()) for n, p in h.state_dict().items()} for m in (one, other)]
    return bool(str(one.losses) == str(other.losses) and same(weights(one), weights(other)) and same(*histories))


# -------------------------------------------------------------------- the same numbers, for less


@every
def test_training_is_bit_for_bit_the_same(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> Any:
        # The window of micro-batches 8 to 11 is skipped, and 60 batches end in mid-epoch windows of 4.
        return fit(AmpPrecision(policy(recipe)), Regressor(spoil=9), 8, accumulate_grad_batches=4)

    assert equal_runs(with_and_without(monkeypatch, train))


@every
def test_a_weight_is_quantized_once_a_window(recipe: Recipe, quantized: Counter[Any]) -> None:
    _, model = fit(AmpPrecision(policy(recipe)), count=3, accumulate_grad_batches=4)
    # The first layer's input needs no gradient, so only the second multiplies its weight by columns as well.
    fine = not recipe.one_scale_a_tensor
    taken = model.body[0].in_features % recipe.multiple == 0
    assert quantized[64, 16] == 3 * taken and quantized[32, 64] == 3 and quantized[64, 32] == 3 * fine
    assert len(model.losses) == 12 and not kept(model)


def test_a_window_of_one_micro_batch_and_a_model_outside_a_trainer_keep_nothing(quantized: Counter[Any]) -> None:
    class Watched(Regressor):
        def on_after_backward(self) -> None:
            assert not kept(self)

    _, model = fit(AmpPrecision(policy(CurrentScaling())), Watched(), 3)
    assert quantized[64, 16] == 3
    model.body(batches(1)[0])
    assert not kept(model) and quantized[64, 16] == 4


def test_the_last_window_of_an_epoch_is_kept_for_by_its_own_length(quantized: Counter[Any]) -> None:
    held: list[int] = []

    class Watched(Regressor):
        def on_after_backward(self) -> None:
            held.append(kept(self))

    trainer = make_trainer(AmpPrecision(policy(CurrentScaling())), max_epochs=1, accumulate_grad_batches=4)
    trainer.fit(Watched(), ResumableLoader(batches(9)))
    assert held == [2, 2, 2, 2, 2, 2, 2, 2, 0] and quantized[64, 16] == 3


def test_amax_of_a_weight_is_noted_once_and_enters_the_history(quantized: Counter[Any]) -> None:
    _, model = fit(AmpPrecision(policy(DelayedScaling(history=8))), count=5, accumulate_grad_batches=4)
    [of] = histories_of(model.modules())
    assert all((past > 0).sum(dim=1).tolist() == [5, 5, 5] for past in of.state_dict().values())
    assert quantized[64, 16] == 5


# -------------------------------------------------------------------- what is stale is seen


class Edited(Regressor):
    """Changes its first layer's weight before the micro-batches named."""

    def __init__(self, edit: Callable[[nn.Linear], None], at: tuple[int, ...]) -> None:
        super().__init__()
        self.edit, self.at = edit, at

    def on_train_batch_start(self, *_: Any) -> None:
        if self.seen in self.at:
            layer: Any = self.body[0]
            self.edit(layer)


def double_in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2.0)


def assign_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 2.0


def load(layer: nn.Linear, assign: bool = False) -> None:
    state = {name: value.clone() * 2.0 for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


def replace(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2.0)


@pytest.mark.parametrize(
    "edit",
    [double_in_place, assign_data, load, partial(load, assign=True), replace],
    ids=["in place", "data", "load", "load and assign", "replace"],
)
def test_a_weight_changed_in_mid_window_is_quantized_anew(
    edit: Any, monkeypatch: pytest.MonkeyPatch, quantized: Counter[Any]
) -> None:
    def train() -> Any:
        return fit(AmpPrecision(policy(RowwiseScaling())), Edited(edit, at=(6,)), 3, accumulate_grad_batches=4)

    found = with_and_without(monkeypatch, train)
    assert equal_runs(found)
    assert quantized[64, 16] == 4 + 12  # three windows and the edit, then all twelve


def test_a_write_that_leaves_the_version_alone_is_seen_by_the_next_window() -> None:
    """As FSDP2 gathers weights, and as an optimizer writes that goes through ``.data``."""

    class Sly(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            for group in self.param_groups:
                for parameter in group["params"]:
                    version = parameter._version
                    with torch.autograd._unsafe_preserve_version_counter((parameter,)), torch.no_grad():
                        parameter.add_(parameter.grad, alpha=-0.01)
                    assert parameter._version == version
            return loss

    class Model(Regressor):
        def configure_optimizers(self) -> Any:
            return self.make(self.parameters())

    runs = []
    for make in (Sly, partial(torch.optim.SGD, lr=0.01)):
        model = Model()
        model.make = make
        runs.append(fit(AmpPrecision(policy(CurrentScaling())), model, 4, accumulate_grad_batches=2)[1])
    assert runs[0].losses == runs[1].losses


def test_an_optimizer_that_evaluates_several_times_sees_its_own_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(Regressor):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    def train() -> Any:
        return fit(AmpPrecision(policy(CurrentScaling())), Model(), 2, accumulate_grad_batches=2)

    assert equal_runs(with_and_without(monkeypatch, train))


def test_a_backward_after_its_window_neither_uses_nor_fills_the_next_one() -> None:
    layer, window = windowed(RowwiseScaling())
    x = torch.randn(4, 32).requires_grad_()
    window.begin(several=True)
    early = layer(x)
    window.begin(several=True)
    early.float().sum().backward()
    assert not kept(layer)


# -------------------------------------------------------------------- who keeps, and for how long


def windowed(recipe: Recipe) -> tuple[nn.Sequential, WindowWeights]:
    """One FP8 layer, and the window of its weight."""
    model = nn.Sequential(nn.Linear(32, 32))
    plan(model, PrecisionPolicy("bf16", rules=[Rule("0", compute="fp8", recipe=recipe)])).apply(model)
    window = WindowWeights()
    window.attach(model)
    return model, window


def test_manual_optimization_keeps_nothing() -> None:
    class Manual(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.manual_backward(super().training_step(batch, batch_idx))
            assert not kept(self)
            if batch_idx % 2:
                self.optimizers().step()  # type: ignore[union-attr]
                self.optimizers().zero_grad()  # type: ignore[union-attr]

    _, model = fit(AmpPrecision(policy(CurrentScaling())), Manual(), 3)
    assert len(model.losses) == 6


def test_evaluation_in_mid_window_neither_uses_nor_fills_it(
    monkeypatch: pytest.MonkeyPatch, quantized: Counter[Any]
) -> None:
    def train() -> Any:
        model = Regressor()
        plugin = AmpPrecision(policy(RowwiseScaling(), fp8_in_evaluation=True))
        trainer = make_trainer(
            plugin, max_epochs=1, accumulate_grad_batches=4, val_check_interval=2, limit_train_batches=8
        )
        trainer.fit(model, ResumableLoader(batches(8)), ResumableLoader(batches(1)))
        return trainer, model

    found = with_and_without(monkeypatch, train)
    assert equal_runs(found)
    assert quantized[64, 16] == (2 + 4) + (8 + 4)  # windows or micro-batches, and validations


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "selective"])
@every
def test_recomputed_activations_use_what_is_kept(
    recipe: Recipe, kind: str, monkeypatch: pytest.MonkeyPatch, quantized: Counter[Any]
) -> None:
    def saves(context: Any, op: Any, *arguments: Any, **more: Any) -> CheckpointPolicy:
        # Ops that quantizing is made of, counted one by one: recomputed without some of them, it would take others'.
        named = op in (torch.ops.aten.where.ScalarOther, torch.ops.aten.reciprocal.default)
        return CheckpointPolicy.MUST_SAVE if named else CheckpointPolicy.PREFER_RECOMPUTE

    class Model(Regressor):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            more: Any = {"context_fn": partial(create_selective_checkpoint_contexts, saves)}
            x = batch.clone().requires_grad_()
            hidden = checkpoint(
                self.body, x, use_reentrant=kind == "reentrant", **(more if kind == "selective" else {})
            )
            loss = nn.functional.mse_loss(self.head(hidden).float(), batch.sum(1, keepdim=True))
            self.losses.append(float(loss.detach()))
            self.seen += 1
            return loss

    def train() -> Any:
        return fit(AmpPrecision(policy(recipe)), Model(), 3, accumulate_grad_batches=4)

    before = train()
    if kind != "selective":
        assert quantized[32, 64] == 3
    with monkeypatch.context() as patch:
        patch.setattr(WindowWeights, "begin", lambda self, several: self.end())
        assert equal_runs((before, train()))


def test_a_compiled_block_keeps_nothing_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(Regressor):
        def on_train_start(self) -> None:
            self.body.compile(backend="aot_eager", fullgraph=True)

        def on_after_backward(self) -> None:
            assert not kept(self)

    def train() -> Any:
        torch._dynamo.reset()
        return fit(AmpPrecision(policy(CurrentScaling())), Model(), 3, accumulate_grad_batches=2)

    assert equal_runs(with_and_without(monkeypatch, train))


def test_a_shared_layer_is_kept_once_and_tied_weights_by_each_layer(quantized: Counter[Any]) -> None:
    shared, other = nn.Linear(32, 32), nn.Linear(32, 32)
    other.weight = shared.weight
    model = nn.Sequential(shared, shared, other)
    rules = [Rule("type:Linear", compute="fp8"), Rule("2", compute="fp8", recipe="rowwise")]
    plan(model, PrecisionPolicy("bf16", rules=rules)).apply(model)
    window = WindowWeights()
    window.attach(model)
    plain = model(torch.ones(4, 32))
    quantized.clear()
    window.begin(several=True)
    for _ in range(2):
        assert torch.equal(model(torch.ones(4, 32)), plain)
    assert quantized[32, 32] == 2 and kept(model[:1]) == kept(model[2:]) == 1


def test_a_weight_made_anew_in_each_forward_is_not_kept() -> None:
    model, window = windowed(CurrentScaling())
    window.begin(several=True)
    made = {"0.weight": torch.randn(32, 32), "0.bias": torch.zeros(32)}
    first = torch.func.functional_call(model, made, torch.ones(4, 32))
    assert not kept(model) and not torch.equal(first, model(torch.ones(4, 32)))
    with torch.inference_mode():
        nn.Sequential(model)(torch.ones(4, 32))
    window.release()
    with torch.inference_mode():
        model(torch.ones(4, 32))
    assert not kept(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_do_not_carry_what_is_kept(copied: Any) -> None:
    model, window = windowed(RowwiseScaling())
    window.begin(several=True)
    plain = model(torch.ones(4, 32))
    assert kept(model) == 1
    copy_of = copied(model)
    assert torch.equal(copy_of(torch.ones(4, 32)), plain) and not kept(copy_of)
    assert list(copy_of.state_dict()) == ["0.weight", "0.bias"]


def test_undo_lets_go_of_it() -> None:
    model, window = windowed(RowwiseScaling())
    window.begin(several=True)
    model(torch.ones(4, 32))
    place = vars(model[0])[KEPT]
    undo(model)
    assert KEPT not in vars(model[0]) and not place.entries


def test_an_exception_and_the_end_of_a_fit_let_go_of_it() -> None:
    class Fails(Regressor):
        where = ""

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.where == "forward" and self.seen == 2:
                raise RuntimeError("on purpose")
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if self.seen == 1:
                assert kept(self) == 2
                if self.where == "between":
                    raise RuntimeError("on purpose")

    for where in ("forward", "between"):
        model = Fails()
        model.where = where
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(AmpPrecision(policy(CurrentScaling())), model, 3, accumulate_grad_batches=4)
        assert not kept(model)


@pytest.mark.parametrize(("name", "compute"), [("body.0", "bf16"), ("body.2", "bf16"), ("head", "fp32")])
def test_a_move_in_mid_window_gives_the_same(name: str, compute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Moving(Regressor):
        def on_train_batch_start(self, *_: Any) -> None:
            plugin: Any = self.trainer.precision_plugin
            if self.seen in (5, 7):
                plugin.set_route(name, compute if self.seen == 5 or name == "head" else "fp8")

    def train() -> Any:
        return fit(AmpPrecision(policy(DelayedScaling(history=4))), Moving(), 4, accumulate_grad_batches=4)

    assert equal_runs(with_and_without(monkeypatch, train))


def test_histories_loaded_in_mid_window_give_the_weight_its_new_scale() -> None:
    class Loads(Regressor):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.seen == 1:
                assert kept(self) == 2
                plugin: Any = self.trainer.precision_plugin
                plugin.load_state_dict(plugin.state_dict())
                assert not kept(self)

    fit(AmpPrecision(policy(DelayedScaling(history=4))), Loads(), 1, accumulate_grad_batches=2)


def test_a_model_in_fp8_trains_with_a_callback_that_copies_it_in_mid_window() -> None:
    class Copies(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
            assert not kept(copy.deepcopy(module.body))

    _, model = fit(AmpPrecision(policy(CurrentScaling())), count=2, accumulate_grad_batches=2, callbacks=[Copies()])
    assert len(model.losses) == 4
