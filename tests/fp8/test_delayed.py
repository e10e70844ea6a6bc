"""Delayed scaling: what enters a history and when, the scales that come of it, and that a run can be resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, PrecisionPolicy, Rule, plan
from lightning_amp_plus.callbacks import PrecisionCheckpoint
from lightning_amp_plus.formats import E4M3, E5M2
from lightning_amp_plus.fp8 import CurrentScaling, DelayedScaling
from lightning_amp_plus.fp8.delayed import AmaxHistory, histories_of
from tests.fp8.test_training import Regressor, batches, fit
from tests.support.training import ResumableLoader, make_trainer, same, weights


def history(**arguments: Any) -> AmaxHistory:
    return AmaxHistory(DelayedScaling(**arguments), ["a", "b"])


def window(of: AmaxHistory, *values: float, row: int = 0, operand: Any = "input", applied: bool = True) -> None:
    for value in values:
        of.note(row, operand, torch.tensor(value))
    of.end_window(applied, None)


def scale(of: AmaxHistory, own: float = 1.0, row: int = 0, operand: Any = "input") -> float:
    return of.scale(row, operand, torch.tensor(own)).item()


# -------------------------------------------------------------------- histories


def test_a_window_is_one_entry_the_largest_of_its_micro_batches() -> None:
    of = history(history=4)
    window(of, 2.0, 8.0, 4.0)
    window(of, 1.0)
    assert of.state_dict()["a"][0].tolist() == [1.0, 8.0, 0.0, 0.0]
    assert scale(of) == 448 / 8


def test_the_scale_is_that_of_earlier_windows_and_forgets_beyond_the_history() -> None:
    of = history(history=2)
    window(of, 8.0)
    of.note(0, "input", torch.tensor(100.0))
    assert scale(of, own=100.0) == 56.0  # this window's amax counts from the next one on
    of.end_window(True, None)
    assert scale(of) == pytest.approx(4.48)
    window(of, 1.0)
    window(of, 1.0)
    assert scale(of) == 448.0


def test_the_most_recent_amax_or_the_largest_and_the_margin() -> None:
    recent, margin = history(amax="most_recent"), history(margin=2)
    for of in (recent, margin):
        window(of, 8.0)
        window(of, 2.0)
    assert scale(recent) == 224.0 and scale(margin) == 448 / 8 / 4


@pytest.mark.parametrize(("operand", "format"), [("input", E4M3), ("weight", E4M3), ("grad_output", E5M2)])
def test_without_a_history_an_operand_is_scaled_by_its_own_amax(operand: Any, format: Any) -> None:
    of = history()
    assert scale(of, own=1e-6, operand=operand) == pytest.approx(format.max_finite / 1e-6, rel=1e-6)
    window(of, 4.0, operand=operand)
    assert scale(of, own=1e-6, operand=operand) == format.max_finite / 4
    assert scale(of, own=2.0, row=1, operand=operand) == format.max_finite / 2  # the other module has none yet


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_or_not_applied_or_did_not_run_enters_nothing(bad: float) -> None:
    of = history()
    window(of, 4.0)
    before = of.state_dict()
    window(of, bad)
    window(of, 16.0, applied=False)
    window(of, 5.0, row=1)
    after = of.state_dict()
    assert torch.equal(after["a"], before["a"]) and after["b"][0, 0] == 5.0 and scale(of) == 112.0


def test_windows_that_change_a_scale_are_counted_by_module_and_operand() -> None:
    of = history(history=2)
    expected = torch.zeros(2, 3, dtype=torch.int64)
    for value, changes in ((4.0, 1), (4.0, 0), (2.0, 0), (2.0, 1), (8.0, 1)):  # one more: the first 4.0 is forgotten
        window(of, value)
        expected[0, 0] += changes
        assert torch.equal(of.updates, expected)
    window(of, 16.0, applied=False)
    window(of, math.inf)
    assert torch.equal(of.updates, expected)
    window(of, 1.0, row=1, operand="grad_output")
    expected[1, 2] += 1
    assert torch.equal(of.updates, expected)
    # With what it has taken up it goes on; that was no window.
    assert set(of.state_dict()) == {"a", "b"} and of.state_dict()["a"].shape == (3, 2)
    of.load_state_dict({"a": torch.full((3, 2), 32.0)})
    assert scale(of) == 14.0 and torch.equal(of.updates, expected)
    window(of, 32.0)
    assert torch.equal(of.updates, expected)


def test_a_discarded_window_leaves_no_note() -> None:
    of = history()
    of.note(0, "input", torch.tensor(1e6))
    of.discard()
    window(of, 2.0)
    assert of.state_dict()["a"][0].max() == 2.0


@pytest.mark.parametrize("applied", [True, torch.ones((), dtype=torch.bool, device="meta")], ids=["known", "unknown"])
def test_after_the_first_window_nothing_is_sent_to_or_from_the_device(applied: Any) -> None:
    of = history(history=2)  # of which "b" never runs

    def places() -> list[Tensor]:
        return [of._past, of._scales, of.updates, *(place for row in of._noted for place in row)]

    for turn in range(3):
        amax = torch.ones(1, 1, device="meta")  # where whatever asks for a number raises
        of.note(0, "input", amax)
        assert of.scale(0, "input", amax).device.type == "meta"
        of.end_window(applied, None)
        assert {place.device.type for place in places()} == {"meta"}, turn


@pytest.mark.parametrize("length", [2, 8])
def test_a_history_of_another_length_keeps_the_newest_part(length: int) -> None:
    of, other = history(history=4), history(history=length)
    for value in (1.0, 2.0, 3.0, 4.0):
        window(of, value)
    other.load_state_dict(of.state_dict())
    assert other.state_dict()["a"][0].tolist() == ([4.0, 3.0] if length == 2 else [4.0, 3.0, 2.0, 1.0, *[0.0] * 4])
    assert scale(other) == 112.0


# -------------------------------------------------------------------- in a model


def policy(**arguments: Any) -> PrecisionPolicy:
    return PrecisionPolicy("bf16", rules=[Rule("body.*", compute="fp8", recipe=DelayedScaling(**arguments))])


def test_in_a_constant_run_it_is_current_scaling() -> None:
    x, layers = torch.randn(16, 32), []
    for recipe in (DelayedScaling(), CurrentScaling()):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(32, 32))
        plan(model, PrecisionPolicy("bf16", rules=[Rule("0", compute="fp8", recipe=recipe)])).apply(model)
        layers.append(model)
    for _ in range(3):
        outputs = [model(x) for model in layers]
        assert torch.equal(*outputs)
        for of in histories_of(layers[0].modules()):
            of.end_window(True, None)


def test_what_outgrows_its_history_saturates_once_and_then_fits() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    nn.init.eye_(model[0].weight)
    plan(model, PrecisionPolicy("bf16", rules=[Rule("0", compute="fp8", recipe=DelayedScaling())])).apply(model)
    [of] = histories_of(model.modules())
    small, large = torch.full((1, 16), 1.0), torch.full((1, 16), 8.0)
    for x, wanted in ((small, 1.0), (large, 1.0), (large, 8.0)):
        assert model(x)[0, 0].item() == wanted
        of.end_window(True, None)


def test_evaluation_and_recomputation_leave_histories_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    rules = [Rule("0", compute="fp8", recipe=DelayedScaling())]
    plan(model, PrecisionPolicy("bf16", fp8_in_evaluation=True, rules=rules)).apply(model)
    [of] = histories_of(model.modules())
    model(torch.ones(1, 16))
    model.eval()
    model(torch.full((1, 16), 100.0))
    of.end_window(True, None)
    assert of.state_dict()["0"][0].max() == 1.0


def test_training_fills_every_operand_once_a_window() -> None:
    plugin = AmpPrecision(policy(history=8))
    _, model = fit(plugin, count=5, accumulate_grad_batches=2)
    [of] = histories_of(model.modules())
    for past in of.state_dict().values():
        assert (past > 0).sum(dim=1).tolist() == [5, 5, 5]


def test_a_skipped_window_and_an_exception_enter_nothing() -> None:
    plugin = AmpPrecision(policy(history=8))
    _, model = fit(plugin, Regressor(spoil=2), 5)
    [of] = histories_of(model.modules())
    assert (of.state_dict()["body.0"] > 0).sum(dim=1).tolist() == [4, 4, 4]
    assert plugin.history.skipped == 1


def test_a_resume_continues_the_histories_bit_for_bit(tmp_path: Path) -> None:
    _, whole = fit(AmpPrecision(policy(history=4)), count=12)
    trainer, first = fit(AmpPrecision(policy(history=4)), count=6)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["lightning_amp_plus"]
    assert saved["fp8"]["modules"]["body.0"]["history_length"] == 4
    [of] = histories_of(first.modules())
    assert all(torch.equal(saved["fp8_histories"][name], past) for name, past in of.state_dict().items())
    model = Regressor()
    make_trainer(AmpPrecision(policy(history=4)), max_epochs=-1, max_steps=12).fit(
        model, ResumableLoader(batches()), ckpt_path=tmp_path / "a.ckpt"
    )
    assert first.losses + model.losses == whole.losses and same(weights(model), weights(whole))
    assert list(first.state_dict()) == list(Regressor().state_dict())


def test_moving_another_module_keeps_the_histories() -> None:
    class Moving(Regressor):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.seen == 3:
                plugin: Any = self.trainer.precision_plugin
                plugin.set_route("body.2", "bf16")

    plugin = AmpPrecision(policy(history=8))
    _, model = fit(plugin, Moving(), 5)
    [of] = histories_of(model.modules())
    assert of.names == ["body.0"] and (of.state_dict()["body.0"] > 0).sum(dim=1).tolist() == [5, 5, 5]


def test_a_fused_optimizer_advances_histories_without_asking_the_device() -> None:
    class Fused(Regressor):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)

    plugin = AmpPrecision(policy(history=8))
    _, model = fit(plugin, Fused(spoil=2), 5)
    [of] = histories_of(model.modules())
    assert (of.state_dict()["body.0"] > 0).sum(dim=1).tolist() == [4, 4, 4]


def test_a_delayed_run_learns() -> None:
    _, model = fit(AmpPrecision(policy()), count=60)
    losses = Tensor(model.losses)
    assert losses[-10:].mean() < 0.3 * losses[:3].mean()


class MovedBy(Regressor):
    """Moves ``name`` before the batches given."""

    def __init__(self, name: str, moves: dict[int, str]) -> None:
        super().__init__()
        self.name, self.moves = name, moves

    def on_train_batch_start(self, *_: Any) -> None:
        if self.seen in self.moves:
            plugin: Any = self.trainer.precision_plugin
            plugin.set_route(self.name, self.moves[self.seen])


def test_a_module_that_comes_back_into_fp8_has_the_recipe_of_its_rule_again() -> None:
    plugin = AmpPrecision(policy(history=8))
    fit(plugin, MovedBy("body.0", {1: "bf16", 3: "fp8"}), 5)
    assert plugin.plan is not None
    fp8 = plugin.plan["body.0"].fp8
    assert fp8 is not None and fp8.recipe == DelayedScaling(history=8)


def moved_into_fp8(*rules: Rule, name: str = "body") -> tuple[AmpPrecision, Regressor]:
    plugin = AmpPrecision(PrecisionPolicy("bf16", rules=rules))
    _, model = fit(plugin, MovedBy(name, {1: "bf16", 2: "fp8"}), 5)
    return plugin, model


def test_a_module_that_comes_back_has_the_recipe_of_a_rule_on_its_class() -> None:
    plugin, _ = moved_into_fp8(Rule("type:Linear", compute="fp8", recipe=DelayedScaling(history=8)), name="body.0")
    assert plugin.plan is not None and plugin.plan["body.0"].fp8 == plugin.plan["body.2"].fp8


def test_the_modules_of_a_container_that_comes_back_have_their_own_settings() -> None:
    plugin, _ = moved_into_fp8(
        Rule("body.0", compute="fp8", recipe="delayed", gemms=["fprop", "dgrad"]),
        Rule("body.2", compute="fp8", recipe="rowwise", backend="torchao"),
    )
    assert plugin.plan is not None
    assert [str(route.fp8) for route in plugin.plan.routes if route.fp8] == [
        "delayed, reference, fprop+dgrad",
        "rowwise, torchao",
    ]


def test_the_last_layer_in_fp8_can_be_moved_out() -> None:
    for policy_ in (policy(), PrecisionPolicy("fp8"), PrecisionPolicy("bf16", rules=[Rule("body", compute="fp8")])):
        plugin = AmpPrecision(policy_)
        fit(plugin, MovedBy("body", {1: "bf16"}), 3)
        assert plugin.plan is not None and not any(route.fp8 for route in plugin.plan.routes)


def test_a_history_that_a_move_brings_into_a_run_without_any_advances() -> None:
    rules = [Rule("body.*", compute="fp8", recipe=DelayedScaling(history=4)), Rule("body.*", compute="bf16")]
    _, model = moved_into_fp8(*rules)
    [of] = histories_of(model.modules())
    assert (of.state_dict()["body.0"] > 0).sum(dim=1).tolist() == [3, 3, 3]


def test_histories_are_fp32_whatever_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        of = history(history=2)
        window(of, 1.0)
        assert of.state_dict()["a"].dtype == of.noted().dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_a_fit_begins_without_what_an_interrupted_one_had_noted() -> None:
    class Interrupted(Regressor):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.seen == 3:
                raise ValueError("between two batches")

    model, plugin = Interrupted(), AmpPrecision(policy(history=4))
    with pytest.raises(ValueError, match="between two"):
        fit(plugin, model, accumulate_grad_batches=2)
    [of] = histories_of(model.modules())
    assert of.noted().any()
    seen: list[bool] = []
    model.on_train_start = lambda: seen.append(bool(of.noted().any()))  # type: ignore[method-assign]
    fit(plugin, model, 1)
    assert seen == [False]


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("fp8_histories", None, "fp8_histories: the manifest says that amax histories are kept; found none"),
        ("fp8_histories", {"body.0": torch.ones(4)}, "fp8_histories, 'body.0': expected an FP32 tensor of shape"),
        ("fp8_scales", [1.0], "fp8_scales: expected a tensor for each module; found list"),
        ("fp8_scales", {"body.0": torch.ones(2)}, "fp8_scales, 'body.0': expected an FP32 tensor of shape"),
        ("fp8_noted", {"body.0": torch.ones(3).double()}, "fp8_noted, 'body.0': expected an FP32 tensor of shape"),
    ],
)
def test_damaged_numbers_of_fp8_are_refused_by_name(tmp_path: Path, part: str, value: Any, said: str) -> None:
    trainer, _ = fit(AmpPrecision(policy()), count=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["lightning_amp_plus"][part] = value
    torch.save(checkpoint, tmp_path / "a.ckpt")
    with pytest.raises(IncompatiblePrecisionError, match=said):
        make_trainer(AmpPrecision(policy()), max_epochs=-1, max_steps=4).fit(
            Regressor(), ResumableLoader(batches()), ckpt_path=tmp_path / "a.ckpt"
        )


def test_a_container_moves_into_fp8() -> None:
    plugin = AmpPrecision("bf16-mixed")
    fit(plugin, MovedBy("body", {1: "fp8"}), 3)
    assert plugin.plan is not None
    assert [route.name for route in plugin.plan.routes if route.fp8] == ["body.0", "body.2"]


def test_a_move_in_mid_window_keeps_what_was_noted() -> None:
    found = []
    for moves in ({}, {3: "fp32"}):
        _, model = fit(AmpPrecision(policy(history=8)), MovedBy("head", moves), 3, accumulate_grad_batches=2)
        [of] = histories_of(model.modules())
        found.append(of.state_dict()["body.0"][0])
    assert torch.equal(*found)


def test_a_resume_in_mid_window_goes_on_with_what_was_noted(tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    def callbacks() -> list[Any]:
        return [PrecisionCheckpoint(save_window=True), Save()]

    _, whole = fit(AmpPrecision(policy(history=4)), count=6, accumulate_grad_batches=2, callbacks=callbacks())
    model = Regressor()
    make_trainer(AmpPrecision(policy(history=4)), max_epochs=-1, max_steps=6, accumulate_grad_batches=2).fit(
        model, ResumableLoader(batches()), ckpt_path=tmp_path / "a.ckpt"
    )
    histories = [histories_of(m.modules())[0].state_dict() for m in (whole, model)]
    assert all(torch.equal(histories[0][name], histories[1][name]) for name in histories[0])
    assert same(weights(model), weights(whole))


def test_other_gemms_are_another_recipe_to_a_resume(tmp_path: Path) -> None:
    trainer, _ = fit(AmpPrecision(policy()), count=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = PrecisionPolicy(
        "bf16", rules=[Rule("body.*", compute="fp8", recipe=DelayedScaling(), gemms=["fprop", "wgrad"])]
    )
    with pytest.raises(IncompatiblePrecisionError, match=r"(?s)fp8_recipe.*gemms=fprop\+wgrad"):
        make_trainer(AmpPrecision(other), max_epochs=-1, max_steps=4).fit(
            Regressor(), ResumableLoader(batches()), ckpt_path=tmp_path / "a.ckpt"
        )
