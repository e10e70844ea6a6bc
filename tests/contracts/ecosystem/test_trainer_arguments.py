"""Arguments and entry points of the Trainer, each against stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_amp_plus
from lightning_amp_plus import AmpPrecision, PrecisionPolicy
from tests.support.models import TinyRegressor, adamw, fused_adamw
from tests.support.training import (
    amp_fp16,
    fit,
    loader,
    make_trainer,
    regression_batches,
    same,
    stock_bf16,
    stock_fp16,
    weights,
)

PAIRS = {"16-mixed": (amp_fp16, stock_fp16), "bf16-mixed": (lambda: AmpPrecision("bf16-mixed"), stock_bf16)}
ARGUMENTS: dict[str, tuple[dict[str, Any], int]] = {
    "overfit_batches": ({"overfit_batches": 2, "max_epochs": 3}, 6),
    "overfit_batches as a share": ({"overfit_batches": 0.25, "max_epochs": 2}, 6),
    "fast_dev_run": ({"fast_dev_run": True}, 1),
    "fast_dev_run of three": ({"fast_dev_run": 3}, 3),
    "limit_train_batches": ({"limit_train_batches": 5, "max_epochs": 2}, 10),
    "limit_train_batches with accumulation": (
        {"limit_train_batches": 5, "max_epochs": 2, "accumulate_grad_batches": 2},
        6,
    ),
    "limit_train_batches as a share": ({"limit_train_batches": 0.5}, 6),
    "max_steps in mid-epoch": ({"max_steps": 7, "max_epochs": -1}, 7),
    "val_check_interval": ({"val_check_interval": 4}, 12),
}


@pytest.mark.parametrize(("arguments", "steps"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("precision", PAIRS)
def test_the_run_is_that_of_stock(precision: str, make_optimizer: Any, arguments: dict[str, Any], steps: int) -> None:
    results = []
    for make_plugin in PAIRS[precision]:
        model, plugin = TinyRegressor(make_optimizer), make_plugin()
        trainer = make_trainer(plugin, **arguments)
        trainer.fit(model, loader(regression_batches(12)), loader(regression_batches(4)))
        results.append((model.losses, trainer.global_step, weights(model)))
        if isinstance(plugin, AmpPrecision):
            assert plugin.applied_steps == steps
    assert results[0][:2] == results[1][:2]
    assert results[0][1] == steps
    assert same(results[0][2], results[1][2])


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
@pytest.mark.parametrize("precision", PAIRS)
def test_evaluation_without_a_fit_gives_the_numbers_of_stock_and_changes_nothing(precision: str, entry: str) -> None:
    results = []
    for make_plugin in PAIRS[precision]:
        model, plugin = TinyRegressor(), make_plugin()
        before = weights(model)
        results.append(getattr(make_trainer(plugin), entry)(model, loader(regression_batches(3))))
        assert same(weights(model), before)
        if isinstance(plugin, AmpPrecision):
            assert plugin.last_report is None and plugin.applied_steps == 0
            assert plugin.scaler is None or plugin.scaler.get_scale() == 1024
    ours, stock = results
    if entry == "predict":
        assert [p.dtype for p in ours] == [PrecisionDtype[precision]] * 3
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
    else:
        assert ours == stock and len(ours[0]) == 1


PrecisionDtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_evaluating_a_checkpoint_leaves_the_live_scale_which_stock_overwrites(tmp_path: Path, entry: str) -> None:
    scales = []
    for make in (amp_fp16, stock_fp16):
        model = TinyRegressor()
        saved = fit(model, make(16.0), regression_batches(2))
        saved.save_checkpoint(tmp_path / "old.ckpt")
        plugin = make(512.0)
        trainer = fit(TinyRegressor(), plugin, regression_batches(2))
        before = plugin.state_dict() if isinstance(plugin, AmpPrecision) else None
        getattr(trainer, entry)(dataloaders=loader(regression_batches(1)), ckpt_path=tmp_path / "old.ckpt")
        assert plugin.scaler is not None
        scales.append(plugin.scaler.get_scale())
        assert before is None or plugin.state_dict() == before  # type: ignore[union-attr]
    assert scales == [512.0, 16.0]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"])
def test_trainer_precision_is_the_string_of_stock(precision: Any) -> None:
    assert make_trainer(AmpPrecision(precision)).precision == precision
    ours = lightning_amp_plus.Trainer(
        precision=precision, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    assert ours.precision == precision
    assert isinstance(ours.precision_plugin, AmpPrecision)


@pytest.mark.parametrize(
    ("policy", "nearest"),
    [
        (PrecisionPolicy("fp32"), "32-true"),
        (PrecisionPolicy("bf16"), "bf16-mixed"),
        (PrecisionPolicy("bf16", params="bf16"), "bf16-true"),
        (PrecisionPolicy("fp16", params="fp16", master_weights=True), "16-true"),
    ],
)
def test_trainer_precision_of_a_policy_is_the_nearest_string(policy: PrecisionPolicy, nearest: str) -> None:
    assert make_trainer(AmpPrecision(policy)).precision == nearest
