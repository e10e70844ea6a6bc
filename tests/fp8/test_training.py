"""FP8 in a real Trainer: it learns, skips what is not finite, begins when it should, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, PrecisionPolicy, Rule, Trainer
from lightning_amp_plus.routed import FP8_SWITCH
from tests.support.training import ResumableLoader, make_trainer, same, weights


class Regressor(L.LightningModule):
    """Two layers that FP8 takes, and a head that it does not."""

    def __init__(self, spoil: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32))
            self.head = nn.Linear(32, 1)
        self.spoil, self.seen = spoil, 0
        self.losses: list[float] = []
        self.on: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.on.append(not hasattr(self.body[0], FP8_SWITCH))
        x = batch * float("inf") if self.seen == self.spoil else batch
        self.seen += 1
        loss = nn.functional.mse_loss(self.head(self.body(x)).float(), batch.sum(1, keepdim=True))
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self.head(self.body(batch)).float(), batch.sum(1, keepdim=True)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def batches(count: int = 60) -> list[Tensor]:
    return list(torch.randn(count, 32, 16, generator=torch.Generator().manual_seed(1)))


def fit(
    plugin: AmpPrecision, model: Regressor | None = None, count: int = 60, **arguments: Any
) -> tuple[L.Trainer, Regressor]:
    model = model or Regressor()
    trainer = make_trainer(plugin, max_epochs=-1, max_steps=count, **arguments)
    trainer.fit(model, ResumableLoader(batches()))
    return trainer, model


def test_fp8_mixed_learns_as_bf16_mixed_does() -> None:
    last = {name: fit(AmpPrecision(name))[1].losses[-10:] for name in ("fp8-mixed", "bf16-mixed")}
    means = {name: sum(losses) / len(losses) for name, losses in last.items()}
    assert means["fp8-mixed"] == pytest.approx(means["bf16-mixed"], rel=0.1) and means["fp8-mixed"] < 4
    assert last["fp8-mixed"] != last["bf16-mixed"]


def test_the_string_and_the_nearest_lightning_precision() -> None:
    plugin = AmpPrecision("fp8-mixed")
    assert plugin.precision == "bf16-mixed" and plugin.scaler is None
    trainer = Trainer(precision="fp8-mixed", accelerator="cpu", logger=False, enable_checkpointing=False)
    assert isinstance(trainer.precision_plugin, AmpPrecision)


def test_a_window_with_an_infinite_input_is_skipped_and_the_weights_stay() -> None:
    plugin = AmpPrecision("fp8-mixed")
    _, model = fit(plugin, Regressor(spoil=5), 12)
    assert plugin.history.skipped == 1 and plugin.applied_steps == 11
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_fp8_begins_after_the_steps_that_the_policy_names(fused: bool) -> None:
    class Model(Regressor):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=fused)

    plugin = AmpPrecision(PrecisionPolicy("fp8", fp8_after_steps=4))
    _, model = fit(plugin, Model(spoil=1), 12, log_every_n_steps=1)
    # Step 1 was skipped and does not count.
    assert model.on == [False] * 5 + [True] * 7


def test_a_resume_after_the_start_goes_on_in_fp8_bit_for_bit(tmp_path: Path) -> None:
    policy = PrecisionPolicy("fp8", fp8_after_steps=4)
    _, whole = fit(AmpPrecision(policy), count=14)
    trainer, first = fit(AmpPrecision(policy), count=7)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    model = Regressor()
    make_trainer(AmpPrecision(policy), max_epochs=-1, max_steps=14).fit(
        model, ResumableLoader(batches()), ckpt_path=tmp_path / "a.ckpt"
    )
    assert model.on == [True] * 7
    assert first.losses + model.losses == whole.losses and same(weights(model), weights(whole))
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["lightning_amp_plus"]["precision"] == "fp8-mixed"
    assert saved["lightning_amp_plus"]["fp8"]["modules"]["body.0"]["backend"] == "reference"
    assert all(type(value) is Tensor for value in saved["state_dict"].values())


def test_a_module_moves_out_of_fp8_and_back_while_training(tmp_path: Path) -> None:
    class Moving(Regressor):
        def on_train_batch_start(self, *_: Any) -> None:
            plugin: Any = self.trainer.precision_plugin
            if self.seen in (3, 6):
                plugin.set_route("body.2", "bf16" if self.seen == 3 else "fp8", reason="by hand")

    plugin = AmpPrecision("fp8-mixed")
    fit(plugin, Moving(), 9)
    assert plugin.plan is not None and plugin.plan["body.2"].compute == "fp8"
    assert plugin.plan["body.2"].reason.startswith("by hand; reference: ")


@pytest.mark.parametrize(("saved", "now"), [("bf16-mixed", "fp8-mixed"), ("fp8-mixed", "bf16-mixed")])
def test_a_checkpoint_goes_into_and_out_of_fp8_only_where_it_is_allowed(tmp_path: Path, saved: str, now: str) -> None:
    trainer, _ = fit(AmpPrecision(saved), count=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    def resume(**arguments: Any) -> None:
        plugin = AmpPrecision(now, **arguments)
        make_trainer(plugin, max_epochs=-1, max_steps=6).fit(
            Regressor(), ResumableLoader(batches()), ckpt_path=tmp_path / "a.ckpt"
        )

    with pytest.raises(IncompatiblePrecisionError, match=rf"(?s){saved} +{now} +refuse.*allow=\['precision'\]"):
        resume()
    with pytest.warns(UserWarning, match="converts"):
        resume(allow=["precision"])


def test_another_recipe_is_refused_and_a_module_out_of_fp8_is_converted(tmp_path: Path) -> None:
    def policy(recipe: str | None, **more: Any) -> PrecisionPolicy:
        return PrecisionPolicy("bf16", rules=[Rule("body.0", compute="fp8", recipe=recipe), *more.get("rules", ())])

    trainer, _ = fit(AmpPrecision(policy("current")), count=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    def resume(policy: PrecisionPolicy) -> None:
        make_trainer(AmpPrecision(policy), max_epochs=-1, max_steps=6).fit(
            Regressor(), ResumableLoader(batches()), ckpt_path=tmp_path / "a.ckpt"
        )

    with pytest.raises(IncompatiblePrecisionError, match=r"(?s)fp8_recipe.*current.*rowwise.*allow=\['fp8_recipe'\]"):
        resume(policy("rowwise"))
    with pytest.warns(UserWarning, match=r"(?s)converts.*body\.0 fp8 +body\.0 bf16"):
        resume(PrecisionPolicy("bf16"))


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_evaluation_runs_in_bf16_and_changes_nothing(params: Any) -> None:
    plugin = AmpPrecision(PrecisionPolicy("fp8", params=params))
    trainer, model = fit(plugin, count=3)
    before = weights(model)
    trainer.validate(model, ResumableLoader(batches(4)), verbose=False)
    assert same(weights(model), before)
