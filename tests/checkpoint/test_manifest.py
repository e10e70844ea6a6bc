"""The manifest as a document: what it takes, what it names as wrong, and what a real run writes into it."""

from __future__ import annotations

import copy
import json
import math
import platform
import types
import typing
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from pydantic import BaseModel
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy, Rule, __version__
from lightning_amp_plus.callbacks.checkpoint import PrecisionCheckpoint
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, SCHEMA_VERSION, TENSOR_PARTS, Manifest
from lightning_amp_plus.checkpoint.saved import saved_precision
from lightning_amp_plus.checkpoint.sidecar import sidecar_of
from lightning_amp_plus.errors import IncompatiblePrecisionError
from tests.support.faults import INF
from tests.support.manifests import census, document
from tests.support.models import TinyRegressor, adamw, fused_adamw, sgd
from tests.support.training import amp_fp16, loader, make_trainer, regression_batches

PRECISIONS = ["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "fp8-mixed"]
Path_ = tuple[Any, ...]


def full() -> dict[str, Any]:
    """A document in which no section, list or mapping is empty."""
    plain = document("fp8-mixed")
    plain |= {key: document("16-mixed")[key] for key in ("scaler", "loss_scale")}
    move = {"match": "second", "compute": "fp8", "reason": "stable", "step": 40}
    plain["moves"] = [
        {**move, "recipe": {"name": "current", "power_of_two": False}, "gemms": ["fprop"], "backend": "torchao"}
    ]
    plain["window"] = {"micro_batches": 2, "size": 4, "gradients": "stored"}
    plain["fp8_start"]["observed"] = [{"optimizer": 0, "norms": [1.5], "losses": [2.5], "peak": 3.5}]
    plain["census"] = census()
    return plain


def at(plain: Any, path: Path_) -> Any:
    for key in path:
        plain = plain[key]
    return plain


def put(path: Path_, value: Any) -> dict[str, Any]:
    plain = full()
    at(plain, path[:-1])[path[-1]] = value
    return plain


def walk(model: type[BaseModel], plain: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every typed place of the document with its annotation: one item of each list, one value of each mapping."""
    for name, info in model.model_fields.items():
        yield from _places(info.annotation, plain[name], (*path, name))


def _places(annotation: Any, value: Any, path: Path_) -> Iterator[tuple[Path_, Any]]:
    yield path, annotation
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            yield from walk(option, value, path)
        elif typing.get_origin(option) is list:
            yield from _places(typing.get_args(option)[0], value[0], (*path, 0))
        elif typing.get_origin(option) is dict:
            key = next(iter(value))
            yield from _places(typing.get_args(option)[1], value[key], (*path, key))


def kinds(annotation: Any) -> set[Any]:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return {typing.get_origin(option) or option for option in options}


SAMPLES: list[tuple[Any, set[Any]]] = [
    (None, {type(None)}),
    ("text", {str}),
    (3, {int, float}),
    (2.5, {float}),
    (True, {bool}),
    ([object], {list}),
    ({"one": object}, {dict}),
]
PLACES = [(path, annotation) for path, annotation in walk(Manifest, full()) if annotation is not Any]
WRONG = [
    (path, [
        sample for sample, fits in SAMPLES
        if not fits & kinds(annotation) and not (sample == "text" and typing.Literal in kinds(annotation))
    ])
    for path, annotation in PLACES
]  # fmt: skip
LITERALS = [path for path, annotation in PLACES if typing.Literal in kinds(annotation)]
SECTIONS = [()] + [
    path
    for path, annotation in PLACES
    if any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds(annotation))
]


def dotted(path: Any) -> str:
    return ".".join(map(str, path)) if isinstance(path, tuple) else repr(path)


# ---------------------------------------------------------------- the document


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_document_comes_back_as_it_was(precision: str) -> None:
    plain = document(precision)
    manifest = Manifest.from_dict(plain, "it")
    assert manifest.to_dict() == plain
    assert Manifest.from_dict(json.loads(manifest.to_json()), "it") == manifest


def test_the_full_document_comes_back_from_json_and_from_a_weights_only_checkpoint(tmp_path: Path) -> None:
    manifest = Manifest.from_dict(full(), "it")
    assert manifest.to_dict() == full()
    assert Manifest.from_dict(json.loads(manifest.to_json()), "it") == manifest
    torch.save(manifest.to_dict(), tmp_path / "a.pt")
    assert Manifest.from_dict(torch.load(tmp_path / "a.pt", weights_only=True), "it") == manifest


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("fp8_start", "observed", 0, "norms"), [1.5, 1.5], "as many losses as norms"),
        (("fp8_start", "observed", 0, "losses"), [math.nan], "finite numbers"),
        (("fp8_start", "observed", 0, "peak"), math.inf, "finite numbers"),
        (("fp8_start", "open_loss"), [math.nan, 1.0], "finite numbers"),
    ],
)
def test_what_was_observed_has_to_be_sound(path: Path_, value: Any, said: str) -> None:
    with pytest.raises(IncompatiblePrecisionError, match=said):
        Manifest.from_dict(put(path, value), "it")


def plain_types(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and plain_types(item) for key, item in value.items())
    if type(value) is list:
        return all(map(plain_types, value))
    return value is None or type(value) in (str, int, float, bool)


def test_what_is_written_are_plain_types() -> None:
    assert plain_types(Manifest.from_dict(full(), "it").to_dict())


@pytest.mark.parametrize("path", [path for path, annotation in PLACES if type(None) in kinds(annotation)], ids=dotted)
def test_what_was_not_recorded_stays_open(path: Path_) -> None:
    manifest = Manifest.from_dict(put(path, None), "it")
    assert at(manifest.to_dict(), path) is None
    assert Manifest.from_dict(json.loads(manifest.to_json()), "it") == manifest


@pytest.mark.parametrize(("path", "samples"), WRONG, ids=[dotted(path) for path, _ in WRONG])
def test_a_wrong_type_is_named(path: Path_, samples: list[Any]) -> None:
    assert len(samples) >= 4
    for sample in samples:
        with pytest.raises(IncompatiblePrecisionError) as error:
            Manifest.from_dict(put(path, sample), "the file x")
        assert path[0] == "schema_version" or f"  {dotted(path)}" in str(error.value), sample
        assert "the file x" in str(error.value), sample


@pytest.mark.parametrize("path", LITERALS, ids=dotted)
def test_a_word_that_is_none_of_those_known_is_named(path: Path_) -> None:
    with pytest.raises(IncompatiblePrecisionError, match=rf"{dotted(path)} holds 'anything': "):
        Manifest.from_dict(put(path, "anything"), "it")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda path: dotted(path) or "manifest")
def test_an_unknown_field_is_named(section: Path_) -> None:
    plain = full()
    at(plain, section)["colour"] = "blue"
    with pytest.raises(IncompatiblePrecisionError, match=rf"{dotted((*section, 'colour'))} is not a field"):
        Manifest.from_dict(plain, "it")


def required(path: Path_) -> list[str]:
    model: Any = Manifest
    for key in path:
        if isinstance(key, str) and isinstance(model, type) and key in model.model_fields:
            annotation = model.model_fields[key].annotation
        else:  # an item of a list, a value of a mapping
            annotation = typing.get_args(model)[-1]
        options = [o for o in typing.get_args(annotation) if o is not type(None)]
        model = options[0] if isinstance(annotation, types.UnionType) else annotation
    return [name for name, info in model.model_fields.items() if info.is_required()]


@pytest.mark.parametrize(
    ("section", "name"),
    [(section, name) for section in SECTIONS for name in required(section)],
    ids=dotted,
)
def test_a_missing_field_is_named(section: Path_, name: str) -> None:
    plain = full()
    del at(plain, section)[name]
    with pytest.raises(IncompatiblePrecisionError) as error:
        Manifest.from_dict(plain, "it")
    assert name == "schema_version" or f"{dotted((*section, name))} is missing" in str(error.value)


@pytest.mark.parametrize("value", [0, -1, "2", 2.0, None, True, [2], {}], ids=repr)
def test_a_version_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(IncompatiblePrecisionError, match="expected a number from 1"):
        Manifest.from_dict(put(("schema_version",), value), "it")


@pytest.mark.parametrize("ahead", [1, 10**9])
def test_a_manifest_from_the_future_says_to_update_whatever_else_is_in_it(ahead: int) -> None:
    with pytest.raises(IncompatiblePrecisionError, match="Update lightning_amp_plus"):
        Manifest.from_dict({"schema_version": SCHEMA_VERSION + ahead, "colour": "blue"}, "it")


@pytest.mark.parametrize("value", [None, 5, "text", [], [1]], ids=repr)
def test_what_is_no_mapping_is_named(value: Any) -> None:
    with pytest.raises(IncompatiblePrecisionError, match=f"holds {type(value).__name__} where"):
        Manifest.from_dict(value, "the file x")


@pytest.mark.parametrize("key", [5, None, b"policy", ("a",)], ids=repr)
def test_a_key_that_is_no_text_is_refused(key: Any) -> None:
    with pytest.raises(IncompatiblePrecisionError, match="damaged"):
        Manifest.from_dict({**full(), key: 1}, "it")


def test_many_faults_are_all_counted_and_twenty_are_shown() -> None:
    with pytest.raises(IncompatiblePrecisionError, match="and 10 more") as error:
        Manifest.from_dict({**full(), **{f"unknown{i}": i for i in range(30)}}, "it")
    assert len(str(error.value).splitlines()) < 25


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(IncompatiblePrecisionError) as error:
        Manifest.from_dict(put(("windows",), "x" * 10_000), "it")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("windows",), -1),
        *((("history", name), -1) for name in ("applied", "skipped", "growths", "backoffs", "consecutive_skips")),
        (("history", "scales"), [[1024.0]]),
        (("history", "scales"), [[1024.0, 3.0, 5.0]]),
        (("history", "scales"), [[1024.0, -3.0]]),
        (("history", "scales"), [[1024.0, 0.5]]),
        (("window", "micro_batches"), -2),
        (("accumulation", "batches"), 0),
        (("strategy", "world_size"), 0),
        (("random", "ranks"), -1),
    ],
    ids=dotted,
)
def test_an_impossible_count_is_named(path: Path_, value: Any) -> None:
    with pytest.raises(IncompatiblePrecisionError, match=dotted(path)):
        Manifest.from_dict(put(path, value), "it")


@pytest.mark.parametrize("part", TENSOR_PARTS)
def test_tensors_beside_the_document_are_not_looked_at(part: str) -> None:
    assert Manifest.from_dict({**full(), part: object()}, "it").to_dict() == full()


def test_a_manifest_cannot_be_changed() -> None:
    manifest = Manifest.from_dict(full(), "it")
    with pytest.raises(ValueError, match="frozen"):
        manifest.precision = "32-true"
    with pytest.raises(ValueError, match="frozen"):
        manifest.strategy.world_size = 5  # type: ignore[union-attr]


def test_reading_leaves_the_document_alone() -> None:
    plain = full()
    Manifest.from_dict(plain, "it")
    assert plain == full()


# ---------------------------------------------------------------- what a run writes


class Wrapped(TinyRegressor):
    """A first layer that is compiled in place or wrapped, for the flags."""

    def __init__(self, how: str) -> None:
        super().__init__(sgd)
        if how == "module.compile()":
            self.first.compile(backend="eager")
        elif how == "torch.compile(module)":
            self.first = torch.compile(self.first, backend="eager")  # type: ignore[assignment]
        elif how == "a checkpoint wrapper":
            self.first = checkpoint_wrapper(self.first)
        elif how == "gradient_checkpointing":
            self.first.gradient_checkpointing = True  # type: ignore[assignment]


def written(tmp_path: Path, plugin: AmpPrecision, model: Any = None, data: Any = None, **arguments: Any) -> Manifest:
    """Fits, saves, and reads back what is in the checkpoint; a sidecar must agree."""
    trainer = make_trainer(plugin, **{"callbacks": [PrecisionCheckpoint()], **arguments})
    model = TinyRegressor(sgd) if model is None else model
    trainer.fit(model, loader(regression_batches(7)) if data is None else data)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    manifest = saved_precision(path).manifest
    assert json.loads(Path(sidecar_of(path)).read_text()) == manifest.to_dict()
    inside = torch.load(path, weights_only=True)[CHECKPOINT_KEY]
    assert {k: v for k, v in inside.items() if k not in TENSOR_PARTS} == manifest.to_dict()
    return manifest


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A run in which most things differ from their defaults."""
    policy = PrecisionPolicy(compute="fp16", reduce="bf16", rules=[Rule("second", compute="fp32", reason="the head")])
    scale = LossScale(
        init=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2, min=2.0, max=8192.0, hysteresis=2,
        backoff_on_forward_overflow=False,
    )  # fmt: skip
    plugin = AmpPrecision(
        policy,
        loss_scale=scale,
        max_consecutive_skips=9,
        advance_scheduler_on_skip=True,
        partial_window="mean",
    )
    return written(
        tmp_path_factory.mktemp("configured"),
        plugin,
        TinyRegressor(fused_adamw, faults={2: INF}),
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
        accumulate_grad_batches=2,
    )


def test_versions_are_those_installed(configured: Manifest) -> None:
    assert configured.versions is not None
    assert configured.versions.model_dump(exclude={"torchao", "transformer_engine"}) == {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "lightning_amp_plus": __version__,
    }
    assert type(configured.versions.torch) is str


def test_the_device_is_that_of_the_run(configured: Manifest) -> None:
    assert configured.hardware is not None
    assert (configured.hardware.device, configured.device_type) == ("cpu", "cpu")
    assert configured.hardware.name
    assert configured.hardware.capability == torch.backends.cpu.get_cpu_capability()
    assert configured.hardware.cuda is None


def test_the_policy_and_its_fingerprint_are_the_plugin_s(configured: Manifest) -> None:
    policy = PrecisionPolicy.from_dict(configured.policy or {})
    assert (policy.compute, policy.reduce, policy.rules[0].match) == ("fp16", "bf16", "second")
    assert configured.fingerprint == policy.fingerprint()
    assert configured.precision == "16-mixed"
    assert configured.writer == "lightning_amp_plus"
    assert configured.moves == []


def test_every_module_has_its_route_with_every_role(configured: Manifest) -> None:
    assert configured.routes is not None
    assert list(configured.routes) == ["", "first", "second"]
    assert configured.routes["first"] == {
        "module_type": "Linear",
        "compute": "fp16",
        "params": "fp32",
        "input": "fp16",
        "weight": "fp16",
        "output": "fp16",
        "accumulator": "fp32",
        "optimizer": "fp32",
        "rule": "",
        "reason": "compute of the policy",
    }
    second = configured.routes["second"]
    assert (second["compute"], second["weight"], second["rule"], second["reason"]) == (
        "fp32", "fp32", "second", "the head",
    )  # fmt: skip


def test_the_loss_scale_is_there_as_configured_and_as_it_stands(configured: Manifest) -> None:
    assert configured.loss_scale is not None
    assert configured.loss_scale.model_dump() == {
        "kind": "dynamic",
        "init": 256.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "min": 2.0,
        "max": 8192.0,
        "hysteresis": 2,
        "backoff_on_forward_overflow": False,
    }
    # Four windows of two, the second skipped (which the hysteresis forgives), then two clean ones.
    assert configured.scaler == {
        "scale": 1024.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "_growth_tracker": 0,
        "_hysteresis": 2,
    }
    assert configured.windows == 4
    assert configured.history.model_dump() == {
        "scales": [[256.0, 3.0], [1024.0, 1.0]],
        "applied": 3,
        "skipped": 1,
        "growths": 1,
        "backoffs": 0,
        "consecutive_skips": 0,
    }


def test_the_trainer_s_and_the_plugin_s_settings_are_there(configured: Manifest) -> None:
    plain = configured.to_dict()
    assert plain["clipping"] == {"value": 0.5, "algorithm": "value"}
    assert plain["accumulation"] == {"batches": 2, "partial_window": "mean", "sync_each_microbatch": True}
    assert plain["settings"] == {"check_finite": True, "max_consecutive_skips": 9, "advance_scheduler_on_skip": True}
    assert plain["strategy"] == {"name": "SingleDeviceStrategy", "world_size": 1, "mesh": None}
    assert plain["flags"] == {"compiled": False, "activation_checkpointing": False}
    assert plain["master_weights_kept"] is False


def test_dtypes_and_optimizers_are_as_found(configured: Manifest) -> None:
    plain = configured.to_dict()
    assert plain["dtypes"] == {
        "parameters": {"fp32": 4},
        "gradients": {"fp32": 4},
        "optimizer_state": {"fp32": 8},
    }
    assert plain["optimizers"] == [{"name": "AdamW", "fused": True, "state_dtypes": {"fp32": 8}}]


def test_the_run_s_position_is_there(configured: Manifest) -> None:
    plain = configured.to_dict()
    assert plain["progress"] == {"epoch": 1, "global_step": 4}
    assert plain["window"] == {"micro_batches": 0, "size": None, "gradients": "none"}
    assert plain["data"] == {"mid_epoch": False, "stateful": False, "moment": "clean"}
    assert plain["random"] == {"ranks": 1, "generators": ["numpy", "python", "torch"]}
    assert plain["weights_only"] is False


@pytest.mark.parametrize(
    ("policy", "parameters", "gradients", "state"),
    [
        pytest.param("32-true", "fp32", "fp32", "fp32", id="32-true"),
        pytest.param("bf16-mixed", "fp32", "fp32", "fp32", id="bf16-mixed"),
        pytest.param("bf16-true", "bf16", "bf16", "bf16", id="bf16-true"),
        pytest.param(
            PrecisionPolicy(compute="bf16", params="bf16", master_weights=True), "bf16", None, "fp32", id="masters"
        ),
    ],
)
def test_dtypes_follow_the_storage(
    policy: Any, parameters: str, gradients: str | None, state: str, tmp_path: Path
) -> None:
    manifest = written(tmp_path, AmpPrecision(policy), TinyRegressor(adamw))
    assert manifest.dtypes is not None
    assert manifest.dtypes.parameters == {parameters: 4}
    assert manifest.dtypes.gradients == ({} if gradients is None else {gradients: 4})
    assert manifest.dtypes.optimizer_state == {state: 8}
    assert manifest.master_weights_kept is (gradients is None)
    assert manifest.routes is not None
    assert (manifest.routes["first"]["params"], manifest.routes["first"]["optimizer"]) == (parameters, state)
    assert manifest.loss_scale is manifest.scaler is None


def test_several_optimizers_are_all_there(tmp_path: Path) -> None:
    class Two(TinyRegressor):
        def __init__(self) -> None:
            super().__init__(manual=True)

        def optimize(self, loss: torch.Tensor) -> None:
            optimizers = self.optimizers()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [fused_adamw(self.first.parameters()), sgd(self.second.parameters())]

    manifest = written(tmp_path, AmpPrecision("bf16-mixed"), Two())
    assert [entry.model_dump() for entry in manifest.optimizers or []] == [
        {"name": "AdamW", "fused": True, "state_dtypes": {"fp32": 4}},
        {"name": "SGD", "fused": False, "state_dtypes": {}},
    ]
    assert manifest.window is not None and manifest.window.gradients == "none"


@pytest.mark.parametrize("loss_scale", [1024, 64.0], ids=str)
def test_a_static_scale_is_told_from_a_dynamic_one(loss_scale: float, tmp_path: Path) -> None:
    manifest = written(tmp_path, AmpPrecision("16-mixed", loss_scale=loss_scale))
    assert manifest.loss_scale is not None and manifest.scaler is not None
    assert (manifest.loss_scale.kind, manifest.loss_scale.init) == ("static", loss_scale)
    assert manifest.scaler["scale"] == loss_scale


@pytest.mark.parametrize(
    ("how", "compiled", "recomputed"),
    [
        ("nothing", False, False),
        ("module.compile()", True, False),
        ("torch.compile(module)", True, False),
        ("a checkpoint wrapper", False, True),
        ("gradient_checkpointing", False, True),
    ],
)
def test_what_wraps_the_computation_is_flagged(how: str, compiled: bool, recomputed: bool, tmp_path: Path) -> None:
    manifest = written(tmp_path, AmpPrecision("bf16-mixed"), Wrapped(how))
    assert manifest.flags is not None
    assert (manifest.flags.compiled, manifest.flags.activation_checkpointing) == (compiled, recomputed)
    assert next(iter(manifest.routes or {})) == "" and {"first", "second"} <= {*(manifest.routes or {})}


def test_a_whole_lightning_module_that_is_compiled_is_flagged(tmp_path: Path) -> None:
    compiled = torch.compile(TinyRegressor(sgd), backend="eager")
    assert isinstance(compiled, nn.Module)
    manifest = written(tmp_path, AmpPrecision("bf16-mixed"), compiled)
    assert manifest.flags is not None and manifest.flags.compiled


@pytest.mark.parametrize("clip", [0.0, None, float("inf")], ids=str)
def test_no_clipping_is_told_from_a_threshold(clip: Any, tmp_path: Path) -> None:
    # With an infinite one the norm is computed and nothing is clipped; JSON, and so a sidecar, has no word for it.
    assert written(tmp_path, AmpPrecision("bf16-mixed"), gradient_clip_val=clip).clipping is None


@pytest.mark.parametrize(("stateful", "steps", "mid"), [(True, 3, True), (False, 3, True), (True, 7, False)])
def test_the_place_in_the_data_is_there(stateful: bool, steps: int, mid: bool, tmp_path: Path) -> None:
    batches = regression_batches(7)
    data = StatefulDataLoader(batches, batch_size=None) if stateful else loader(batches)
    manifest = written(tmp_path, AmpPrecision("bf16-mixed"), data=data, max_steps=steps, max_epochs=-1)
    assert manifest.data is not None
    assert (manifest.data.mid_epoch, manifest.data.stateful) == (mid, stateful)
    assert manifest.progress is not None and manifest.progress.global_step == steps


class SaveAfter(L.Callback):
    """Saves after micro-batches, counted from 1, under ``<number>.ckpt``."""

    def __init__(self, folder: Path, *numbers: int) -> None:
        self.folder, self.numbers = folder, numbers

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if done in self.numbers:
            trainer.save_checkpoint(self.folder / f"{done}.ckpt")


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "lost"])
@pytest.mark.filterwarnings("ignore:.*saved in mid-window")
def test_an_open_window_is_there_with_what_became_of_its_gradients(stored: bool, tmp_path: Path) -> None:
    trainer = make_trainer(
        AmpPrecision("bf16-mixed"),
        callbacks=[SaveAfter(tmp_path, 1, 3, 4, 7), PrecisionCheckpoint(save_window=stored)],
        accumulate_grad_batches=4,
    )
    trainer.fit(TinyRegressor(sgd), loader(regression_batches(7)))
    found = {n: saved_precision(tmp_path / f"{n}.ckpt").manifest.window for n in (1, 3, 4, 7)}
    word = "stored" if stored else "lost"
    assert {n: (w.micro_batches, w.size, w.gradients) for n, w in found.items() if w} == {
        1: (1, 4, word),
        3: (3, 4, word),
        4: (0, None, "none"),
        7: (0, None, "none"),  # the last window of an epoch is a short one
    }


def test_moves_are_there_with_reason_and_step_and_show_in_the_routes(tmp_path: Path) -> None:
    plugin = AmpPrecision("bf16-mixed")

    class Move(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                plugin.set_route("second", "fp32", "unstable")

    manifest = written(tmp_path, plugin, callbacks=[Move(), PrecisionCheckpoint()])
    assert [move.model_dump() for move in manifest.moves] == [
        {
            "match": "second",
            "compute": "fp32",
            "reason": "unstable",
            "step": 3,
            "recipe": None,
            "gemms": None,
            "backend": None,
        }
    ]
    assert manifest.routes is not None and manifest.routes["second"]["compute"] == "fp32"


def test_every_save_has_an_id_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(amp_fp16(), callbacks=[SaveAfter(tmp_path, 2, 3)])
    trainer.fit(TinyRegressor(sgd), loader(regression_batches(4)))
    ids = [saved_precision(tmp_path / f"{n}.ckpt").manifest.save_id for n in (2, 3)]
    assert None not in ids and len(set(ids)) == 2


def test_a_manifest_without_a_trainer_outlines_the_routes() -> None:
    plugin = AmpPrecision(PrecisionPolicy(compute="bf16", rules=[Rule("second", compute="fp32")]))
    manifest = plugin.manifest(model=TinyRegressor(sgd))
    assert manifest.routes == {
        "": {"compute": "bf16", "params": "-", "optimizer": "-"},
        "first": {"compute": "bf16", "params": "fp32", "optimizer": "fp32"},
        "second": {"compute": "fp32", "params": "fp32", "optimizer": "fp32"},
    }
    assert manifest.strategy is manifest.progress is manifest.save_id is None
    assert plain_types(copy.deepcopy(manifest.to_dict()))
