"""What every FP8 backend has to do, as plain functions for tests, and for a subprocess where a backend needs it.

Everything is on torch's default device: ``with torch.device("cuda")`` around a check asks a GPU. Numbers are drawn on the
CPU, so they are the same everywhere.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp_plus import PrecisionPolicy, Rule, plan
from lightning_amp_plus.fp8 import Recipe

IN, OUT = 64, 96

# Rows and columns that share a scale, by granularity.
TILES = {
    "tensor": (10**6, 10**6),
    "row": (1, 10**6),
    "block_1x128": (1, 128),
    "block_128x128": (128, 128),
    "mx_32": (1, 32),
}


def normal(*shape: int, seed: int) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def layer(bias: bool = True) -> nn.Linear:
    made = nn.Linear(IN, OUT, bias=bias)
    with torch.no_grad():
        made.weight.copy_(normal(OUT, IN, seed=1) / 8)
        if bias:
            made.bias.copy_(normal(OUT, seed=2))
    return made


def routed(model: nn.Module, backend: str, recipe: Recipe, **arguments: Any) -> nn.Module:
    """A model with its Linear layers in FP8, each named: others stay in BF16 on a GPU that would not be faster in FP8."""
    wrapped = nn.Sequential(model) if isinstance(model, nn.Linear) else model
    names = [name for name, module in wrapped.named_modules() if isinstance(module, nn.Linear)]
    rules = [Rule(name, compute="fp8", recipe=recipe, backend=backend, **arguments) for name in names]  # type: ignore[arg-type]
    plan(wrapped, PrecisionPolicy("bf16", rules=rules)).apply(wrapped)
    return model


def tokens(count: int = 32) -> Tensor:
    return normal(count, IN, seed=3)


def grads(count: int = 32) -> Tensor:
    return normal(count, OUT, seed=4)


def run(model: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the input, gradient of the weight."""
    weight: Any = model.weight
    weight.grad = None
    x = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        y = model(x)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad, weight.grad


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Whether the bits are equal; on a GPU, whose GEMMs add up in an order that follows the shape, up to that order."""
    return torch.equal(found, wanted) if found.device.type == "cpu" else error(found, wanted) < 4e-3


def errors_are_those_of_fp8(backend: str, recipe: Recipe) -> None:
    exact = run_exactly(tokens(), grads())
    found = run(routed(layer(), backend, recipe), tokens(), grads())
    in_bf16 = run(layer(), tokens(), grads())
    for name, mine, bf16, truth in zip(("output", "input", "weight"), found, in_bf16, exact, strict=True):
        assert 2 * error(bf16, truth) < error(mine, truth) < 0.09, (name, error(bf16, truth), error(mine, truth))
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == found[2].dtype == torch.float32


def run_exactly(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in FP64."""
    model = layer().double()
    x = x.double().requires_grad_()
    y = model(x)
    y.backward(grad.double())
    assert x.grad is not None and model.weight.grad is not None
    return y.detach(), x.grad, model.weight.grad


def any_number_of_tokens_is_exact(backend: str, recipe: Recipe) -> None:
    model = routed(layer(), backend, recipe)
    for count in (1, 15, 17):
        zeros = -count % 32
        x = torch.cat([tokens(count), torch.zeros(zeros, IN)])
        grad = torch.cat([grads(count), torch.zeros(zeros, OUT)])
        padded, whole = run(model, tokens(count), grads(count)), run(model, x, grad)
        for mine, reference in zip(padded, whole, strict=True):
            assert alike(mine, reference[: len(mine)]), count


def leading_dimensions_stay(backend: str, recipe: Recipe) -> None:
    model = routed(layer(), backend, recipe)
    flat = run(model, tokens(24), grads(24))
    shaped = run(model, tokens(24).reshape(2, 3, 4, IN), grads(24).reshape(2, 3, 4, OUT))
    assert shaped[0].shape == (2, 3, 4, OUT) and torch.equal(shaped[0].flatten(0, 2), flat[0])
    assert torch.equal(shaped[1].flatten(0, 2), flat[1]) and torch.equal(shaped[2], flat[2])


def an_empty_batch_gives_zero_gradients(backend: str, recipe: Recipe) -> None:
    model = routed(layer(), backend, recipe)
    y, grad_x, grad_weight = run(model, tokens(0), grads(0))
    assert y.shape == (0, OUT) and grad_x.shape == (0, IN) and not grad_weight.any()


def what_is_not_finite_comes_through(backend: str, recipe: Recipe) -> None:
    for bad in (float("inf"), -float("inf"), float("nan")):
        model = routed(layer(), backend, recipe)
        x, grad = tokens(), grads()
        x[3, 5] = bad
        assert not run(model, x, grads())[0].isfinite().all(), f"{bad} in the input is not in the output"
        grad[2, 7] = bad
        assert not run(model, tokens(), grad)[2].isfinite().all(), f"{bad} in the gradient is not in the weight's"


def odd_layers_compute(backend: str, recipe: Recipe) -> None:
    without = routed(layer(bias=False), backend, recipe)
    assert run(without, tokens(), grads())[0].isfinite().all()
    frozen = layer()
    frozen.weight.requires_grad_(False)
    routed(frozen, backend, recipe)
    x = tokens().requires_grad_()
    frozen(x).sum().backward()
    assert x.grad is not None and frozen.weight.grad is None and frozen.bias.grad is not None
    first = routed(layer(), backend, recipe)
    first(tokens()).sum().backward()  # an input that needs no gradient
    assert first.weight.grad is not None
    zero = layer(bias=False)
    nn.init.zeros_(zero.weight)
    assert not run(routed(zero, backend, recipe), tokens(), grads())[0].any()
    with torch.no_grad():
        assert first(tokens()).isfinite().all()


def a_layer_called_twice_adds_its_gradients(backend: str, recipe: Recipe) -> None:
    model: Any = routed(layer(), backend, recipe)
    model(tokens()).float().sum().backward()
    once = model.weight.grad.clone()
    model.weight.grad = None
    (model(tokens()).float().sum() + model(tokens()).float().sum()).backward()
    assert torch.allclose(model.weight.grad, 2 * once, rtol=1e-6)


def the_model_stays_what_it_is(backend: str, recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    before = dict(model.named_parameters(remove_duplicate=False))
    modules, state = list(model.modules()), model.state_dict()
    routed(model, backend, recipe)
    model(tokens()).float().sum().backward()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert all(mine is theirs for mine, theirs in zip(model.modules(), modules, strict=True))
    assert list(model.state_dict()) == list(state) and {type(v) for v in model.state_dict().values()} == {Tensor}
    nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).load_state_dict(model.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied[2].weight is copied[0].weight is not model[0].weight
        assert torch.equal(copied(tokens()), model(tokens()))


def evaluation_is_in_bf16(backend: str, recipe: Recipe) -> None:
    model = routed(layer(), backend, recipe).eval()
    with torch.autocast(tokens().device.type, torch.bfloat16):
        assert alike(model(tokens()), layer()(tokens()))


def recomputation_gives_the_same(backend: str, recipe: Recipe) -> None:
    for reentrant in (True, False):

        def through(x: Any, model: Any, reentrant: bool = reentrant) -> Any:
            return checkpoint(model, x, use_reentrant=reentrant)

        model: Any = routed(layer(), backend, recipe)
        x = tokens().requires_grad_()
        y = through(x, model)
        y.backward(grads().to(y.dtype))
        plain = run(routed(layer(), backend, recipe), tokens(), grads())
        assert torch.equal(y, plain[0]) and torch.equal(model.weight.grad, plain[2])


CONTRACT: dict[str, Callable[[str, Recipe], None]] = {
    check.__name__: check
    for check in (
        errors_are_those_of_fp8,
        any_number_of_tokens_is_exact,
        leading_dimensions_stay,
        an_empty_batch_gives_zero_gradients,
        what_is_not_finite_comes_through,
        odd_layers_compute,
        a_layer_called_twice_adds_its_gradients,
        the_model_stays_what_it_is,
        evaluation_is_in_bf16,
        recomputation_gives_the_same,
    )
}
