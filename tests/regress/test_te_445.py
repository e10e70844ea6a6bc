"""TE#445, ao#2262: one large FP8 GEMM and nine tiny BF16 ones are 10 % by count and over 90 % by FLOPs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks.fp8_coverage import Fp8CoverageMonitor
from lightning_amp_plus.fp8.coverage.report import Coverage
from tests.support.models import sgd
from tests.support.training import fit

TOKENS, LARGE, TINY = 8, 256, 16


class Model(L.LightningModule):
    """A large layer and nine tiny ones beside each other, all on the model's input: two GEMMs each."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(LARGE, LARGE)
        self.tiny = nn.ModuleList(nn.Linear(TINY, TINY) for _ in range(9))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tiny = sum(layer(batch[:, :TINY]).float().square().mean() for layer in self.tiny)
        return self.large(batch).float().square().mean() + tiny

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


def test_one_in_ten_gemms_is_more_than_nine_tenths_of_the_work() -> None:
    monitor = Fp8CoverageMonitor(1)
    policy = PrecisionPolicy("bf16", rules=[Rule("large", compute="fp8")])
    trainer = fit(Model(), AmpPrecision(policy), [torch.randn(TOKENS, LARGE)], callbacks=[monitor])
    assert isinstance(monitor.last, Coverage)
    large, tiny = 2 * TOKENS * LARGE**2, 2 * TOKENS * TINY**2
    shares = monitor.last.shares()
    assert shares.gemms == 2 / 20
    assert shares.flops == large / (large + 9 * tiny) > 0.9
    logged = trainer.callback_metrics
    assert logged["fp8/coverage_gemms"].item() == torch.tensor(0.1).item()
    assert logged["fp8/coverage_flops"].item() == torch.tensor(shares.flops).item()
