"""Every callback of the suite through all that a Trainer does with it. A new one joins by joining the suite, or here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, LossScale
from lightning_amp_plus.callbacks import ActivationMonitor, DtypeCensus, precision_callbacks
from lightning_amp_plus.callbacks.fp8_coverage import Fp8CoverageMonitor
from tests.support.faults import INF, INF_LOSS
from tests.support.models import MakeOptimizer, TinyRegressor, adamw, fused_adamw, sgd_momentum
from tests.support.training import WeightTrace, loader, make_trainer, regression_batches, same, weights


def every_callback(every_n_steps: int | None = None) -> dict[str, L.Callback]:
    more = [ActivationMonitor(every_n_steps, detail=True), Fp8CoverageMonitor(every_n_steps)]
    return {type(callback).__name__: callback for callback in (*precision_callbacks("full", every_n_steps), *more)}


NAMES = list(every_callback())
FAULTS = {2: INF, 5: INF_LOSS}


def make(name: str) -> L.Callback:
    return every_callback(every_n_steps=3)[name]


class Watched(AmpPrecision):
    """Knows how many subscriptions are open."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.open: list[object] = []

    def subscribe(self, *args: Any, **kwargs: Any) -> Callable[[], None]:
        end, token = super().subscribe(*args, **kwargs), object()
        self.open.append(token)

        def unsubscribe() -> None:
            self.open = [other for other in self.open if other is not token]
            end()

        return unsubscribe


def plugin_for(policy: str) -> Watched:
    if policy == "16-mixed":
        return Watched(policy, loss_scale=LossScale(init=8.0, growth_interval=2))
    return Watched(policy)


class Noisy(TinyRegressor):
    """Draws random numbers in every step, so that a callback that draws one too is found out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        return super().training_step((torch.nn.functional.dropout(x, 0.3), y), batch_idx)


class Fails(TinyRegressor):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == 4:
            raise RuntimeError("the model failed")
        return super().training_step(batch, batch_idx)


DATA = loader(regression_batches(8))


@pytest.fixture(params=NAMES)
def callback(request) -> L.Callback:
    return make(request.param)


@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed", "32-true"])
def test_whole_life_in_one_trainer(callback, policy, tmp_path):
    loggers = [TensorBoardLogger(tmp_path, "", "tensorboard"), CSVLogger(tmp_path, "", "csv")]
    plugin = plugin_for(policy)
    trainer = make_trainer(plugin, callbacks=[callback], logger=loggers, num_sanity_val_steps=1)
    model = TinyRegressor(faults=FAULTS)
    trainer.validate(model, DATA, verbose=False)
    trainer.fit(model, DATA, DATA)
    trainer.validate(model, DATA, verbose=False)
    trainer.test(model, DATA, verbose=False)
    assert len(trainer.predict(model, DATA)) == 8
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, DATA, DATA)
    assert plugin.history.applied == 14
    assert plugin.open == []


def test_evaluation_needs_no_training_and_no_plugin_of_ours(callback):
    trainer = make_trainer(callbacks=[callback])
    trainer.test(TinyRegressor(), DATA, verbose=False)
    trainer.predict(TinyRegressor(), DATA)


def test_fast_dev_run(callback):
    make_trainer(plugin_for("16-mixed"), callbacks=[callback], fast_dev_run=True).fit(TinyRegressor(), DATA, DATA)


def test_an_exception_ends_it_and_the_next_fit_works(callback, tmp_path):
    plugin = plugin_for("16-mixed")
    trainer = make_trainer(plugin, callbacks=[callback], logger=CSVLogger(tmp_path))
    with pytest.raises(RuntimeError, match="the model failed"):
        trainer.fit(Fails(fused_adamw, faults=FAULTS), DATA)
    assert plugin.open == []
    make_trainer(plugin, callbacks=[callback]).fit(TinyRegressor(fused_adamw), DATA)
    assert plugin.history.applied == 3 + 8


def test_optimizers_made_anew_while_training_are_watched(callback):
    class NewOptimizers(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.optimizers = [adamw(pl_module.parameters())]

    plugin = plugin_for("32-true")
    trainer = make_trainer(plugin, callbacks=[NewOptimizers(), callback], max_epochs=2)
    trainer.fit(TinyRegressor(sgd_momentum), DATA)
    assert plugin.history.applied == 16  # a StopIteration in a hook would end the fit without a word
    assert getattr(getattr(callback, "last", None), "step", 14) == (0 if type(callback) is DtypeCensus else 14)


class HoldsItself(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {"x": x}
        found["all"] = [found]
        return found


class Transformed(nn.Module):
    """Calls its layer under vmap, and under grad in a vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda row: self.layer(row).float().sum()))(x)
        return torch.func.vmap(self.layer)(x) + slope


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make_odd", [HoldsItself, Transformed, scripted])
def test_odd_modules_train_to_the_same_bits(callback, make_odd):
    class Odd(TinyRegressor):
        def __init__(self) -> None:
            super().__init__(adamw)
            torch.manual_seed(1)
            self.odd = make_odd()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            found = self.odd(batch[0])
            return self.loss((found["x"] if isinstance(found, dict) else found, batch[1]))

    def run(callbacks: list[L.Callback]) -> dict[str, Tensor]:
        model = Odd()
        make_trainer(plugin_for("bf16-mixed"), callbacks=callbacks).fit(model, DATA)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        return weights(model)

    assert same(run([]), run([callback]))


def copies(callback: L.Callback) -> list[L.Callback]:
    return [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_copies_made_before_while_and_after_training_train(callback, make_optimizer):
    made = copies(callback)

    class Copies(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, i: int) -> None:
            if i == 4:
                made.extend(copies(callback))

    trainer = make_trainer(plugin_for("16-mixed"), callbacks=[callback, Copies()])
    trainer.fit(TinyRegressor(make_optimizer, faults=FAULTS), DATA)
    made.extend(copies(callback))
    assert len(made) == 6
    for twin in made:
        assert twin.state_key == callback.state_key
        make_trainer(plugin_for("16-mixed"), callbacks=[twin]).fit(TinyRegressor(make_optimizer, faults=FAULTS), DATA)


def test_state_survives_a_checkpoint_read_with_weights_only(callback, tmp_path):
    trainer = make_trainer(plugin_for("16-mixed"), callbacks=[callback])
    trainer.fit(TinyRegressor(faults=FAULTS), DATA)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"].get(callback.state_key, {})
    assert saved == callback.state_dict()

    twin = make(type(callback).__name__)
    resumed = make_trainer(plugin_for("16-mixed"), callbacks=[twin], max_epochs=2)
    resumed.fit(TinyRegressor(), DATA, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.global_step == 16


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.5}])
@pytest.mark.parametrize("make_optimizer", [sgd_momentum, adamw, fused_adamw])
@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed", "32-true"])
def test_training_is_bit_identical_with_and_without(
    callback, policy, make_optimizer: MakeOptimizer, arguments, tmp_path
):
    def run(callbacks: list[L.Callback]) -> tuple[list[dict[str, Tensor]], list[float], list[float]]:
        trace, plugin = WeightTrace(), plugin_for(policy)
        torch.manual_seed(5)
        model = Noisy(make_optimizer, faults=FAULTS)
        trainer = make_trainer(
            plugin, callbacks=[*callbacks, trace], logger=TensorBoardLogger(tmp_path, ""), max_epochs=2, **arguments
        )
        trainer.fit(model, DATA, DATA)
        return trace.weights, model.losses, list(plugin.history.scales)

    bare, with_it = run([]), run([callback])
    assert len(bare[0]) == len(with_it[0])
    assert all(same(a, b) for a, b in zip(bare[0], with_it[0], strict=True))
    assert repr(bare[1:]) == repr(with_it[1:])  # a loss may be nan, which equals nothing
