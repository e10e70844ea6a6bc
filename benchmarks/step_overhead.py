"""Time and dispatched ops of a training step under AmpPrecision over Lightning's MixedPrecision, same model, one run.

Bars: time ratio at most 1.02; at most 10 more dispatched ops a step. Also shows that what we add does not grow with the
number of parameters.

    python benchmarks/step_overhead.py
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from support.runs import Meter, fit, interleaved, ours, quiet, stock, table

# Rows in a batch are to a linear layer what tokens are to a transformer: 1024 is a small training step. The check of
# BF16 gradients, which stock does not make, is one pass over the parameters, so its share falls with the rows. FP16
# products are some fifty times slower on CPU, so 64 rows keep the processor as busy.
SIZES: list[tuple[str, dict[str, int]]] = [
    ("16-mixed", {"width": 128, "batch": 64}),
    ("bf16-mixed", {"width": 384, "batch": 1024}),
]


def adamw(parameters: Any, fused: bool) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=fused, foreach=None if fused else True)


def ops(meter: Meter) -> int:
    return int(statistics.median(sum(counter.counts.values()) for counter in meter.counters[3:]))


def main() -> None:
    quiet()
    rows = []
    for precision, size in SIZES:
        for fused in (False, True):
            configure = partial(adamw, fused=fused)
            arms = {
                "stock": lambda: fit(stock(precision), configure, **size, steps=40),  # noqa: B023
                "ours": lambda: fit(ours(precision), configure, **size, steps=40),  # noqa: B023
            }
            seconds = interleaved(arms, rounds=8)
            counted = {
                name: ops(fit(make(precision), configure, **size, steps=10, count=True))
                for name, make in (("stock", stock), ("ours", ours))
            }
            rows.append(
                [
                    precision,
                    "fused" if fused else "foreach",
                    f"{seconds['stock'] * 1e3:.2f} ms",
                    f"{seconds['ours'] * 1e3:.2f} ms",
                    f"{seconds['ours'] / seconds['stock']:.3f}",
                    f"{(seconds['ours'] - seconds['stock']) * 1e6:+.0f} us",
                    f"{counted['stock']}",
                    f"{counted['ours'] - counted['stock']:+d}",
                ]
            )
    table(
        "A step under AmpPrecision over Lightning's MixedPrecision (median CPU time, one thread; bars: 1.02, +10)",
        ["precision", "AdamW", "stock", "ours", "ratio", "difference", "ops stock", "ops ours - stock"],
        rows,
    )

    rows = []
    for depth in (2, 20, 200):
        row = [str(2 * (depth + 1))]
        for precision, fused in (("16-mixed", True), ("bf16-mixed", False)):
            configure = partial(adamw, fused=fused)
            counts = [
                ops(fit(make(precision), configure, width=8, depth=depth, batch=4, steps=8, count=True))
                for make in (stock, ours)
            ]
            row.append(f"{counts[1] - counts[0]:+d}")
        rows.append(row)
    table(
        "Dispatched ops a step over stock, by the number of parameters",
        ["parameter tensors", "16-mixed fused", "bf16-mixed foreach"],
        rows,
    )


if __name__ == "__main__":
    main()
