"""lightweight-gan#103: a run that was saved with an empty scaler state, or with none, is resumed in FP16."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, LossScale
from tests.support.models import TinyRegressor, adamw
from tests.support.training import PLAIN_TYPES_ONLY, fit, loader, make_trainer, regression_batches, same, stock_fp16
from tests.support.training import weights as weights_of

BATCHES = 4


def fp16(**arguments: Any) -> AmpPrecision:
    return AmpPrecision("16-mixed", loss_scale=LossScale(init=1024.0, growth_interval=3), **arguments)


def saved_with(path: Path, plugin: Any, change: Any) -> Path:
    fit(TinyRegressor(adamw), plugin, regression_batches(BATCHES)).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


def resume(path: Path, plugin: AmpPrecision, model: TinyRegressor) -> None:
    trainer = make_trainer(plugin, max_epochs=2)
    trainer.fit(model, loader(regression_batches(BATCHES)), ckpt_path=path, **PLAIN_TYPES_ONLY)


def empty(checkpoint: dict[str, Any]) -> None:
    checkpoint["lightning_amp_plus"]["scaler"] = torch.amp.GradScaler("cpu", enabled=False).state_dict()


def missing(checkpoint: dict[str, Any]) -> None:
    checkpoint["lightning_amp_plus"]["scaler"] = None


@pytest.mark.parametrize("change", [empty, missing])
def test_it_is_a_named_error_before_anything_changes(tmp_path: Path, change: Any) -> None:
    path = saved_with(tmp_path / "run.ckpt", fp16(), change)
    model, plugin = TinyRegressor(adamw), fp16()
    before = weights_of(model)
    with pytest.raises(IncompatiblePrecisionError, match=rf"scaler +{change.__name__}") as caught:
        resume(path, plugin, model)
    assert "let the loss scale start anew: allow=['scaler']" in str(caught.value)
    assert same(weights_of(model), before) and plugin.applied_steps == 0


@pytest.mark.parametrize("change", [empty, missing])
def test_an_explicit_reset_goes_on_with_a_new_scale_and_all_else_of_the_run(tmp_path: Path, change: Any) -> None:
    path = saved_with(tmp_path / "run.ckpt", fp16(), change)
    model, plugin = TinyRegressor(adamw), fp16(allow=["scaler"])
    with pytest.warns(UserWarning, match=r"starts at 1024"):
        resume(path, plugin, model)
    assert len(model.losses) == BATCHES and all(map(math.isfinite, model.losses))
    assert plugin.applied_steps == 2 * BATCHES
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 2048.0  # 1024, and one growth since


def test_the_empty_state_in_a_file_of_stock_lightning_is_named_as_such(tmp_path: Path) -> None:
    path = saved_with(tmp_path / "run.ckpt", stock_fp16(), lambda checkpoint: checkpoint["MixedPrecision"].clear())
    with pytest.raises(IncompatiblePrecisionError, match=r"scaler +empty") as caught:
        resume(path, fp16(), TinyRegressor(adamw))
    assert "allow=['scaler']" in str(caught.value)


def test_a_file_of_stock_lightning_without_any_is_refused_and_can_start_anew(tmp_path: Path) -> None:
    path = saved_with(tmp_path / "run.ckpt", stock_fp16(), lambda checkpoint: checkpoint.pop("MixedPrecision"))
    with pytest.raises(IncompatiblePrecisionError, match="a loss scale that this checkpoint does not have") as caught:
        resume(path, fp16(), TinyRegressor(adamw))
    assert "not recorded" in str(caught.value) and "allow=['precision']" in str(caught.value)
    model, plugin = TinyRegressor(adamw), fp16(allow=["precision"])
    with pytest.warns(UserWarning, match="the loss scale starts at 1024"):
        resume(path, plugin, model)
    assert len(model.losses) == BATCHES and all(map(math.isfinite, model.losses))


def test_stock_stops_at_it_with_the_weights_already_replaced(tmp_path: Path) -> None:
    path = saved_with(tmp_path / "run.ckpt", stock_fp16(), lambda checkpoint: checkpoint["MixedPrecision"].clear())
    model = TinyRegressor(adamw)
    before = weights_of(model)
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        resume(path, stock_fp16(), model)  # type: ignore[arg-type]
    assert not same(weights_of(model), before)
