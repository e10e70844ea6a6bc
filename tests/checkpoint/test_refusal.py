"""What is refused, noted and converted in a resume, and that a refused one leaves everything as it was."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, LossScale, PrecisionPolicy, Rule
from tests.support.faults import INF
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
    randomness,
    resume,
    rows_of,
    save_run,
)
from tests.support.training import PLAIN_TYPES_ONLY, fit, loader, make_trainer, regression_batches, same, weights


def bf16_policy(*rules: Rule, **fields: Any) -> PrecisionPolicy:
    return PrecisionPolicy(compute="bf16", rules=rules, **fields)


# ---------------------------------------------------------------- nothing is touched


def test_a_refusal_leaves_a_plugin_and_a_model_that_have_trained_as_they_were(tmp_path: Path, bf16: Path) -> None:
    model, plugin = make_model(faults={2: INF}), plugin_for("16-mixed")
    trainer = fit(model, plugin, regression_batches(BATCHES))
    plugin.set_route("second", "fp32")
    before, state, moves = weights(model), plugin_state(plugin), plugin.state_dict()["moves"]
    random.seed(5), numpy.random.seed(6), torch.manual_seed(7)
    generators, file = randomness(), on_disk(bf16)
    assert state["history"]["skipped"] == 1 and moves

    trainer.fit_loop.max_epochs = 2
    with pytest.raises(IncompatiblePrecisionError):
        trainer.fit(model, loader(regression_batches(BATCHES)), ckpt_path=bf16, **PLAIN_TYPES_ONLY)

    assert same(weights(model), before)
    assert plugin_state(plugin) == state and plugin.state_dict()["moves"] == moves
    assert randomness() == generators
    assert on_disk(bf16) == file


def test_the_hooks_of_model_and_callbacks_that_see_a_checkpoint_are_not_reached(bf16: Path) -> None:
    reached = []

    class Model(type(make_model())):  # type: ignore[misc]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            reached.append("model")

    class Watching(L.Callback):
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            reached.append("callback")

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            reached.append("callback's state")

    def model() -> Any:
        return Model(make_optimizer=make_model().make_optimizer)

    assert_refused(bf16, plugin_for("16-mixed"), model=model(), callbacks=[Watching()])
    assert reached == []
    resume(bf16, plugin_for("bf16-mixed"), model(), callbacks=[Watching()])
    assert reached == ["model", "callback"]


def test_a_refused_resume_reads_no_tensor(bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loaded.append(args) or load(*args, **kwargs))
    assert_refused(bf16, plugin_for("16-mixed"))
    assert loaded == []
    resume(bf16, plugin_for("bf16-mixed"))
    assert len(loaded) == 1


# ---------------------------------------------------------------- callbacks that save when a run fails


KEEPERS = ["OnExceptionCheckpoint", "ModelCheckpoint", "a callback of the user's"]


class Rescue(L.Callback):
    """Saves by hand when a run fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def keepers(kind: str, path: Path) -> list[Any]:
    if kind == "a callback of the user's":
        return [Rescue(path)]
    if kind == "OnExceptionCheckpoint":
        return [OnExceptionCheckpoint(path.parent, path.stem)]
    return [
        ModelCheckpoint(
            path.parent,
            path.stem,
            save_last=True,
            save_on_exception=True,
            enable_version_counter=False,
            every_n_epochs=1,
        )
    ]


# "last" is what a checkpoint callback finds.
@pytest.mark.parametrize(
    ("kind", "by"), [*((kind, "path") for kind in KEEPERS), *((kind, "last") for kind in KEEPERS[:2])]
)
@pytest.mark.parametrize("trained", [False, True], ids=["fresh Trainer", "Trainer that has trained"])
def test_a_callback_that_saves_on_exceptions_neither_overwrites_nor_deletes_the_refused_file(
    tmp_path: Path, kind: str, by: str, trained: bool
) -> None:
    path = tmp_path / ("last.ckpt" if kind == "ModelCheckpoint" else "run.ckpt")
    save_run(path, plugin_for("bf16-mixed"))
    model, plugin, witness = make_model(), plugin_for("16-mixed"), Witness()
    trainer = make_trainer(plugin, callbacks=[witness])
    if trained:  # so that ModelCheckpoint has steps to save
        trainer.fit(model, loader(regression_batches(BATCHES)))
        trainer.fit_loop.max_epochs = 3
    trainer.callbacks += keepers(kind, path)
    file, folder = on_disk(path), sorted(tmp_path.iterdir())
    with listening() as said, pytest.raises(IncompatiblePrecisionError):
        trainer.fit(
            model, loader(regression_batches(BATCHES)), ckpt_path=path if by == "path" else "last", **PLAIN_TYPES_ONLY
        )
    assert witness.after  # the callbacks were told of the exception
    assert on_disk(path) == file
    assert sorted(tmp_path.iterdir()) == folder
    if kind == "a callback of the user's":
        assert said.having(f"Not saved: {path}.", "nothing was trained")
    else:
        assert said.having("Nothing is saved: the run failed before it began, and nothing was trained.")


@pytest.mark.parametrize("save_last", [True, "link"])
def test_a_refusal_costs_a_trained_run_none_of_the_checkpoints_it_had(
    tmp_path: Path, bf16: Path, save_last: Any
) -> None:
    """ModelCheckpoint removes or relinks the one before last as soon as it believes the new one to be saved."""

    class Keeper(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "last" if save_last == "link" else "last-{step}"

    keeper = Keeper(tmp_path, "{step}", save_last=save_last, save_on_exception=True, every_n_train_steps=3)
    trainer = make_trainer(plugin_for("16-mixed"), enable_checkpointing=True, callbacks=[keeper])
    trainer.fit(make_model(), loader(regression_batches(BATCHES)))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(files) == 2
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(IncompatiblePrecisionError):
        trainer.fit(make_model(), loader(regression_batches(BATCHES)), ckpt_path=bf16, **PLAIN_TYPES_ONLY)
    assert {path.name for path in tmp_path.iterdir()} == set(files)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_late_refusal_of_weights_that_are_not_finite_overwrites_nothing_either(tmp_path: Path, kind: str) -> None:
    def spoil(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["first.weight"][0, 0] = float("nan")

    path = edited(save_run(tmp_path / "whole.ckpt", plugin_for("bf16-mixed")), tmp_path / "last.ckpt", spoil)
    arguments: Any = {"enable_checkpointing": True, "callbacks": keepers(kind, path)}
    assert_refused(path, plugin_for("bf16-mixed"), "first.weight", **arguments)


def test_after_a_refusal_the_same_trainer_saves_and_fits_as_usual(tmp_path: Path, bf16: Path) -> None:
    model, plugin = make_model(), plugin_for("16-mixed")
    trainer = make_trainer(plugin, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, "kept")])
    with pytest.raises(IncompatiblePrecisionError):
        trainer.fit(model, loader(regression_batches(BATCHES)), ckpt_path=bf16, **PLAIN_TYPES_ONLY)
    trainer.save_checkpoint(tmp_path / "by hand.ckpt")
    assert same(torch.load(tmp_path / "by hand.ckpt", weights_only=True)["state_dict"], weights(make_model()))

    trainer.fit(model, loader(regression_batches(BATCHES)))
    plain = make_model()
    fit(plain, plugin_for("16-mixed"), regression_batches(BATCHES))
    assert model.losses == plain.losses and same(weights(model), weights(plain))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert same(torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"], weights(model))
    assert (tmp_path / "kept.ckpt").exists()


def test_after_a_refusal_the_same_trainer_can_resume_from_a_file_that_fits(fp16: Path, bf16: Path) -> None:
    model, whole = make_model(), make_model()
    trainer = make_trainer(plugin_for("16-mixed"), max_epochs=2)
    with pytest.raises(IncompatiblePrecisionError):
        trainer.fit(model, loader(regression_batches(BATCHES)), ckpt_path=bf16, **PLAIN_TYPES_ONLY)
    trainer.fit(model, loader(regression_batches(BATCHES)), ckpt_path=fp16, **PLAIN_TYPES_ONLY)
    fit(whole, plugin_for("16-mixed"), regression_batches(BATCHES), max_epochs=2)
    assert model.losses == whole.losses[BATCHES:] and same(weights(model), weights(whole))


# ---------------------------------------------------------------- allow


@pytest.mark.parametrize(
    ("allow", "hint"),
    [
        (["precison"], "Did you mean 'precision'?"),
        (["precision", "loss_scal"], "Did you mean 'loss_scale'?"),
        (["optimiser_state"], "Did you mean 'optimizer_state'?"),
        (["master_weight"], "Did you mean 'master_weights'?"),
        (["zzz"], "there is no such field"),
        ([3], "there is no such field"),
        ([None], "there is no such field"),
        ([["precision"]], "there is no such field"),
    ],
)
def test_an_unknown_name_in_allow_is_an_error_with_the_close_match(allow: Any, hint: str) -> None:
    with pytest.raises(ValueError, match="allow") as caught:
        AmpPrecision("bf16-mixed", allow=allow)
    said, listed = str(caught.value).split("Fields that can be allowed:\n  ")
    assert hint in said
    assert listed.split(", ")[:2] == ["precision", "routes"] and "clipping" not in listed


@pytest.mark.parametrize("name", ["world_size", "version_torch", "clipping", "moves", "policy"])
def test_a_field_that_is_never_refused_cannot_be_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="never refused; leave it out"):
        AmpPrecision("bf16-mixed", allow=[name])


@pytest.mark.parametrize("allow", ["precision", None, 3, {"precision": True}, iter(["precision"])])
def test_allow_must_be_a_list_of_names(allow: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a list of field names"):
        AmpPrecision("bf16-mixed", allow=allow)


@pytest.mark.parametrize(
    ("allow", "taken"),
    [
        ([], ()),
        (("precision",), ("precision",)),
        ({"precision"}, ("precision",)),
        (["routes", "precision", "routes"], ("routes", "precision")),
    ],
)
def test_allow_takes_any_collection_and_each_name_once_in_its_order(allow: Any, taken: tuple[str, ...]) -> None:
    assert AmpPrecision("bf16-mixed", allow=allow).allow == taken


def test_an_allowed_field_that_was_not_needed_is_logged_and_a_needed_one_is_not(bf16: Path, fp16: Path) -> None:
    with listening() as said:
        resume(bf16, plugin_for("bf16-mixed", allow=["precision", "scaler"]))
    assert said.having("'precision'", "'scaler'", "not needed", str(bf16))
    with listening() as said:
        resume(bf16, plugin_for("16-mixed", allow=["precision", "scaler"]))
    [line] = said.having("not needed")
    assert "'scaler'" in line and "'precision'" not in line


def test_a_refusal_prints_what_was_allowed_already_together_with_what_is_missing(bf16: Path) -> None:
    error = assert_refused(bf16, plugin_for("bf16-true", allow=["scaler", "precision"]))
    assert allow_of(error) == ["buffers", "optimizer_state", "parameters", "precision", "scaler"]


# ---------------------------------------------------------------- rules and moves


def head(compute: Any) -> Rule:
    return Rule("second", compute=compute)


@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_a_module_widened_by_a_rule_goes_on_with_a_logged_conversion(tmp_path: Path, base: Any) -> None:
    path = save_run(tmp_path / "run.ckpt", AmpPrecision(PrecisionPolicy(compute=base), loss_scale=scale_of(base)))
    start = AtStart()
    with listening() as said:
        resume(path, AmpPrecision(PrecisionPolicy(compute=base, rules=[head("fp32")]), loss_scale=scale_of(base)),
               callbacks=[start])  # fmt: skip
    assert f"second {base}" in said.converts() and "second fp32" in said.converts()
    assert "first" not in said.converts()
    assert start.routes["second"] == "fp32" and start.routes["first"] == base
    assert start.step == BATCHES


def scale_of(base: str) -> Any:
    return LossScale(init=INIT) if base == "fp16" else "auto"


@pytest.mark.parametrize(
    ("before", "now"),
    [("fp32", None), ("fp32", "bf16"), ("fp32", "fp16"), ("fp16", "bf16"), (None, "fp16")],
)
def test_a_module_narrowed_or_moved_between_the_16_bit_formats_is_refused_by_name(
    tmp_path: Path, before: Any, now: Any
) -> None:
    def rules(compute: Any) -> list[Rule]:
        return [] if compute is None else [head(compute)]

    path = save_run(tmp_path / "run.ckpt", AmpPrecision(bf16_policy(*rules(before))))
    error = assert_refused(path, AmpPrecision(bf16_policy(*rules(now))))
    assert rows_of(error)["routes"] == "refuse" and allow_of(error) == ["routes"]
    [finding] = [f for f in error.findings if f.field == "routes"]
    assert finding.saved == f"second {before or 'bf16'}" and finding.current == f"second {now or 'bf16'}"

    start = AtStart()
    resume(path, AmpPrecision(bf16_policy(*rules(now)), allow=["routes"]), callbacks=[start])
    assert start.routes["second"] == (now or "bf16")


def test_among_modules_widened_and_narrowed_at_once_the_refusal_names_only_the_narrowed(tmp_path: Path) -> None:
    path = save_run(tmp_path / "run.ckpt", AmpPrecision(bf16_policy(Rule("second", compute="fp32"))))
    error = assert_refused(path, AmpPrecision(bf16_policy(Rule("first", compute="fp32"))))
    [finding] = [f for f in error.findings if f.field == "routes"]
    assert (finding.saved, finding.current) == ("second fp32", "second bf16")


def test_another_way_to_write_the_same_policy_is_no_more_than_a_note(tmp_path: Path) -> None:
    path = save_run(tmp_path / "run.ckpt", AmpPrecision(bf16_policy(head("fp32"))))
    with listening() as said:
        resume(path, AmpPrecision(bf16_policy(Rule("sec*", compute="fp32", reason="the same"))))
    assert said.converts() == "" and "policy" in said.notes()


class Moving(L.Callback):
    """Moves a module at one step, as a demotion does."""

    def __init__(self, name: str = "second", compute: Any = "fp32") -> None:
        self.name, self.compute = name, compute

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.precision_plugin.set_route(self.name, self.compute, "it overflowed")  # type: ignore[attr-defined]


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_modules_moved_while_training_are_moved_again_and_not_compared(tmp_path: Path, compute: Any) -> None:
    path = save_run(tmp_path / "run.ckpt", plugin_for("bf16-mixed"), callbacks=[Moving(compute=compute)])
    saved = torch.load(path, weights_only=True)[KEY]
    assert [(move["match"], move["compute"], move["step"]) for move in saved["moves"]] == [("second", compute, 2)]

    start, plugin, model = AtStart(), plugin_for("bf16-mixed"), make_model()
    with listening() as said:
        resume(path, plugin, model, callbacks=[start])
    assert start.routes["second"] == compute and start.routes["first"] == "bf16"
    assert said.converts() == "" and said.notes() == ""

    whole = make_model()
    fit(whole, plugin_for("bf16-mixed"), regression_batches(BATCHES), max_epochs=2, callbacks=[Moving(compute=compute)])
    assert model.losses == whole.losses[BATCHES:] and same(weights(model), weights(whole))

    again = AtStart()  # and a checkpoint of the resumed run knows of them too
    trainer = make_trainer(plugin, max_epochs=2)
    trainer.fit(make_model(), loader(regression_batches(BATCHES)), ckpt_path=path, **PLAIN_TYPES_ONLY)
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    resume(tmp_path / "second.ckpt", plugin_for("bf16-mixed"), callbacks=[again], epochs=3)
    assert again.routes["second"] == compute


def test_a_moved_module_that_a_rule_now_widens_is_not_narrowed_by_its_move(tmp_path: Path) -> None:
    """The commonest rescue: FP16 overflowed, a move to BF16 did not help, and the user's rule says FP32 now."""
    path = save_run(tmp_path / "run.ckpt", plugin_for("bf16-mixed"), callbacks=[Moving(compute="fp16")])
    start = AtStart()
    with listening() as said:
        resume(path, AmpPrecision(bf16_policy(head("fp32"))), callbacks=[start])
    assert start.routes["second"] == "fp16"  # moves come after the rules, here as in the run that was saved
    assert said.converts() == ""


class Headless(type(make_model())):  # type: ignore[misc]
    """Another model: its head has another name."""

    def __init__(self) -> None:
        super().__init__(make_optimizer=make_model().make_optimizer)
        self.strict_loading = False
        self.output = self.second
        del self.second

    def loss(self, batch: Any, *_: Any) -> Tensor:
        return nn.functional.mse_loss(self.output(torch.tanh(self.first(batch[0]))).float(), batch[1])


def test_a_moved_module_that_the_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    path = save_run(tmp_path / "run.ckpt", plugin_for("bf16-mixed"), callbacks=[Moving()])
    error = assert_refused(path, plugin_for("bf16-mixed"), "moved", Headless())
    assert "second" in str(error)


def test_modules_that_came_and_went_are_a_note(bf16: Path) -> None:
    with listening() as said, pytest.raises(Exception):  # noqa: B017  strict loading has the last word
        model = Headless()
        model.strict_loading = True
        resume(bf16, plugin_for("bf16-mixed"), model)
    assert "second" in said.notes() and "output" in said.notes()


# ---------------------------------------------------------------- storage, masters, communication


def masters(keep: bool) -> PrecisionPolicy:
    return PrecisionPolicy(compute="bf16", params="bf16", master_weights=keep)


@pytest.mark.parametrize("kept", [True, False], ids=["lost", "gained"])
def test_master_weights_lost_or_gained_are_refused_and_can_be_allowed(tmp_path: Path, kept: bool) -> None:
    path = save_run(tmp_path / "run.ckpt", AmpPrecision(masters(kept)))
    error = assert_refused(path, AmpPrecision(masters(not kept)))
    assert rows_of(error) == {"master_weights": "refuse", "optimizer_state": "refuse", "policy": "note"}
    assert f"master_weights={kept}" in str(error)

    model, start = make_model(), AtStart()
    resume(path, AmpPrecision(masters(not kept), allow=allow_of(error)), model, callbacks=[start])
    assert len(model.losses) == BATCHES and all(map(math.isfinite, model.losses))
    assert same(start.weights, torch.load(path, weights_only=True)["state_dict"])
    assert {moment.dtype for moment in start.moments} == {torch.bfloat16 if kept else torch.float32}


def test_masters_kept_go_on_without_a_word(tmp_path: Path) -> None:
    path = save_run(tmp_path / "run.ckpt", AmpPrecision(masters(True)))
    with listening() as said:
        resume(path, AmpPrecision(masters(True)))
    assert said.converts() == "" and said.notes() == ""


@pytest.mark.parametrize(
    ("field", "before", "now", "verdict"),
    [
        ("reduce", "bf16", "fp32", "convert"),
        ("reduce", "fp32", "bf16", "refuse"),
        ("reduce", "bf16", "fp16", "refuse"),
        ("buffers", "bf16", "fp32", "convert"),
        ("buffers", "fp32", "bf16", "refuse"),
    ],
)
def test_a_wider_format_of_communication_or_buffers_converts_and_any_other_is_refused(
    tmp_path: Path, field: str, before: Any, now: Any, verdict: str
) -> None:
    path = save_run(tmp_path / "run.ckpt", AmpPrecision(bf16_policy(**{field: before})))
    changed = bf16_policy(**{field: now})
    if verdict == "convert":
        with listening() as said:
            resume(path, AmpPrecision(changed))
        assert f"{field}: A wider format loses nothing." in said.converts()
        return
    error = assert_refused(path, AmpPrecision(changed))
    assert rows_of(error)[field] == "refuse" and allow_of(error) == [field]
    assert f"{field}='{before}'" in str(error)
    model = make_model()
    resume(path, AmpPrecision(changed, allow=[field]), model)
    assert len(model.losses) == BATCHES


@pytest.mark.parametrize(("before", "now"), [(None, "fp32"), ("fp32", None)])
def test_buffers_named_as_what_they_follow_anyway_are_no_change(tmp_path: Path, before: Any, now: Any) -> None:
    path = save_run(tmp_path / "run.ckpt", AmpPrecision(bf16_policy(buffers=before)))
    model = make_model()
    resume(path, AmpPrecision(bf16_policy(buffers=now)), model)
    assert len(model.losses) == BATCHES


@pytest.mark.parametrize("before", [None, "bf16"])
def test_buffers_of_a_16_bit_model_that_become_fp32_are_widened(tmp_path: Path, before: Any) -> None:
    def policy(buffers: Any) -> PrecisionPolicy:
        return PrecisionPolicy(compute="bf16", params="bf16", buffers=buffers)

    path = save_run(tmp_path / "run.ckpt", AmpPrecision(policy(before)))
    with listening() as said:
        resume(path, AmpPrecision(policy("fp32")))
    assert "buffers" in said.converts()


def test_an_optimizer_without_state_has_none_that_could_be_cast(tmp_path: Path) -> None:
    """Plain SGD keeps nothing, so there is nothing of it to refuse."""
    sgd: Any = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    path = save_run(tmp_path / "run.ckpt", plugin_for("bf16-true"), make_model(make_optimizer=sgd))
    error = assert_refused(path, plugin_for("32-true"), model=make_model(make_optimizer=sgd))
    assert "optimizer_state" not in rows_of(error)


# ---------------------------------------------------------------- the loss scale

KINDS: dict[str, Any] = {"none": None, "static": 64.0, "dynamic": LossScale(init=INIT, growth_interval=3)}


def kind(name: str, **arguments: Any) -> AmpPrecision:
    return AmpPrecision("16-mixed", loss_scale=KINDS[name], **arguments)


@pytest.mark.parametrize("before", ["static", "dynamic"])
@pytest.mark.parametrize("gained", [True, False], ids=["gained", "lost"])
def test_a_loss_scale_gained_or_lost_in_the_same_precision_is_refused(
    tmp_path: Path, before: str, gained: bool
) -> None:
    saved, now = ("none", before) if gained else (before, "none")
    path = save_run(tmp_path / "run.ckpt", kind(saved))
    error = assert_refused(path, kind(now))
    assert rows_of(error) == {"loss_scale": "refuse"} and allow_of(error) == ["loss_scale"]
    start = AtStart()
    resume(path, kind(now, allow=["loss_scale"]), callbacks=[start])
    assert start.scale == {"none": None, "static": 64.0, "dynamic": INIT}[now]


@pytest.mark.parametrize(
    ("saved", "now", "scale"), [("static", "dynamic", 64.0), ("dynamic", "static", 64.0)], ids=["freed", "fixed"]
)
def test_static_to_dynamic_and_back_converts(tmp_path: Path, saved: str, now: str, scale: float) -> None:
    path = save_run(tmp_path / "run.ckpt", kind(saved))
    start = AtStart()
    with listening() as said:
        resume(path, kind(now), callbacks=[start])
    assert "loss_scale" in said.converts()
    assert start.scale == scale


def test_another_static_scale_converts_to_the_one_of_this_run(tmp_path: Path) -> None:
    path = save_run(tmp_path / "run.ckpt", AmpPrecision("16-mixed", loss_scale=64.0))
    start = AtStart()
    with listening() as said:
        resume(path, AmpPrecision("16-mixed", loss_scale=256.0), callbacks=[start])
    assert "64" in said.converts() and "256" in said.converts()
    assert start.scale == 256.0


@pytest.mark.parametrize(("limits", "inside"), [({"max": 512.0}, 512.0), ({"min": 4096.0, "max": 8192.0}, 4096.0)])
def test_a_saved_scale_outside_the_limits_of_this_run_is_moved_into_them(
    fp16: Path, limits: dict[str, float], inside: float
) -> None:
    assert torch.load(fp16, weights_only=True)[KEY]["scaler"]["scale"] == 2 * INIT
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=inside, growth_interval=3, **limits))
    start = AtStart()
    with listening() as said:
        resume(fp16, plugin, callbacks=[start])
    assert f"{inside:g}" in said.converts() and "scaler" in said.converts()
    assert start.scale == inside


def test_another_rule_of_the_scale_is_a_note_and_the_scale_goes_on_from_where_it_was(fp16: Path) -> None:
    start = AtStart()
    with listening() as said:
        resume(fp16, AmpPrecision("16-mixed", loss_scale=LossScale(init=16.0, growth_interval=77)), callbacks=[start])
    assert "growth_interval 3" in said.notes() and "growth_interval 77" in said.notes()
    assert said.converts() == ""
    assert start.scale == 2 * INIT


# ---------------------------------------------------------------- what else may differ


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"gradient_clip_val": 0.5}, ("clipping", "none", "0.5 by norm")),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, ("clipping", "0.5 by value")),
        ({"accumulate_grad_batches": 2}, ("accumulation", "effective batch size")),
    ],
)
def test_clipping_and_accumulation_are_notes(bf16: Path, arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    with listening() as said:
        resume(bf16, plugin_for("bf16-mixed"), **arguments)
    assert all(part in said.notes() for part in parts)
    assert said.converts() == ""


def of_four_ranks(manifest: dict[str, Any]) -> None:
    manifest["strategy"] |= {"world_size": 4, "name": "DDPStrategy"}


@pytest.mark.parametrize(
    ("change", "where", "parts"),
    [
        (of_four_ranks, "converts", ("world_size", "averaged over another number of ranks")),
        (of_four_ranks, "notes", ("strategy", "DDPStrategy", "SingleDeviceStrategy")),
        (lambda m: m["versions"].update(torch="1.0.0"), "notes", ("version_torch", "1.0.0", "bits may")),
        (lambda m: m["versions"].update(torchao="0.1"), "notes", ("version_torchao", "0.1")),
        (lambda m: m["hardware"].update(name="Other", device="cuda"), "notes", ("hardware", "Other (cuda")),
        (lambda m: m["flags"].update(compiled=True), "notes", ("compiled", "yes")),
        (lambda m: m["settings"].update(check_finite=False), "notes", ("check_finite", "no", "yes")),
    ],
)
def test_ranks_versions_devices_and_settings_are_converted_or_noted(
    bf16: Path, tmp_path: Path, change: Any, where: str, parts: tuple[str, ...]
) -> None:
    path = edited(bf16, tmp_path / "run.ckpt", lambda checkpoint: change(checkpoint[KEY]))
    model = make_model()
    with listening() as said:
        resume(path, plugin_for("bf16-mixed"), model)
    text = getattr(said, where)()
    assert all(part in text for part in parts), text
    assert len(model.losses) == BATCHES


def test_what_is_the_same_is_not_mentioned(fp16: Path) -> None:
    with listening() as said:
        resume(fp16, plugin_for("16-mixed"))
    assert said.converts() == said.notes() == ""
    assert said.having("not needed") == []
    assert said.having("Restored all states")  # we did listen
