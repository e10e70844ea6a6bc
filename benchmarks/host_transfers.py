"""Device-to-host transfers a step (`_local_scalar_dense`) under AmpPrecision, over Lightning's MixedPrecision.

Bars over stock: FP16 +0; BF16 and FP32 non-fused +1 (+0 with check_finite=False); fused 0 in all, or 1 where a per-step
scheduler or weight averaging needs the verdict; the same with clipping, and with LossScaleMonitor between log points.

    python benchmarks/host_transfers.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from support.runs import fit, ours, quiet, stock, table

from lightning_amp_plus.callbacks import LossScaleMonitor


def configure(parameters: Any, fused: bool = False, scheduler: bool = False) -> Any:
    # foreach: the single-tensor AdamW on CPU reads one number a parameter by itself.
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=fused, foreach=None if fused else True)
    if not scheduler:
        return optimizer
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


def transfers(plugin: Any, **options: Any) -> int:
    """Transfers of the fifth step, well between log points and after anything that happens once."""
    settings = {name: options.pop(name) for name in ("fused", "scheduler") if name in options}
    meter = fit(plugin, partial(configure, **settings), width=16, depth=2, steps=6, count=True, **options)
    return meter.counters[4].transfers


def main() -> None:
    quiet()
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any], int]] = [
        # name, precision, our plugin's options, the run's options, bar over stock
        ("FP16", "16-mixed", {}, {}, 0),
        ("FP16, clipping", "16-mixed", {}, {"gradient_clip_val": 1.0}, 0),
        ("FP16, scheduler", "16-mixed", {}, {"scheduler": True}, 0),
        ("FP16 fused", "16-mixed", {}, {"fused": True}, 0),
        ("FP16 fused, scheduler", "16-mixed", {}, {"fused": True, "scheduler": True}, 1),
        ("FP16 fused, averaging", "16-mixed", {}, {"fused": True, "callbacks": (EMAWeightAveraging(),)}, 1),
        ("BF16", "bf16-mixed", {}, {}, 1),
        ("BF16, clipping", "bf16-mixed", {}, {"gradient_clip_val": 1.0}, 1),
        ("BF16, check_finite=False", "bf16-mixed", {"check_finite": False}, {}, 0),
        ("BF16 fused", "bf16-mixed", {}, {"fused": True}, 0),
        ("BF16 fused, scheduler", "bf16-mixed", {}, {"fused": True, "scheduler": True}, 1),
        ("FP32", "32-true", {}, {}, 1),
        ("FP32, check_finite=False", "32-true", {"check_finite": False}, {}, 0),
        ("FP32 fused", "32-true", {}, {"fused": True}, 0),
    ]
    rows = []
    for name, precision, options, run, bar in cases:
        peer = transfers(Precision() if precision == "32-true" else stock(precision), **run)
        mine = transfers(ours(precision, **options), **run)
        watched = transfers(
            ours(precision, **options), **{**run, "callbacks": (*run.get("callbacks", ()), LossScaleMonitor())}
        )
        rows.append([name, str(peer), str(mine), f"{mine - peer:+d}", f"{watched - peer:+d}", f"{bar:+d}"])
    for name, precision in (("FP16 fused, clipping", "16-mixed"), ("BF16 fused, clipping", "bf16-mixed")):
        run = {"fused": True, "gradient_clip_val": 1.0}
        mine = transfers(ours(precision), **run)
        watched = transfers(ours(precision), **run, callbacks=(LossScaleMonitor(),))
        rows.append([name, "refused", str(mine), f"{mine:+d}", f"{watched:+d}", "+0"])
    table(
        "Host transfers a step, between log points",
        ["run", "stock", "ours", "over stock", "with LossScaleMonitor", "bar"],
        rows,
    )


if __name__ == "__main__":
    main()
