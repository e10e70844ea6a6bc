"""transformers PR#11663, ultralytics PR#22189: an FP16 run that is saved and resumed goes on as if never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_amp_plus import AmpPrecision, LossScale
from tests.support.faults import INF
from tests.support.models import TinyRegressor, adamw, fused_adamw, fused_sgd_momentum, sgd_momentum
from tests.support.training import (
    PLAIN_TYPES_ONLY,
    ResumableLoader,
    fit,
    make_trainer,
    outcomes,
    regression_batches,
    reports_of,
    same,
    stock_fp16,
    weights,
)

STEPS, STOP = 16, 7
FAULTS = {3: INF, 9: INF}


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def fp16() -> AmpPrecision:
    return AmpPrecision("16-mixed", loss_scale=LossScale(init=1024.0, growth_interval=3))


def stop_and_resume(
    directory: Path, plugins: Any, make_model: Any, micro_batches: int, **arguments: Any
) -> tuple[Any, Any]:
    """Trains up to ``STOP``, saves, and goes on in a new Trainer with a new model and the second plugin."""
    batches = regression_batches(STEPS * micro_batches)
    first = make_model()
    trainer = make_trainer(plugins[0], max_epochs=-1, max_steps=STOP, **arguments)
    trainer.fit(first, ResumableLoader(batches))
    trainer.save_checkpoint(directory / "run.ckpt")
    second = make_model()
    second.seen = first.seen
    trainer = make_trainer(plugins[1], max_epochs=-1, max_steps=STEPS, **arguments)
    trainer.fit(second, ResumableLoader(batches), ckpt_path=directory / "run.ckpt", **PLAIN_TYPES_ONLY)
    return first, second


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(("manual", "accumulate"), [(False, 1), (False, 2), (True, 1), (True, 2)])
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw, sgd_momentum, fused_sgd_momentum])
def test_losses_scales_and_weights_equal_the_uninterrupted_run_bit_for_bit(
    tmp_path: Path, make_optimizer: Any, manual: bool, accumulate: int, clip: float | None
) -> None:
    faults = {step * accumulate: fault for step, fault in FAULTS.items()}

    def make_model() -> TinyRegressor:
        by_hand = None if clip is None else (clip, "norm")
        return TinyRegressor(make_optimizer, decay, faults, manual=manual, accumulate=accumulate, clip=by_hand)

    arguments = {} if manual else {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    whole, plugin = make_model(), fp16()
    fit(whole, plugin, regression_batches(STEPS * accumulate), max_epochs=-1, max_steps=STEPS, **arguments)

    stopped, resumed = fp16(), fp16()
    reports = reports_of(resumed)
    first, second = stop_and_resume(tmp_path, (stopped, resumed), make_model, accumulate, **arguments)

    assert first.losses + second.losses == whole.losses
    assert same(weights(second), weights(whole))
    assert resumed.history.scales == list(plugin.history.scales)
    assert len(set(resumed.history.scales)) >= 3
    assert resumed.applied_steps == STEPS - 2
    assert outcomes(reports).count("skipped_overflow") == 1
    assert reports[0].window == STOP


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "bf16-true", "16-true"])
def test_other_precisions_resume_bit_for_bit_too(tmp_path: Path, precision: str, make_optimizer: Any) -> None:
    def make_model() -> TinyRegressor:
        # In FP16 AdamW's eps of 1e-8 is 0, and weights become infinite; see that they stay finite.
        fused = make_optimizer is fused_adamw
        eps = 1e-4 if precision == "16-true" else 1e-8
        return TinyRegressor(lambda p: torch.optim.AdamW(p, lr=0.01, eps=eps, fused=fused), decay, FAULTS)

    def plugin() -> AmpPrecision:
        return AmpPrecision(precision, loss_scale=LossScale(init=64.0) if precision == "16-true" else "auto")

    whole, reference = make_model(), plugin()
    fit(whole, reference, regression_batches(STEPS))
    resumed = plugin()
    first, second = stop_and_resume(tmp_path, (plugin(), resumed), make_model, 1)
    assert first.losses + second.losses == whole.losses
    assert same(weights(second), weights(whole))
    assert resumed.history.state_dict() == reference.history.state_dict()
    assert resumed.applied_steps == STEPS - 2


def test_the_checkpoint_is_read_without_unpickling_and_holds_one_fixed_key(tmp_path: Path) -> None:
    trainer = fit(TinyRegressor(adamw), fp16(), regression_batches(2))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", **PLAIN_TYPES_ONLY)
    assert "AmpPrecision" not in checkpoint
    assert checkpoint["lightning_amp_plus"]["schema_version"] == 2


def test_stock_loses_the_scale_when_the_plugin_is_a_subclass(tmp_path: Path) -> None:
    """Stock saves under the class's name, so a renamed class starts over without a word; ours has one fixed key."""

    class Renamed(MixedPrecision):
        pass

    class RenamedAmp(AmpPrecision):
        pass

    def make_model() -> TinyRegressor:
        return TinyRegressor(adamw, faults={3: INF})

    resumed = Renamed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    stop_and_resume(tmp_path, (stock_fp16(), resumed), make_model, 1)
    assert resumed.scaler is not None and resumed.scaler.get_scale() == 1024.0

    stopped = AmpPrecision("16-mixed", loss_scale=LossScale(init=1024.0))
    ours = RenamedAmp("16-mixed", loss_scale=LossScale(init=1024.0))
    stop_and_resume(tmp_path, (stopped, ours), make_model, 1)
    assert ours.scaler is not None and ours.scaler.get_scale() == 512.0
