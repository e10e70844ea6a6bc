"""validate, test and predict with a checkpoint: weights are taken, everything else is left alone and nothing is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, PrecisionPolicy
from lightning_amp_plus.callbacks import PrecisionCheckpoint
from tests.support.faults import INF
from tests.support.refusals import (
    BATCHES,
    INIT,
    KEY,
    AtStart,
    Said,
    assert_refused,
    edited,
    listening,
    make_model,
    on_disk,
    plugin_for,
    plugin_state,
    randomness,
    resume,
    save_run,
)
from tests.support.training import PLAIN_TYPES_ONLY, loader, make_trainer, regression_batches, same, weights

VERBS = ["validate", "test", "predict"]


def evaluate(trainer: Any, verb: str, model: Any, path: Any) -> Said:
    with listening() as said:
        getattr(trainer, verb)(model, loader(regression_batches(2)), ckpt_path=path, **PLAIN_TYPES_ONLY)
    return said


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("saved", "now"),
    [("bf16-mixed", "16-mixed"), ("16-mixed", "32-true"), ("32-true", "bf16-true"), ("16-true", "bf16-mixed")],
)
def test_evaluation_in_another_precision_is_a_note_and_takes_the_weights(
    checkpoints: dict[str, Path], verb: str, saved: str, now: str
) -> None:
    path, model, plugin = checkpoints[saved], make_model(), plugin_for(now)
    file, state = on_disk(path), plugin_state(plugin)
    said = evaluate(make_trainer(plugin), verb, model, path)
    note = said.notes()
    assert "precision" in note and saved in note and now in note and str(path) in note
    assert "refuse" not in note.partition("\nprecision:")[0]
    assert "Evaluation goes on" in note
    assert said.converts() == ""
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(now, torch.float32)
    wanted = torch.load(path, weights_only=True)["state_dict"]
    assert same(weights(model), {name: value.to(dtype) for name, value in wanted.items()})
    assert plugin_state(plugin) == state and on_disk(path) == file


@pytest.mark.parametrize("verb", VERBS)
def test_evaluation_in_the_same_precision_says_nothing(checkpoints: dict[str, Path], verb: str) -> None:
    said = evaluate(make_trainer(plugin_for("16-mixed")), verb, make_model(), checkpoints["16-mixed"])
    assert said.notes() == said.converts() == ""
    assert said.having("Loaded model weights")


@pytest.mark.parametrize("verb", VERBS)
def test_fit_then_evaluation_of_an_older_checkpoint_then_fit_leaves_the_plugin_as_if_never_asked(
    tmp_path: Path, verb: str
) -> None:
    older = tmp_path / "older.ckpt"
    save_run(older, plugin_for("16-mixed"), make_model(faults={1: INF}))
    old = torch.load(older, weights_only=True)[KEY]
    model, plugin = make_model(faults={2: INF, 3: INF}), plugin_for("16-mixed")
    trainer = make_trainer(plugin, max_epochs=2)
    trainer.fit(model, loader(regression_batches(BATCHES)))
    plugin.set_route("second", "fp32")
    state, moves = plugin_state(plugin), plugin.state_dict()["moves"]
    assert state["scaler"] != old["scaler"] and state["history"] != old["history"]

    torch.manual_seed(11)
    evaluate(trainer, verb, model, None)
    without = randomness()
    torch.manual_seed(11)
    evaluate(trainer, verb, model, older)
    assert randomness() == without  # what the loader draws is all that is drawn
    assert same(weights(model), torch.load(older, weights_only=True)["state_dict"])
    assert plugin_state(plugin) == state and plugin.state_dict()["moves"] == moves

    trainer.fit_loop.max_epochs = 3
    start = AtStart()
    trainer.callbacks.append(start)
    trainer.fit(model, loader(regression_batches(BATCHES)))
    assert start.plugin == state
    assert start.routes["second"] == "fp32"
    assert plugin.applied_steps == state["applied"] + BATCHES


def test_fit_test_fit_goes_on_exactly_as_without_the_test(tmp_path: Path) -> None:
    """The weights are the user's to put back; with them, scale, history, counters and losses are those of one run."""
    runs = []
    for tested in (False, True):
        path = tmp_path / f"{tested}.ckpt"
        model, plugin = make_model(faults={1: INF}), plugin_for("16-mixed")
        trainer = make_trainer(plugin, max_epochs=1)
        trainer.fit(model, loader(regression_batches(BATCHES)))
        kept = weights(model)
        if tested:
            older = save_run(path, plugin_for("bf16-mixed"))
            evaluate(trainer, "test", model, older)
            model.load_state_dict(kept)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader(regression_batches(BATCHES)))
        runs.append((model.losses, plugin_state(plugin), weights(model)))
    assert runs[0][:2] == runs[1][:2] and same(runs[0][2], runs[1][2])


def test_masters_follow_the_weights_that_an_evaluation_loaded(tmp_path: Path) -> None:
    def masters() -> AmpPrecision:
        return AmpPrecision(PrecisionPolicy(compute="bf16", params="bf16", master_weights=True))

    older = save_run(tmp_path / "older.ckpt", masters())
    model, plugin = make_model(), masters()
    trainer = make_trainer(plugin, max_epochs=3)
    trainer.fit(model, loader(regression_batches(BATCHES)))
    evaluate(trainer, "test", model, older)
    state = plugin.state_dict()["master_weights"]
    loaded = torch.load(older, weights_only=True)["state_dict"]
    trainer.fit_loop.max_epochs = 4
    start = AtStart()
    trainer.callbacks.append(start)
    trainer.fit(model, loader(regression_batches(BATCHES)))
    assert same(start.weights, loaded)
    assert state.keys() == loaded.keys()


@pytest.mark.parametrize("verb", VERBS)
def test_best_and_last_of_a_run_evaluate_without_a_word(tmp_path: Path, verb: str) -> None:
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    trainer = make_trainer(plugin_for("16-mixed"), enable_checkpointing=True, callbacks=[keeper])
    model = make_model()
    trainer.fit(model, loader(regression_batches(BATCHES)))
    for which in ("best", "last"):
        assert evaluate(trainer, verb, model, which).notes() == ""


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda c: c[KEY].update(scaler={}), "scaler"),
        (lambda c: c[KEY].update(scaler=None), "scaler"),
        (lambda c: c[KEY]["scaler"].update(scale=0.0), "scaler"),
    ],
)
def test_a_broken_scaler_state_does_not_stop_an_evaluation(
    checkpoints: dict[str, Path], tmp_path: Path, change: Any, part: str
) -> None:
    path = edited(checkpoints["16-mixed"], tmp_path / "run.ckpt", change)
    plugin, model = plugin_for("16-mixed"), make_model()
    evaluate(make_trainer(plugin), "test", model, path)
    assert plugin.scaler is not None and plugin.scaler.get_scale() == INIT
    assert same(weights(model), torch.load(path, weights_only=True)["state_dict"])


@pytest.mark.parametrize("verb", VERBS)
def test_a_moved_module_that_the_model_does_not_have_does_not_stop_an_evaluation(
    checkpoints: dict[str, Path], tmp_path: Path, verb: str
) -> None:
    move = {"match": "teacher", "compute": "fp32", "reason": "it overflowed", "step": 2}
    path = edited(checkpoints["bf16-mixed"], tmp_path / "run.ckpt", lambda c: c[KEY].update(moves=[move]))
    model = make_model()
    evaluate(make_trainer(plugin_for("bf16-mixed")), verb, model, path)
    assert same(weights(model), torch.load(path, weights_only=True)["state_dict"])
    assert_refused(path, plugin_for("bf16-mixed"), "teacher")


def test_weights_that_are_not_finite_can_be_evaluated_to_look_at_them(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = edited(
        checkpoints["bf16-mixed"], tmp_path / "run.ckpt", lambda c: c["state_dict"]["first.bias"].fill_(float("nan"))
    )
    model = make_model()
    evaluate(make_trainer(plugin_for("bf16-mixed")), "test", model, path)
    assert torch.isnan(model.first.bias).all()


# ---------------------------------------------------------------- save_weights_only


def weights_only(path: Path, precision: str, *callbacks: Any) -> Path:
    trainer = make_trainer(plugin_for(precision), callbacks=list(callbacks))
    trainer.fit(make_model(), loader(regression_batches(BATCHES)))
    trainer.save_checkpoint(path, weights_only=True)
    assert KEY not in torch.load(path, weights_only=True)
    return path


@pytest.mark.parametrize("verb", VERBS)
def test_evaluation_says_that_a_checkpoint_of_weights_alone_holds_no_precision(tmp_path: Path, verb: str) -> None:
    path = weights_only(tmp_path / "run.ckpt", "bf16-mixed")
    model = make_model()
    said = evaluate(make_trainer(plugin_for("16-mixed")), verb, model, path)
    assert said.having(str(path), "no precision state", "save_weights_only=True")
    assert same(weights(model), torch.load(path, weights_only=True)["state_dict"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("sidecar", [False, True])
def test_a_fit_from_weights_alone_is_refused_readably(tmp_path: Path, precision: str, sidecar: bool) -> None:
    path = weights_only(tmp_path / "run.ckpt", "bf16-mixed", *([PrecisionCheckpoint()] if sidecar else []))
    error = assert_refused(path, plugin_for(precision), "save_weights_only=True")
    assert "neither optimizer state nor the state of the precision" in str(error)
    assert "state_dict" in str(error) and "new fit" in str(error)


def test_a_sidecar_speaks_for_weights_alone_in_evaluation(tmp_path: Path) -> None:
    path = weights_only(tmp_path / "run.ckpt", "bf16-mixed", PrecisionCheckpoint())
    assert (tmp_path / "run.ckpt.precision.json").exists()
    said = evaluate(make_trainer(plugin_for("16-mixed")), "test", make_model(), path)
    assert said.having("its sidecar does")
    assert "bf16-mixed" in said.notes() and "16-mixed" in said.notes()
    said = evaluate(make_trainer(plugin_for("bf16-mixed")), "test", make_model(), path)
    assert said.notes() == ""


def test_a_model_checkpoint_of_weights_alone_is_refused_and_said_too(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, "kept", save_weights_only=True)
    trainer = make_trainer(plugin_for("16-mixed"), enable_checkpointing=True, callbacks=[keeper])
    trainer.fit(make_model(), loader(regression_batches(BATCHES)))
    assert_refused(tmp_path / "kept.ckpt", plugin_for("16-mixed"), "save_weights_only=True")
    said = evaluate(trainer, "test", make_model(), "best")
    assert said.having("no precision state")


def test_the_weights_can_still_be_loaded_by_hand_as_the_refusal_says(tmp_path: Path) -> None:
    path = weights_only(tmp_path / "run.ckpt", "bf16-mixed")
    model = make_model()
    with pytest.raises(IncompatiblePrecisionError):
        resume(path, plugin_for("16-mixed"), model)
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    make_trainer(plugin_for("16-mixed")).fit(model, loader(regression_batches(BATCHES)))
    assert len(model.losses) == BATCHES
