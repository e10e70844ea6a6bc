"""What only a GPU can show. Skipped where there is none; sized for a minute of one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy, Rule
from tests.support.training import loader, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"),
]


class Net(L.LightningModule):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
        self.head = nn.Linear(64, 8)
        self.fused = fused
        self.dtypes: dict[str, torch.dtype] = {}

    def training_step(self, batch: Any, _: int) -> Tensor:
        hidden = self.body(batch[0])
        logits = self.head(hidden)
        self.dtypes = {"body": hidden.dtype, "head": logits.dtype}
        return nn.functional.mse_loss(logits.float(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.fused)


def batches(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 64, generator=generator), torch.randn(16, 8, generator=generator)) for _ in range(count)]


def fit(model: Net, plugin: Any, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "gpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": [plugin],
    }
    trainer = L.Trainer(**{**settings, **options})
    trainer.fit(model, loader(batches()))
    return trainer


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_weights_equal_stock_bit_for_bit(precision: Any, fused: bool) -> None:
    stock, ours = Net(fused), Net(fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0) if precision == "16-mixed" else None
    fit(stock, MixedPrecision(precision, "cuda", scaler))
    scale = LossScale(init=1024.0) if precision == "16-mixed" else "auto"
    fit(ours, AmpPrecision(precision, loss_scale=scale))
    assert same(stock.state_dict(), ours.state_dict())


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_fused_steps_never_wait_for_the_device(precision: str, clip: float | None) -> None:
    class NoSync(L.Callback):
        """Any wait for the device raises, from the start of a batch to its end; its transfer lies before that."""

        def on_train_batch_start(self, _trainer: Any, _module: Any, _batch: Any, batch_idx: int) -> None:
            if batch_idx >= 5:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, *_: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    plugin = AmpPrecision(precision)
    try:
        fit(Net(fused=True), plugin, callbacks=[NoSync()], gradient_clip_val=clip, log_every_n_steps=1000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plugin.history.applied + plugin.history.skipped == 20


def test_rule_holds_and_an_overflow_is_skipped() -> None:
    class Overflows(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 3 else 1.0)

    policy = PrecisionPolicy("fp16", rules=[Rule("head", compute="fp32")])
    plugin, model = AmpPrecision(policy, loss_scale=LossScale(init=256.0)), Overflows(fused=True)
    fit(model, plugin)
    assert model.dtypes["head"] == torch.float32
    assert (plugin.history.applied, plugin.history.skipped, plugin.history.backoffs) == (19, 1, 1)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_full_fsdp1_checkpoint_resumes_the_scale(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    def run(steps: int, resume: Path | None = None) -> tuple[L.Trainer, AmpPrecision]:
        plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=64.0, growth_interval=3))
        strategy = FSDPStrategy(state_dict_type="full")
        trainer = L.Trainer(
            accelerator="gpu",
            devices=1,
            strategy=strategy,
            plugins=[plugin],
            max_epochs=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(), loader(batches(4)), ckpt_path=resume)
        return trainer, plugin

    trainer, _ = run(1)
    trainer.save_checkpoint(tmp_path / "full.ckpt")
    _, whole = run(2)
    _, resumed = run(2, tmp_path / "full.ckpt")
    assert whole.history.state_dict() == resumed.history.state_dict()
