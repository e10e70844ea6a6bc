"""FP8 coverage where only a GPU can show it: another thread's backward, kernels, times. Skipped where none has FP8."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import Fp8CoverageMonitor
from lightning_amp_plus.fp8 import CurrentScaling
from lightning_amp_plus.fp8.backends import BACKENDS
from lightning_amp_plus.fp8.recipes import GEMMS
from tests.support.training import loader

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="needs a CUDA GPU with FP8 (compute capability 8.9); this machine has none"),
]

TOKENS, WIDTH, INNER = 256, 256, 512


class Model(L.LightningModule):
    def __init__(self, checkpoint: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, 16)
        self.checkpoint = checkpoint

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = nn.functional.scaled_dot_product_attention(batch[None], batch[None], batch[None])[0]
        if self.checkpoint:
            hidden = torch.utils.checkpoint.checkpoint(self._body, hidden, use_reentrant=False)
        else:
            hidden = self._body(hidden)
        return self.head(hidden).float().square().mean()

    def _body(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).relu())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("backend", ["torchao", "transformer_engine", "reference"])
def test_a_step_on_a_gpu(backend: str, checkpoint: bool) -> None:
    obstacle = BACKENDS[backend].obstacle(CurrentScaling(), GEMMS, "cuda")
    if obstacle is not None:
        pytest.skip(str(obstacle))
    rules = [Rule(name, compute="fp8", recipe=CurrentScaling(), backend=backend) for name in ("up", "down")]
    monitor = Fp8CoverageMonitor(1, what_if=["rowwise"])
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        plugins=[AmpPrecision(PrecisionPolicy("bf16", rules=rules))],
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    trainer.fit(Model(checkpoint), loader(list(torch.randn(3, TOKENS, WIDTH))))
    assert monitor.last is not None and monitor.last_fit is not None
    work = {(row.module, row.role): row.flops for row in monitor.last.rows if row.module in ("up", "down")}
    gemm = 2 * TOKENS * WIDTH * INNER
    wanted = {(name, role): gemm for name in ("up", "down") for role in ("fprop", "dgrad", "wgrad")}
    if ("up", "dgrad") not in work:  # the first layer's input wants no gradient
        del wanted["up", "dgrad"]
    if checkpoint:
        wanted |= {(name, "recompute"): gemm for name in ("up", "down")}
        work.pop(("down", "recompute"), None)  # recomputing may stop before the last layer
        del wanted["down", "recompute"]
    assert work == wanted, monitor.last
    shares = monitor.last.shares()
    assert shares.native_flops == (0.0 if backend == "reference" else shares.flops) and 0.5 < shares.flops < 1
    assert set(monitor.last.time) == {"gemm", "cast", "rest"}
    assert not [note for note in monitor.last.notes if "kernel" in note], monitor.last.notes
    assert set(monitor.last_fit.own) == {"up", "down"}
