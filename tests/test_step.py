"""The step sequence by itself: no Trainer, plain backward, real optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import LossScale
from lightning_amp_plus.errors import ScaleCollapseError, SkipLimitError
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.grad_norm import GradNorm
from lightning_amp_plus.scaling.master_weights import MasterWeights
from lightning_amp_plus.scaling.scaler import LossScaler
from lightning_amp_plus.step import StepSequence
from lightning_amp_plus.step_report import StepReport
from lightning_amp_plus.window import Window


def sequence_for(
    *optimizers: torch.optim.Optimizer,
    model: nn.Module | None = None,
    scale: LossScale | None = None,
    manual: bool = True,
    limit: int = 100,
    masters: MasterWeights | None = None,
    warnings: list[str] | None = None,
    settle_every: int = 50,
    check_finite: bool = True,
) -> StepSequence:
    scaler = LossScaler(scale, "cpu") if scale is not None else None
    sequence = StepSequence(scaler, check_finite, limit, (warnings if warnings is not None else []).append)
    sequence.begin_fit(
        optimizers,
        (model or nn.Module()).named_parameters,
        manual=manual,
        consensus=Consensus(),
        grad_norm=GradNorm(),
        masters=masters,
        settle_every=settle_every,
        device=torch.device("cpu"),
    )
    return sequence


def close(
    sequence: StepSequence,
    optimizer: torch.optim.Optimizer,
    *,
    window: Window | None = None,
    hooks: Callable[[], None] = lambda: None,
    host_verdict: bool = False,
    closure: Callable[[], Any] = lambda: None,
) -> StepReport:
    sequence.run(
        optimizer,
        lambda: window or Window(sequence.journal.windows),
        closure=closure,
        hooks=hooks,
        step=optimizer.step,
        host_verdict=host_verdict,
    )
    report = sequence.journal.last_report
    assert report is not None
    return report


def backward(sequence: StepSequence, loss: Tensor) -> None:
    scaled = sequence.scale_loss(loss)
    with sequence.backward():
        scaled.backward()
    sequence.record_loss(scaled.detach())


def sgd(parameters: Any, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1.0, **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("fused", [False, True])
def test_scale_follows_the_rule_of_the_facts_page(fused: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    sequence = sequence_for(optimizer, scale=LossScale(init=8.0, growth_interval=2))
    reports = []
    for step in range(5):
        optimizer.zero_grad()
        backward(sequence, model(torch.ones(1, 2)).sum() * (math.inf if step == 2 else 1.0))
        reports.append(close(sequence, optimizer))
    assert sequence.journal.settle().scales == [8.0, 16.0, 8.0, 8.0, 16.0]
    assert [r.outcome for r in reports] == ["applied", "applied", "skipped_overflow", "applied", "applied"]
    assert [r.scale for r in reports] == [8.0, 8.0, 16.0, 8.0, 8.0]
    assert [r.window for r in reports] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("fused", [False, True])
def test_skipped_step_leaves_weights_and_state_as_if_it_had_not_been(optimizer_class: Any, fused: bool) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}

    def train(overflows: bool) -> tuple[list[Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = optimizer_class(model.parameters(), lr=0.1, fused=fused, **options)
        sequence = sequence_for(optimizer, scale=LossScale(init=4.0))
        if overflows:  # the first step of all: fused SGD would keep an uninitialized momentum buffer
            backward(sequence, model(torch.ones(1, 3)).sum() * math.nan)
            assert close(sequence, optimizer).outcome == "skipped_overflow"
        for factor in (1.0, 2.0, 3.0):
            optimizer.zero_grad()
            backward(sequence, model(torch.ones(1, 3)).sum() * factor)
            close(sequence, optimizer)
        return weights(model), copy.deepcopy(optimizer.state_dict()["state"])

    clean, clean_state = train(overflows=False)
    skipped, skipped_state = train(overflows=True)
    for a, b in zip(clean, skipped, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for key, value in clean_state.items():
        for name, tensor in value.items():
            torch.testing.assert_close(skipped_state[key][name], tensor, rtol=0, atol=0)


def test_gradients_held_by_another_optimizer_stay_exact_through_growth_and_backoff() -> None:
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    first, second = sgd(a.parameters()), sgd(b.parameters())
    sequence = sequence_for(first, second, scale=LossScale(init=8.0, growth_interval=1))
    seen: list[float] = []
    for step in range(4):
        first.zero_grad()
        second.zero_grad()
        backward(sequence, a(torch.ones(1, 1)).sum() * (math.inf if step == 2 else 1.0))
        backward(sequence, 3.0 * b(torch.ones(1, 1)).sum())
        close(sequence, first)
        close(sequence, second, hooks=lambda: seen.append(b.weight.grad.item()))  # type: ignore[union-attr]
    assert seen == [3.0] * 4
    # Growth waits for the second optimizer, backoff does not.
    assert sequence.journal.settle().scales == [8.0, 16.0, 16.0, 32.0, 16.0, 32.0, 32.0, 64.0]


def test_growth_is_not_put_off_for_ever_by_gradients_nobody_consumes() -> None:
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    first, second = sgd(a.parameters()), sgd(b.parameters())
    sequence = sequence_for(first, second, scale=LossScale(init=8.0, growth_interval=2))
    backward(sequence, 3.0 * b(torch.ones(1, 1)).sum())
    for _ in range(4):
        first.zero_grad()
        backward(sequence, a(torch.ones(1, 1)).sum())
        close(sequence, first)
    assert sequence.journal.settle().scales == [8.0, 8.0, 8.0, 16.0]
    seen: list[float] = []
    close(sequence, second, hooks=lambda: seen.append(b.weight.grad.item()))  # type: ignore[union-attr]
    assert seen == [3.0]


def test_parameters_shared_by_two_optimizers_are_unscaled_once() -> None:
    shared = nn.Linear(1, 1, bias=False)
    first, second = sgd(shared.parameters()), sgd(shared.parameters())
    sequence = sequence_for(first, second, scale=LossScale(init=8.0))
    backward(sequence, 5.0 * shared(torch.ones(1, 1)).sum())
    seen: list[float] = []
    for optimizer in (first, second):
        close(sequence, optimizer, hooks=lambda: seen.append(shared.weight.grad.item()))  # type: ignore[union-attr]
    assert seen == [5.0, 5.0]


def test_second_step_on_the_same_backward_does_not_unscale_again() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = sgd(model.parameters())
    sequence = sequence_for(optimizer, scale=LossScale(init=8.0))
    backward(sequence, 2.0 * model(torch.ones(1, 1)).sum())
    close(sequence, optimizer)
    close(sequence, optimizer)
    assert model.weight.item() == -4.0


def test_backward_past_the_plugin_is_refused_with_a_scale_and_fine_without() -> None:
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters())
    before = weights(model)
    sequence = sequence_for(optimizer, model=model, scale=LossScale(init=8.0))
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'weight'.*manual_backward"):
        close(sequence, optimizer)
    assert all(torch.equal(x, y) for x, y in zip(before, weights(model), strict=True))
    assert close(sequence_for(optimizer), optimizer).outcome == "skipped_no_backward"  # begin_fit dropped the gradient
    model(torch.ones(1, 1)).sum().backward()
    sequence = sequence_for(optimizer)
    model(torch.ones(1, 1)).sum().backward()
    assert close(sequence, optimizer).outcome == "applied"


@pytest.mark.parametrize("raw_first", [False, True])
def test_backward_past_the_plugin_is_noticed_beside_one_through_it(raw_first: bool) -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second = sgd(a.parameters()), sgd(b.parameters())
    sequence = sequence_for(first, second, scale=LossScale(init=8.0))
    before = weights(b)
    for raw in (raw_first, not raw_first):
        if raw:
            b(torch.ones(1, 1)).sum().backward()
        else:
            backward(sequence, a(torch.ones(1, 1)).sum() + b(torch.ones(1, 1)).sum())
    assert close(sequence, first).outcome == "applied"
    with pytest.raises(RuntimeError, match="manual_backward"):
        close(sequence, second)
    assert all(torch.equal(x, y) for x, y in zip(before, weights(b), strict=True))
    second.zero_grad()
    backward(sequence, b(torch.ones(1, 1)).sum())
    assert close(sequence, second).outcome == "applied"


def test_optimizer_without_gradients_is_reported_and_leaves_the_scale_alone() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second = sgd(a.parameters()), sgd(b.parameters())
    sequence = sequence_for(first, second, scale=LossScale(init=8.0, growth_interval=1))
    backward(sequence, a(torch.ones(1, 1)).sum())
    report = close(sequence, second)
    assert (report.outcome, report.optimizer, report.scale, report.next_scale) == ("skipped_no_grads", 1, 8.0, 8.0)
    assert close(sequence, first).next_scale == 16.0
    assert close(sequence, first).outcome == "applied"  # same gradient once more
    first.zero_grad()
    assert close(sequence, first).outcome == "skipped_no_backward"
    assert sequence.journal.settle().skip_rate == 0.0


def test_window_unscaled_early_goes_on_without_mixing_scales() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model.parameters())
    sequence = sequence_for(optimizer, scale=LossScale(init=1024.0))
    assert sequence.scaler is not None
    backward(sequence, model(torch.ones(1, 1)).sum())
    sequence.scaler.unscale_(optimizer)
    assert model.weight.grad is not None and model.weight.grad.item() == 1.0
    backward(sequence, 2.0 * model(torch.ones(1, 1)).sum())
    seen: list[float] = []
    close(sequence, optimizer, hooks=lambda: seen.append(model.weight.grad.item()))  # type: ignore[union-attr]
    assert seen == [3.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_in_mid_window_equals_fp32(algorithm: Any, fused: bool) -> None:
    def train(scale: LossScale | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        sequence = sequence_for(optimizer, scale=scale)
        for _ in range(3):
            optimizer.zero_grad()
            for x in (torch.ones(1, 4), torch.full((1, 4), 2.0)):
                backward(sequence, model(x).pow(2).sum())
                sequence.clip(optimizer, 0.5, algorithm)
            close(sequence, optimizer, hooks=lambda: sequence.clip(optimizer, 0.25, algorithm))
        return weights(model)

    for a, b in zip(train(None), train(LossScale(init=1024.0)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_value_clipping_in_mid_window_does_not_hide_an_overflow() -> None:
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters())
    sequence = sequence_for(optimizer, scale=LossScale(init=8.0))
    backward(sequence, model(torch.ones(1, 1)).sum() * math.inf)
    sequence.clip(optimizer, 0.5, "value")
    assert close(sequence, optimizer).outcome == "skipped_overflow"


@pytest.mark.parametrize("fused", [False, True])
def test_finite_gradients_whose_square_overflows_are_clipped_not_skipped(fused: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = sgd(model.parameters(), fused=fused)
    sequence = sequence_for(optimizer)
    backward(sequence, (model.weight * torch.tensor([[3e25, 4e25]])).sum())
    report = close(sequence, optimizer, hooks=lambda: sequence.clip(optimizer, 1.0, "norm"))
    assert report.outcome == "applied"
    assert report.grad_norm == pytest.approx(5e25)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.6, -0.8]]))


def test_norm_is_measured_on_reading_while_the_gradients_last() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model.parameters())
    sequence = sequence_for(optimizer)
    backward(sequence, 3.0 * model(torch.ones(1, 1)).sum())
    early = close(sequence, optimizer)
    assert early.grad_norm == pytest.approx(3.0)
    optimizer.zero_grad()
    backward(sequence, 4.0 * model(torch.ones(1, 1)).sum())
    late = close(sequence, optimizer)
    optimizer.zero_grad()
    backward(sequence, model(torch.ones(1, 1)).sum())
    assert late.grad_norm is None
    assert early.grad_norm == pytest.approx(3.0)


def test_subscriber_gets_each_report_once_and_the_norm_it_asked_for() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model.parameters())
    sequence = sequence_for(optimizer, scale=LossScale(init=8.0))
    got: list[StepReport] = []
    unsubscribe = sequence.journal.subscribe(got.append, grad_norm=lambda window: window.index == 1)
    for factor in (1.0, 2.0, 3.0):
        optimizer.zero_grad()
        backward(sequence, factor * model(torch.ones(1, 1)).sum())
        close(sequence, optimizer)
    optimizer.zero_grad()
    assert [r.window for r in got] == [0, 1, 2]
    assert [r.grad_norm for r in got] == [None, 2.0, None]
    unsubscribe()
    backward(sequence, model(torch.ones(1, 1)).sum())
    close(sequence, optimizer)
    assert len(got) == 3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_origin_of_an_overflow_is_told(where: str, fused: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model.parameters(), fused=fused)
    sequence = sequence_for(optimizer, scale=LossScale(init=8.0))
    loss = model(torch.ones(1, 1)).sum()
    if where == "forward":
        loss = loss * math.inf
    else:
        loss.register_hook(lambda g: g * math.inf)
    backward(sequence, loss)
    report = close(sequence, optimizer)
    assert report.overflow_origin == where
    assert report.overflow_ranks == (0,)
    assert where in str(report)


@pytest.mark.parametrize("fused", [False, True])
def test_forward_overflow_can_be_exempted_from_lowering_the_scale(fused: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model.parameters(), fused=fused)
    sequence = sequence_for(optimizer, scale=LossScale(init=8.0, backoff_on_forward_overflow=False))
    backward(sequence, model(torch.ones(1, 1)).sum() * math.inf)
    assert close(sequence, optimizer).next_scale == 8.0
    optimizer.zero_grad()
    loss = model(torch.ones(1, 1)).sum()
    loss.register_hook(lambda g: g * math.inf)
    backward(sequence, loss)
    assert close(sequence, optimizer).next_scale == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_finite_gradient_that_unscaling_makes_infinite_is_an_overflow(fused: bool) -> None:
    model = nn.Linear(1, 1, bias=False).half()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    before = weights(model)
    sequence = sequence_for(optimizer, scale=LossScale(init=0.25))
    backward(sequence, (model.weight * 50000.0 * 4).sum() * 0.5)
    assert model.weight.grad is not None and model.weight.grad.isfinite().all()
    assert close(sequence, optimizer).outcome == "skipped_overflow"
    assert torch.equal(before[0], model.weight)


def test_scale_set_by_hand_in_mid_window_carries_the_gradients_along() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model.parameters())
    sequence = sequence_for(optimizer, scale=LossScale(init=1024.0))
    assert sequence.scaler is not None
    backward(sequence, model(torch.ones(1, 1)).sum())
    sequence.scaler.update(16.0)
    backward(sequence, 2.0 * model(torch.ones(1, 1)).sum())
    seen: list[float] = []
    close(sequence, optimizer, hooks=lambda: seen.append(model.weight.grad.item()))  # type: ignore[union-attr]
    assert seen == [3.0]


def test_dropped_window_zeroes_its_gradients() -> None:
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters())
    sequence = sequence_for(optimizer)
    backward(sequence, model(torch.ones(1, 1)).sum() * math.inf)
    close(sequence, optimizer)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_run_of_skips_stops_the_run_and_names_the_layer(fused: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    warnings: list[str] = []
    sequence = sequence_for(
        optimizer, model=model, scale=LossScale(init=4.0, min=0.5), limit=6, warnings=warnings, settle_every=3
    )
    with pytest.raises(ScaleCollapseError) as error:
        for _ in range(400):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).sum()
            loss.register_hook(lambda g: g * math.inf)
            backward(sequence, loss)
            close(sequence, optimizer)
    text = str(error.value)
    for words in ("6 windows in a row", "backward", "'1.bias'", "2*1 1*1 0.5*4", "bf16-mixed", "max_consecutive_skips"):
        assert words in text
    assert sequence.scaler is not None and sequence.scaler.get_scale() == 0.5
    assert any("was skipped" in w and "loss scale went from 4 to 2" in w for w in warnings)
    assert sum("below 1" in w for w in warnings) == 1
    assert len(warnings) == 2


def test_run_of_skips_without_a_scale_speaks_of_none() -> None:
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters())
    warnings: list[str] = []
    sequence = sequence_for(optimizer, model=model, limit=3, warnings=warnings)
    with pytest.raises(SkipLimitError) as error:
        for _ in range(10):
            backward(sequence, model(torch.ones(1, 1)).sum() * math.nan)
            close(sequence, optimizer)
    assert not isinstance(error.value, ScaleCollapseError)
    assert "3 windows in a row" in str(error.value)
    assert not any("scale" in text for text in [str(error.value), *warnings])


def test_run_of_skips_under_a_static_scale_says_so() -> None:
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters())
    scaler = LossScaler(LossScale(init=512.0), "cpu", dynamic=False)
    sequence = StepSequence(scaler, True, 3, [].append)
    with pytest.raises(SkipLimitError, match=r"static loss scale of 512.*lower scale") as error:
        for _ in range(10):
            loss = model(torch.ones(1, 1)).sum()
            loss.register_hook(lambda g: g * math.inf)
            backward(sequence, loss)
            close(sequence, optimizer)
    assert not isinstance(error.value, ScaleCollapseError)


def test_items_weight_summed_losses() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model.parameters())
    sequence = sequence_for(optimizer, scale=LossScale(init=8.0))
    backward(sequence, 6.0 * model(torch.ones(1, 1)).sum() / 2)
    seen: list[float] = []
    window = Window(0, size=2, gradient_factor=2.0, num_items=torch.tensor(3))
    close(sequence, optimizer, window=window, hooks=lambda: seen.append(model.weight.grad.item()))  # type: ignore[union-attr]
    assert seen == [2.0]


def test_exception_in_the_closure_leaves_no_trace_once_the_window_is_discarded() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model.parameters())
    sequence = sequence_for(optimizer, scale=LossScale(init=8.0), manual=False)
    backward(sequence, model(torch.ones(1, 1)).sum())

    def fails() -> None:
        raise KeyError("data")

    with pytest.raises(KeyError):
        close(sequence, optimizer, closure=fails)
    sequence.ledger.discard()
    optimizer.zero_grad()
    assert close(sequence, optimizer).outcome == "skipped_no_backward"
    assert sequence.scaler is not None and sequence.scaler.get_scale() == 8.0


def test_master_weights_are_back_in_low_precision_after_an_exception_in_the_step() -> None:
    model = nn.Linear(2, 1).bfloat16()
    optimizer = sgd(model.parameters())
    masters = MasterWeights()
    masters.attach(model.parameters())
    sequence = sequence_for(optimizer, masters=masters)
    backward(sequence, model(torch.ones(1, 2, dtype=torch.bfloat16)).sum())

    def hooks() -> None:
        assert model.weight.dtype == torch.float32
        raise KeyError("hook")

    with pytest.raises(KeyError):
        close(sequence, optimizer, hooks=hooks)
    assert model.weight.dtype == torch.bfloat16


def test_sequence_state_goes_on_bit_for_bit() -> None:
    def train(interrupted: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        config = LossScale(init=8.0, growth_interval=3, hysteresis=2)
        sequence = sequence_for(optimizer, scale=config)
        for step in range(12):
            if interrupted and step == 5:
                state = copy.deepcopy(sequence.state_dict())
                sequence = sequence_for(optimizer, scale=config)
                sequence.load_state_dict(state)
            optimizer.zero_grad()
            backward(sequence, model(torch.ones(1, 2)).sum() * (math.inf if step in (1, 6, 7) else 1.0))
            close(sequence, optimizer)
        return list(sequence.journal.settle().scales), weights(model)

    whole, resumed = train(False), train(True)
    assert whole[0] == resumed[0]
    assert all(torch.equal(a, b) for a, b in zip(whole[1], resumed[1], strict=True))


class _FusedOnAnyDevice(torch.optim.Optimizer):
    """Takes ``found_inf`` in its kernel, as torch's fused optimizers do, but on any device."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found_inf: Tensor = self.found_inf  # type: ignore[attr-defined]
        assert found_inf.dim() == 0
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * (1 - found_inf), alpha=-0.1)


class _OpNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale", [None, LossScale(init=8.0), LossScale(init=8.0, hysteresis=2)])
@pytest.mark.parametrize("clip", [None, "norm", "value"])
def test_whole_step_runs_on_the_meta_device_where_any_transfer_raises(scale: LossScale | None, clip: Any) -> None:
    model = nn.Linear(4, 2, device="meta")
    optimizer = _FusedOnAnyDevice(model.parameters())
    sequence = sequence_for(optimizer, scale=scale, manual=False)
    for _ in range(3):
        optimizer.zero_grad()
        backward(sequence, model(torch.ones(1, 4, device="meta")).sum())
        hooks = (lambda: sequence.clip(optimizer, 1.0, clip)) if clip else (lambda: None)
        close(sequence, optimizer, hooks=hooks)
    with pytest.raises((RuntimeError, NotImplementedError)):
        _ = sequence.journal.last_report.outcome  # type: ignore[union-attr]  # reading it is the transfer


@pytest.mark.parametrize("number_of_layers", [1, 40])
@pytest.mark.parametrize("scale", [None, LossScale(init=8.0)])
def test_what_the_sequence_dispatches_does_not_depend_on_the_number_of_parameters(
    scale: LossScale | None, number_of_layers: int
) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(number_of_layers)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sequence = sequence_for(optimizer, scale=scale, manual=False)
    loss = model(torch.ones(1, 2)).sum()
    with _OpNames() as scaling:
        scaled = sequence.scale_loss(loss)
    scaled.backward()
    names: list[str] = []
    with _OpNames() as closing:
        sequence.run(
            optimizer,
            lambda: Window(0),
            closure=lambda: None,
            hooks=lambda: None,
            step=lambda: names.extend(closing.names),  # the optimizer's own ops are its own affair
            host_verdict=False,
        )
    assert len(scaling.names) <= 5
    assert len(closing.names) <= 16
    assert names.count("_amp_foreach_non_finite_check_and_unscale_") == 1
    assert "_local_scalar_dense" not in closing.names
