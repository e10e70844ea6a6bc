"""AppliedUpdate: what it says a step did is what the step did, for every optimizer, group and shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from lightning_amp_plus.metrics import rounded_away
from lightning_amp_plus.metrics.applied_update import AppliedUpdate

SHAPES = [(64, 64)] * 3 + [(64,)] * 3 + [(600, 500), (), (0, 3), (7, 5)]

Make = Callable[[list[nn.Parameter]], Any]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    made[1].data = made[1].data.t()  # a transposed weight keeps its state in the same order of memory
    return made


def give_gradients(of: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for position, parameter in enumerate(of):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1
        parameter.grad = torch.empty_like(parameter).copy_(gradient)  # in the order of memory, as backward leaves it
        if position == 4 and step % 2:
            parameter.grad = None  # was not used


def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": of[:5]}, {"params": of[5:], "lr": 0.003, "weight_decay": 0.2}]


FORMULAS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd, decay, maximize": lambda p: SGD(p, lr=0.1, weight_decay=0.1, maximize=True),
    "sgd, fused": lambda p: SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "sgd, groups": lambda p: SGD(groups(p), lr=0.1, weight_decay=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.5),
    "momentum, maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, maximize=True),
    "momentum, fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "momentum in one group": lambda p: SGD([{"params": p[:5], "momentum": 0.9}, {"params": p[5:]}], lr=0.1),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "nesterov, maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    "nesterov, foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "nesterov, foreach, decay": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.1),
    "nesterov, fused": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda p: Adam(p, lr=0.01),
    "adam, decay": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "adam, amsgrad, maximize": lambda p: Adam(p, lr=0.01, amsgrad=True, maximize=True, betas=(0.5, 0.6), eps=0.1),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adamw, groups": lambda p: AdamW(groups(p), lr=0.01, weight_decay=0.0),
    "adamw, amsgrad in one group": lambda p: AdamW([{"params": p[:5], "amsgrad": True}, {"params": p[5:]}], lr=0.01),
    "adamw, fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.5, fused=True),
    "adamw, foreach": lambda p: AdamW(p, lr=0.01, weight_decay=0.5, foreach=True),
    "adamw, tensor lr": lambda p: AdamW(p, lr=torch.tensor(0.01), weight_decay=0.5, fused=True),
    "adamw, large decay": lambda p: AdamW(p, lr=0.5, weight_decay=1.5),
}

COPIES: dict[str, Make] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "a subclass": lambda p: type("Mine", (AdamW,), {})(p, lr=0.01),
    "decay takes all": lambda p: AdamW(p, lr=0.5, weight_decay=2.0),
}


def run(make: Make, dtype: torch.dtype = torch.float32, steps: int = 4, **options: Any) -> list[float]:
    """Largest relative error of the ratio and of both norms, over parameters and steps."""
    of = parameters(dtype)
    optimizer = make(of)
    applied = AppliedUpdate(optimizer, **options)
    worst = [0.0, 0.0]
    for step in range(steps):
        give_gradients(of, step)
        before = [p.detach().clone() for p in of]
        applied.before_step()
        optimizer.step()
        seen: dict[int, Tensor] = {}
        for found in applied.after_step():
            for parameter, sums in zip(found.layout.parameters, found.sums, strict=True):
                assert id(parameter) not in seen
                seen[id(parameter)] = sums
        assert set(seen) == {id(p) for p in of if p.grad is not None}
        for parameter, old in zip(of, before, strict=True):
            if id(parameter) not in seen or not parameter.numel():
                continue
            new = parameter.detach().double()
            change, norm = (new - old.double()).norm(), new.norm()
            moved, weights, _, pushed = seen[id(parameter)].unbind()
            # What is stored is the update after a rounding or two.
            noise = new.numel() ** 0.5 * float(new.abs().max()) * torch.finfo(torch.float32).eps
            worst[0] = max(worst[0], (abs(float(moved.sqrt() - change)) - noise) / max(float(change), 1e-30))
            worst[1] = max(worst[1], abs(float(weights.sqrt() / norm) - 1))
            assert pushed > 0
    assert not applied._copies
    return worst


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_state_tells_the_update_without_a_copy(name: str, dtype: torch.dtype) -> None:
    change, norm = run(FORMULAS[name], dtype)
    assert change < 1e-5 and norm < 1e-5
    of = parameters(dtype)
    applied = AppliedUpdate(FORMULAS[name](of))
    give_gradients(of, 0)
    applied.before_step()
    assert not applied._copies


@pytest.mark.parametrize("name", COPIES)
def test_any_other_optimizer_is_measured(name: str) -> None:
    assert max(run(COPIES[name])) < 1e-5


@pytest.mark.parametrize("make", [FORMULAS["adamw, groups"], FORMULAS["nesterov"], COPIES["rmsprop"]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_stored_in_16_bits_is_measured(make: Make, dtype: torch.dtype) -> None:
    assert max(run(make, dtype)) < 1e-5


def steps_of(make: Make, of: list[nn.Parameter], count: int = 3, **options: Any) -> tuple[Any, AppliedUpdate]:
    optimizer = make(of)
    applied = AppliedUpdate(optimizer, **options)
    for step in range(count):
        give_gradients(of, step)
        applied.before_step()
        optimizer.step()
    return optimizer, applied


@pytest.mark.parametrize("make", [FORMULAS["adamw, groups"], FORMULAS["adam, amsgrad, maximize"], FORMULAS["nesterov"]])
def test_a_sixteenth_of_the_elements_gives_the_ratio_to_a_few_percent(make: Make) -> None:
    of = parameters()
    of.append(nn.Parameter(torch.randn(1024, 1024, generator=torch.Generator().manual_seed(5))))
    _, applied = steps_of(make, of)
    (whole,) = applied.after_step()[:1]
    applied.one_in = 16
    applied._layouts.clear()
    (some,) = applied.after_step()[:1]
    assert some.layout.parameters == whole.layout.parameters
    assert torch.allclose(some.sums[:, :2].sqrt(), whole.sums[:, :2].sqrt(), rtol=0.02)
    assert sum(m.numel() for m in some.layout.blocks.of(of)) < 0.1 * sum(p.numel() for p in of)


def test_other_optimizers_copy_a_sixteenth_only() -> None:
    of = [nn.Parameter(torch.randn(1024, 1024)) for _ in range(2)]
    optimizer = torch.optim.RMSprop(of)
    applied = AppliedUpdate(optimizer, one_in=16)
    give_gradients(of, 0)
    before = [p.detach().clone() for p in of]
    applied.before_step()
    ((_, copies),) = applied._copies
    assert sum(c.untyped_storage().nbytes() for c in copies) < 0.07 * 4 * sum(p.numel() for p in of)
    optimizer.step()
    (found,) = applied.after_step()
    for sums, old, new in zip(found.sums, before, of, strict=True):
        assert float(sums[0].sqrt()) == pytest.approx(float((new.detach() - old).norm()), rel=0.02)


def test_one_kernel_serves_every_shape_when_compiled() -> None:
    of = [
        nn.Parameter(torch.randn(shape)) for shape in [(64, 64)] * 3 + [(64,)] * 3 + [(600, 500), (300, 70), (), (9,)]
    ]
    make = FORMULAS["adamw, groups"]
    _, applied = steps_of(make, of)
    eager = {id(p): s for f in applied.after_step() for p, s in zip(f.layout.parameters, f.sums, strict=True)}
    torch._dynamo.utils.counters.clear()
    applied.compiled = True
    applied._layouts.clear()
    compiled = {id(p): s for f in applied.after_step() for p, s in zip(f.layout.parameters, f.sums, strict=True)}
    assert eager.keys() == compiled.keys()
    for key, sums in eager.items():
        assert torch.allclose(sums[[0, 1, 3]], compiled[key][[0, 1, 3]], rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1


@pytest.mark.parametrize("rate", [1e-4, 1e-7, 1e-9, 0.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_share_rounded_away_is_that_of_the_arithmetic_of_the_format(rate: float, compiled: bool) -> None:
    of = [nn.Parameter(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))]
    optimizer, applied = steps_of(lambda p: Adam(p, lr=rate), of, compiled=compiled)
    (found,) = applied.after_step()
    state = optimizer.state[of[0]]
    step = float(state["step"])
    corrected = state["exp_avg_sq"].double().sqrt() / (1 - 0.999**step) ** 0.5 + 1e-8
    update = -rate / (1 - 0.9**step) * state["exp_avg"].double() / corrected
    share = float(rounded_away(of[0].detach(), update))
    assert float(found.sums[0, 2]) / of[0].numel() == pytest.approx(share, abs=1e-3 if compiled else 0.03)
    assert (share > 0.1) == (0 < rate < 1e-6)


@pytest.mark.parametrize("equal", [False, True])
def test_fifteen_million_elements_keep_their_digits(equal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    of = [nn.Parameter(torch.randn(15_000_001, generator=generator) + 0.5)]
    optimizer = AdamW(of, lr=1e-3)
    of[0].grad = torch.ones_like(of[0]) if equal else torch.randn(of[0].shape, generator=generator)
    before = of[0].detach().double()
    optimizer.step()
    (found,) = AppliedUpdate(optimizer).after_step()
    moved, weights = found.sums[0, :2].sqrt().tolist()
    assert moved == pytest.approx(float((of[0].detach().double() - before).norm()), rel=1e-4)
    assert weights == pytest.approx(float(of[0].detach().double().norm()), rel=1e-5)


@pytest.mark.parametrize("make", [*FORMULAS.values(), *COPIES.values()])
@pytest.mark.parametrize("tensor_rate", [False, True])
def test_nothing_is_asked_of_the_device(make: Make, tensor_rate: bool) -> None:
    """On the meta device every question for a value raises."""
    optimizer = make([nn.Parameter(torch.empty(shape)) for shape in SHAPES])
    with torch.device("meta"):
        of = [nn.Parameter(torch.empty(shape)) for shape in SHAPES]
        fresh = iter(of)
        for group in optimizer.param_groups:
            group["params"] = [next(fresh) for _ in group["params"]]
            group["lr"] = torch.empty(()) if tensor_rate else float(group["lr"])
        for parameter in of:
            parameter.grad = torch.empty_like(parameter)
        applied = AppliedUpdate(optimizer)
        applied.before_step()
        for parameter in of:
            like = torch.empty_like(parameter)
            optimizer.state[parameter] = {
                "step": torch.empty(()),
                **{name: like for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")},
            }
        assert all(found.sums.is_meta for found in applied.after_step())


def test_complex_and_sparse_parameters() -> None:
    of = [nn.Parameter(torch.randn(40, 30, dtype=torch.complex64))]
    for make in (FORMULAS["adamw"], FORMULAS["momentum"], FORMULAS["sgd"]):
        optimizer = make(of)
        of[0].grad = torch.randn_like(of[0])
        before = of[0].detach().clone()
        optimizer.step()
        (found,) = AppliedUpdate(optimizer).after_step()
        assert float(found.sums[0, 0].sqrt()) == pytest.approx(float((of[0].detach() - before).norm()), rel=1e-4)

    table = nn.Embedding(50, 4, sparse=True)
    for optimizer in (SGD(table.parameters(), lr=0.1), torch.optim.SparseAdam(table.parameters())):
        table.zero_grad()
        table(torch.tensor([3, 3, 7])).sum().backward()
        before = table.weight.detach().clone()
        applied = AppliedUpdate(optimizer)
        applied.before_step()
        optimizer.step()
        (found,) = applied.after_step()
        assert float(found.sums[0, 0].sqrt()) == pytest.approx(float((table.weight.detach() - before).norm()), rel=1e-5)
        assert found.sums[0, 3] > 0
