"""Sidecars: written whole, beside every checkpoint, gone with it, and believed only where they belong to it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_amp_plus import AmpPrecision
from lightning_amp_plus.callbacks.checkpoint import PrecisionCheckpoint
from lightning_amp_plus.checkpoint import sidecar
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, TENSOR_PARTS
from lightning_amp_plus.checkpoint.saved import saved_precision
from lightning_amp_plus.checkpoint.sidecar import remove_sidecar, sidecar_of, write_sidecar
from lightning_amp_plus.errors import IncompatiblePrecisionError
from tests.support.manifests import document, manifest
from tests.support.models import TinyRegressor, sgd, sgd_momentum
from tests.support.refusals import assert_refused, resume, rows_of, save_run
from tests.support.training import PLAIN_TYPES_ONLY, amp_fp16, loader, make_trainer, regression_batches

SUFFIX = ".precision.json"
ROOT = Path(__file__).resolve().parents[2]


class Falling(TinyRegressor):
    """Logs a number for each epoch that ModelCheckpoint may watch."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__(sgd)
        self.scores = scores

    def on_train_epoch_end(self) -> None:
        self.log("score", self.scores[self.current_epoch])


def trainer_with(*plugins: Any, **arguments: Any) -> L.Trainer:
    """As ``make_trainer``, with other plugins beside the precision."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return L.Trainer(plugins=[amp_fp16(), *plugins], **{**quiet, **arguments})


def fit(*callbacks: Any, epochs: int = 1, model: Any = None, plugins: Any = (), **arguments: Any) -> L.Trainer:
    """Trains over four batches an epoch, PrecisionCheckpoint first."""
    trainer = trainer_with(
        *plugins,
        callbacks=[PrecisionCheckpoint(), *callbacks],
        max_epochs=epochs,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        **arguments,
    )
    trainer.fit(model or TinyRegressor(sgd), loader(regression_batches(4)))
    return trainer


def save(path: Path, **arguments: Any) -> L.Trainer:
    trainer = fit(**arguments)
    trainer.save_checkpoint(path)
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def paired(*checkpoints: str) -> list[str]:
    return sorted([*checkpoints, *(f"{name}{SUFFIX}" for name in checkpoints)])


def id_in(path: Path) -> str:
    return str(torch.load(path, weights_only=True)[CHECKPOINT_KEY]["save_id"])


def id_beside(path: Path) -> str:
    return str(json.loads(Path(f"{path}{SUFFIX}").read_text())["save_id"])


def clean(path: Any) -> None:
    """The sidecar of ``path`` is there and belongs to it."""
    found = saved_precision(path)
    assert (found.source, found.notes) == ("checkpoint", ())


# ---------------------------------------------------------------- what a run leaves


def test_every_checkpoint_of_a_run_has_one_of_its_own(tmp_path: Path) -> None:
    fit(ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}"), epochs=3)
    assert names(tmp_path) == paired("epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt")
    for path in tmp_path.glob("*.ckpt"):
        assert id_in(path) == id_beside(path)
        clean(path)


def test_it_is_the_manifest_of_the_checkpoint_as_json(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    inside = torch.load(tmp_path / "a.ckpt", weights_only=True)[CHECKPOINT_KEY]
    plain = {key: value for key, value in inside.items() if key not in TENSOR_PARTS}
    assert json.loads((tmp_path / f"a.ckpt{SUFFIX}").read_text()) == plain


def test_it_is_removed_with_its_checkpoint(tmp_path: Path) -> None:
    keep_best = ModelCheckpoint(tmp_path, save_top_k=2, monitor="score", filename="{epoch}")
    fit(keep_best, epochs=4, model=Falling([3.0, 1.0, 2.0, 0.5]))
    assert names(tmp_path) == paired("epoch=1.ckpt", "epoch=3.ckpt")


def test_the_last_checkpoint_is_a_save_of_its_own(tmp_path: Path) -> None:
    fit(ModelCheckpoint(tmp_path, save_top_k=1, save_last=True, filename="{epoch}"), epochs=2)
    assert names(tmp_path) == paired("epoch=1.ckpt", "last.ckpt")
    assert id_in(tmp_path / "last.ckpt") == id_beside(tmp_path / "last.ckpt") != id_beside(tmp_path / "epoch=1.ckpt")


def test_a_link_to_the_last_checkpoint_has_the_sidecar_of_its_target(tmp_path: Path) -> None:
    fit(ModelCheckpoint(tmp_path, save_top_k=1, save_last="link", filename="{epoch}"), epochs=3)
    assert names(tmp_path) == sorted([*paired("epoch=2.ckpt"), "last.ckpt"])
    assert (tmp_path / "last.ckpt").is_symlink()
    assert sidecar_of(tmp_path / "last.ckpt") == f"{tmp_path}/epoch=2.ckpt{SUFFIX}"
    clean(tmp_path / "last.ckpt")


def test_removing_a_link_leaves_the_sidecar_of_its_target(tmp_path: Path) -> None:
    trainer = save(tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    trainer.strategy.remove_checkpoint(tmp_path / "last.ckpt")
    assert names(tmp_path) == paired("a.ckpt")


def test_saving_over_a_link_makes_a_checkpoint_with_a_sidecar_of_its_own(tmp_path: Path) -> None:
    trainer = save(tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert names(tmp_path) == paired("a.ckpt", "last.ckpt")
    clean(tmp_path / "a.ckpt")
    clean(tmp_path / "last.ckpt")


def test_a_checkpoint_that_is_written_over_gets_a_new_one(tmp_path: Path) -> None:
    trainer = save(tmp_path / "a.ckpt")
    first = id_beside(tmp_path / "a.ckpt")
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert names(tmp_path) == paired("a.ckpt")
    assert first != id_beside(tmp_path / "a.ckpt") == id_in(tmp_path / "a.ckpt")


def test_a_save_after_the_fit_has_one_too_and_after_a_second_fit_and_a_test(tmp_path: Path) -> None:
    trainer = save(tmp_path / "a.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader(regression_batches(4)))
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    trainer.test(trainer.lightning_module, loader(regression_batches(4)), verbose=False)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    assert names(tmp_path) == paired("a.ckpt", "b.ckpt", "c.ckpt")
    for name in ("a", "b", "c"):
        clean(tmp_path / f"{name}.ckpt")


def test_a_checkpoint_saved_in_a_new_folder_has_one(tmp_path: Path) -> None:
    trainer = fit()
    trainer.save_checkpoint(tmp_path / "new" / "deeper" / "a.ckpt")
    assert names(tmp_path / "new" / "deeper") == paired("a.ckpt")


def test_a_save_on_an_exception_has_one(tmp_path: Path) -> None:
    class Interrupted(TinyRegressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise KeyError("a fault of the user's")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError):
        fit(OnExceptionCheckpoint(tmp_path, "crash"), model=Interrupted(sgd))
    assert names(tmp_path) == paired("crash.ckpt")
    clean(tmp_path / "crash.ckpt")


@pytest.mark.parametrize("flag", [True, False])
def test_sidecars_are_written_unless_switched_off(flag: bool, tmp_path: Path) -> None:
    trainer = make_trainer(amp_fp16(), callbacks=[PrecisionCheckpoint(sidecar=flag)])
    trainer.fit(TinyRegressor(sgd), loader(regression_batches(2)))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert names(tmp_path) == (paired("a.ckpt") if flag else ["a.ckpt"])


def test_an_asynchronous_save_has_one_and_loses_it_with_its_checkpoint(tmp_path: Path) -> None:
    keep_one = ModelCheckpoint(tmp_path, save_top_k=1, monitor="score", filename="{epoch}")
    fit(keep_one, epochs=3, model=Falling([3.0, 2.0, 1.0]), plugins=[AsyncCheckpointIO()])
    assert names(tmp_path) == paired("epoch=2.ckpt")
    clean(tmp_path / "epoch=2.ckpt")


def test_checkpoints_at_a_remote_address_have_sidecars_there(tmp_path: Path) -> None:
    address = f"memory://{uuid.uuid4().hex}"
    filesystem = fsspec.filesystem("memory")
    keep_one = ModelCheckpoint(address, save_top_k=1, monitor="score", filename="{epoch}", save_last=True)
    fit(keep_one, epochs=3, model=Falling([3.0, 1.0, 2.0]))
    listed = sorted(Path(str(name)).name for name in filesystem.ls(address, detail=False))
    assert listed == paired("epoch=1.ckpt", "last.ckpt")
    clean(f"{address}/last.ckpt")
    again = make_trainer(amp_fp16(), max_epochs=4)
    again.fit(TinyRegressor(sgd), loader(regression_batches(4)), ckpt_path=f"{address}/last.ckpt", **PLAIN_TYPES_ONLY)
    assert again.global_step == 16


def test_a_weights_only_checkpoint_has_one_that_says_so(tmp_path: Path) -> None:
    fit(ModelCheckpoint(tmp_path, save_weights_only=True, filename="{epoch}"))
    assert names(tmp_path) == paired("epoch=0.ckpt")
    assert CHECKPOINT_KEY not in torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    found = saved_precision(tmp_path / "epoch=0.ckpt")
    assert (found.source, found.weights_only, found.manifest.weights_only) == ("sidecar", True, True)
    assert found.manifest.precision == "16-mixed"
    assert found.manifest.scaler is not None and found.manifest.progress is not None
    assert found.manifest.progress.global_step == 4
    assert "save_weights_only=True" in found.notes[0]


def test_a_weights_only_checkpoint_cannot_be_fitted_on_but_evaluated(tmp_path: Path) -> None:
    fit().save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    with pytest.raises(IncompatiblePrecisionError, match="save_weights_only=True"):
        make_trainer(amp_fp16()).fit(
            TinyRegressor(sgd), loader(regression_batches(4)), ckpt_path=tmp_path / "a.ckpt", **PLAIN_TYPES_ONLY
        )
    make_trainer(AmpPrecision("bf16-mixed")).test(
        TinyRegressor(sgd),
        loader(regression_batches(4)),
        ckpt_path=tmp_path / "a.ckpt",
        verbose=False,
        **PLAIN_TYPES_ONLY,
    )


# ---------------------------------------------------------------- renamed, copied, stale, edited


@pytest.mark.parametrize("move", [shutil.move, shutil.copy], ids=["renamed", "copied"])
def test_a_checkpoint_that_left_its_sidecar_behind_is_read_by_itself(move: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    move(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    clean(tmp_path / "b.ckpt")
    assert saved_precision(tmp_path / "b.ckpt").manifest.precision == "16-mixed"


def test_a_pair_that_moved_together_still_belongs_together(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    shutil.copytree(tmp_path, tmp_path / "elsewhere")
    clean(tmp_path / "elsewhere" / "a.ckpt")


def test_a_stale_sidecar_is_ignored_and_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "a.ckpt")
    save_run(tmp_path / "b.ckpt", AmpPrecision("bf16-mixed"))
    shutil.copy(tmp_path / f"a.ckpt{SUFFIX}", tmp_path / f"b.ckpt{SUFFIX}")
    found = saved_precision(tmp_path / "b.ckpt")
    assert (found.source, found.manifest.save_id) == ("checkpoint", id_in(tmp_path / "b.ckpt"))
    with caplog.at_level(logging.INFO):
        assert resume(tmp_path / "b.ckpt", AmpPrecision("bf16-mixed")).global_step == 8
    assert f"The sidecar {tmp_path}/b.ckpt{SUFFIX} is stale" in caplog.text
    error = assert_refused(tmp_path / "b.ckpt", amp_fp16())  # whatever the sidecar says
    assert rows_of(error)["precision"] == "refuse"


@pytest.mark.parametrize(
    ("field", "value"),
    [("precision", "bf16-mixed"), ("windows", 99), ("scaler", None), ("colour", "blue"), ("moves", [])],
)
def test_the_same_id_with_other_content_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    torch.save({CHECKPOINT_KEY: document(moves=[{"match": "a", "compute": "fp32"}])}, tmp_path / "a.ckpt")
    edited = {**document(moves=[{"match": "a", "compute": "fp32"}]), field: value}
    (tmp_path / f"a.ckpt{SUFFIX}").write_text(json.dumps(edited))
    with pytest.raises(IncompatiblePrecisionError, match=rf"something else in {field}: "):
        saved_precision(tmp_path / "a.ckpt")


def test_a_refused_sidecar_refuses_the_fit_and_can_be_removed(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    place = tmp_path / f"a.ckpt{SUFFIX}"
    place.write_text(place.read_text().replace("16-mixed", "bf16-mixed"))
    error = assert_refused(tmp_path / "a.ckpt", amp_fp16(), "says something else in precision: ", TinyRegressor(sgd))
    assert str(place) in str(error) and "Remove the sidecar" in str(error)
    place.unlink()
    assert resume(tmp_path / "a.ckpt", amp_fp16(), TinyRegressor(sgd)).global_step == 8


def test_a_damaged_sidecar_is_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "a.ckpt")
    (tmp_path / f"a.ckpt{SUFFIX}").write_text("{")
    with caplog.at_level(logging.INFO):
        assert resume(tmp_path / "a.ckpt", amp_fp16(), TinyRegressor(sgd)).global_step == 8
    assert f"sidecar {tmp_path}" in caplog.text and "cannot be read" in caplog.text


def test_the_sidecar_of_another_save_beside_bare_weights_is_stale(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "global_step": 13}, tmp_path / "a.ckpt")
    write_sidecar(tmp_path / "a.ckpt", manifest(weights_only=True).to_json())  # of step 12
    found = saved_precision(tmp_path / "a.ckpt")
    assert found.source == "checkpoint" and "is stale" in found.notes[0]
    assert found.manifest.precision is None


def test_the_sidecar_of_a_full_checkpoint_beside_bare_weights_is_stale(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "global_step": 12}, tmp_path / "a.ckpt")
    write_sidecar(tmp_path / "a.ckpt", manifest().to_json())
    found = saved_precision(tmp_path / "a.ckpt")
    assert found.source == "checkpoint" and "is stale" in found.notes[0]


@pytest.mark.parametrize("plain", [{}, {"schema_version": 2}, {"comment": "mine"}], ids=str)
def test_a_sidecar_without_an_id_beside_a_checkpoint_of_version_1_is_not_said_to_carry_its_id(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copy(ROOT / "tests" / "data" / "checkpoints" / "ours-1-16-mixed.pt", tmp_path / "a.ckpt")
    (tmp_path / f"a.ckpt{SUFFIX}").write_text(json.dumps(plain))
    found = saved_precision(tmp_path / "a.ckpt")
    assert found.source == "checkpoint" and found.notes


@pytest.mark.parametrize("name", [f"a.ckpt{SUFFIX}.123.tmp", f"a.ckpt{SUFFIX}.part", f".a.ckpt{SUFFIX}"])
def test_temporary_files_are_not_taken_for_sidecars(name: str, tmp_path: Path) -> None:
    torch.save({CHECKPOINT_KEY: document()}, tmp_path / "a.ckpt")
    (tmp_path / name).write_text("{")
    clean(tmp_path / "a.ckpt")


# ---------------------------------------------------------------- written in one move


def test_a_reader_sees_the_old_one_or_the_new_one_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    write_sidecar(path, "old")
    seen: list[tuple[str, str]] = []
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        seen.append((Path(source).read_text(), Path(target).read_text()))
        assert Path(source).parent == Path(target).parent  # else it would be a copy
        replace(source, target)

    monkeypatch.setattr(sidecar.os, "replace", watched)
    write_sidecar(path, "new")
    assert seen == [("new", "old")]
    assert names(tmp_path) == [f"a.ckpt{SUFFIX}"]
    assert Path(sidecar_of(path)).read_text() == "new"


def test_a_write_that_fails_leaves_the_old_one_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sidecar(tmp_path / "a.ckpt", "old")

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(sidecar.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_sidecar(tmp_path / "a.ckpt", "new")
    assert names(tmp_path) == [f"a.ckpt{SUFFIX}"]
    assert Path(sidecar_of(tmp_path / "a.ckpt")).read_text() == "old"


def test_removing_one_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    remove_sidecar(sidecar_of(tmp_path / "a.ckpt"))
    assert names(tmp_path) == []


# One process imports everything and is forked for each place to die at.
KILLED = """
import os, shutil, signal, sys
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_amp_plus.callbacks.checkpoint import PrecisionCheckpoint
from tests.checkpoint.test_sidecar import trainer_with
from tests.support.models import TinyRegressor, sgd_momentum
from tests.support.training import loader, regression_batches

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def half(obj, zip_file, *rest):
    zip_file.write_record("data.pkl", b"half", 4)
    die()

def run(folder, where):
    class Dying(TorchCheckpointIO):
        armed = False

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if self.armed and where == "before the file":
                die()
            super().save_checkpoint(checkpoint, path, storage_options)
            if self.armed and where == "before the sidecar":
                die()

    io = Dying()
    trainer = trainer_with(io, callbacks=[PrecisionCheckpoint()])
    trainer.fit(TinyRegressor(sgd_momentum), loader(regression_batches(4)))
    trainer.save_checkpoint(folder + "/a.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader(regression_batches(4)))
    io.armed = True
    if where == "in torch.save":
        torch.serialization._save = half
    if where == "in the move of the checkpoint":
        shutil.move = os.replace = os.rename = die
    if where == "in the move of the sidecar":
        replace = os.replace
        os.replace = lambda source, target: die() if str(target).endswith(".json") else replace(source, target)
    trainer.save_checkpoint(folder + "/a.ckpt")

for folder, where in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if child == 0:
        try:
            run(folder, where)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    print(where, os.WTERMSIG(status) if os.WIFSIGNALED(status) else "still alive", flush=True)
"""
KILLED_AT = {
    "before the file": 4,
    "in torch.save": 4,
    "in the move of the checkpoint": 4,
    "before the sidecar": 8,
    "in the move of the sidecar": 8,
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs that saved ``a.ckpt`` after one epoch and were killed while they saved over it after two."""
    script = tmp_path_factory.mktemp("script") / "killed.py"
    script.write_text(KILLED)
    folders = {place: tmp_path_factory.mktemp("killed") for place in KILLED_AT}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [str(part) for place, folder in folders.items() for part in (folder, place)]
    done = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, timeout=90
    )
    expected = [f"{place} {int(signal.SIGKILL)}" for place in KILLED_AT]
    assert done.stdout.splitlines() == expected, done.stderr[-3000:]
    return folders


@pytest.mark.parametrize(("place", "step"), KILLED_AT.items())
def test_a_kill_in_mid_save_leaves_something_to_go_on_with(place: str, step: int, killed: dict[str, Path]) -> None:
    path = killed[place] / "a.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == step
    found = saved_precision(path)
    assert found.manifest.progress is not None and found.manifest.progress.global_step == step
    beside = json.loads(Path(sidecar_of(path)).read_text())
    assert beside["progress"]["global_step"] == 4  # whole, and of the first save
    assert bool(found.notes) == (step == 8)
    trainer = make_trainer(amp_fp16(), max_epochs=3, callbacks=[PrecisionCheckpoint()])
    trainer.fit(TinyRegressor(sgd_momentum), loader(regression_batches(4)), ckpt_path=path, **PLAIN_TYPES_ONLY)
    assert trainer.global_step == 12
    trainer.save_checkpoint(path)
    clean(path)


def test_an_asynchronous_save_that_has_not_ended_leaves_a_stale_sidecar_at_worst(tmp_path: Path) -> None:
    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            while not ready:
                time.sleep(0.01)
            super().save_checkpoint(checkpoint, path, storage_options)

    ready = [True]
    trainer = trainer_with(AsyncCheckpointIO(Slow()), callbacks=[PrecisionCheckpoint()])

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                while not (tmp_path / "a.ckpt").exists():
                    time.sleep(0.01)
            if batch_idx == 2:
                ready.clear()
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                found = saved_precision(tmp_path / "a.ckpt")
                steps.append(found.manifest.progress.global_step)  # type: ignore[union-attr]
                stale.append(bool(found.notes))
                ready.append(True)

    steps: list[int] = []
    stale: list[bool] = []
    trainer.callbacks.append(Save())
    trainer.fit(TinyRegressor(sgd), loader(regression_batches(4)))
    assert (steps, stale) == ([2], [True])
    clean(tmp_path / "a.ckpt")


# ---------------------------------------------------------------- the callback itself


@pytest.mark.parametrize("arguments", [{"sidecar": 1}, {"save_window": "yes"}, {"sidecar": None}], ids=str)
def test_a_flag_that_is_none_is_an_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected True or False"):
        PrecisionCheckpoint(**arguments)


def test_a_run_without_our_precision_is_told_what_to_pass(tmp_path: Path) -> None:
    trainer = make_trainer(callbacks=[PrecisionCheckpoint()], precision="bf16-mixed")
    with pytest.raises(Exception, match=r"Pass plugins=\[AmpPrecision"):
        trainer.fit(TinyRegressor(sgd), loader(regression_batches(2)))


def test_evaluation_without_our_precision_is_left_alone() -> None:
    trainer = make_trainer(callbacks=[PrecisionCheckpoint()], precision="bf16-mixed")
    trainer.test(TinyRegressor(sgd), loader(regression_batches(2)), verbose=False)


def test_two_of_them_in_one_trainer_write_the_same(tmp_path: Path) -> None:
    trainer = make_trainer(amp_fp16(), callbacks=[PrecisionCheckpoint(), PrecisionCheckpoint()])
    trainer.fit(TinyRegressor(sgd), loader(regression_batches(2)))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    clean(tmp_path / "a.ckpt")


def test_the_callback_can_be_pickled_and_copied_in_a_fit(tmp_path: Path) -> None:
    import copy
    import pickle

    copies: list[PrecisionCheckpoint] = []

    class Copy(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            ours = next(c for c in trainer.callbacks if isinstance(c, PrecisionCheckpoint))
            copies.extend([pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)])

    trainer = make_trainer(amp_fp16(), callbacks=[PrecisionCheckpoint(save_window=True), Copy()], max_steps=1)
    trainer.fit(TinyRegressor(sgd), loader(regression_batches(2)))
    assert [(c.sidecar, c.save_window) for c in copies] == [(True, True)] * 2
