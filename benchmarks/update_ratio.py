"""What the update ratio of a step costs: time and memory a parameter, against peers, and its error against FP64.

Bars, AdamW in FP32: exact at most 1.3 ns a parameter and 4 % more memory; with ``compile=True`` 0.6 ns and nothing;
``sample=1/16`` 0.15 ns and 7 %. Peers hold the parameters before the step a second time: one norm of the difference by
parameter, or torch's ``_foreach`` ops. Reading parameter and both moments once at the speed of memory is the limit. The
last bar is an error of at most 1e-4 at 15 million elements.

    python benchmarks/update_ratio.py [millions of parameters]
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

import torch
from support.runs import quiet, table
from torch import Tensor, nn

from lightning_amp_plus.metrics.applied_update import AppliedUpdate

# As in a transformer: some large matrices, an embedding that is most of it, and many small vectors.
SHAPES = [(4096, 1024), (1024, 4096), (1024, 1024), (1024,), (1024,)]


class Step:
    """An AdamW step on parameters of about so many elements in all."""

    def __init__(self, elements: int) -> None:
        torch.manual_seed(0)
        shapes, left = [], elements
        while left > 0:
            shapes.append(SHAPES[len(shapes) % len(SHAPES)])
            left -= torch.Size(shapes[-1]).numel()
        self.parameters = [nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
        self.count = sum(p.numel() for p in self.parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, weight_decay=0.1, fused=True)
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def ours(self, one_in: int = 1, compiled: bool = False) -> Callable[[], object]:
        applied = AppliedUpdate(self.optimizer, one_in, compiled)
        return lambda: (applied.before_step(), applied.after_step())

    @torch.no_grad()
    def clone_and_norm(self) -> list[Tensor]:
        before = [p.clone() for p in self.parameters]
        return [(p - b).norm() / p.norm() for p, b in zip(self.parameters, before, strict=True)]

    @torch.no_grad()
    def foreach(self) -> list[Tensor]:
        before = torch._foreach_clone(self.parameters)
        change = torch._foreach_sub(self.parameters, before)
        return torch._foreach_div(torch._foreach_norm(change), torch._foreach_norm(self.parameters))

    @torch.no_grad()
    def read(self) -> list[Tensor]:
        """The limit: 12 bytes a parameter, read and added up."""
        states = [self.optimizer.state[p] for p in self.parameters]
        return [
            t.sum() for p, s in zip(self.parameters, states, strict=True) for t in (p, s["exp_avg"], s["exp_avg_sq"])
        ]


ARMS: dict[str, tuple[str, Callable[[Step], Callable[[], object]]]] = {
    "exact": ("1.3 ns, 4 %", lambda step: step.ours()),
    "exact, compile=True": ("0.6 ns, 0 %", lambda step: step.ours(compiled=True)),
    "sample=1/16": ("0.15 ns, 7 %", lambda step: step.ours(16)),
    "peer: clone and norm": ("", lambda step: step.clone_and_norm),
    "peer: foreach": ("", lambda step: step.foreach),
    "limit: read once": ("0.42 ns", lambda step: step.read),
}


def memory(name: str, elements: int) -> float:
    """Bytes that resident memory rises by while an arm runs, over those of the parameters; in a process of its own."""
    quiet()
    step = Step(elements)
    arm = ARMS[name][1]
    arm(Step(10**6))()  # what code and compiler need is not counted
    run, page = arm(step), resource.getpagesize()
    statm, peak, running = Path("/proc/self/statm"), 0, True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, int(statm.read_text().split()[1]))

    before = int(statm.read_text().split()[1])
    watcher = Thread(target=watch)
    watcher.start()
    run()
    running = False
    watcher.join()
    return max(0, peak - before) * page / (4 * step.count)


def error() -> float:
    """Of the ratio of one matrix of 15 million elements, against FP64 on the weights before and after the step."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(15_000_000))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    weight.grad = torch.randn_like(weight)
    before = weight.detach().double()
    optimizer.step()
    ((moved, norm, *_),) = AppliedUpdate(optimizer).after_step()[0].sums.tolist()
    after = weight.detach().double()
    return abs((moved / norm) ** 0.5 / float((after - before).norm() / after.norm()) - 1)


def main() -> None:
    quiet()
    elements = int(float(sys.argv[1]) * 1e6) if len(sys.argv) > 1 else 100_000_000
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        more = {name: pool.apply(memory, (name, elements)) for name in ARMS}
    step = Step(elements)
    arms = {name: make(step) for name, (_, make) in ARMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(6):
        for name in list(arms) if turn % 2 else list(arms)[::-1]:
            start = time.process_time()
            arms[name]()
            if turn:  # the first only warms up
                seconds[name].append(time.process_time() - start)
    rows = [
        [name, f"{statistics.median(seconds[name]) / step.count * 1e9:.2f} ns", f"{more[name]:.1%}", ARMS[name][0]]
        for name in arms
    ]
    table(
        f"Update ratio of {step.count / 1e6:.0f}M parameters, fused AdamW, FP32 (median CPU time, one thread)",
        ["", "a parameter", "more memory", "bar"],
        rows,
    )
    table("Against FP64 at 15M elements", ["relative error", "bar"], [[f"{error():.1e}", "1e-4"]])


if __name__ == "__main__":
    main()
