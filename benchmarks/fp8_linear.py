"""Time of a Linear's forward and backward in FP8 (reference backend) over the same in BF16 eager, one thread, in one run.

Bars, eager: current scaling 1.8 at 256-1024 and 1.45 at 1024-1024, delayed 2.0 and 1.5. Compiled, over BF16 eager too:
current 1.6 and 1.3. The other recipes are shown beside it. The time is rounding: a GEMM in BF16 costs the same whatever
its numbers are. Below it the torchao backend over torchao's own converted layer (bar 1.02).

    PYTHONPATH=. python benchmarks/fp8_linear.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from support.runs import quiet, table
from torch import nn

from lightning_amp_plus import PrecisionPolicy, Rule, plan
from lightning_amp_plus.fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Recipe, RowwiseScaling

TOKENS, ROUNDS, WARM_UP = 1024, 25, 5
ARMS: dict[str, Recipe | None] = {
    "bf16": None,
    "current": CurrentScaling(),
    "current, powers of two": CurrentScaling(power_of_two=True),
    "delayed": DelayedScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "mx": MXScaling(),
}
COMPILED = ("current", "delayed", "rowwise", "block", "mx")


def step_of(recipe: Recipe | None, inner: int, outer: int, compiled: bool = False) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inner, outer))
    if recipe is not None:
        plan(model, PrecisionPolicy("bf16", rules=[Rule("0", compute="fp8", recipe=recipe)])).apply(model)
    call = torch.compile(model, fullgraph=True) if compiled else model
    x, gradient = torch.randn(TOKENS, inner, requires_grad=True), torch.randn(TOKENS, outer).bfloat16()

    def step() -> None:
        x.grad = model[0].weight.grad = model[0].bias.grad = None
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = call(x)
        y.backward(gradient)

    return step


def torchao_step(inner: int, outer: int, ours: bool) -> Callable[[], None]:
    """A step by torchao: of its own converted layer, or of ours that goes by it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inner, outer))
    if ours:
        rule = Rule("0", compute="fp8", recipe=CurrentScaling(), backend="torchao")
        plan(model, PrecisionPolicy("bf16", rules=[rule])).apply(model)
    else:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    x = torch.randn(TOKENS, inner).bfloat16().requires_grad_()
    gradient = torch.randn(TOKENS, outer).bfloat16()

    def step() -> None:
        x.grad = model[0].weight.grad = model[0].bias.grad = None
        model(x).backward(gradient)

    return step


def medians(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of each, taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS):
        for name in list(steps) if turn % 2 == 0 else list(steps)[::-1]:
            start = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values[WARM_UP:]) for name, values in seconds.items()}


def main() -> None:
    quiet()
    rows = []
    # Compiled ones apart and last: whether an eager step's buffers are faulted in anew (a third of its time at 256-1024)
    # hangs on what the allocator was asked for before.
    for compiled in (False, True):
        for inner, outer in ((256, 1024), (1024, 1024)):
            steps = {name: step_of(recipe, inner, outer) for name, recipe in ARMS.items()}
            if compiled:
                torch._dynamo.reset()  # an arm is a model of its own, and there is a limit to graphs of the same code
                steps = {"bf16": steps["bf16"]}
                steps |= {f"{name}, compiled": step_of(ARMS[name], inner, outer, compiled=True) for name in COMPILED}
            found = medians(steps)
            rows += [
                [f"{inner}-{outer}", name, f"{value * 1e3:.2f} ms", f"{value / found['bf16']:.2f}"]
                for name, value in found.items()
            ]
    table(f"Forward and backward of {TOKENS} tokens, over BF16", ["layer", "recipe", "time", "ratio"], rows)
    rows = []
    for inner, outer in ((256, 1024), (1024, 1024)):
        found = medians(
            {"plain": torchao_step(inner, outer, ours=False), "ours": torchao_step(inner, outer, ours=True)}
        )
        ratio = found["ours"] / found["plain"]
        rows.append(
            [f"{inner}-{outer}", *(f"{found[name] * 1e3:.2f} ms" for name in ("plain", "ours")), f"{ratio:.3f}"]
        )
    table("torchao, current scaling", ["layer", "its own layer", "this backend", "ratio"], rows)


if __name__ == "__main__":
    main()
