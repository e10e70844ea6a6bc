"""Checkpoints whose precision state is missing, impossible or damaged: a named error before anything changes."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, PrecisionPolicy
from lightning_amp_plus.callbacks import PrecisionCheckpoint
from lightning_amp_plus.checkpoint.saved import saved_precision
from tests.support.manifests import IMPOSSIBLE_SCALERS, changed
from tests.support.refusals import (
    BATCHES,
    INIT,
    KEY,
    AtStart,
    Witness,
    allow_of,
    assert_refused,
    edited,
    listening,
    make_model,
    on_disk,
    plugin_for,
    plugin_state,
    resume,
    rows_of,
    save_run,
)
from tests.support.training import PLAIN_TYPES_ONLY, fit, loader, regression_batches, stock_fp16

NAN, INF = float("nan"), float("inf")


# ---------------------------------------------------------------- the state of the loss scale


def with_scaler(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy whose scaler state ``change`` worked on, or is what it returned."""

    def edit(checkpoint: dict[str, Any]) -> None:
        scaler = checkpoint[KEY]["scaler"]
        result = change(scaler)
        checkpoint[KEY]["scaler"] = scaler if result is None else result

    return edited(source, target, edit)


def broken(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda scaler: changed(scaler, IMPOSSIBLE_SCALERS[name][0])


@pytest.mark.parametrize("name", IMPOSSIBLE_SCALERS)
def test_an_impossible_scaler_state_is_refused_by_its_field_and_value(fp16: Path, tmp_path: Path, name: str) -> None:
    path = with_scaler(fp16, tmp_path / "run.ckpt", broken(name))
    error = assert_refused(path, plugin_for("16-mixed"))
    assert rows_of(error)["scaler"] == "refuse" and allow_of(error) == ["scaler"]
    [finding] = [f for f in error.findings if f.field == "scaler"]
    assert finding.saved == IMPOSSIBLE_SCALERS[name][1]


SOME_BROKEN = ["neither", "no tracker", "zero", "NaN", "text", "backoff above", "tracker negative", "hysteresis half"]


@pytest.mark.parametrize("name", SOME_BROKEN)
def test_an_impossible_scaler_state_starts_anew_where_the_user_asked_for_it(
    fp16: Path, tmp_path: Path, name: str
) -> None:
    path = with_scaler(fp16, tmp_path / "run.ckpt", broken(name))
    start, plugin, model = AtStart(), plugin_for("16-mixed", allow=["scaler"]), make_model()
    with listening() as said:
        resume(path, plugin, model, callbacks=[start])
    assert f"starts at {INIT:g}" in said.converts() and "Allowed by allow=['scaler']" in said.converts()
    assert start.scale == INIT
    assert start.plugin["scaler"]["_growth_tracker"] == 0
    assert start.plugin["applied"] == BATCHES  # only the scale is new
    assert len(model.losses) == BATCHES and all(map(math.isfinite, model.losses))


def test_a_scaler_state_that_is_not_there_is_refused_and_can_start_anew(fp16: Path, tmp_path: Path) -> None:
    def drop(checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY]["scaler"] = None

    path = edited(fp16, tmp_path / "run.ckpt", drop)
    error = assert_refused(path, plugin_for("16-mixed"), "not in the checkpoint")
    assert allow_of(error) == ["scaler"]
    start = AtStart()
    resume(path, plugin_for("16-mixed", allow=["scaler"]), callbacks=[start])
    assert start.scale == INIT


def test_starting_anew_means_the_configured_scale_also_for_a_plugin_that_has_trained(
    fp16: Path, tmp_path: Path
) -> None:
    path = with_scaler(fp16, tmp_path / "run.ckpt", broken("zero"))
    plugin, model, start = plugin_for("16-mixed", allow=["scaler"]), make_model(), AtStart()
    trainer = fit(model, plugin, regression_batches(BATCHES), callbacks=[start])
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 2 * INIT
    trainer.fit_loop.max_epochs = 2
    with listening() as said:
        trainer.fit(model, loader(regression_batches(BATCHES)), ckpt_path=path, **PLAIN_TYPES_ONLY)
    assert f"starts at {INIT:g}" in said.converts()
    assert start.scale == INIT and start.plugin["scaler"]["_growth_tracker"] == 0


@pytest.mark.parametrize("value", ["GradScaler()", 1024.0, [1024.0], ("scale", 1024.0)], ids=repr)
def test_a_scaler_state_of_another_class_is_refused_naming_the_field_and_what_it_holds(
    fp16: Path, tmp_path: Path, value: Any
) -> None:
    path = with_scaler(fp16, tmp_path / "run.ckpt", lambda scaler: value)
    error = assert_refused(path, plugin_for("16-mixed"))
    assert "scaler holds" in str(error) and repr(value)[:10] in str(error)


def test_a_scaler_state_that_is_a_tensor_is_refused(fp16: Path, tmp_path: Path) -> None:
    path = with_scaler(fp16, tmp_path / "run.ckpt", lambda scaler: {**scaler, "scale": torch.tensor(1024.0)})
    error = assert_refused(path, plugin_for("16-mixed"), "scale=")
    assert allow_of(error) == ["scaler"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("stock") / "run.ckpt", stock_fp16(INIT))


@pytest.mark.parametrize("name", SOME_BROKEN)
@pytest.mark.parametrize("key", ["MixedPrecision", "native_amp_scaling_state"])
def test_an_impossible_scaler_state_in_a_file_of_stock_lightning_is_refused_by_its_field_too(
    stock: Path, tmp_path: Path, key: str, name: str
) -> None:
    def edit(checkpoint: dict[str, Any]) -> None:
        checkpoint[key] = broken(name)(checkpoint.pop("MixedPrecision"))

    path = edited(stock, tmp_path / "run.ckpt", edit)
    error = assert_refused(path, plugin_for("16-mixed"))
    assert rows_of(error)["scaler"] == "refuse" and IMPOSSIBLE_SCALERS[name][1] in str(error)


def test_the_state_of_a_scale_that_this_run_does_not_have_is_not_judged(fp16: Path, tmp_path: Path) -> None:
    path = with_scaler(fp16, tmp_path / "run.ckpt", broken("NaN"))
    model = make_model()
    resume(path, plugin_for("bf16-mixed", allow=["precision"]), model)
    assert len(model.losses) == BATCHES


@pytest.mark.parametrize("name", SOME_BROKEN)
def test_load_state_dict_of_the_plugin_alone_refuses_it_too_and_stays_as_it_was(fp16: Path, name: str) -> None:
    state = torch.load(fp16, weights_only=True)[KEY]
    state["scaler"] = broken(name)(state["scaler"])
    plugin = plugin_for("16-mixed")
    before = plugin_state(plugin)
    with pytest.raises(IncompatiblePrecisionError, match="scaler"):
        plugin.load_state_dict(state)
    assert plugin_state(plugin) == before


# ---------------------------------------------------------------- weights and moments


def spoiled(source: Path, target: Path, value: float, *where: Any) -> Path:
    def edit(checkpoint: dict[str, Any]) -> None:
        found: Any = checkpoint
        for step in where:
            found = found[step]
        found.view(-1)[1] = value

    return edited(source, target, edit)


WEIGHT = ("state_dict", "second.weight")
MOMENT = ("optimizer_states", 0, "state", 2, "exp_avg_sq")


@pytest.mark.parametrize("where", [WEIGHT, MOMENT], ids=["weight", "moment"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-true", "32-true"])
def test_weights_and_moments_that_are_not_finite_are_refused_by_name(
    checkpoints: dict[str, Path], tmp_path: Path, precision: str, value: float, where: tuple[Any, ...]
) -> None:
    path = spoiled(checkpoints[precision], tmp_path / "run.ckpt", value, *where)
    error = assert_refused(path, plugin_for(precision), "NaN or inf")
    assert ".".join(map(str, where)) in str(error).replace("\n", "").replace(" ", "")
    assert rows_of(error) == {"weights": "refuse"} and allow_of(error) == ["weights"]


def test_the_check_of_weights_can_be_waived_or_left_out(bf16: Path, tmp_path: Path) -> None:
    path = spoiled(bf16, tmp_path / "run.ckpt", NAN, *MOMENT)
    start = AtStart()
    with listening() as said:
        resume(path, plugin_for("bf16-mixed", allow=["weights"]), callbacks=[start], max_steps=5)
    assert "weights" in said.converts() and start.step == BATCHES
    start = AtStart()
    with listening() as said:
        resume(path, plugin_for("bf16-mixed", check_restored_weights=False), callbacks=[start], max_steps=5)
    assert said.converts() == "" and start.step == BATCHES


def test_large_finite_weights_are_no_reason_to_refuse(bf16: Path, tmp_path: Path) -> None:
    path = spoiled(bf16, tmp_path / "run.ckpt", 3e38, "optimizer_states", 0, "state", 2, "exp_avg_sq")
    start = AtStart()
    resume(path, plugin_for("bf16-mixed"), callbacks=[start])
    assert max(float(moment.max()) for moment in start.moments) > 2e38


# ---------------------------------------------------------------- what lies beside the manifest


def masters() -> AmpPrecision:
    return AmpPrecision(PrecisionPolicy(compute="bf16", params="bf16", master_weights=True))


@pytest.fixture(scope="module")
def mastered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("masters") / "run.ckpt", masters())


def test_master_weights_that_are_not_finite_are_refused_by_name(mastered: Path, tmp_path: Path) -> None:
    path = spoiled(mastered, tmp_path / "run.ckpt", NAN, KEY, "master_weights", "second.weight")
    assert_refused(path, masters(), "second.weight")


MASTERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda ours: ours.pop("master_weights"),
    "partial": lambda ours: ours["master_weights"].pop("second.weight"),
    "another shape": lambda ours: ours["master_weights"].update({"second.weight": torch.zeros(3)}),
    "no tensors": lambda ours: ours.update(master_weights=[1, 2, 3]),
}


@pytest.mark.parametrize("name", MASTERS)
def test_damaged_master_weights_are_refused_before_anything_changes(mastered: Path, tmp_path: Path, name: str) -> None:
    path = edited(mastered, tmp_path / "run.ckpt", lambda checkpoint: MASTERS[name](checkpoint[KEY]))
    assert_refused(path, masters(), "(?i)master.weight")


def cut(checkpoint: dict[str, Any]) -> None:
    checkpoint[KEY]["random_state"][0]["torch"] = checkpoint[KEY]["random_state"][0]["torch"][:100].clone()


RANDOM: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cut": cut,
    "floats": lambda c: c[KEY]["random_state"][0].update(numpy=torch.zeros(7)),
    "no list": lambda c: c[KEY].update(random_state={"torch": torch.zeros(7)}),
    "empty": lambda c: c[KEY].update(random_state=[]),
    "no mapping": lambda c: c[KEY].update(random_state=[3]),
}


@pytest.mark.parametrize("name", RANDOM)
def test_damaged_random_states_are_refused_before_anything_changes(fp16: Path, tmp_path: Path, name: str) -> None:
    path = edited(fp16, tmp_path / "run.ckpt", RANDOM[name])
    assert_refused(path, plugin_for("16-mixed"), "random state")


@pytest.mark.parametrize("name", RANDOM)
def test_damaged_random_states_do_not_cost_the_file(fp16: Path, tmp_path: Path, name: str) -> None:
    path = edited(fp16, tmp_path / "run.ckpt", RANDOM[name])
    before = on_disk(path)
    keeper = OnExceptionCheckpoint(tmp_path, "run")
    with pytest.raises(IncompatiblePrecisionError):
        resume(path, plugin_for("16-mixed"), enable_checkpointing=True, callbacks=[keeper])
    assert on_disk(path) == before


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved in the middle of a window of two, with its gradients."""
    path = tmp_path_factory.mktemp("window") / "run.ckpt"

    class Saving(PrecisionCheckpoint):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.save_checkpoint(path)

    fit(make_model(), plugin_for("bf16-mixed"), regression_batches(BATCHES), accumulate_grad_batches=2,
        callbacks=[Saving(sidecar=False, save_window=True)])  # fmt: skip
    assert torch.load(path, weights_only=True)[KEY]["window"]["gradients"] == "stored"
    return path


GRADIENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "of no parameter": lambda ours: ours["gradients"]["ranks"][0].update({"third.weight": torch.zeros(3)}),
    "of another size": lambda ours: ours["gradients"]["ranks"][0].update({"second.weight": torch.zeros(3)}),
    "missing": lambda ours: ours.pop("gradients"),
    "partial": lambda ours: ours["gradients"].pop("backwards"),
    "of no rank": lambda ours: ours["gradients"].update(ranks=[]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_damaged_gradients_of_an_open_window_are_refused_before_anything_changes(
    windowed: Path, tmp_path: Path, name: str
) -> None:
    path = edited(windowed, tmp_path / "run.ckpt", lambda checkpoint: GRADIENTS[name](checkpoint[KEY]))
    assert_refused(path, plugin_for("bf16-mixed"), "gradient", accumulate_grad_batches=2)


# ---------------------------------------------------------------- the file itself


@pytest.mark.parametrize("kept", [0, 1, 3, 4, 100, 0.3, 0.6, 0.9, -1])
def test_a_file_cut_off_anywhere_is_refused_readably(bf16: Path, tmp_path: Path, kept: float) -> None:
    data = bf16.read_bytes()
    length = int(kept * len(data)) if isinstance(kept, float) else kept
    path = tmp_path / "run.ckpt"
    path.write_bytes(data[:length])
    error = assert_refused(path, plugin_for("bf16-mixed"), "cut off")
    assert str(path) in str(error) and "another one" in str(error)


def zeros(bf16: Path) -> bytes:
    return bytes(4096)


def noise(bf16: Path) -> bytes:
    return random.Random(3).randbytes(4096)


def zip_magic_and_noise(bf16: Path) -> bytes:
    return b"PK\x03\x04" + random.Random(4).randbytes(4096)


def text(bf16: Path) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"


def plain_pickle(bf16: Path) -> bytes:
    return pickle.dumps({"state_dict": {}, KEY: {}})


def pickled_list(bf16: Path) -> bytes:
    return pickle.dumps([1, 2, 3])


@pytest.mark.parametrize("make", [zeros, noise, zip_magic_and_noise, text, plain_pickle, pickled_list])
def test_a_file_that_is_something_else_is_refused_readably(bf16: Path, tmp_path: Path, make: Any) -> None:
    path = tmp_path / "run.ckpt"
    path.write_bytes(make(bf16))
    error = assert_refused(path, plugin_for("bf16-mixed"), "cannot be read as a checkpoint")
    assert str(path) in str(error)


@pytest.mark.parametrize("value", [[1, 2], 3, "text", None, torch.zeros(3)], ids=str)
def test_a_torch_file_that_is_no_checkpoint_is_refused_readably(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "run.ckpt"
    torch.save(value, path)
    assert_refused(
        path, plugin_for("bf16-mixed"), "holds .* where the checkpoint of a Lightning Trainer holds a mapping"
    )


@pytest.mark.parametrize("weights", [5, "text", [1, 2], {3: torch.zeros(2)}, None], ids=str)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
def test_reading_a_file_whose_state_dict_is_none_raises_nothing_unforeseen(
    bf16: Path, tmp_path: Path, weights: Any, ours: bool
) -> None:
    """Only rank 0 reads, so an error that nobody foresaw leaves the others waiting."""

    def edit(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = weights
        if not ours:
            del checkpoint[KEY]

    path = edited(bf16, tmp_path / "run.ckpt", edit)
    with contextlib.suppress(IncompatiblePrecisionError):
        assert saved_precision(path).manifest.precision in ("bf16-mixed", None)


def test_a_weight_without_a_name_is_for_lightning_to_refuse(bf16: Path, tmp_path: Path) -> None:
    path = edited(bf16, tmp_path / "run.ckpt", lambda checkpoint: checkpoint["state_dict"].update({3: torch.zeros(2)}))
    before, model = on_disk(path), make_model()
    with pytest.raises(Exception) as caught:  # whatever it is
        resume(path, plugin_for("bf16-mixed"), model)
    assert any("load_state_dict" in str(entry.name) for entry in caught.traceback)
    assert on_disk(path) == before and model.losses == []


@pytest.mark.parametrize("inside", ["data.pkl", "data/0"])
def test_a_zip_that_lacks_a_record_costs_no_file(bf16: Path, tmp_path: Path, inside: str) -> None:
    """Such as a copy of a damaged disk: what reads well may still not load."""
    path = tmp_path / "run.ckpt"
    with zipfile.ZipFile(bf16) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as less:
        for item in whole.infolist():
            if not item.filename.endswith(inside):
                less.writestr(item, whole.read(item))
    before, witness = on_disk(path), Witness()
    keeper = OnExceptionCheckpoint(tmp_path, "run")
    with pytest.raises((RuntimeError, ValueError)):
        resume(path, plugin_for("bf16-mixed"), enable_checkpointing=True, callbacks=[witness, keeper])
    assert witness.after == witness.before
    assert on_disk(path) == before


def test_a_folder_that_is_no_checkpoint_is_refused_readably(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("nothing here")
    assert_refused(tmp_path / "run", plugin_for("bf16-mixed"), "holds no meta.pt")


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        resume(tmp_path / "nowhere.ckpt", plugin_for("bf16-mixed"))


class Evil:
    """What runs a command when a pickle that holds it is loaded by Python's own rules."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def in_a_pickle(source: Path, path: Path, evil: Evil) -> None:
    path.write_bytes(pickle.dumps(evil))


def in_an_old_torch_file(source: Path, path: Path, evil: Evil) -> None:
    torch.save({"state_dict": {}, "evil": evil}, path, _use_new_zipfile_serialization=False)


def as_the_whole_of_a_zip(source: Path, path: Path, evil: Evil) -> None:
    torch.save(evil, path)


def in_our_manifest(source: Path, path: Path, evil: Evil) -> None:
    edited(source, path, lambda checkpoint: checkpoint[KEY].update(policy=evil))


def as_our_manifest(source: Path, path: Path, evil: Evil) -> None:
    edited(source, path, lambda checkpoint: checkpoint.update({KEY: evil}))


def as_a_weight_beside_a_refusal(source: Path, path: Path, evil: Evil) -> None:
    def edit(checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY]["precision"] = "16-mixed"
        checkpoint["state_dict"]["evil"] = evil

    edited(source, path, edit)


@pytest.mark.parametrize(
    "hide",
    [
        in_a_pickle,
        in_an_old_torch_file,
        as_the_whole_of_a_zip,
        in_our_manifest,
        as_our_manifest,
        as_a_weight_beside_a_refusal,
    ],
)
def test_nothing_in_a_checkpoint_is_run_by_judging_it(bf16: Path, tmp_path: Path, hide: Any) -> None:
    marker = tmp_path / "it ran"
    path = tmp_path / "run.ckpt"
    hide(bf16, path, Evil(str(marker)))
    with pytest.raises(IncompatiblePrecisionError):
        resume(path, plugin_for("bf16-mixed"))
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(str(marker))))
    assert marker.exists()  # the trap does work where it is sprung


@pytest.mark.skipif(not PLAIN_TYPES_ONLY, reason="Lightning before 2.6 loads everything")
def test_a_checkpoint_that_the_guard_finds_fit_is_still_loaded_as_plain_types(bf16: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    path = edited(bf16, tmp_path / "run.ckpt", lambda c: c.update(hyper_parameters={"a": Evil(str(marker))}))
    with pytest.raises(pickle.UnpicklingError):
        resume(path, plugin_for("bf16-mixed"))  # weights_only=True
    assert not marker.exists()


# ---------------------------------------------------------------- the manifest


def with_manifest(source: Path, target: Path, **values: Any) -> Path:
    return edited(source, target, lambda checkpoint: checkpoint[KEY].update(values))


@pytest.mark.parametrize("version", [3, 10**30])
def test_a_manifest_from_the_future_asks_for_an_update(bf16: Path, tmp_path: Path, version: int) -> None:
    path = with_manifest(bf16, tmp_path / "run.ckpt", schema_version=version)
    error = assert_refused(path, plugin_for("bf16-mixed"), "newer lightning_amp_plus")
    assert str(version) in str(error) and "Update lightning_amp_plus" in str(error)


@pytest.mark.parametrize("version", [0, None, "2"], ids=repr)
def test_a_schema_version_that_is_none_is_refused(bf16: Path, tmp_path: Path, version: Any) -> None:
    path = with_manifest(bf16, tmp_path / "run.ckpt", schema_version=version)
    assert_refused(path, plugin_for("bf16-mixed"), re.escape(f"schema_version {version!r}"))


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"colour": "red"}, ["colour is not a field of this version"]),
        ({"versions": {"torch": "2"}}, ["versions.python is missing", "versions.lightning is missing"]),
        ({"windows": -1}, ["windows holds -1"]),
        ({"moves": [{"match": "second", "compute": "fp4"}]}, ["moves.0.compute holds 'fp4'"]),
        ({"policy": [1]}, ["policy holds [1]"]),
        ({"policy": {"compute": torch.zeros(1)}}, ["policy holds Tensor, which is no plain type"]),
        ({"window": {"micro_batches": 1, "size": 2, "gradients": "eaten"}}, ["window.gradients holds 'eaten'"]),
        ({"colour": "red", "windows": -1}, ["colour", "windows"]),
    ],
    ids=str,
)
def test_unknown_fields_and_wrong_types_are_each_named(
    bf16: Path, tmp_path: Path, values: dict[str, Any], parts: list[str]
) -> None:
    path = with_manifest(bf16, tmp_path / "run.ckpt", **values)
    error = assert_refused(path, plugin_for("bf16-mixed"), "damaged, or was edited")
    assert str(path) in str(error)
    assert all(part in str(error) for part in parts), str(error)


@pytest.mark.parametrize("field", ["schema_version", "policy", "moves", "scaler", "windows", "history"])
def test_a_field_that_is_missing_is_named(bf16: Path, tmp_path: Path, field: str) -> None:
    path = edited(bf16, tmp_path / "run.ckpt", lambda checkpoint: checkpoint[KEY].pop(field))
    assert_refused(path, plugin_for("bf16-mixed"), field)


@pytest.mark.parametrize("value", [None, [], "text", 3, {}, torch.zeros(2)], ids=str)
def test_something_else_in_the_place_of_the_manifest_is_refused(bf16: Path, tmp_path: Path, value: Any) -> None:
    path = edited(bf16, tmp_path / "run.ckpt", lambda checkpoint: checkpoint.update({KEY: value}))
    assert_refused(path, plugin_for("bf16-mixed"), "manifest")


@pytest.mark.parametrize("value", ["17-mixed", "", "fp64"])
def test_a_precision_that_nobody_knows_is_refused_and_can_be_allowed(bf16: Path, tmp_path: Path, value: str) -> None:
    path = with_manifest(bf16, tmp_path / "run.ckpt", precision=value)
    error = assert_refused(path, plugin_for("bf16-mixed"))
    assert rows_of(error)["precision"] == "refuse"
