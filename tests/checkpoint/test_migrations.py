"""Checkpoints written by Lightning itself and by older versions of ours, resumed in a real fit: tests/data/checkpoints."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy, Rule
from lightning_amp_plus.checkpoint.manifest import SCHEMA_VERSION, Manifest
from lightning_amp_plus.checkpoint.migrations import document_of, drop_extra_state, upgrade
from lightning_amp_plus.checkpoint.saved import saved_precision
from lightning_amp_plus.errors import IncompatiblePrecisionError
from tests.support.models import TinyRegressor, sgd_momentum
from tests.support.refusals import AtStart
from tests.support.training import (
    PLAIN_TYPES_ONLY,
    loader,
    make_trainer,
    outcomes,
    regression_batches,
    reports_of,
    same,
    weights,
)

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
BATCHES = 7  # as in make.py
HEAD_IN_FP32 = PrecisionPolicy(compute="fp16", rules=[Rule("second", compute="fp32")])
MASTERS = PrecisionPolicy(compute="bf16", params="bf16", master_weights=True)

# What every file says, and the policies that may continue it.
PRECISION: dict[str, tuple[str | None, list[Any]]] = {
    "stock-16-mixed": ("16-mixed", ["16-mixed"]),
    "stock-bf16-mixed": (None, ["bf16-mixed", "32-true"]),
    "stock-32-true": (None, ["32-true", "bf16-mixed"]),
    "stock-bf16-true": ("bf16-true", ["bf16-true"]),
    "stock-16-true": ("16-true", ["16-true"]),
    "hand-fsdp-16-mixed": ("16-mixed", ["16-mixed"]),
    "hand-native-amp": ("16-mixed", ["16-mixed"]),
    "ours-1-16-mixed": ("16-mixed", [HEAD_IN_FP32]),
    "ours-1-bf16-true-masters": ("bf16-true", [MASTERS]),
    "ours-1-moved": ("bf16-mixed", ["bf16-mixed"]),
    "ours-2-16-mixed": ("16-mixed", [HEAD_IN_FP32]),
}
FITTING = [(name, policy) for name, (_, policies) in PRECISION.items() for policy in policies]
ALL = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
REFUSED = [
    (name, other)
    for name, (_, policies) in PRECISION.items()
    for other in ALL
    if other not in [p if isinstance(p, str) else p.precision_name for p in policies]
] + [(name, other) for name in ("stock-64-true", "hand-transformer-engine") for other in ALL]
WITH_SCALER = ["stock-16-mixed", "hand-fsdp-16-mixed", "hand-native-amp", "ours-1-16-mixed", "ours-2-16-mixed"]


def path_of(name: str) -> Path:
    return DATA / f"{name}.pt"


def plugin_for(policy: Any, **arguments: Any) -> AmpPrecision:
    """With the growth interval that the files were made with, and another first scale."""
    policy = PrecisionPolicy.from_string(policy) if isinstance(policy, str) else policy
    # 16-true has a loss scale here but none in stock Lightning; that is a difference of its own.
    scale = LossScale(init=64.0, growth_interval=3) if policy.precision_name == "16-mixed" else None
    return AmpPrecision(policy, loss_scale=scale, **arguments)


def resume(path: Path, plugin: AmpPrecision, model: L.LightningModule | None = None) -> AtStart:
    start = AtStart()
    # Lightning brings checkpoints from before 1.6 back without the number of their epoch, but with that of their steps.
    steps = 2 * BATCHES if path.stem == "hand-native-amp" else -1
    trainer = make_trainer(plugin, max_epochs=2, max_steps=steps, callbacks=[start])
    trainer.fit(
        model or TinyRegressor(sgd_momentum),
        loader(regression_batches(BATCHES)),
        ckpt_path=path,
        **PLAIN_TYPES_ONLY,
    )
    return start


# The tests say once more what the library warns of, which is not their subject.
pytestmark = pytest.mark.filterwarnings("ignore:.*loss_scale=None with FP16.*")


def test_every_file_is_tiny_and_named_here() -> None:
    sizes = {path.stem: path.stat().st_size for path in DATA.glob("*.pt")}
    assert sizes.keys() == {*PRECISION, "stock-64-true", "hand-transformer-engine"}
    assert max(sizes.values()) < 20_000


def test_there_is_a_file_of_every_version_of_the_manifest() -> None:
    versions = {
        torch.load(path, weights_only=True)["lightning_amp_plus"]["schema_version"] for path in DATA.glob("ours-*.pt")
    }
    assert versions == set(range(1, SCHEMA_VERSION + 1))


@pytest.mark.parametrize("name", PRECISION)
def test_the_precision_is_told_without_the_tensors_and_with_them(name: str) -> None:
    saved = saved_precision(path_of(name)).manifest
    assert saved.precision == PRECISION[name][0]
    assert saved == Manifest.from_dict(document_of(torch.load(path_of(name), weights_only=True)), "it")


@pytest.mark.parametrize(("name", "policy"), FITTING, ids=lambda value: getattr(value, "precision_name", value))
def test_a_fit_goes_on_from_the_saved_weights(name: str, policy: Any) -> None:
    checkpoint = torch.load(path_of(name), weights_only=True)
    plugin = plugin_for(policy)
    reports = reports_of(plugin)
    model = TinyRegressor(sgd_momentum)
    start = resume(path_of(name), plugin, model)
    assert same(start.weights, checkpoint["state_dict"])
    assert start.step == checkpoint["global_step"]
    assert outcomes(reports) == ["applied"] * BATCHES
    assert not same(weights(model), start.weights)


@pytest.mark.parametrize("name", WITH_SCALER)
def test_scale_and_tracker_are_taken_over(name: str) -> None:
    plugin = plugin_for(PRECISION[name][1][0])
    reports = reports_of(plugin)
    start = resume(path_of(name), plugin)
    assert (start.scale, start.plugin["scaler"]["_growth_tracker"]) == (512.0, 1)
    # One of the three clean windows that make it grow lies before the save.
    assert [report.next_scale for report in reports] == [512.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 2048.0]


@pytest.mark.parametrize("name", ["ours-1-16-mixed", "ours-2-16-mixed"])
def test_counts_and_history_go_on(name: str) -> None:
    plugin = plugin_for(HEAD_IN_FP32)
    resume(path_of(name), plugin)
    assert (plugin.history.applied, plugin.history.skipped) == (2 * BATCHES - 1, 1)
    assert list(plugin.history.scales)[:BATCHES] == [512.0, 512.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0]


@pytest.mark.parametrize(("name", "other"), REFUSED)
def test_another_precision_is_refused_and_nothing_is_touched(name: str, other: str) -> None:
    model = TinyRegressor(sgd_momentum)
    before = weights(model)
    with pytest.raises(IncompatiblePrecisionError) as refusal:
        resume(path_of(name), plugin_for(other), model)
    assert "precision" in [finding.field for finding in refusal.value.findings if finding.verdict == "refuse"]
    assert "'precision'" in str(refusal.value)
    assert same({n: w.float() for n, w in weights(model).items()}, before) or other.endswith("-true")
    assert model.seen == 0


def test_allowing_what_the_refusal_names_goes_on() -> None:
    start = resume(path_of("stock-16-mixed"), plugin_for("bf16-mixed", allow=["precision"]))
    assert same(start.weights, torch.load(path_of("stock-16-mixed"), weights_only=True)["state_dict"])


def test_a_stock_16_true_has_no_loss_scale_to_go_on_with() -> None:
    with pytest.raises(IncompatiblePrecisionError) as refusal:
        resume(path_of("stock-16-true"), AmpPrecision("16-true"))
    assert [f.field for f in refusal.value.findings if f.verdict == "refuse"] == ["loss_scale"]
    resume(path_of("stock-16-true"), AmpPrecision("16-true", loss_scale=LossScale(init=64.0), allow=["loss_scale"]))


@pytest.mark.parametrize("policy", ["bf16-mixed", "32-true"])
def test_a_checkpoint_without_a_trace_of_its_precision_is_said_to_be_one(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        resume(path_of("stock-32-true"), plugin_for(policy))
    assert "not recorded (32-true or bf16-mixed)" in caplog.text


def test_entries_of_transformer_engine_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        start = resume(path_of("hand-transformer-engine"), plugin_for("bf16-mixed", allow=["precision"]))
    assert set(start.weights) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert "Left out 2 entries of Transformer Engine" in caplog.text


def test_an_extra_state_that_the_model_has_stays() -> None:
    history = torch.zeros(5, dtype=torch.uint8)
    entries: dict[str, Any] = {"a._extra_state": history, "b._extra_state": history, "b.weight": torch.zeros(3)}
    entries["c.weight"] = torch.zeros(3)
    entries["c._extra_state"] = io.BytesIO(b"of an older Transformer Engine")
    checkpoint = {"state_dict": entries}
    assert drop_extra_state(checkpoint, lambda: {"a._extra_state"}) == ["b._extra_state", "c._extra_state"]
    assert list(entries) == ["a._extra_state", "b.weight", "c.weight"]


@pytest.mark.parametrize(
    "state",
    [
        1,
        None,
        {"calls": 3},
        torch.zeros(5),
        torch.zeros(2, 5, dtype=torch.uint8),
        [torch.zeros(1, dtype=torch.uint8)] * 2,
    ],
    ids=["a number", "nothing", "a mapping", "floats", "a matrix", "two vectors"],
)
def test_an_extra_state_that_is_not_transformer_engine_s_stays(state: Any, tmp_path: Path) -> None:
    checkpoint = {"state_dict": {"a._extra_state": state}}
    assert drop_extra_state(checkpoint, set()) == []
    assert list(checkpoint["state_dict"]) == ["a._extra_state"]
    torch.save(checkpoint, tmp_path / "a.pt")
    assert saved_precision(tmp_path / "a.pt").manifest.writer == "lightning"


def test_masters_of_version_1_are_taken_over() -> None:
    checkpoint = torch.load(path_of("ours-1-bf16-true-masters"), weights_only=True)
    masters = checkpoint["lightning_amp_plus"]["master_weights"]
    assert any(not torch.equal(m, checkpoint["state_dict"][n].float()) for n, m in masters.items())
    plugin, found = plugin_for(MASTERS), {}

    class Look(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            found.update({n: m.clone() for n, m in plugin.state_dict()["master_weights"].items()})

    trainer = make_trainer(plugin, max_epochs=2, callbacks=[Look()])
    trainer.fit(
        TinyRegressor(sgd_momentum),
        loader(regression_batches(BATCHES)),
        ckpt_path=path_of("ours-1-bf16-true-masters"),
        **PLAIN_TYPES_ONLY,
    )
    assert same(found, masters)


def test_masters_of_version_1_are_not_dropped_without_a_word() -> None:
    with pytest.raises(IncompatiblePrecisionError) as refusal:
        resume(path_of("ours-1-bf16-true-masters"), plugin_for("bf16-true"))
    assert [f.field for f in refusal.value.findings if f.verdict == "refuse"] == [
        "optimizer_state", "master_weights",
    ]  # fmt: skip


def test_moves_of_version_1_are_made_again() -> None:
    plugin = plugin_for("bf16-mixed")
    resume(path_of("ours-1-moved"), plugin)
    assert plugin.plan is not None
    assert [plugin.plan[name].compute for name in ("first", "second")] == ["bf16", "fp32"]
    [move] = plugin.manifest().moves
    assert (move.match, move.compute, move.reason, move.step) == ("second", "fp32", "unstable", None)


def test_a_module_narrower_than_in_version_1_is_refused() -> None:
    # Version 1 recorded no routes, but the whole policy, from which they follow.
    with pytest.raises(IncompatiblePrecisionError) as refusal:
        resume(path_of("ours-1-16-mixed"), plugin_for("16-mixed"))
    assert [f.field for f in refusal.value.findings if f.verdict == "refuse"] == ["routes"]
    assert "second" in str(refusal.value)


def of_version_1(edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    document = torch.load(path_of("ours-1-16-mixed"), weights_only=True)["lightning_amp_plus"]
    edit(document)
    return document


def test_the_step_from_version_1_leaves_what_nobody_recorded_open() -> None:
    before = of_version_1(lambda document: None)
    after = upgrade(before)
    assert after["schema_version"] == 2
    assert {key: after[key] for key in before if key != "schema_version"} == {
        key: value for key, value in before.items() if key != "schema_version"
    }
    manifest = Manifest.from_dict(after, "it")
    assert (manifest.precision, manifest.master_weights_kept) == ("16-mixed", False)
    unknown = (manifest.routes, manifest.versions, manifest.loss_scale, manifest.strategy, manifest.window)
    assert unknown == (None,) * 5


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("moves", 5, "moves"),
        ("moves", None, "moves"),
        ("moves", [5], "moves.0"),
        ("moves", [{"match": "second"}], "moves.0.compute"),
        ("policy", 5, "policy"),
        ("scaler", [], "scaler"),
        ("history", {}, "history.scales"),
        ("windows", -1, "windows"),
        ("schema_version", [1], "schema_version"),
        ("schema_version", 1.0, "schema_version"),
        ("schema_version", True, "schema_version"),
        ("schema_version", "1", "schema_version"),
    ],
)
def test_damage_in_version_1_is_named(field: str, value: Any, named: str) -> None:
    damaged = of_version_1(lambda document: document.update({field: value}))
    with pytest.raises(IncompatiblePrecisionError, match=named):
        Manifest.from_dict(upgrade(damaged), "it")


@pytest.mark.parametrize("field", ["policy", "moves", "scaler", "windows", "history", "fingerprint"])
def test_what_version_1_lacks_is_named(field: str) -> None:
    damaged = of_version_1(lambda document: document.pop(field))
    with pytest.raises(IncompatiblePrecisionError, match=rf"  {field} "):
        Manifest.from_dict(upgrade(damaged), "it")


def test_a_policy_of_version_1_that_means_nothing_leaves_the_precision_open() -> None:
    manifest = Manifest.from_dict(upgrade(of_version_1(lambda d: d["policy"].update(compute="fp12"))), "it")
    assert manifest.precision is None


@pytest.mark.parametrize(
    "weights_entry",
    [
        pytest.param(5, id="a number"),
        pytest.param(["first.weight"], id="a list"),
        pytest.param({0: torch.zeros(1)}, id="numbers as names"),
        pytest.param(None, id="nothing"),
    ],
)
def test_a_state_dict_of_another_shape_does_not_stop_the_reader(weights_entry: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": weights_entry, "global_step": 3}, tmp_path / "odd.pt")
    assert saved_precision(tmp_path / "odd.pt").manifest.precision is None


def test_a_module_with_state_of_its_own_is_not_taken_for_transformer_engine(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    torch.save({"state_dict": Counting(2, 2).state_dict(), "optimizer_states": []}, tmp_path / "own.pt")
    assert saved_precision(tmp_path / "own.pt").manifest.precision is None


@pytest.mark.parametrize("key", ["MixedPrecision", "FSDPPrecision", "NativeMixedPrecisionPlugin"])
def test_the_writer_is_named_after_the_key_of_the_scaler(key: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {}, key: {"scale": 8.0, "_growth_tracker": 2}}, tmp_path / "a.pt")
    manifest = saved_precision(tmp_path / "a.pt").manifest
    assert manifest.writer == f"lightning ({key})"
    assert manifest.scaler == {"scale": 8.0, "_growth_tracker": 2}
