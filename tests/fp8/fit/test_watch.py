"""Watching FP8 layers: what is measured and when, that nothing is left behind, and that nothing is changed."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_amp_plus import PrecisionPolicy, Rule, plan
from lightning_amp_plus.fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Recipe, RowwiseScaling
from lightning_amp_plus.fp8.delayed import histories_of
from lightning_amp_plus.fp8.fit.measure import FIT_COLUMNS, Fit, Fits, measured
from lightning_amp_plus.fp8.fit.watch import FitWatch
from lightning_amp_plus.fp8.switch import switch_fp8

CPU = torch.device("cpu")
ALL = [CurrentScaling(), DelayedScaling(history=4), RowwiseScaling(), BlockScaling(), MXScaling()]
every = pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
STEPS = 3


class Net(nn.Module):
    """Two layers, the second of which may be called several times or recomputed."""

    def __init__(self, calls: int = 1, run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 64)
        self.calls, self.run = calls, run

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        for _ in range(self.calls):
            x = self.run(self.b, x) if self.run is not None else self.b(x)
            x = torch.tanh(x)
        return x.float().square().sum()


def routed(model: nn.Module, recipe: Recipe, **arguments: Any) -> Any:
    backend, gemms = arguments.pop("backend", None), arguments.pop("gemms", None)
    rule = Rule("type:Linear", compute="fp8", recipe=recipe, backend=backend, gemms=gemms)
    plan(model, PrecisionPolicy("bf16", rules=[rule], **arguments)).apply(model)
    return model


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def batch(seed: int = 0, rows: int = 24) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def watched(model: nn.Module, *batches: Tensor, watch: FitWatch | None = None, **arguments: Any) -> Tensor:
    """Numbers of one window."""
    watch = watch or FitWatch(linears(model), CPU, **arguments)
    for x in batches:
        watch.begin()
        model(x).backward()
        watch.end()
    return watch.numbers()


def seen(model: nn.Module, *batches: Tensor, **arguments: Any) -> Fits:
    return FitWatch(linears(model), CPU, **arguments).fits(watched(model, *batches, **arguments))


def operands(model: Net, x: Tensor) -> dict[tuple[str, str], Tensor]:
    """What the layers of a net take, by hooks of its own."""
    found: dict[tuple[str, str], Tensor] = {}
    handles = []
    for name, layer in linears(model).items():

        def note(module: Any, args: Any, output: Tensor, name: str = name) -> None:
            found[name, "input"], found[name, "weight"] = args[0].detach(), module.weight.detach().clone()
            output.register_hook(partial(found.__setitem__, (name, "grad_output")))

        handles.append(layer.register_forward_hook(note))
    model(x).backward()
    for handle in handles:
        handle.remove()
    return found


def rows(numbers: Tensor, layers: int = 2) -> Tensor:
    return numbers.view(-1, layers, 3, len(FIT_COLUMNS) + 1)


def same(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-9, atol=0)


# -------------------------------------------------------------------- what is measured


@every
def test_every_operand_is_measured_as_it_is_quantized(recipe: Recipe) -> None:
    model, x = routed(Net(), recipe), batch()
    found = rows(watched(model, x))[0]
    for (layer, operand), tensor in operands(model, x).items():
        wanted = measured(tensor, operand, recipe)  # type: ignore[arg-type]
        place = found[list(linears(model)).index(layer), ("input", "weight", "grad_output").index(operand)]
        assert same(place[:-1], wanted), (layer, operand)
        assert place[-1] == (0 if isinstance(recipe, DelayedScaling) else -1)


@every
def test_training_is_the_same_bit_for_bit(recipe: Recipe) -> None:
    results = []
    for watching in (False, True):
        model = routed(Net(), recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watch = FitWatch(linears(model), CPU, what_if=ALL)
        for step in range(STEPS):
            if watching:
                watch.begin()
            model(batch(step)).backward()
            watch.end()
            optimizer.step()
            optimizer.zero_grad()
            for history in histories_of(model.modules()):
                history.end_window(True, None)
            if watching:
                watch.end_window(True)
                assert len(watch.fits(watch.numbers()).own["b"]) == 3
        histories = [past for of in histories_of(model.modules()) for past in of.state_dict().values()]
        results.append([*model.parameters(), *histories])
    assert len(results[0]) == (6 if isinstance(recipe, DelayedScaling) else 4)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_micro_batches_and_calls_add_up_and_a_weight_counts_once() -> None:
    model, x, other = routed(Net(), CurrentScaling()), batch(0), 4 * batch(1)
    first, second, both = (rows(watched(model, *given))[0] for given in ((x,), (other,), (x, other)))
    for operand in (0, 2):
        assert same(both[:, operand, 2:-1], first[:, operand, 2:-1] + second[:, operand, 2:-1])
        assert torch.equal(both[:, operand, 0], torch.maximum(first[:, operand, 0], second[:, operand, 0]))
        assert torch.equal(both[:, operand, 1], torch.minimum(first[:, operand, 1], second[:, operand, 1]))
    assert torch.equal(both[:, 1], first[:, 1])
    shared = rows(watched(routed(Net(calls=3), CurrentScaling()), x))[0]
    assert shared[1, :, 5].tolist() == [3 * 24 * 64, 64 * 64, 3 * 24 * 64]


def test_delayed_scaling_is_measured_with_the_scale_in_force() -> None:
    model = routed(Net(), DelayedScaling(history=4))
    [history] = histories_of(model.modules())
    model(batch()).backward()
    history.end_window(True, None)
    held = {
        (name, operand): history.in_force(row, operand).item()
        for row, name in enumerate(history.names)
        for operand in ("input", "weight", "grad_output")
    }  # type: ignore[arg-type]
    noted = history.noted()
    watch = FitWatch(linears(model), CPU)
    watch.begin()
    model(100 * batch(1)).backward()
    watch.end()
    between = history.noted()
    history.end_window(True, None)  # what comes next is not what was used
    fits = watch.fits(watch.numbers()).own
    assert {(name, o): fit.scale for name, by in fits.items() for o, fit in by.items()} == held
    assert fits["a"]["input"].saturation > 0.5 and fits["b"]["weight"].saturation == 0
    assert fits["a"]["input"].amax == between[0, 0].item() > 10 * history._past[0, 0, 1]
    assert not noted.any()
    assert fits["a"]["input"].updates == 1 and fits["b"]["weight"].updates == 0
    assert watch.fits(watched(model, batch(), watch=watch)).own["a"]["input"].updates == 0


def test_looking_notes_nothing_in_the_histories_of_training() -> None:
    noted = []
    for watching in (False, True):
        model = routed(Net(), DelayedScaling(history=4))
        watch = FitWatch(linears(model), CPU, what_if=[DelayedScaling(history=8)])
        if watching:
            watch.begin()
        model(batch()).backward()
        watch.end()
        watch.numbers()
        noted.append(histories_of(model.modules())[0].noted())
    assert torch.equal(*noted) and noted[0].all()


def test_torchao_s_layers_are_measured_as_the_reference_s() -> None:
    pytest.importorskip("torchao")
    x = batch(rows=32)
    one, other = (watched(routed(Net(), CurrentScaling(), backend=name), x) for name in ("reference", "torchao"))
    # What comes behind the first layer's forward differs by the order of summation.
    assert torch.equal(rows(one)[0, 0, :2], rows(other)[0, 0, :2])
    assert torch.allclose(one[:, :2], other[:, :2], rtol=0.05) and torch.equal(one[:, 5], other[:, 5])


# -------------------------------------------------------------------- what is not


def test_what_is_not_quantized_is_not_measured() -> None:
    x = batch()
    model = routed(Net(), CurrentScaling())
    model.eval()
    assert seen(model, x).own == {}
    model.train()
    switch_fp8(model, False)
    assert seen(model, x).own == {}
    switch_fp8(model, True)
    assert set(seen(model, x).own) == {"a", "b"}
    assert seen(model, batch(rows=0)).own == {}
    assert set(seen(routed(Net(), CurrentScaling(), gemms=["fprop"]), x).own["b"]) == {"input", "weight"}
    assert set(seen(routed(Net(), CurrentScaling(), gemms=["dgrad"]), x).own["b"]) == {"weight", "grad_output"}
    model = routed(Net(), CurrentScaling(), fp8_in_evaluation=True).eval()
    assert set(seen(model, x).own) == {"a", "b"}


def test_what_cannot_be_read_is_left_out() -> None:
    model = Net()
    nn.utils.parametrizations.weight_norm(model.a)
    made = []
    model.a.parametrizations.weight[0].register_forward_hook(lambda *_: made.append(1))
    routed(model, CurrentScaling())
    model(batch())
    once = len(made)
    made.clear()
    assert set(seen(model, batch()).own["a"]) == {"input", "grad_output"}
    assert len(made) == once  # it was not made once more


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_told_not_raised(bad: float) -> None:
    x = batch()
    x[3, 3] = bad
    found = seen(routed(Net(), CurrentScaling()), x, what_if=[RowwiseScaling()])
    for fits in (found.own, found.what_if["rowwise"]):
        assert math.isnan(fits["a"]["input"].sqnr) and math.isfinite(fits["a"]["weight"].sqnr)
        assert not math.isfinite(fits["a"]["input"].amax)


def test_of_hidden_layers_only_weights_are_measured_as_they_were_in_the_window() -> None:
    model = routed(Net(), CurrentScaling())
    wanted = measured(model.b.weight.detach(), "weight", CurrentScaling())
    watch = FitWatch(linears(model), CPU, hidden=["b"])
    watch.begin()
    assert model.a._forward_hooks and not model.b._forward_hooks
    model(batch()).backward()
    watch.end()
    with torch.no_grad():
        model.b.weight.mul_(2)
    numbers = watch.numbers()
    assert torch.equal(rows(numbers)[0, 1, 1, :-1], wanted)
    assert {name: set(by) for name, by in watch.fits(numbers).own.items()} == {
        "a": {"input", "weight", "grad_output"},
        "b": {"weight"},
    }
    assert torch.equal(watched(model, batch(), watch=watch)[4, :1], 2 * wanted[:1])


def test_a_layer_that_is_compiled_itself_gets_no_hook_and_is_compiled_once() -> None:
    model = routed(Net(), CurrentScaling())
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    model.b.compile(backend=backend)
    model(batch()).backward()
    count = len(compiled)
    own = seen(model, batch()).own
    assert count and len(compiled) == count and set(own["b"]) == {"weight"} and len(own["a"]) == 3


# -------------------------------------------------------------------- torch's machinery


def twice(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(layer(torch.tanh(layer(x))))


@every
@pytest.mark.parametrize("kind", ["reentrant", "not", "selective"])
def test_recomputed_layers_are_measured_once(recipe: Recipe, kind: str) -> None:
    def run(layer: Any, x: Tensor) -> Tensor:
        inner = partial(twice, layer)
        if kind == "selective":
            aten = torch.ops.aten  # what a layer and its measurement both do
            policy = [aten.aminmax.default, aten.amax.default, aten.reciprocal.default]
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(inner, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]
        return checkpoint(inner, x, use_reentrant=kind == "reentrant")  # type: ignore[no-any-return]

    plain, recomputed = Net(run=twice), Net(run=run)
    found = [watched(routed(model, recipe), batch()) for model in (plain, recomputed)]
    assert torch.equal(*found) and (rows(found[0])[0, :, :, 5] > 0).all()
    assert all(
        torch.equal(*(p.grad for p in pair))  # type: ignore[misc]
        for pair in zip(plain.parameters(), recomputed.parameters(), strict=True)
    )


def test_dispatch_modes_see_nothing_of_it() -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    model, counts = routed(Net(), CurrentScaling()), []
    for watching in (False, True):
        watch = FitWatch(linears(model), CPU, what_if=[MXScaling()])
        if watching:
            watch.begin()
        with Counting() as mode:
            model(batch()).backward()
        watch.end()
        counts.append(mode.count)
        assert bool(watch.fits(watch.numbers()).own) == watching
        model.zero_grad()
    assert counts[0] == counts[1] > 0


def test_inside_of_torch_func_it_keeps_quiet() -> None:
    model = routed(Net(), CurrentScaling())
    watch = FitWatch(linears(model), CPU)
    watch.begin()
    [hook] = model.a._forward_hooks.values()

    def call(x: Tensor) -> Tensor:
        hook(model.a, (x,), {}, x)
        return 2 * x

    torch.func.vmap(call)(batch())
    assert not watch.fits(watch.numbers()).own
    call(batch())
    watch.end()
    assert set(watch.fits(watch.numbers()).own) == {"a"}


# -------------------------------------------------------------------- no trace


def hooks(model: nn.Module) -> list[Any]:
    return [
        (name, key, dict(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "hooks" in key and value
    ]


def test_hooks_are_there_from_begin_to_end_only() -> None:
    model = routed(Net(), CurrentScaling())
    watch = FitWatch(linears(model), CPU)
    model.a.register_forward_hook(lambda *_: None)
    before, attributes = hooks(model), [set(vars(module)) for module in model.modules()]
    watch.begin()
    watch.begin()
    assert sum(len(module._forward_hooks) for module in model.modules()) == 3
    model.a(batch())
    kept = model.b(torch.ones(2, 64))
    assert kept._backward_hooks
    watch.end()
    watch.end()
    assert hooks(model) == before and not kept._backward_hooks
    assert [set(vars(module)) for module in model.modules()] == attributes
    numbers = watch.numbers()
    kept.sum().backward()  # of a graph from before
    assert (rows(numbers)[0, :, 0, 5] > 0).all() and not watch.fits(watch.numbers()).own


def test_a_hook_of_the_model_s_own_that_changes_outputs_is_not_in_the_way() -> None:
    model = routed(Net(), CurrentScaling())
    plain = watched(model, batch())
    model.b.register_forward_hook(lambda module, args, output: output * 1.0)
    assert same(watched(model, batch()), plain)


def test_copies_made_meanwhile_hold_no_live_hook() -> None:
    model = routed(Net(), CurrentScaling())
    watch = FitWatch(linears(model), CPU)
    watch.begin()
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    others = [copy.deepcopy(model), torch.load(stored, weights_only=False)]
    for other in others:
        [hook] = other.a._forward_hooks.values()
        assert hook.__self__._watch is None
        other(batch()).backward()
        assert other.b.weight.grad is not None
    watch.end()
    assert not watch.fits(watch.numbers()).own


# -------------------------------------------------------------------- other recipes


@every
def test_recipes_that_are_tried_give_what_training_in_them_would_see(recipe: Recipe) -> None:
    model, x = routed(Net(), CurrentScaling()), batch()
    tensors = operands(model, x)
    found = rows(watched(model, x, what_if=ALL))
    assert found.shape[0] == 1 + len(ALL)
    for (layer, operand), tensor in tensors.items():
        place = list(linears(model)).index(layer), ("input", "weight", "grad_output").index(operand)
        assert same(found[1 + ALL.index(recipe)][place][:-1], measured(tensor, operand, recipe))  # type: ignore[arg-type]
    assert same(found[1], found[0])  # the first one is what they have


def test_large_tensors_are_tried_by_tiles_too() -> None:
    model, x = routed(nn.Sequential(nn.Linear(256, 512)), CurrentScaling()), torch.randn(8, 256)
    watch = FitWatch(linears(model), CPU, what_if=[BlockScaling()], most=2**13)
    watch.begin()
    model(x).float().sum().backward()
    watch.end()
    found, weight = rows(watch.numbers(), 1), model[0].weight.detach()
    for turn, recipe in enumerate([CurrentScaling(), BlockScaling()]):
        assert same(found[turn, 0, 1, :-1], measured(weight, "weight", recipe, most=2**13))
    assert found[0, 0, 1, 5] == 2**13 and found[1, 0, 1, 5] == 128 * 256


def test_delayed_scaling_that_is_tried_has_a_history_of_observed_windows() -> None:
    model, recipe = routed(Net(), CurrentScaling()), DelayedScaling(history=4)
    watch = FitWatch(linears(model), CPU, what_if=[recipe])

    def window(size: float, applied: bool = True) -> tuple[Fit, int]:
        reduced: list[Tensor] = []
        watch.begin()
        model(size * batch()).backward()
        watch.end()
        watch.end_window(applied, reduced.append)
        return watch.fits(watch.numbers()).what_if["delayed(history=4)"]["a"]["input"], len(reduced)

    amax = batch().bfloat16().float().abs().max().item()
    first, exchanges = window(1.0)
    assert first.scale == pytest.approx(448 / amax) and first.saturation == 0 and exchanges == 1
    assert first.updates == 1
    model(100 * batch())  # not observed
    skipped, _ = window(1000.0, applied=False)
    assert skipped.scale == first.scale and skipped.saturation > 0.9 and skipped.updates == 0
    grown, _ = window(2.0)
    assert grown.scale == first.scale and 0 < grown.saturation < 0.5 and grown.updates == 1
    after, _ = window(2.0)
    assert after.scale == pytest.approx(448 / (2 * amax)) and after.saturation == 0


def test_a_recipe_cannot_be_tried_twice() -> None:
    with pytest.raises(ValueError, match=r"twice: mx, mx"):
        FitWatch({}, CPU, what_if=[MXScaling(), MXScaling()])


# -------------------------------------------------------------------- numbers


def test_numbers_have_one_size_whatever_was_seen() -> None:
    model = routed(Net(), DelayedScaling(history=4))
    watch = FitWatch(linears(model), CPU, what_if=ALL[:2])
    empty = watch.numbers()
    assert empty.shape == (3 * 2 * 3, len(FIT_COLUMNS) + 1) and watch.fits(empty).own == {}
    assert watched(model, batch(), watch=watch).shape == empty.shape
    nobody = FitWatch({}, CPU, what_if=ALL)
    nobody.begin()
    nobody.end_window(True)
    assert nobody.numbers().shape == (0, len(FIT_COLUMNS) + 1)


def test_updates_count_all_windows_since_they_were_asked_for() -> None:
    model = routed(Net(), DelayedScaling(history=1))
    [history] = histories_of(model.modules())

    def train(*sizes: float) -> None:
        for size in sizes:
            model(size * batch())
            history.end_window(True, None)

    train(1.0, 2.0)
    watch = FitWatch(linears(model), CPU)
    train(1.0, 1.0, 4.0)
    assert rows(watch.numbers())[0, 0, :, -1].tolist() == [2, 0, 0]
    train(8.0)
    assert rows(watch.numbers())[0, 0, :, -1].tolist() == [1, 0, 0]
    routed(model, DelayedScaling(history=2))  # begins to count anew
    [history] = histories_of(model.modules())
    train(1.0)
    assert rows(watch.numbers())[0, 0, 0, -1] == history.updates[0, 0]
