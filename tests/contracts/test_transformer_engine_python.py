"""Transformer Engine's Python over emulated kernels: what an adapter relies on, and what it has to know.

Each ``check_*`` runs in a process of its own, where ``tests.support.transformer_engine`` stands in for the binary. The
histories are read for the input's and the output gradient's column, oldest first; the first place takes the next amax.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.transformer_engine import (
    FOLDER,
    MISSING,
    StandInOutdated,
    check_in_transformer_engine,
    run_in_transformer_engine,
    verify_source,
)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

LENGTH = 4  # of the histories

# ------------------------------------------------------------------ helpers of the checks


def equal(found: Any, expected: Any) -> None:
    """An ``assert`` that says what it found where pytest does not rewrite it."""
    assert found == expected, f"found {found!r}, expected {expected!r}"


@contextmanager
def raises(error: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except error as caught:
        assert text in str(caught), f"found {caught!r}, expected {text!r} in it"
    else:
        raise AssertionError(f"nothing raised, expected {error.__name__}: {text}")


def delayed(**arguments: Any) -> Any:
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling(**{"amax_history_len": LENGTH, **arguments})


def layer(features: int = 32, outputs: int = 32, **arguments: Any) -> Any:
    import transformer_engine.pytorch as te

    return te.Linear(features, outputs, **{"device": "cpu", **arguments})


def batch(amax: float, tokens: int = 16, features: int = 32) -> Tensor:
    """An input with a known amax."""
    x = 0.01 * torch.randn(tokens, features)
    x[0, 0] = amax
    return x.requires_grad_()


def train(module: Callable[[Tensor], Tensor], amax: float, grad_amax: float = 1.0, recipe: Any = None) -> Tensor:
    """One forward under an autocast of its own, and one backward."""
    import transformer_engine.pytorch as te

    with te.autocast(recipe=recipe or delayed()):
        output = module(batch(amax))
    output.backward(torch.full_like(output, grad_amax))
    return output


def forward_history(module: Any) -> list[float]:
    history: list[float] = module.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()
    return history


def backward_history(module: Any) -> list[float]:
    history: list[float] = module.fp8_meta["scaling_bwd"].amax_history[:, 0].tolist()
    return history


def advances(history: list[float]) -> int:
    """How often a history that has taken one amax has been rolled since."""
    return LENGTH - max(range(LENGTH), key=lambda place: history[place]) if history[0] == 0 and any(history) else 0


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# ------------------------------------------------------------------ the names that an adapter uses


def check_recipes_have_the_fields_in_use() -> None:
    from transformer_engine.common.recipe import (
        DelayedScaling,
        Float8BlockScaling,
        Float8CurrentScaling,
        Format,
        MXFP8BlockScaling,
    )

    fields = {field.name for field in dataclasses.fields(DelayedScaling)}
    assert fields >= {"margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax"}, fields
    for recipe in (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling):
        assert "fp8_format" in {field.name for field in dataclasses.fields(recipe)}, recipe
    assert "use_power_2_scales" in {field.name for field in dataclasses.fields(Float8CurrentScaling)}
    assert {"E4M3", "HYBRID"} <= set(Format.__members__)
    # A misspelled field is not noticed by anyone.
    assert not hasattr(DelayedScaling(history=3), "history")
    with raises(ValueError, "E5M2"):
        DelayedScaling(fp8_format=Format.E5M2)


def check_signatures_are_those_in_use() -> None:
    import transformer_engine.pytorch as te

    autocast = list(inspect.signature(te.autocast).parameters)
    equal(autocast[:4], ["enabled", "calibrating", "recipe", "amax_reduction_group"])
    constructor = inspect.signature(te.Linear).parameters
    assert set(constructor) >= {"in_features", "out_features", "bias", "params_dtype", "device"}, list(constructor)
    assert list(constructor)[2] != "bias", "bias became the third parameter"
    equal(constructor["device"].default, "cuda")
    equal(list(inspect.signature(te.Linear.forward).parameters)[1:3], ["inp", "is_first_microbatch"])
    equal(inspect.signature(te.checkpoint).parameters["args"].kind, inspect.Parameter.VAR_POSITIONAL)


# ------------------------------------------------------------------ computing


def check_a_linear_computes_in_fp8_forward_and_backward() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    for recipe in (Float8CurrentScaling(), delayed()):
        module, ran = layer(64, 128), []
        module.register_forward_hook(lambda module, inputs, output, ran=ran: ran.append(module.fp8))
        x, grad = torch.randn(64, 64, requires_grad=True), torch.randn(64, 128)
        with te.autocast(recipe=recipe):
            output = module(x)
        assert any(saved is not None and saved.dtype is torch.uint8 for saved in output.grad_fn.saved_tensors)
        output.backward(grad)
        equal(ran, [True])
        exact = nn.functional.linear(x, module.weight, module.bias)
        exact_grads = torch.autograd.grad(exact, (x, module.weight, module.bias), grad)
        bf16 = nn.functional.linear(x.bfloat16(), module.weight.bfloat16(), module.bias.bfloat16())
        errors = [
            distance(output, exact),
            distance(x.grad, exact_grads[0]),
            distance(module.weight.grad, exact_grads[1]),
        ]
        assert all(4 * distance(bf16, exact) < error < 0.1 for error in errors), errors
        assert torch.allclose(module.bias.grad, exact_grads[2], atol=1e-5)


def check_outside_an_autocast_a_linear_computes_as_torch_does() -> None:
    module, x = layer(), batch(1.0)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    assert not module.fp8


def check_a_nested_autocast_demotes_one_module() -> None:
    import transformer_engine.pytorch as te

    first, second = layer(), layer()
    with te.autocast(recipe=delayed()):
        hidden = first(batch(1.0))
        with te.autocast(enabled=False):
            output = second(hidden)
            assert torch.equal(output, nn.functional.linear(hidden, second.weight, second.bias))
    equal((first.fp8, second.fp8), (True, False))


def check_under_the_autocast_of_torch_the_output_is_bf16_and_gradients_are_fp32() -> None:
    import transformer_engine.pytorch as te

    module = layer()
    with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=delayed()):
        output = module(batch(1.0))
    equal(output.dtype, torch.bfloat16)
    output.sum().backward()
    equal(module.weight.grad.dtype, torch.float32)


def check_a_layer_norm_computes_as_torch_does() -> None:
    import transformer_engine.pytorch as te

    module, stock = te.LayerNorm(32, device="cpu"), nn.LayerNorm(32)
    equal(list(dict(module.named_parameters())), ["weight", "bias"])
    x, grad = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
    found = torch.autograd.grad(module(x), [x, *module.parameters()], grad)
    expected = torch.autograd.grad(stock(x), [x, *stock.parameters()], grad)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True))


def check_what_does_not_fit_is_refused() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling

    def run(module: Any, tokens: int, features: int, recipe: Any = None) -> Tensor:
        with te.autocast(recipe=recipe or delayed()):
            output: Tensor = module(torch.randn(tokens, features, requires_grad=True))
        return output

    with raises(ValueError, "divisible by 8"):
        run(layer(), 15, 32)
    with raises(ValueError, "divisible by 16"):
        run(layer(24, 32), 16, 24)
    with raises(ValueError, "divisible by 8"):
        run(layer(32, 12), 16, 32)
    # The forward is content with multiples of 8 where the backward, which contracts these dimensions, is not.
    for module, tokens in ((layer(), 8), (layer(32, 24), 16)):
        output = run(module, tokens, 32)
        with raises(RuntimeError, "multiple of 16"):
            output.sum().backward()
    with raises(RuntimeError, "compute capability 10.0"):
        run(layer(), 16, 32, MXFP8BlockScaling())
    with raises(RuntimeError, "CUDA >= 12.9"):
        run(layer(), 16, 32, Float8BlockScaling())
    # After an error FP8 is off again.
    run(module := layer(), 16, 32)
    module(torch.randn(15, 32))
    assert not module.fp8


# ------------------------------------------------------------------ taking the place of nn.Linear


def check_a_meta_linear_adopts_the_parameters_of_another() -> None:
    import transformer_engine.pytorch as te

    for bias in (True, False):
        stock = nn.Linear(64, 32, bias=bias)
        module = layer(64, 32, bias=bias, device="meta")
        for name, parameter in stock.named_parameters():
            module._parameters[name] = parameter
        equal([id(one) for one in module.parameters()], [id(one) for one in stock.parameters()])
        x = torch.randn(16, 64)
        with te.autocast(recipe=delayed()):
            output = module(x)
        output.sum().backward()
        assert distance(output, stock(x)) < 0.1
        assert all(one.grad is not None and one.grad.isfinite().all() for one in stock.parameters())
        # Where there is no bias, an empty tensor that is no Parameter has its name.
        equal(isinstance(module.bias, nn.Parameter), bias)
        equal(list(module.state_dict()), [*stock.state_dict(), "_extra_state"])


def check_a_used_linear_can_be_copied_but_not_pickled() -> None:
    module = layer()
    train(module, 1.0)
    copied = copy.deepcopy(module)
    equal(forward_history(copied), forward_history(module))
    with raises((AttributeError, pickle.PicklingError), "init_method"):  # type: ignore[arg-type]
        pickle.dumps(module)


# ------------------------------------------------------------------ when histories advance


def check_histories_advance_at_the_end_of_the_autocast_and_of_the_backward() -> None:
    import transformer_engine.pytorch as te

    module = layer()
    equal(delayed().amax_compute_algo, "max")
    for step in (1.0, 2.0):
        with te.autocast(recipe=delayed()):
            output = module(batch(step))
            equal(forward_history(module)[0], step)  # taken, and no scale comes of it yet
        equal(forward_history(module)[-1], step)
        equal(module.fp8_meta["scaling_fwd"].scale[0].item(), 448 / step)
        equal(advances(backward_history(module)), int(step > 1))
        output.backward(torch.full_like(output, step))
        equal(backward_history(module)[-1], step)
        equal(module.fp8_meta["scaling_bwd"].scale[0].item(), 57344 / step)
    equal(forward_history(module), [0, 0, 1, 2])
    equal(backward_history(module), [0, 0, 1, 2])


def check_the_first_scale_is_one_so_tiny_gradients_vanish_in_the_first_step() -> None:
    module = layer()
    train(module, 1.0, grad_amax=1e-6)
    equal(module.weight.grad.count_nonzero().item(), 0)
    train(module, 1.0, grad_amax=1e-6)
    assert module.weight.grad.count_nonzero() > 0


def check_every_micro_batch_advances_the_histories() -> None:
    module = layer()
    for _ in range(3):
        train(module, 1.0)
    equal(forward_history(module), [0, 1, 1, 1])
    equal(backward_history(module), [0, 1, 1, 1])


def check_a_module_that_did_not_run_advances_with_the_others_by_zero() -> None:
    idle, busy = layer(), layer()
    train(idle, 4.0)
    train(busy, 1.0)
    equal(forward_history(idle), [0, 0, 4, 0])
    equal(backward_history(idle), [0, 0, 1, 0])
    equal(idle.fp8_meta["scaling_fwd"].scale[0].item(), 448 / 4)
    for _ in range(LENGTH):
        train(busy, 1.0)
    equal(forward_history(idle), [0, 0, 0, 0])
    equal(idle.fp8_meta["scaling_fwd"].scale[0].item(), 448 / 4)  # with no history the scale stays as it is


def check_only_the_outermost_autocast_advances_histories() -> None:
    import transformer_engine.pytorch as te

    first, second = layer(), layer()
    with te.autocast(recipe=delayed()):
        hidden = first(batch(1.0))
        with te.autocast(recipe=delayed()):
            second(hidden)
        with te.autocast(enabled=False):
            second(hidden)
        equal((advances(forward_history(first)), advances(forward_history(second))), (0, 0))
    equal((advances(forward_history(first)), advances(forward_history(second))), (1, 1))


def check_autocasts_one_after_the_other_advance_all_histories_each() -> None:
    import transformer_engine.pytorch as te

    first, second = layer(), layer()
    with te.autocast(recipe=delayed()):
        hidden = first(batch(1.0))
    with te.autocast(recipe=delayed()):
        output = second(hidden)
    output.sum().backward()
    equal((advances(forward_history(first)), advances(forward_history(second))), (2, 1))
    equal((advances(backward_history(first)), advances(backward_history(second))), (1, 2))


def check_inside_a_disabled_autocast_forward_histories_never_advance() -> None:
    import transformer_engine.pytorch as te

    module = layer()
    for step in (2.0, 1.0):
        with te.autocast(enabled=False), te.autocast(recipe=delayed()):
            output = module(batch(step))
        output.backward(torch.ones_like(output))
    equal(forward_history(module), [2, 0, 0, 0])  # the emulated kernel keeps the larger one, as the real one does
    equal(backward_history(module), [0, 0, 1, 1])


def check_modules_each_in_a_nested_autocast_advance_backward_histories_each() -> None:
    """The end of a nested autocast restores "the next module is the first one", and the first ones update."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for correct in (False, True):
        FP8GlobalStateManager.reset()
        modules = [layer() for _ in range(3)]
        hidden = batch(1.0)
        with te.autocast(recipe=delayed()):
            for module in modules:
                with te.autocast(recipe=delayed()):
                    hidden = module(hidden)
                if correct:
                    FP8GlobalStateManager.quantization_state.is_first_fp8_module = False
        hidden.sum().backward()
        equal([advances(forward_history(module)) for module in modules], [1, 1, 1])
        equal([advances(backward_history(module)) for module in modules], [1, 1, 1] if correct else [1, 2, 3])


def check_two_recipes_nested_advance_together_each_by_its_own_rule() -> None:
    import transformer_engine.pytorch as te

    first, second = layer(), layer()
    with te.autocast(recipe=delayed()):
        hidden = first(batch(1.0))
        with te.autocast(recipe=delayed(margin=2)):
            output = second(hidden)
    output.sum().backward()
    for module, margin in ((first, 0), (second, 2)):
        equal((advances(forward_history(module)), advances(backward_history(module))), (1, 1))
        amax, scale = forward_history(module)[-1], module.fp8_meta["scaling_fwd"].scale[0].item()
        assert abs(scale * amax * 2**margin / 448 - 1) < 1e-6, (scale, amax)


def check_recipes_that_differ_in_the_algorithm_alone_are_taken_for_one() -> None:
    """Its text is a recipe's identity, and the algorithm is not in it: the autocast entered last decides for all."""
    import transformer_engine.pytorch as te

    most_recent = delayed(amax_compute_algo="most_recent")
    equal(str(most_recent), str(delayed()))
    first, second = layer(), layer()
    for amax in (4.0, 1.0):
        with te.autocast(recipe=most_recent):
            hidden = first(batch(amax))
            with te.autocast(recipe=delayed()):
                second(hidden)
    equal(forward_history(first), [0, 0, 4, 1])
    equal(first.fp8_meta["scaling_fwd"].scale[0].item(), 448 / 4)


def check_without_gradients_an_amax_is_taken_but_nothing_advances() -> None:
    import transformer_engine.pytorch as te

    module = layer()
    train(module, 1.0)
    module.eval()  # makes no difference
    with torch.no_grad(), te.autocast(recipe=delayed()):
        module(batch(100.0))
    equal(forward_history(module), [100, 0, 0, 1])
    module.train()
    train(module, 2.0)
    equal(forward_history(module), [0, 0, 1, 100])  # the evaluation's amax has taken the place of the training's
    with te.autocast(recipe=delayed()), torch.no_grad():
        module(batch(5.0))
    equal(forward_history(module), [0, 1, 100, 5])  # what counts is whether gradients are on where the autocast ends


def check_a_weight_quantized_once_a_window_takes_zeros_afterwards() -> None:
    import transformer_engine.pytorch as te

    module, x = layer(), batch(1.0)
    outputs = []
    for is_first in (True, False, True):
        with te.autocast(recipe=delayed()):
            outputs.append(module(x, is_first_microbatch=is_first))
        with torch.no_grad():
            module.weight.mul_(0.5)
    weight = module.fp8_meta["scaling_fwd"].amax_history[:, 1]
    equal((weight > 0).tolist(), [False, True, False, True])
    assert distance(outputs[1] - module.bias, outputs[0] - module.bias) < 0.1, "the weight was quantized again"
    assert distance(outputs[2] - module.bias, (outputs[0] - module.bias) / 4) < 0.1


def check_an_infinite_amax_keeps_the_scale_and_stays_in_the_history() -> None:
    import transformer_engine.pytorch as te

    module = layer()
    for amax in (1.0, float("inf"), 8.0):
        with te.autocast(recipe=delayed()):
            module(batch(amax))
    equal(forward_history(module), [0, 1, float("inf"), 8])
    equal(module.fp8_meta["scaling_fwd"].scale[0].item(), 448.0)


# ------------------------------------------------------------------ checkpointing of activations


def check_te_checkpoint_recomputes_in_fp8_and_advances_forward_histories_twice() -> None:
    import transformer_engine.pytorch as te

    for arguments in ({"use_reentrant": True}, {"use_reentrant": False}):
        torch.manual_seed(0)
        plain = layer()
        module, ran = copy.deepcopy(plain), []
        module.register_forward_hook(lambda module, inputs, output, ran=ran: ran.append(module.fp8))
        x = batch(1.0)
        for step, one in enumerate((plain, module)):
            with te.autocast(recipe=delayed()):
                output = te.checkpoint(one, x, **arguments) if step else one(x)
            output.backward(torch.ones_like(output))
        equal(ran, [True, True])
        assert torch.equal(module.weight.grad, plain.weight.grad)
        equal((advances(forward_history(module)), advances(backward_history(module))), (2, 1))


def check_the_checkpoint_of_torch_recomputes_in_high_precision() -> None:
    import transformer_engine.pytorch as te
    from torch.utils.checkpoint import CheckpointError, checkpoint

    module, ran = layer(), []
    module.register_forward_hook(lambda module, inputs, output: ran.append(module.fp8))
    with te.autocast(recipe=delayed()):
        output = checkpoint(module, batch(1.0), use_reentrant=True)
    output.backward(torch.ones_like(output))
    equal(ran, [True, False])
    equal(any(backward_history(module)), False)
    with te.autocast(recipe=delayed()):
        output = checkpoint(module, batch(1.0), use_reentrant=False)
    with raises(CheckpointError, "different number of tensors"):
        output.backward(torch.ones_like(output))


def check_the_checkpoint_of_torch_around_an_autocast_recomputes_in_fp8_with_other_scales() -> None:
    """The forward pass that is repeated finds the scale that the first one's end has set, and advances once more."""
    import transformer_engine.pytorch as te
    from torch.utils.checkpoint import checkpoint

    def note(module: Any, inputs: Any) -> None:  # before the forward: the repeated one stops before its end
        scales.append(module.fp8_meta["scaling_fwd"].scale[0].item() if "scaling_fwd" in module.fp8_meta else 1.0)

    module, scales = layer(), []
    module.register_forward_pre_hook(note)

    def forward(x: Tensor) -> Tensor:
        with te.autocast(recipe=delayed()):
            output: Tensor = module(x)
        return output

    checkpoint(forward, batch(2.0), use_reentrant=False).sum().backward()
    equal(scales, [1.0, 448 / 2])
    equal(module.fp8, True)


# ------------------------------------------------------------------ changes in mid-training


def check_after_another_kind_of_recipe_delayed_scaling_never_advances_again() -> None:
    from transformer_engine.common.recipe import Float8CurrentScaling

    module = layer()
    train(module, 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(module, 1.0, recipe=Float8CurrentScaling())
        train(module, 2.0)
        train(module, 2.0)
    equal(sum("Recipe type changed" in str(one.message) for one in caught), 2)
    equal(forward_history(module), [2, 0, 0, 0])
    equal(module.fp8_meta["scaling_fwd"].scale[0].item(), 1.0)
    module.fp8_meta.pop("buffer_index_and_autocast_key")  # as if it had never been registered
    train(module, 2.0)
    equal(forward_history(module), [0, 0, 0, 2])


def check_a_changed_margin_changes_nothing() -> None:
    module = layer()
    train(module, 1.0)
    train(module, 1.0, recipe=delayed(margin=2))
    equal(module.fp8_meta["scaling_fwd"].scale[0].item(), 448.0)


def check_a_changed_length_mixes_up_the_histories() -> None:
    """Both global buffers get the backward's history: adjust_amax_history_length sets both, whichever it is called for."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    module = layer()
    train(module, 1.0)
    with raises(RuntimeError, "size of tensor"), te.autocast(recipe=delayed(amax_history_len=2)):
        module(batch(1.0))
    for histories in FP8GlobalStateManager.quantization_state.global_amax_history_buffer.values():
        assert histories[0] is module.fp8_meta["scaling_bwd"].amax_history


def check_histories_of_modules_that_are_gone_stay_until_the_reset() -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    def registered() -> list[int]:
        return [len(one) for one in FP8GlobalStateManager.quantization_state.global_amax_buffer.values()]

    module = layer()
    train(layer(), 1.0)
    train(module, 1.0)
    equal(registered(), [2, 2])
    FP8GlobalStateManager.reset()
    train(module, 2.0)  # believes to be registered still
    equal(registered(), [])
    equal(forward_history(module), [2, 0, 0, 1])


# ------------------------------------------------------------------ extra state


def check_only_delayed_scaling_has_an_extra_state_and_it_is_a_pickle() -> None:
    from transformer_engine.common.recipe import Float8CurrentScaling

    module = layer()
    equal(module.get_extra_state().numel(), 0)
    train(module, 1.0, recipe=Float8CurrentScaling())
    equal(module.get_extra_state().numel(), 0)
    module = layer()
    train(module, 3.0)
    state = module.get_extra_state()
    equal(state.dtype, torch.uint8)
    content = pickle.loads(state.numpy().tobytes())
    equal(tuple(content["amax_history_fwd"].shape), (LENGTH, 3))
    equal(tuple(content["amax_history_bwd"].shape), (LENGTH, 2))
    equal((tuple(content["scale_fwd"].shape), tuple(content["scale_bwd"].shape)), ((3,), (2,)))


def check_an_extra_state_is_refused_unless_the_environment_allows_pickles() -> None:
    import transformer_engine.pytorch as te

    module, other = layer(), layer()
    train(module, 3.0)
    os.environ.pop("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", None)
    with raises(RuntimeError, "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1"):
        other.load_state_dict(module.state_dict())
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    try:
        other.load_state_dict(module.state_dict())
    finally:
        del os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"]
    equal(forward_history(other), [0, 0, 0, 3])
    x = batch(1.0)
    with te.autocast(recipe=delayed()):
        found = other(x), module(x)
    assert torch.equal(*found)
    equal(forward_history(other), [0, 0, 3, 1])


def check_strict_loading_fails_both_ways_against_a_linear_of_torch() -> None:
    with raises(RuntimeError, 'Missing key(s) in state_dict: "_extra_state"'):
        layer().load_state_dict(nn.Linear(32, 32).state_dict())
    with raises(RuntimeError, 'Unexpected key(s) in state_dict: "_extra_state"'):
        nn.Linear(32, 32).load_state_dict(layer().state_dict())


def check_after_a_forward_in_high_precision_the_extra_state_is_empty() -> None:
    import transformer_engine.pytorch as te

    module = layer()
    train(module, 3.0)
    with te.autocast(enabled=False):
        module(batch(1.0))
    equal(module.get_extra_state().numel(), 0)
    equal(forward_history(module), [0, 0, 0, 3])  # it is still there
    train(module, 2.0)
    equal(forward_history(module), [0, 0, 3, 2])


def check_histories_can_be_given_to_a_module_before_its_first_forward() -> None:
    import transformer_engine.pytorch as te

    module, other = layer(), layer()
    other.load_state_dict(module.state_dict())
    train(module, 3.0)
    saved = module.get_fp8_meta_tensors()  # plain tensors: scale and history, for each of the two
    other.fp8_meta["num_gemms"] = 1
    other.init_fp8_meta_tensors(delayed())
    other.reset_fp8_meta_tensors(saved)
    x = batch(1.0)
    with te.autocast(recipe=delayed()):
        found = other(x), module(x)
    assert torch.equal(*found)
    equal(forward_history(other), [0, 0, 3, 1])


# ------------------------------------------------------------------ the stand-in


def check_the_stand_in_multiplies_no_e5m2_with_e5m2() -> None:
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E5M2, torch.device("cpu"))
    with raises(RuntimeError, "E5M2"):
        general_gemm(quantizer(torch.randn(32, 32)), quantizer(torch.randn(16, 32)), out_dtype=torch.bfloat16)


def check_what_the_stand_in_does_not_emulate_raises() -> None:
    import transformer_engine.pytorch as te

    with raises(NotImplementedError, "transformer_engine_torch.rmsnorm_fwd is not emulated"):
        te.RMSNorm(32, device="cpu")(batch(1.0))


def check_the_stand_in_notices_another_source() -> None:
    from transformer_engine.pytorch import quantization

    path = "transformer_engine.pytorch.quantization:FP8GlobalStateManager.reduce_and_update_fp8_tensors"
    verify_source(path)
    with (
        mock.patch.object(quantization.FP8GlobalStateManager, "reduce_and_update_fp8_tensors", lambda: None),
        raises(StandInOutdated, "has another source"),
    ):
        verify_source(path)


# ------------------------------------------------------------------ the tests

CHECKS = [
    check for name, check in list(globals().items()) if name.startswith("check_") and check.__module__ == __name__
]


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Tracebacks of the checks that failed."""
    return check_in_transformer_engine(*CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_over_emulated_kernels(check: Callable[[], None], failures: dict[str, str]) -> None:
    if check.__name__ in failures:
        pytest.fail(failures[check.__name__], pytrace=False)


def histories_of_two_ranks(reduce_amax: bool) -> tuple[list[float], list[float], float]:
    import torch.distributed as dist

    torch.manual_seed(0)
    module = layer()
    train(module, 1.0 + dist.get_rank(), 3.0 + dist.get_rank(), delayed(reduce_amax=reduce_amax))
    return forward_history(module), backward_history(module), module.fp8_meta["scaling_fwd"].scale[0].item()


@pytest.mark.parametrize("reduce_amax", [True, False])
def test_ranks_share_their_scales_unless_told_otherwise(reduce_amax: bool) -> None:
    low, high = run_in_transformer_engine(histories_of_two_ranks, reduce_amax, ranks=2)
    assert high == ([0, 0, 0, 2], [0, 0, 0, 4], 448 / 2)
    assert low == (high if reduce_amax else ([0, 0, 0, 1], [0, 0, 0, 3], 448.0))


def test_without_the_binary_the_import_raises_a_runtime_error() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    code = "import transformer_engine.pytorch"
    plain = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "PYTHONPATH": str(FOLDER)}, capture_output=True, text=True
    )
    assert plain.returncode
    assert "RuntimeError: Found empty `transformer-engine` meta package installed." in plain.stderr, plain.stderr
