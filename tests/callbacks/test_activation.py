"""ActivationMonitor: numbers against a slow obvious reference, what it cannot see, what it warns about, what it costs."""

from __future__ import annotations

import copy
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import ActivationMonitor
from lightning_amp_plus.callbacks import sightings as sightings_module
from lightning_amp_plus.metrics.activation_health import LARGEST
from tests.support.models import adamw, fused_adamw, sgd
from tests.support.training import WeightTrace, amp_fp16, fit, loader, make_trainer, regression_batches, same


class Model(L.LightningModule):
    """Trains a module on batches of ``(4 features, 1 target)``."""

    def __init__(self, net: nn.Module, make_optimizer: Any = fused_adamw) -> None:
        super().__init__()
        self.net, self.make_optimizer = net, make_optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make()


class Reference(L.Callback):
    """Copies what leaf modules take and return, in the batches named, and looks at the copies one element at a time."""

    def __init__(self, batches: set[int]) -> None:
        self.batches = batches
        self.seen: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self.handles: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if index not in self.batches:
            return
        for name, module in pl_module.named_modules():
            if next(module.children(), None) is None:
                before = partial(self.before, name)
                self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self.handles.append(module.register_forward_hook(partial(self.after, name)))

    def before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.keep(name, "input", (args, kwargs))

    def after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.keep(name, "output", output)

    def keep(self, name: str, side: str, value: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if isinstance(value, Tensor):
            if value.is_floating_point():
                self.seen[name, side].append(value.detach().clone())
        elif isinstance(value, dict):
            self.keep(name, side, list(value.values()))
        elif isinstance(value, (tuple, list)):
            for item in value:
                self.keep(name, side, item)
        elif hasattr(value, "__dataclass_fields__"):
            self.keep(name, side, list(vars(value).values()))

    def on_train_batch_end(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def agrees_with(self, monitor: ActivationMonitor) -> None:
        for name, layer in monitor.last.items():
            for side, health in (("input", layer.input), ("output", layer.output)):
                tensors = self.seen.get((name, side))
                if not tensors:
                    assert health is None, (name, side, health)
                    continue
                assert health is not None, (name, side, layer.note)
                numbers = torch.cat([t.double().abs().flatten() for t in tensors])
                finite = numbers[numbers.isfinite()]
                assert health.amax == pytest.approx(float(numbers.amax()), rel=1e-12, nan_ok=True)
                assert health.smallest == pytest.approx(float(finite[finite > 0].min()), rel=1e-12)
                assert health.nonfinite == pytest.approx(1 - len(finite) / len(numbers))
                assert health.elements == len(numbers)
                room = [
                    math.log2(LARGEST[t.dtype]) - math.log2(amax) for t in tensors if (amax := float(t.abs().max()))
                ]
                assert health.headroom == pytest.approx(min(room))


def looked_at(net: nn.Module, plugin: Any = None, batches: int = 4, **arguments: Any) -> ActivationMonitor:
    """Trains and compares the last log point with the reference."""
    accumulate = arguments.get("accumulate_grad_batches", 1)
    monitor = ActivationMonitor(every_n_steps=batches // accumulate)
    reference = Reference(set(range(batches - accumulate, batches)))
    fit(Model(net), plugin or AmpPrecision("bf16-mixed"), regression_batches(batches), callbacks=[reference, monitor],
        **arguments)  # fmt: skip
    reference.agrees_with(monitor)
    return monitor


# ---------------------------------------------------------------- the numbers


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)))


@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed", "32-true", "bf16-true"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_is_what_each_module_took_and_returned(policy: str, accumulate: int) -> None:
    plugin = amp_fp16() if policy == "16-mixed" else AmpPrecision(policy)
    monitor = looked_at(mlp(), plugin, accumulate_grad_batches=accumulate)
    wanted = {"16-mixed": "fp16", "32-true": "fp32"}.get(policy, "bf16")
    assert monitor.last["net.0"].output.dtype == wanted


def test_batches_of_several_sizes_are_weighted_by_elements() -> None:
    batches = [(torch.randn(n, 4), torch.randn(n, 1)) for n in (3, 5, 2, 7)]
    monitor, reference = ActivationMonitor(every_n_steps=1), Reference({0, 1, 2, 3})
    fit(Model(mlp()), AmpPrecision("bf16-mixed"), batches, callbacks=[reference, monitor], accumulate_grad_batches=4)
    reference.agrees_with(monitor)
    assert monitor.last["net.0"].output.elements == 17 * 8


def test_tensors_larger_than_a_matrix_and_many_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sightings_module, "CPU_ELEMENTS", 40)
    monkeypatch.setattr(sightings_module, "_CPU_MATRIX", 10)
    looked_at(mlp())
    monkeypatch.setattr(sightings_module, "_MOST_MATRICES", 0.5)
    looked_at(mlp())


class InPlace(nn.Module):
    """Every way to write to an activation after a module returned it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b, self.c, self.out = (
            nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        y = self.b(x)
        y += x
        z = self.c(y)
        nn.functional.relu_(z)
        return self.out(z)


def test_modules_that_work_in_place_are_looked_at_before() -> None:
    net = seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Dropout(inplace=True), nn.Linear(8, 1)
        )
    )
    looked_at(net)


def test_what_was_changed_in_place_is_said_once_and_then_read_in_time() -> None:
    logged: list[set[str]] = []
    notes: list[str] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            logged.append({key for key in trainer.callback_metrics if "activation_amax" in key})
            notes.append(monitor.last["net.b"].note)

    monitor, reference = ActivationMonitor(every_n_steps=1), Reference({1})
    batches = regression_batches(2)
    fit(Model(seeded(InPlace)), AmpPrecision("bf16-mixed"), batches, callbacks=[reference, monitor, Look()])
    assert notes == ["output: changed in place before it was read", ""]
    names = {f"precision/activation_amax/net.{name}" for name in ("a", "relu", "b", "c", "out")}
    assert logged[0] == names - {"precision/activation_amax/net.b", "precision/activation_amax/net.c"}
    assert logged[1] == names
    reference.agrees_with(monitor)


def test_what_was_freed_is_not_read() -> None:
    """As FSDP frees gathered weights, of which a module may have returned a view."""
    seen, tensor = sightings_module.Sightings(1, torch.device("cpu")), torch.randn(8)
    seen.see(seen.call(0), 1, tensor)
    tensor.untyped_storage().resize_(0)
    maxima, sums = seen.totals()
    assert seen.unreadable == {1: "freed before it was read"}
    assert sums[1].tolist() == [0.0, 0.0, 1.0, 0.0] and float(maxima[1, 0]) == -math.inf


@dataclass
class Pair:
    first: Tensor
    second: tuple[Tensor, dict[str, Tensor]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make, self.take, self.rnn, self.embed = Makes(), Takes(), nn.LSTM(8, 8), nn.Embedding(5, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        pair = self.make(features=x)
        y = self.take(pair, scale=pair.first[:1])
        y, _ = self.rnn(y + self.embed(torch.arange(len(y)) % 5))
        return self.out(y)


class Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 8), 0.3))

    def forward(self, features: Tensor) -> Pair:
        y = features @ self.weight
        return Pair(y, (y * 2, {"deep": y.float() * 3}))


class Takes(nn.Module):
    def forward(self, pair: Pair, scale: Tensor) -> Tensor:
        return (pair.first + pair.second[0] + pair.second[1]["deep"]) * scale


def test_nested_outputs_keywords_indices_and_several_dtypes() -> None:
    monitor = looked_at(seeded(Nested))
    assert monitor.last["net.make"].output.dtype == "bf16+fp32"
    assert monitor.last["net.embed"].input is None and monitor.last["net.embed"].note == ""


class Odd(nn.Module):
    """A shared module called twice, an unused one, nothing returned, a parameter returned, inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.unused, self.none, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4), Nothing(), nn.Linear(4, 4)
        self.alias, self.out, self.position = self.shared, nn.Linear(4, 1), Position()

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.teacher(x)
        self.none(torch.arange(3))
        return self.out(self.alias(self.shared(x)) + self.position())


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 0.4]))

    def forward(self) -> Tensor:
        return self.weight


def test_shared_unused_and_odd_modules() -> None:
    monitor = looked_at(seeded(Odd))
    last = monitor.last
    assert "net.alias" not in last
    assert last["net.shared"].output.elements == 2 * 4 * 4
    assert last["net.unused"].output is None and last["net.unused"].note == "did not run"
    assert last["net.none"].note == "output: no floating-point tensor"
    assert last["net.unused"].parameter_amax > 0


def test_attention_is_one_layer() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(4, 2), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attention(x, x, x)[0])

    monitor = ActivationMonitor(every_n_steps=1)
    fit(Model(seeded(Attends)), AmpPrecision("bf16-mixed"), regression_batches(1), callbacks=[monitor])
    assert monitor.last["net.attention"].output is not None
    assert monitor.last["net.attention.out_proj"].note == "not watched"
    assert monitor.last["net.attention.out_proj"].parameter_amax is not None


def test_routes_give_their_dtypes() -> None:
    policy = PrecisionPolicy("bf16", rules=[Rule("net.2", compute="fp32")])
    monitor = looked_at(mlp(), AmpPrecision(policy))
    assert [monitor.last[f"net.{i}"].output.dtype for i in (0, 2, 4)] == ["bf16", "fp32", "bf16"]


def test_parameters_are_those_after_the_step() -> None:
    class Own(Model):
        def __init__(self) -> None:
            super().__init__(mlp(), sgd)
            self.extra = nn.Parameter(torch.tensor([-3.0, 2.0]))
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.net[4].weight = self.tied = nn.Parameter(self.net[4].weight.detach().clone())
            self.empty = nn.ParameterList([nn.Parameter(torch.zeros(0))])

    model, monitor = Own(), ActivationMonitor(every_n_steps=2)
    trainer = fit(model, AmpPrecision("bf16-mixed"), regression_batches(2), callbacks=[monitor])
    for name in ("net.0", "net.2", "net.4", "frozen", "empty"):
        own = [p for p in model.get_submodule(name).parameters(recurse=False) if p.numel()]
        wanted = max((float(p.abs().max()) for p in own), default=0.0)
        assert float(trainer.callback_metrics[f"precision/parameter_amax/{name}"]) == pytest.approx(wanted)
    assert float(trainer.callback_metrics["precision/parameter_amax/(model)"]) == 3.0


def test_parameters_of_any_kind() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Parameter(torch.tensor([3 + 4j]))
            self.sixteen = nn.Parameter(torch.tensor([-5.0], dtype=torch.float16))
            self.whole = nn.Parameter(torch.tensor([7]), requires_grad=False)
            self.lazy, self.out = nn.LazyLinear(3), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x)

    class Frozen(Model):
        def configure_optimizers(self) -> Any:
            return sgd(self.net.out.parameters())

    net = seeded(Kinds)
    model, monitor = Frozen(net), ActivationMonitor(every_n_steps=1)
    fit(model, AmpPrecision("32-true"), regression_batches(1), callbacks=[monitor])
    assert monitor.last["net"].parameter_amax == 5.0
    assert monitor.last["net.lazy"].parameter_amax == 0.0


def test_a_parameter_that_goes_while_training_is_read_no_more() -> None:
    class Drops(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                pl_module.net[0].bias = None

    model, monitor = Model(mlp(), sgd), ActivationMonitor(every_n_steps=1)
    fit(model, AmpPrecision("32-true"), regression_batches(2), callbacks=[Drops(), monitor])
    assert monitor.last["net.0"].parameter_amax == pytest.approx(float(model.net[0].weight.detach().abs().max()))


# ---------------------------------------------------------------- what is logged


def keys(trainer: L.Trainer) -> set[str]:
    return {key.removeprefix("precision/") for key in trainer.callback_metrics if key.startswith("precision/")}


def test_keys() -> None:
    trainer = fit(Model(mlp()), AmpPrecision("bf16-mixed"), callbacks=[ActivationMonitor(every_n_steps=5)])
    assert keys(trainer) == {f"activation_amax/net.{i}" for i in range(5)} | {
        f"parameter_amax/net.{i}" for i in (0, 2, 4)
    }
    detailed = fit(Model(mlp()), AmpPrecision("bf16-mixed"), callbacks=[ActivationMonitor(5, detail=True)])
    more = {f"{what}_{column}/net.{i}" for what in ("activation", "activation_input")
            for column in ("amax", "headroom", "nonfinite", "smallest") for i in range(5)}  # fmt: skip
    assert keys(detailed) == keys(trainer) | more


@pytest.mark.parametrize("globs", ["net.[02]", ["net.0", "net.2"]])
def test_modules_are_chosen_by_globs(globs: Any) -> None:
    trainer = fit(Model(mlp()), AmpPrecision("bf16-mixed"), callbacks=[ActivationMonitor(5, modules=globs)])
    assert keys(trainer) == {f"{what}_amax/net.{i}" for what in ("activation", "parameter") for i in (0, 2)}


def test_containers_can_be_chosen() -> None:
    monitor = ActivationMonitor(5, modules="net")
    trainer = fit(Model(mlp()), AmpPrecision("bf16-mixed"), callbacks=[monitor])
    assert keys(trainer) == {"activation_amax/net"}
    assert monitor.last["net"].input.elements == 16


def test_history_holds_the_headroom() -> None:
    monitor = ActivationMonitor(every_n_steps=5)
    fit(Model(mlp()), AmpPrecision("bf16-mixed"), callbacks=[monitor])
    (history,) = monitor.layer_histories()
    assert history.steps == [4, 9, 14, 19] and history.names == [f"net.{i}" for i in range(5)]
    assert history.rows()[0][-1] == monitor.last["net.0"].output.headroom


def test_without_a_log_point_nothing_is_known() -> None:
    monitor = ActivationMonitor(every_n_steps=50)
    assert monitor.last == {}
    assert keys(fit(Model(mlp()), AmpPrecision("bf16-mixed"), callbacks=[monitor])) == set()
    assert monitor.last == {}


def test_manual_optimization_with_raw_backwards_and_two_optimizers() -> None:
    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return adamw(self.net[0].parameters()), fused_adamw(self.net[2].parameters())

    monitor, reference = ActivationMonitor(every_n_steps=3), Reference({2})
    fit(Manual(mlp()), AmpPrecision("bf16-mixed"), regression_batches(3), callbacks=[reference, monitor])
    reference.agrees_with(monitor)
    assert monitor.last["net.0"].output.elements == 2 * 4 * 8


# ---------------------------------------------------------------- recomputation


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.out, self.how = mlp()[:4], nn.Linear(8, 1), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "reentrant":
            x = checkpoint(self.body, x.requires_grad_(), use_reentrant=True)
        elif self.how == "selective":

            def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
                return CheckpointPolicy.MUST_SAVE  # of everything that runs while it is on

            def contexts() -> Any:
                return create_selective_checkpoint_contexts(policy)

            x = checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)
        else:
            x = checkpoint(self.body, x, use_reentrant=False)
        return self.out(x)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "selective"])
def test_what_backward_recomputes_is_not_counted_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sightings_module, "CPU_ELEMENTS", 8)  # looks at everything on the spot
    monitor = looked_at(seeded(lambda: Checkpointed(how)))
    assert monitor.last["net.body.0"].output.elements == 4 * 8

    def trained(callbacks: list[L.Callback]) -> list[dict[str, Tensor]]:
        trace = WeightTrace()
        fit(Model(seeded(lambda: Checkpointed(how))), AmpPrecision("bf16-mixed"), callbacks=[*callbacks, trace])
        return trace.weights

    bare, watched = trained([]), trained([ActivationMonitor(every_n_steps=2)])
    assert all(same(a, b) for a, b in zip(bare, watched, strict=True))


# ---------------------------------------------------------------- compiled models


class Frames:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


class Body(nn.Sequential):
    """With a forward outside of torch, whose own the compiler leaves alone."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Outer(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.out = body, nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


def compiled(how: str, backend: Any) -> L.LightningModule:
    torch._dynamo.reset()
    body: Any = Body(*mlp())
    if how == "wrapper":
        body = torch.compile(body, backend=backend)
    elif how == "in place":
        body.compile(backend=backend)
    elif how == "forward":
        body.forward = torch.compile(body.forward, backend=backend)
    return Model(seeded(lambda: Outer(body)))


@pytest.mark.parametrize("how", ["wrapper", "in place", "forward"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_compiled_module_is_looked_at_from_outside_and_compiled_once(how: str, every: int, recwarn: Any) -> None:
    bare, watched = Frames(), Frames()
    without = WeightTrace()
    fit(compiled(how, bare), AmpPrecision("bf16-mixed"), callbacks=[without])
    monitor, trace = ActivationMonitor(every_n_steps=every), WeightTrace()
    model = compiled(how, watched)
    fit(model, AmpPrecision("bf16-mixed"), callbacks=[monitor, trace])
    assert watched.count == bare.count > 0
    last = monitor.last
    assert last["net.body"].input.elements == 16 and last["net.body"].output.elements == 4
    assert last["net.out"].output.amax > 0
    assert last["net.body.0"].output is None and "inside the compiled 'net.body'" in last["net.body.0"].note
    assert last["net.body.0"].parameter_amax > 0
    (message,) = [str(w.message) for w in recwarn if "cannot see inside" in str(w.message)]
    assert "'net.body.0'" in message and "from outside: 'net.body'" in message and "5 modules" in message
    assert all(same(a, b) for a, b in zip(trace.weights, without.weights, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_lightning_module(backend: str, recwarn: Any) -> None:
    torch._dynamo.reset()
    monitor = ActivationMonitor(every_n_steps=5)
    trainer = make_trainer(AmpPrecision("bf16-mixed"), callbacks=[monitor])
    trainer.fit(torch.compile(Model(mlp()), backend=backend), loader(regression_batches()))
    assert keys(trainer) == {f"parameter_amax/net.{i}" for i in (0, 2, 4)}
    assert "inside the compiled '(model)'" in monitor.last["net.0"].note
    assert any("cannot see inside" in str(w.message) for w in recwarn)


@pytest.mark.parametrize("every", [1, 3])  # hooks are there, or not, when it is compiled
def test_a_compiled_function_that_nobody_can_recognize_is_compiled_once(every: int) -> None:
    torch._dynamo.reset()
    frames = Frames()

    class Hidden(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(run(batch[0]).float(), batch[1])

    model = Hidden(mlp())
    run = torch.compile(lambda x: model.net(x), backend=frames)
    monitor = ActivationMonitor(every_n_steps=every)
    fit(model, AmpPrecision("bf16-mixed"), callbacks=[monitor])
    assert frames.count == 1
    assert monitor.last["net.0"].note == "did not run"


# ---------------------------------------------------------------- hooks


def hooks_on(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_with_kwargs)
        + len(m._forward_pre_hooks_with_kwargs) + (getattr(m._compiled_call_impl, "__name__", "") == "watched")
        for m in model.modules()
    )  # fmt: skip


def test_hooks_are_there_at_log_points_only() -> None:
    there: list[bool] = []

    class Look(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            there.append(hooks_on(self) > 0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not hooks_on(self)

        def on_train_batch_end(self, *_: Any) -> None:
            assert not hooks_on(self)

    trainer = make_trainer(AmpPrecision("bf16-mixed"), callbacks=[ActivationMonitor(2)], accumulate_grad_batches=2,
                           num_sanity_val_steps=2, val_check_interval=1)  # fmt: skip
    data = loader(regression_batches(8))
    trainer.fit(Look(seeded(InPlace)), data, data)
    assert there == [False, False, True, True] * 2


@pytest.mark.parametrize("how", ["eager", "in place"])
def test_hooks_go_after_an_exception(how: str) -> None:
    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            assert hooks_on(self)
            raise RuntimeError("the model failed")

    body = mlp()
    if how == "in place":
        body.compile(backend="eager")
    model = Fails(body)
    with pytest.raises(RuntimeError, match="the model failed"):
        fit(model, AmpPrecision("bf16-mixed"), callbacks=[ActivationMonitor(1)])
    assert not hooks_on(model)
    fit(Model(model.net), AmpPrecision("bf16-mixed"), callbacks=[ActivationMonitor(1)])


def test_hooks_go_where_the_model_ends_an_epoch_by_itself() -> None:
    class Ends(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    model = Ends(mlp())
    fit(model, AmpPrecision("bf16-mixed"), callbacks=[ActivationMonitor(1)])
    assert not hooks_on(model)


def test_copies_of_a_model_made_at_a_log_point_are_not_watched() -> None:
    copies: list[nn.Module] = []

    class Copies(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 0:
                copies.extend([copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))])
            for twin in copies:
                twin(batch[0] * 1000)
            return loss

    monitor = ActivationMonitor(every_n_steps=1)
    fit(Copies(seeded(InPlace)), AmpPrecision("bf16-mixed"), regression_batches(2), callbacks=[monitor])
    assert len(copies) == 2 and monitor.last["net.a"].output.elements == 4 * 8


def test_transforms_of_functions_are_left_alone() -> None:
    class PerSample(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            parameters = dict(self.net.named_parameters())

            def one(values: dict[str, Tensor], x: Tensor) -> Tensor:
                return torch.func.functional_call(self.net, values, (x.unsqueeze(0),)).float().sum()

            torch.func.vmap(torch.func.grad(one), (None, 0))({k: v.detach() for k, v in parameters.items()}, batch[0])
            return loss

    monitor = ActivationMonitor(every_n_steps=1)
    fit(PerSample(mlp()), AmpPrecision("bf16-mixed"), regression_batches(2), callbacks=[monitor])
    assert monitor.last["net.0"].output.elements == 4 * 8


# ---------------------------------------------------------------- warnings and errors


def warnings_of(caught: Any, words: str) -> list[str]:
    return [str(warning.message) for warning in caught if words in str(warning.message)]


def scaled_mlp(factor: float) -> nn.Module:
    net = mlp()
    with torch.no_grad():
        net[2].weight.mul_(factor)
    return net


def test_warns_once_when_fp16_is_nearly_full(recwarn: Any) -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 8), Times(0, 40000), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)))
    fit(Model(net, sgd), AmpPrecision("16-mixed", loss_scale=1.0), callbacks=[ActivationMonitor(1)])
    (message,) = warnings_of(recwarn, "one doubling overflows")
    for words in ("'net.1'", "40000 in fp16 at step 0", "0.71 bits", "65504", "Rule('net.1', compute='bf16')"):
        assert words in message


@pytest.mark.parametrize("factor", [20.0, 20000.0])
def test_no_warning_with_room_or_in_a_wide_format(factor: float, recwarn: Any) -> None:
    plugin = amp_fp16() if factor == 20.0 else AmpPrecision("bf16-mixed")
    fit(Model(scaled_mlp(factor)), plugin, callbacks=[ActivationMonitor(1)])
    assert not warnings_of(recwarn, "doubling") and not warnings_of(recwarn, "not finite")


class Times(nn.Module):
    def __init__(self, factor: float, plus: float) -> None:
        super().__init__()
        self.factor, self.plus = factor, plus

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.plus


class Divides(nn.Module):
    def __init__(self, at: int = 1) -> None:
        super().__init__()
        self.calls, self.at = 0, at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / 0.0 if self.calls == self.at else x + 0.0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_names_the_module_in_which_the_first_infinity_arose(accumulate: int, recwarn: Any) -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 8), Divides(), nn.Linear(8, 8), Divides(2), nn.Linear(8, 1)))
    monitor = ActivationMonitor(every_n_steps=1)
    fit(Model(net, sgd), AmpPrecision("bf16-mixed"), regression_batches(2), callbacks=[monitor],
        accumulate_grad_batches=accumulate)  # fmt: skip
    (message,) = warnings_of(recwarn, "The output of")
    assert "'net.1' (bf16)" in message and "its inputs are" in message
    assert f"{1 / accumulate:.3%}" in message


def test_an_overflow_in_fp16_says_which_rule_helps(recwarn: Any) -> None:
    fit(
        Model(scaled_mlp(1e6)),
        AmpPrecision("16-mixed", loss_scale=1.0),
        regression_batches(2),
        callbacks=[ActivationMonitor(1)],
    )
    (message,) = warnings_of(recwarn, "The output of")
    assert "'net.2' (fp16)" in message and "Rule('net.2', compute='bf16')" in message


def test_an_infinity_from_outside_accuses_no_module(recwarn: Any) -> None:
    batches = [(torch.full((4, 4), math.inf), torch.zeros(4, 1))]
    fit(Model(mlp()), AmpPrecision("bf16-mixed"), batches, callbacks=[ActivationMonitor(1)])
    (message,) = warnings_of(recwarn, "The output of")
    assert "'net.0'" in message and "no module was seen that made it so" in message


@pytest.mark.parametrize("modules", [[], "", ["net", ""], [3]])
def test_globs_of_another_kind_are_refused(modules: Any) -> None:
    with pytest.raises(ValueError, match=r"ActivationMonitor\(modules=.*glob"):
        ActivationMonitor(modules=modules)


def test_a_glob_without_a_module_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'nett\.\*' matches no module.*net, net\.0"):
        fit(Model(mlp()), AmpPrecision("bf16-mixed"), callbacks=[ActivationMonitor(1, modules=["net.0", "nett.*"])])


# ---------------------------------------------------------------- what it costs


class Ops(TorchDispatchMode, L.Callback):
    """Names of the ops of each training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.now: list[str] = []
        self.batches: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now.append(str(func))
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, *_: Any) -> None:
        self.now = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches.append(self.now)


def ops_of(callbacks: list[L.Callback], net: nn.Module) -> list[list[str]]:
    ops = Ops()
    with ops:
        fit(
            Model(net),
            AmpPrecision("bf16-mixed"),
            regression_batches(6),
            callbacks=[*callbacks, ops],
            log_every_n_steps=50,
        )
    return ops.batches


def test_between_log_points_nothing_runs_and_at_them_nothing_is_transferred() -> None:
    bare, watched = ops_of([], mlp()), ops_of([ActivationMonitor(every_n_steps=3)], mlp())
    for step, (without, with_it) in enumerate(zip(bare, watched, strict=True)):
        assert (without == with_it) == (step not in (2, 5))
        assert "aten._local_scalar_dense.default" not in with_it


def test_the_number_of_ops_does_not_grow_with_layers() -> None:
    def deep(depth: int) -> nn.Module:
        return seeded(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)], nn.Linear(4, 1)))

    extra = []
    for depth in (10, 100):
        bare, watched = ops_of([], deep(depth)), ops_of([ActivationMonitor(every_n_steps=3)], deep(depth))
        views = ("aten.view", "aten.detach", "aten.unbind", "aten.split")
        extra.append([len([op for op in ops[5] if not op.startswith(views)]) for ops in (watched, bare)])
    (few, bare_few), (many, bare_many) = extra
    assert many - bare_many <= few - bare_few + 5
    assert many - bare_many < 120


@pytest.mark.parametrize("detail", [False, True])
def test_training_is_bit_identical(detail: bool) -> None:
    def trained(callbacks: list[L.Callback]) -> list[dict[str, Tensor]]:
        trace = WeightTrace()
        torch.manual_seed(3)
        net = seeded(lambda: nn.Sequential(InPlace(), nn.Dropout(0.2)))
        fit(Model(net), amp_fp16(), callbacks=[*callbacks, trace], accumulate_grad_batches=2)
        return trace.weights

    bare, watched = trained([]), trained([ActivationMonitor(every_n_steps=1, detail=detail)])
    assert all(same(a, b) for a, b in zip(bare, watched, strict=True))


def test_what_is_held_back_is_let_go_before_backward() -> None:
    held: list[int] = []

    class Look(Model):
        def on_before_backward(self, loss: Tensor) -> None:
            held.append(monitor._sightings._held_elements)

    monitor = ActivationMonitor(every_n_steps=1)
    fit(Look(mlp()), AmpPrecision("bf16-mixed"), regression_batches(2), callbacks=[monitor])
    assert held == [0, 0]


def test_all_that_runs_at_a_log_point_runs_on_the_meta_device() -> None:
    from lightning_amp_plus.callbacks.parameter_amax import ParameterAmax
    from lightning_amp_plus.callbacks.sightings import Sightings
    from lightning_amp_plus.callbacks.watched import Watch

    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    device = torch.device("meta")
    seen = Sightings(3, device)
    watches = [Watch(module, number, seen) for number, module in enumerate(net)]
    for watch in watches:
        watch.begin()
    net(torch.randn(3, 4, device="meta"))
    maxima, sums = seen.totals()
    amax = ParameterAmax([[(net[0], "weight"), (net[0], "bias")], [(net[2], "weight")]], device).measure()
    assert maxima.shape == (6, 3) and sums.shape == (6, 4) and amax.shape == (2, 1)
    assert {tensor.device.type for tensor in (maxima, sums, amax)} == {"meta"}
