"""What a checkpoint holds beside weights that train, and how it changes hands between layouts."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError
from lightning_amp_plus.callbacks import PrecisionCheckpoint
from lightning_amp_plus.checkpoint.saved import saved_precision
from tests.support.models import TinyRegressor, adamw, sgd_momentum
from tests.support.training import ResumableLoader, make_trainer, regression_batches, same, weights


def fit(
    model: L.LightningModule, plugin: AmpPrecision, steps: int, path: Path | None = None, **arguments: Any
) -> L.Trainer:
    trainer = make_trainer(plugin, max_epochs=-1, max_steps=steps, **arguments)
    trainer.fit(model, ResumableLoader(regression_batches()), ckpt_path=path)
    return trainer


class Masked(TinyRegressor):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), value).triu(1))


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_buffers_may_hold_what_is_not_finite(tmp_path: Path, value: float) -> None:
    """A causal mask is full of -inf, and healthy."""
    fit(Masked(value), AmpPrecision("bf16-mixed"), 2).save_checkpoint(tmp_path / "a.ckpt")
    fit(Masked(value), AmpPrecision("bf16-mixed"), 4, tmp_path / "a.ckpt")


def test_another_optimizer_is_refused_before_its_state_is_restored(tmp_path: Path) -> None:
    fit(TinyRegressor(adamw), AmpPrecision("bf16-mixed"), 2).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(IncompatiblePrecisionError, match=r"(?s)optimizer +AdamW +SGD +refuse.*allow=\['optimizer'\]"):
        fit(TinyRegressor(sgd_momentum), AmpPrecision("bf16-mixed"), 4, tmp_path / "a.ckpt")


class Sparse(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(8, 4, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.embedding(torch.arange(4)).float().square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveIn(L.Callback):
    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


def test_sparse_gradients_of_an_open_window_are_lost_and_said_to_be(tmp_path: Path) -> None:
    callbacks = [PrecisionCheckpoint(save_window=True), SaveIn(tmp_path / "a.ckpt", 0)]
    with pytest.warns(UserWarning, match="in mid-window"):
        fit(Sparse(), AmpPrecision("bf16-mixed"), 2, accumulate_grad_batches=2, callbacks=callbacks)
    window = saved_precision(tmp_path / "a.ckpt").manifest.window
    assert window is not None and window.gradients == "lost"
    with pytest.warns(UserWarning, match="gradients lost"):
        fit(Sparse(), AmpPrecision("bf16-mixed"), 3, tmp_path / "a.ckpt", accumulate_grad_batches=2)


def test_a_file_that_cannot_be_restored_is_not_overwritten_by_the_model_that_it_did_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "on_exception.ckpt"
    fit(TinyRegressor(), AmpPrecision("bf16-mixed"), 2).save_checkpoint(path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="mask"):
        fit(
            Masked(0.0),
            AmpPrecision("bf16-mixed"),
            4,
            path,
            callbacks=[L.callbacks.OnExceptionCheckpoint(tmp_path)],
            enable_checkpointing=True,
        )
    assert path.read_bytes() == before


def test_sync_each_microbatch_is_a_flag() -> None:
    with pytest.raises(ValueError, match="sync_each_microbatch=1: expected True or False"):
        AmpPrecision("bf16-mixed", sync_each_microbatch=1)  # type: ignore[arg-type]


def test_a_trainer_without_the_callback_stores_no_gradients(tmp_path: Path) -> None:
    plugin = AmpPrecision("bf16-mixed")
    fit(TinyRegressor(), plugin, 1, accumulate_grad_batches=2, callbacks=[PrecisionCheckpoint(save_window=True)])
    fit(TinyRegressor(), plugin, 2, accumulate_grad_batches=2, callbacks=[SaveIn(tmp_path / "a.ckpt", 0)])
    window = saved_precision(tmp_path / "a.ckpt").manifest.window
    assert window is not None and window.gradients == "lost"


def test_a_plugin_resumes_a_second_time_as_it_did_the_first(tmp_path: Path) -> None:
    fit(TinyRegressor(adamw), AmpPrecision("bf16-mixed"), 3).save_checkpoint(tmp_path / "a.ckpt")
    plugin, found = AmpPrecision("bf16-mixed"), []
    for _ in range(2):
        model = TinyRegressor(adamw)
        fit(model, plugin, 6, tmp_path / "a.ckpt")
        found.append(weights(model))
    assert same(*found) and plugin.applied_steps == 6


# -------------------------------------------------------------------- formats, moments, sidecars


class Gzipped(TorchCheckpointIO):
    """Writes what nobody but itself can read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        Path(path).write_bytes(gzip.compress(buffer.getvalue(), 1))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return torch.load(io.BytesIO(gzip.decompress(Path(path).read_bytes())), weights_only=True)  # type: ignore[no-any-return]


def with_gzip(model: L.LightningModule, precision: str, steps: int, path: Path | None = None) -> L.Trainer:
    trainer = L.Trainer(
        plugins=[AmpPrecision(precision), Gzipped()], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=-1, max_steps=steps,
    )  # fmt: skip
    trainer.fit(model, ResumableLoader(regression_batches()), ckpt_path=path)
    return trainer


def test_a_checkpoint_in_a_format_of_its_own_is_judged_as_loaded_and_before_it_is_restored(tmp_path: Path) -> None:
    whole = TinyRegressor(adamw)
    with_gzip(whole, "bf16-mixed", 6)
    with_gzip(TinyRegressor(adamw), "bf16-mixed", 3).save_checkpoint(tmp_path / "a.ckpt")
    model = TinyRegressor(adamw)
    with_gzip(model, "bf16-mixed", 6, tmp_path / "a.ckpt")
    assert same(weights(model), weights(whole))
    fresh = TinyRegressor(adamw)
    before = weights(fresh)
    with pytest.raises(IncompatiblePrecisionError, match=r"(?s)bf16-mixed +16-mixed +refuse.*no file was changed"):
        with_gzip(fresh, "16-mixed", 6, tmp_path / "a.ckpt")
    assert same(weights(fresh), before)


def test_a_sidecar_that_cannot_be_written_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt.precision.json").mkdir()
    model = TinyRegressor()
    with pytest.warns(UserWarning, match=r"sidecar of .*a\.ckpt could not be written.*sidecar=False"):
        fit(model, AmpPrecision("bf16-mixed"), 3, callbacks=[PrecisionCheckpoint(), SaveIn(tmp_path / "a.ckpt", 1)])
    assert len(model.losses) == 3 and (tmp_path / "a.ckpt").exists()


class SaveAt(L.Callback):
    def __init__(self, path: Path, hook: str) -> None:
        self.path = path
        setattr(self, hook, lambda trainer, *_: trainer.global_step < 6 and trainer.save_checkpoint(self.path))


@pytest.mark.parametrize(
    ("hook", "moment"),
    [("on_train_batch_start", "batch"), ("on_train_epoch_start", "epoch_start"), ("on_train_batch_end", "clean")],
)
def test_a_moment_from_which_lightning_does_not_go_on_is_recorded(tmp_path: Path, hook: str, moment: str) -> None:
    model, path = TinyRegressor(), tmp_path / "a.ckpt"
    trainer = make_trainer(AmpPrecision("bf16-mixed"), max_epochs=2, callbacks=[SaveAt(path, hook)])
    trainer.fit(model, ResumableLoader(regression_batches(4)))
    data = saved_precision(path).manifest.data
    assert data is not None and data.moment == moment


def test_a_save_after_a_fit_that_stopped_in_mid_epoch_says_that_its_rest_is_left_out(tmp_path: Path) -> None:
    fit(TinyRegressor(), AmpPrecision("bf16-mixed"), 3).save_checkpoint(tmp_path / "a.ckpt")
    data = saved_precision(tmp_path / "a.ckpt").manifest.data
    assert data is not None and (data.moment, data.mid_epoch) == ("stopped", True)


def test_a_resume_with_nothing_left_to_train_keeps_the_random_states(tmp_path: Path) -> None:
    torch.manual_seed(5)
    fit(TinyRegressor(), AmpPrecision("bf16-mixed"), 3).save_checkpoint(tmp_path / "a.ckpt")
    torch.manual_seed(6)
    fit(TinyRegressor(), AmpPrecision("bf16-mixed"), 3, tmp_path / "a.ckpt").save_checkpoint(tmp_path / "b.ckpt")
    states = [torch.load(tmp_path / name)["lightning_amp_plus"]["random_state"][0] for name in ("a.ckpt", "b.ckpt")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_model_with_lazy_parameters_resumes(tmp_path: Path) -> None:
    class Lazy(TinyRegressor):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LazyLinear(8)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.second.parameters(), lr=0.1)

    fit(Lazy(), AmpPrecision("bf16-mixed"), 2).save_checkpoint(tmp_path / "a.ckpt")
    model = Lazy()
    fit(model, AmpPrecision("bf16-mixed"), 4, tmp_path / "a.ckpt")
    assert len(model.losses) == 2
