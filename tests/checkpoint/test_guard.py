"""The guard: how it joins a Trainer, what it costs others, and what stands in where it is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

import lightning_amp_plus
import lightning_amp_plus_guard
from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError
from lightning_amp_plus.callbacks import PrecisionCheckpoint
from lightning_amp_plus.integration.guard import ResumeGuard
from tests.support.ranks import ROOT
from tests.support.refusals import (
    BATCHES,
    AtStart,
    Witness,
    allow_of,
    assert_refused,
    edited,
    listening,
    make_model,
    on_disk,
    plugin_for,
    resume,
    rows_of,
    save_run,
)
from tests.support.training import PLAIN_TYPES_ONLY, loader, make_trainer, regression_batches

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}


def guards(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ResumeGuard)]


def no_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_amp_plus_guard, "callbacks", list)


# ---------------------------------------------------------------- joining


def test_lightnings_own_trainer_has_one_guard() -> None:
    assert len(guards(L.Trainer(plugins=[AmpPrecision("bf16-mixed")], **QUIET))) == 1


@pytest.mark.parametrize("installed", [True, False], ids=["entry point", "no entry point"])
def test_our_trainer_has_one_guard_however_it_got_there(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    if not installed:
        no_entry_point(monkeypatch)
        assert guards(L.Trainer(**QUIET)) == []
    assert len(guards(lightning_amp_plus.Trainer(precision="bf16-mixed", **QUIET))) == 1


@pytest.mark.parametrize("make", [L.Trainer, lightning_amp_plus.Trainer], ids=["lightning's", "ours"])
@pytest.mark.parametrize("installed", [True, False], ids=["entry point", "no entry point"])
@pytest.mark.parametrize("extra", ["none", "PrecisionCheckpoint", "a second guard", "two PrecisionCheckpoints"])
def test_however_many_ask_for_it_a_checkpoint_is_judged_once(
    bf16: Path, monkeypatch: pytest.MonkeyPatch, make: Any, installed: bool, extra: str
) -> None:
    if not installed:
        no_entry_point(monkeypatch)
    callbacks = {
        "none": [],
        "PrecisionCheckpoint": [PrecisionCheckpoint()],
        "a second guard": [ResumeGuard()],
        "two PrecisionCheckpoints": [PrecisionCheckpoint(), PrecisionCheckpoint(sidecar=False)],
    }[extra]
    read = []
    module = sys.modules["lightning_amp_plus.integration.resume"]
    original = module.saved_precision
    monkeypatch.setattr(module, "saved_precision", lambda path: read.append(path) or original(path))
    plugin = plugin_for("16-mixed")
    trainer = make(plugins=[plugin], callbacks=callbacks, **QUIET)
    load = trainer.strategy.load_checkpoint
    for _ in range(2):  # and once more for another fit
        read.clear()
        with pytest.raises(IncompatiblePrecisionError) as caught:
            trainer.fit(make_model(), loader(regression_batches(BATCHES)), ckpt_path=bf16, **PLAIN_TYPES_ONLY)
        guarded = make is lightning_amp_plus.Trainer or installed or extra != "none"
        assert len(read) == (1 if guarded else 0)
        assert allow_of(caught.value) == ["precision"]
        assert trainer.strategy.load_checkpoint == load  # nothing stays wrapped
        assert "load_checkpoint" not in vars(trainer.strategy) and "save_checkpoint" not in vars(trainer)


def test_a_trainer_whose_precision_is_not_ours_resumes_unguarded(tmp_path: Path) -> None:
    path = save_run(tmp_path / "run.ckpt", None)
    model, start = make_model(), []

    class Watching(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            start.append(vars(trainer.strategy).get("load_checkpoint"))

    trainer = resume(path, None, model, callbacks=[Watching()])
    assert len(guards(trainer)) == 1 and start == [None] and len(model.losses) == BATCHES


def test_a_checkpoint_of_ours_still_loads_in_a_trainer_without_the_plugin(bf16: Path) -> None:
    model = make_model()
    resume(bf16, None, model)
    assert len(model.losses) == BATCHES


# ---------------------------------------------------------------- in foreign programs

FOREIGN = """
import json, sys
import lightning.pytorch as L
trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
print(json.dumps({
    "callbacks": [type(c).__name__ for c in trainer.callbacks],
    "asked": "lightning_amp_plus_guard" in sys.modules,
    "imported": [name for name in sys.modules if name.partition(".")[0] == "lightning_amp_plus"],
}))
"""

ALONE = """
import json, sys
before = set(sys.modules)
import lightning_amp_plus_guard
found = lightning_amp_plus_guard.callbacks()
new = {name.partition(".")[0] for name in set(sys.modules) - before} - {"lightning_amp_plus_guard"}
print(json.dumps({"callbacks": found, "foreign": sorted(new - set(sys.stdlib_module_names))}))
"""


def in_a_new_process(script: str) -> tuple[dict[str, Any], str]:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr


def test_a_program_that_never_imported_the_plugin_gets_no_callback_and_no_log_line() -> None:
    found, logged = in_a_new_process(FOREIGN)
    assert found["asked"], "the entry point is not installed in this environment"
    assert found["imported"] == []
    assert "ResumeGuard" not in found["callbacks"]
    assert "lightning_amp_plus" not in logged and "ResumeGuard" not in logged


def test_the_module_of_the_entry_point_imports_the_standard_library_only() -> None:
    found, _ = in_a_new_process(ALONE)
    assert found == {"callbacks": [], "foreign": []}


@pytest.mark.parametrize("error", [ImportError("half installed"), AttributeError("partially initialized module")])
def test_a_failure_of_ours_does_not_break_a_foreign_trainer(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken:
        def find_spec(self, name: str, *args: Any) -> None:
            if name == "lightning_amp_plus.integration.guard":
                raise error

    monkeypatch.delitem(sys.modules, "lightning_amp_plus.integration.guard")
    monkeypatch.delattr(sys.modules["lightning_amp_plus.integration"], "guard")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    trainer = L.Trainer(**QUIET)
    assert "ResumeGuard" not in [type(callback).__name__ for callback in trainer.callbacks]


# ---------------------------------------------------------------- without it


def unguarded(plugin: Any, **arguments: Any) -> L.Trainer:
    trainer = make_trainer(plugin, max_epochs=2, **arguments)
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, ResumeGuard)]  # type: ignore[attr-defined]
    return trainer


def refuse_late(path: Path, plugin: Any, model: Any = None, **arguments: Any) -> IncompatiblePrecisionError:
    trainer, model = unguarded(plugin, **arguments), model or make_model()
    with pytest.raises(IncompatiblePrecisionError) as caught:
        trainer.fit(model, loader(regression_batches(BATCHES)), ckpt_path=path, **PLAIN_TYPES_ONLY)
    assert model.losses == []
    return caught.value


@pytest.mark.parametrize("resumed", ["16-mixed", "32-true", "bf16-true"])
def test_without_the_callback_the_plugin_refuses_before_training(bf16: Path, resumed: str) -> None:
    early = assert_refused(bf16, plugin_for(resumed))
    late = refuse_late(bf16, plugin_for(resumed))
    assert rows_of(late) == rows_of(early) and allow_of(late) == allow_of(early)
    assert str(bf16) in str(late)


def test_without_the_callback_what_fits_goes_on_and_allow_works(bf16: Path) -> None:
    for plugin in (plugin_for("bf16-mixed"), plugin_for("16-mixed", allow=["precision"])):
        start, model = AtStart(), make_model()
        trainer = unguarded(plugin, callbacks=[start])
        with listening() as said:
            trainer.fit(model, loader(regression_batches(BATCHES)), ckpt_path=bf16, **PLAIN_TYPES_ONLY)
        assert start.plugin["applied"] == BATCHES and len(model.losses) == BATCHES
        assert ("precision" in said.converts()) == bool(plugin.allow)


def test_without_the_callback_a_refusal_leaves_scale_and_counts_alone(bf16: Path) -> None:
    witness = Witness()
    refuse_late(bf16, plugin_for("16-mixed"), callbacks=[witness])
    for part in ("scaler", "history", "applied", "randomness", "step"):
        assert witness.after[part] == witness.before[part], part


def test_without_the_callback_a_refused_file_is_not_overwritten_either(tmp_path: Path) -> None:
    path = save_run(tmp_path / "run.ckpt", plugin_for("bf16-mixed"))
    before = on_disk(path)
    refuse_late(
        path, plugin_for("16-mixed"), enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(tmp_path, "run")]
    )
    assert on_disk(path) == before


def test_without_the_callback_a_damaged_manifest_is_refused(bf16: Path, tmp_path: Path) -> None:
    path = edited(bf16, tmp_path / "run.ckpt", lambda checkpoint: checkpoint["lightning_amp_plus"].update(windows=-1))
    assert "windows holds -1" in str(refuse_late(path, plugin_for("bf16-mixed")))


def test_a_state_handed_to_the_plugin_alone_is_judged_too() -> None:
    plugin = plugin_for("16-mixed")
    with pytest.raises(IncompatiblePrecisionError) as caught:
        plugin.load_state_dict(plugin_for("bf16-mixed").state_dict())
    assert allow_of(caught.value) == ["precision"]
    plugin_for("16-mixed", allow=["precision"]).load_state_dict(plugin_for("bf16-mixed").state_dict())
