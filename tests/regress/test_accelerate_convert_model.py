"""Accelerate convert_model: of Linear(16, 10), (16, 32), (32, 64) the last two convert, the first says why not."""

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, plan
from lightning_amp_plus.callbacks.fp8_coverage import Fp8CoverageMonitor
from tests.support.models import sgd
from tests.support.training import fit


def test_the_last_two_convert_and_the_first_is_listed_with_its_reason() -> None:
    routes = plan(nn.ModuleList([nn.Linear(16, 10), nn.Linear(16, 32), nn.Linear(32, 64)]), PrecisionPolicy("fp8"))
    assert [routes[name].compute for name in "012"] == ["bf16", "fp8", "fp8"]
    assert routes["0"].reason == "shape: out_features=10 is no multiple of 16"
    assert "out_features=10" in str(routes)


class Three(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 10), nn.Linear(16, 32), nn.Linear(32, 64)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        narrow, wide = self.layers[0](batch), self.layers[2](self.layers[1](batch))
        return narrow.float().square().mean() + wide.float().square().mean()

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


def test_measured_the_last_two_ran_in_fp8_and_the_first_did_not_for_its_shape() -> None:
    monitor = Fp8CoverageMonitor(1)
    trainer = fit(Three(), AmpPrecision(PrecisionPolicy("fp8")), [torch.randn(8, 16)], callbacks=[monitor])
    assert monitor.last is not None
    found = {(row.module, row.reason, row.format == "bf16") for row in monitor.last.rows}
    assert found == {("layers.0", "shape", True), ("layers.1", "", False), ("layers.2", "", False)}
    # Two GEMMs of the layers that get the model's input, and three of the last.
    first, last_two = 2 * 2 * 8 * 16 * 10, 2 * 2 * 8 * 16 * 32 + 3 * 2 * 8 * 32 * 64
    assert monitor.last.shares().flops == last_two / (first + last_two) and monitor.last.shares().gemms == 5 / 7
    assert monitor.last.fallbacks() == {"shape": first / (first + last_two)}
    assert "layers.0" in str(monitor.last) and "shape" in str(monitor.last)
    assert torch.isclose(trainer.callback_metrics["fp8/fallback/shape"], torch.tensor(first / (first + last_two)))
