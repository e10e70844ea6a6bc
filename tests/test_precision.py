"""AmpPrecision inside a real Trainer: what it adds to Lightning's verbs. That it keeps them is tested in contracts."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision as StockPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, LossScale, PrecisionPolicy, Rule
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, SCHEMA_VERSION
from tests.support.models import TinyRegressor, Wrapping, sgd
from tests.support.training import fit


class Net(L.LightningModule):
    def __init__(self, optimizer: Any = None, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)
        self.optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01))
        self.automatic_optimization = not manual
        self.dtypes: dict[str, torch.dtype] = {}
        for name in ("body.0", "head"):
            module = self.get_submodule(name)
            module.register_forward_hook(lambda _m, _i, out, name=name: self.dtypes.__setitem__(name, out.dtype))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.head(self.body(batch[0])).float(), batch[1].float())

    def training_step(self, batch: Any, _: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def nn_only() -> Net:
    """A model without the module that a test has moved."""
    model = Net()
    model.body = nn.Linear(4, 8)
    model.loss = lambda batch: nn.functional.mse_loss(model.head(model.body(batch[0])).float(), batch[1])  # type: ignore[method-assign]
    return model


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 4, generator=generator), torch.randn(24, 2, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=2)


def trainer(plugin: Any, **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": [plugin],
    }
    return L.Trainer(**{**defaults, **options})


class Gradients(L.Callback):
    """Keeps what ``on_before_optimizer_step`` sees."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def on_before_optimizer_step(self, _trainer: Any, pl_module: L.LightningModule, _optimizer: Any) -> None:
        self.seen.append([p.grad.clone() for p in pl_module.parameters() if p.grad is not None])


# -------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "8-bit"}, ["8-bit", "16-mixed", "bf16-true"]),
        ({"policy": "16-mixed", "check_ranks_every": 2.5}, ["check_ranks_every=2.5", "whole number"]),
        ({"policy": "16-mixed", "partial_window": "sum"}, ["sum", "lightning", "mean"]),
        ({"policy": "16-mixed", "check_finite": False}, ["check_finite=False", "loss_scale=None"]),
        ({"policy": "16-mixed", "loss_scale": "dynamic"}, ["dynamic", "'auto'", "LossScale"]),
        ({"policy": "16-mixed", "loss_scale": True}, ["True", "LossScale"]),
        ({"policy": "16-mixed", "loss_scale": 0.0}, ["0.0", "above 0"]),
        ({"policy": "16-mixed", "loss_scale": float("nan")}, ["nan", "finite"]),
        ({"policy": "16-mixed", "max_consecutive_skips": 0}, ["max_consecutive_skips=0", "at least 1"]),
        ({"policy": "16-mixed", "max_consecutive_skips": 1.5}, ["1.5", "whole number"]),
    ],
)
def test_contradictory_arguments_are_refused_with_what_to_do(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        AmpPrecision(**arguments)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("policy", "loss_scale", "dynamic"),
    [
        ("16-mixed", "auto", True),
        ("16-true", "auto", True),
        ("bf16-mixed", "auto", None),
        ("bf16-true", "auto", None),
        ("32-true", "auto", None),
        ("bf16-mixed", LossScale(), True),
        ("bf16-mixed", 128.0, False),
        ("16-mixed", 128, False),
    ],
)
def test_scale_is_in_use_where_it_was_asked_for(policy: str, loss_scale: Any, dynamic: bool | None) -> None:
    plugin = AmpPrecision(policy, loss_scale=loss_scale)
    assert plugin.precision == policy
    if dynamic is None:
        assert plugin.scaler is None
    else:
        assert isinstance(plugin.scaler, torch.amp.GradScaler)
        assert plugin.scaler.dynamic is dynamic


@pytest.mark.parametrize("left_out", ["windows", "history", "scaler", "moves", "policy"])
def test_incomplete_state_is_refused_with_nothing_changed(left_out: str) -> None:
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=8.0))
    state = AmpPrecision("16-mixed", loss_scale=LossScale(init=32.0)).state_dict()
    del state[left_out]
    with pytest.raises(ValueError, match=left_out):
        plugin.load_state_dict(state)
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 8.0


def test_no_scale_in_fp16_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="6e-8"):
        assert AmpPrecision("16-mixed", loss_scale=None).scaler is None


def test_static_scale_skips_overflows_and_never_changes() -> None:
    plugin = AmpPrecision("bf16-mixed", loss_scale=64.0)

    class Overflowing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (float("inf") if batch_idx == 1 else 1.0)

    trainer(plugin).fit(Overflowing(), data())
    assert plugin.history.scales == [64.0] * 12
    assert (plugin.history.skipped, plugin.history.backoffs) == (1, 0)


# -------------------------------------------------------------------- setup


def test_strategy_that_does_its_own_precision_is_refused_before_the_model_is_touched() -> None:
    plugin, model = AmpPrecision("bf16-true"), Net()
    fake = trainer(plugin)
    fake.strategy.__class__ = type("Faked", (DeepSpeedStrategy,), {})
    model.trainer = fake
    with pytest.raises(ValueError, match=r"DeepSpeed.*(ddp|FSDP)"):
        plugin.convert_module(model)
    assert model.head.weight.dtype == torch.float32


def test_device_is_the_strategys_also_for_an_accelerator_given_as_an_instance() -> None:
    from lightning.pytorch.accelerators import CPUAccelerator

    model = Net()
    trainer(AmpPrecision("bf16-mixed"), accelerator=CPUAccelerator()).fit(model, data())
    assert model.dtypes["body.0"] == torch.bfloat16


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_half_parameter_under_autocast_is_refused_by_name_unless_frozen(precision: str) -> None:
    model = Net()
    model.body[2].half()
    with pytest.raises(ValueError, match=r"'body.2'.*half\(\)"):
        trainer(AmpPrecision(precision)).fit(model, data())
    assert model.head.weight.dtype == torch.float32
    model.body[2].requires_grad_(False)
    AmpPrecision(precision).convert_module(model)


def test_rule_moves_one_module_and_the_plan_says_so() -> None:
    model = Net()
    plugin = AmpPrecision(PrecisionPolicy("bf16", rules=[Rule("head", compute="fp32", reason="logits")]))
    trainer(plugin).fit(model, data())
    assert model.dtypes == {"body.0": torch.bfloat16, "head": torch.float32}
    assert plugin.plan is not None
    assert (plugin.plan["head"].compute, plugin.plan["head"].reason) == ("fp32", "logits")


def test_second_plugin_on_the_same_model_replaces_the_routes_of_the_first() -> None:
    model = Net()
    trainer(AmpPrecision(PrecisionPolicy("bf16", rules=[Rule("head", compute="fp32")]))).fit(model, data())
    trainer(AmpPrecision("bf16-mixed")).fit(model, data())
    assert model.dtypes["head"] == torch.bfloat16


def test_module_moved_while_training_computes_elsewhere_from_the_next_step_on() -> None:
    class Move(L.Callback):
        seen: list[torch.dtype]

        def __init__(self) -> None:
            self.seen = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.seen.append(pl_module.dtypes["body.0"])
            if len(self.seen) == 2:
                before = [id(p) for p in pl_module.parameters()]
                trainer.precision_plugin.set_route("body", "fp32", reason="overflowed")
                assert before == [id(p) for p in pl_module.parameters()]

    plugin, move = AmpPrecision("bf16-mixed"), Move()
    with pytest.raises(RuntimeError, match="Rule"):
        plugin.set_route("body", "fp32")
    trainer(plugin, callbacks=[move]).fit(Net(), data())
    assert move.seen == [torch.bfloat16] * 2 + [torch.float32] * 10
    assert plugin.plan is not None and plugin.plan["body.2"].reason == "overflowed"
    with pytest.raises(ValueError, match=r"'bdy'.*'body'"):
        plugin.set_route("bdy", "fp32")
    with pytest.raises(ValueError, match="as a whole"):
        plugin.set_route("", "fp32")
    trainer(plugin).fit(nn_only(), data())  # the move was of another model


# -------------------------------------------------------------------- windows


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_items_weight_unequal_micro_batches_as_one_batch_would(precision: str, as_tensor: bool) -> None:
    class Tokens(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            mask = torch.zeros(2, 2)
            mask[:, : 1 + batch_idx % 2] = 1
            loss = ((self.head(self.body(x)).float() - y).pow(2) * mask).sum()
            items = mask.sum()
            return {"loss": loss, "num_items": items if as_tensor else int(items)}

    plugin, gradients = AmpPrecision(precision, loss_scale=64.0 if precision == "16-mixed" else "auto"), Gradients()
    model = Tokens()
    reference = copy.deepcopy(model)
    trainer(plugin, callbacks=[gradients], accumulate_grad_batches=3, limit_train_batches=3).fit(model, data())
    outputs = [reference.training_step(batch, i) for i, batch in zip(range(3), data(), strict=False)]
    (sum(o["loss"] for o in outputs) / sum(float(o["num_items"]) for o in outputs)).backward()
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if precision == "32-true" else {"rtol": 3e-2, "atol": 2e-3}
    for got, parameter in zip(gradients.seen[0], reference.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, **tolerance)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([2, None, 2], r"2 of the 3 micro-batches"),
        ([-1, 1, 1], r"num_items=-1"),
        ([torch.ones(2), 1, 1], r"shape \(2,\)"),
    ],
)
def test_item_counts_that_cannot_be_meant_are_refused(outputs: list[Any], words: str) -> None:
    class Tokens(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return loss if outputs[batch_idx] is None else {"loss": loss, "num_items": outputs[batch_idx]}

    model = Tokens()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):
        trainer(AmpPrecision("bf16-mixed"), accumulate_grad_batches=3, limit_train_batches=3).fit(model, data())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("zero", [0, torch.tensor(0)])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_window_over_no_item_at_all_moves_nothing(precision: str, zero: Any) -> None:
    class Padding(Net):
        def training_step(self, batch: Any, _: int) -> Any:
            return {"loss": self.loss(batch) * 0.0, "num_items": zero}

    model = Padding(lambda p: torch.optim.SGD(p, lr=1.0))
    before = copy.deepcopy(model.state_dict())
    plugin = AmpPrecision(precision, loss_scale=64.0 if precision == "16-mixed" else "auto")
    trainer(plugin, limit_train_batches=3).fit(model, data())
    assert plugin.applied_steps == 3
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize("mode", ["lightning", "mean"])
def test_partial_last_window_is_weighted_as_asked(mode: Any, check_finite: bool) -> None:
    gradients = Gradients()
    plugin = AmpPrecision("32-true", partial_window=mode, check_finite=check_finite)
    model = Net(optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    trainer(plugin, callbacks=[gradients], accumulate_grad_batches=4, limit_train_batches=6).fit(model, data())
    reference = Net()
    batches = list(data())
    losses = [reference.loss(batch) for batch in batches[4:6]]
    (sum(losses) / (4 if mode == "lightning" else 2)).backward()
    assert len(gradients.seen) == 2
    for got, parameter in zip(gradients.seen[1], reference.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)


def test_windows_abandoned_by_the_loop_do_not_leak_into_the_next() -> None:
    class Stops(Net):
        def on_train_batch_start(self, _batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 and self.current_epoch == 0 else None

    plugin = AmpPrecision("16-mixed", loss_scale=64.0)
    trainer(plugin, accumulate_grad_batches=2, limit_train_batches=4, max_epochs=2).fit(Stops(), data())
    assert plugin.history.applied == 2


def test_manual_optimization_runs_backward_and_the_optimizers_arithmetic_outside_autocast() -> None:
    seen: dict[str, bool] = {}

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            seen["step"] = torch.is_autocast_enabled("cpu")
            return super().step(closure)

    class Manual(Net):
        def training_step(self, batch: Any, _: int) -> None:
            optimizer = self.optimizers()

            def closure() -> None:
                seen["closure"] = torch.is_autocast_enabled("cpu")
                loss = self.loss(batch)
                loss.register_hook(lambda g: seen.__setitem__("backward", torch.is_autocast_enabled("cpu")))
                optimizer.zero_grad()
                self.manual_backward(loss)

            optimizer.step(closure)

        def on_before_optimizer_step(self, _: Any) -> None:
            seen["hook"] = torch.is_autocast_enabled("cpu")

    plugin = AmpPrecision("bf16-mixed")
    trainer(plugin, limit_train_batches=2).fit(Manual(lambda p: Spy(p, lr=0.1), manual=True), data())
    assert seen == {"step": False, "closure": True, "backward": False, "hook": False}
    assert plugin.applied_steps == 2


@pytest.mark.parametrize("manual", [False, True])
def test_lbfgs_works_in_bf16_with_and_without_the_check_and_is_refused_with_a_scale(manual: bool) -> None:
    class Closing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not manual:
                return self.loss(batch)
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            return optimizer.step(closure)

    def fit(check_finite: bool, precision: str = "bf16-mixed") -> list[Tensor]:
        model = Closing(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), manual=manual)
        plugin = AmpPrecision(precision, check_finite=check_finite)
        trainer(plugin, limit_train_batches=4).fit(model, data())
        assert plugin.applied_steps == 4
        return list(model.parameters())

    for a, b in zip(fit(True), fit(False), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    with pytest.raises(MisconfigurationException, match=r"LBFGS.*loss scale.*bf16-mixed"):
        fit(True, "16-mixed")


# -------------------------------------------------------------------- storage


class Weight(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def training_step(self, *_: Any) -> Tensor:
        return self.w.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("edit", ["copy", "data"])
def test_edits_of_weights_during_a_fit_are_not_undone_by_masters(edit: str) -> None:
    class Clamped(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                if edit == "copy":
                    self.head.weight.copy_(torch.full_like(self.head.weight, 0.25))
                else:
                    self.head.weight.data.clamp_(0.25, 0.25)

    model = Clamped(lambda p: torch.optim.SGD(p, lr=1e-6))
    trainer(AmpPrecision(PrecisionPolicy("bf16", params="bf16", master_weights=True))).fit(model, data())
    assert model.head.weight.eq(0.25).all()
    trainer(AmpPrecision(PrecisionPolicy("bf16", params="bf16", master_weights=True)), max_steps=1).fit(model, data())
    torch.testing.assert_close(model.head.weight.float(), torch.full((2, 8), 0.25), rtol=0, atol=1e-3)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("check_finite", [True, False])
def test_adamw_on_masters_moves_as_in_fp32(compute: Any, check_finite: bool) -> None:
    def fit(policy: Any, **options: Any) -> tuple[Tensor, L.Trainer]:
        model = Weight()
        run = trainer(AmpPrecision(policy, **options), max_steps=100, max_epochs=-1)
        run.fit(model, data())
        return model.w.detach(), run

    exact, _ = fit("32-true")
    options: dict[str, Any] = {"check_finite": check_finite, "loss_scale": None if not check_finite else "auto"}
    stuck, _ = fit(PrecisionPolicy("bf16", params="bf16"), check_finite=check_finite)
    assert stuck.eq(1.0).all()
    moved, run = fit(PrecisionPolicy(compute, params=compute, master_weights=True), **options)
    skipped = run.precision_plugin.history.skipped  # FP16's first scale overflows on a loss held in FP16
    torch.testing.assert_close(moved.float(), exact + skipped * 1e-3, rtol=4e-3, atol=0)
    assert run.optimizers[0].state[run.lightning_module.w]["exp_avg"].dtype == torch.float32


def test_masters_and_optimizer_state_resume_bit_for_bit(tmp_path: Any) -> None:
    policy = PrecisionPolicy("bf16", params="bf16", master_weights=True)

    def fit(epochs: int, resume: Any = None) -> tuple[L.Trainer, Net]:
        model = Net()
        run = trainer(AmpPrecision(policy), max_epochs=epochs)
        run.fit(model, data(), ckpt_path=resume)
        return run, model

    half, _ = fit(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    whole, reference = fit(2)
    resumed, model = fit(2, tmp_path / "half.ckpt")
    for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b), name
    for key in ("exp_avg", "exp_avg_sq"):
        a, b = (
            whole.optimizers[0].state[reference.head.weight][key],
            resumed.optimizers[0].state[model.head.weight][key],
        )
        assert a.dtype == torch.float32 and torch.equal(a, b)


# -------------------------------------------------------------------- checkpoint


def test_checkpoint_holds_everything_under_the_fixed_key_and_reads_with_weights_only(tmp_path: Any) -> None:
    class Renamed(AmpPrecision):
        pass

    plugin = Renamed("16-mixed", loss_scale=LossScale(init=8.0, growth_interval=5))
    run = trainer(plugin)
    run.fit(Net(), data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert "Renamed" not in checkpoint and "AmpPrecision" not in checkpoint
    ours = checkpoint[CHECKPOINT_KEY]
    assert ours["schema_version"] == SCHEMA_VERSION
    assert ours["scaler"]["scale"] == 32.0
    assert ours["scaler"]["_growth_tracker"] == 2
    assert PrecisionPolicy.from_dict(ours["policy"]) == plugin.policy


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("fused", [False, True])
def test_resume_goes_on_bit_for_bit(tmp_path: Any, precision: str, fused: bool) -> None:
    scale = LossScale(init=2.0**22, growth_interval=4) if precision == "16-mixed" else "auto"

    def fit(epochs: int, resume: Any = None) -> tuple[L.Trainer, Net]:
        model = Net(lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused))
        run = trainer(AmpPrecision(precision, loss_scale=scale), max_epochs=epochs)
        run.fit(model, data(), ckpt_path=resume)
        return run, model

    half, _ = fit(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    whole, reference = fit(2)
    resumed, model = fit(2, tmp_path / "half.ckpt")
    plugins: list[Any] = [whole.precision_plugin, resumed.precision_plugin]
    assert plugins[0].history.scales == plugins[1].history.scales
    assert plugins[0].history.state_dict() == plugins[1].history.state_dict()
    assert plugins[0].applied_steps == plugins[1].applied_steps > 12
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), model.parameters(), strict=True))
    if precision == "16-mixed":
        assert plugins[0].history.skipped > 0


def test_evaluation_never_changes_training_state(tmp_path: Any) -> None:
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=8.0, growth_interval=3))
    run, model = trainer(plugin, max_epochs=2), Net()
    older = trainer(AmpPrecision("16-mixed", loss_scale=LossScale(init=2.0)), max_steps=1)
    older.fit(Net(), data())
    older.save_checkpoint(tmp_path / "older.ckpt")
    run.fit(model, data())
    before = copy.deepcopy(plugin.state_dict())
    run.validate(model, data(), verbose=False)
    run.test(model, data(), ckpt_path=tmp_path / "older.ckpt", verbose=False)
    assert plugin.state_dict() == before


def test_checkpoint_of_another_kind_of_run_is_refused(tmp_path: Any) -> None:
    run = trainer(AmpPrecision("16-mixed"))
    run.fit(Net(), data())
    run.save_checkpoint(tmp_path / "fp16.ckpt")
    with pytest.raises(IncompatiblePrecisionError, match=r"(?s)16-mixed +bf16-mixed +refuse.*allow=\['precision'\]"):
        trainer(AmpPrecision("bf16-mixed"), max_epochs=2).fit(Net(), data(), ckpt_path=tmp_path / "fp16.ckpt")
    plugin = AmpPrecision("16-mixed")
    with pytest.raises(ValueError, match="schema_version 99"):
        plugin.load_state_dict({**plugin.state_dict(), "schema_version": 99})


@pytest.mark.parametrize(("saved", "now"), [("auto", None), (None, "auto")])
@pytest.mark.filterwarnings("ignore:loss_scale=None")
def test_state_with_and_without_a_loss_scale_are_refused_for_each_other(saved: Any, now: Any) -> None:
    state = AmpPrecision("16-mixed", loss_scale=saved).state_dict()
    plugin = AmpPrecision("16-mixed", loss_scale=now)
    before = copy.deepcopy(plugin.state_dict())
    with pytest.raises(IncompatiblePrecisionError, match=r"allow=\['loss_scale'\]"):
        plugin.load_state_dict(state)
    assert plugin.state_dict() == before


def test_checkpoint_without_our_state_is_said_and_starts_the_scale_anew(tmp_path: Any) -> None:
    run = trainer(AmpPrecision("16-mixed"))
    run.fit(Net(), data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del checkpoint[CHECKPOINT_KEY]
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    with pytest.raises(IncompatiblePrecisionError, match="not recorded"):
        trainer(AmpPrecision("16-mixed"), max_epochs=2).fit(Net(), data(), ckpt_path=tmp_path / "foreign.ckpt")
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=128.0), allow=["precision"])
    with pytest.warns(UserWarning, match=r"holds no state of lightning_amp_plus.*128"):
        trainer(plugin, max_epochs=2).fit(Net(), data(), ckpt_path=tmp_path / "foreign.ckpt")
    assert plugin.applied_steps == 12


def test_moved_modules_come_back_on_resume(tmp_path: Any) -> None:
    plugin = AmpPrecision("bf16-mixed")
    run = trainer(plugin)
    run.fit(Net(), data())
    plugin.set_route("head", "fp32", reason="by hand")
    run.save_checkpoint(tmp_path / "a.ckpt")
    model, resumed = Net(), AmpPrecision("bf16-mixed")
    trainer(resumed, max_epochs=2).fit(model, data(), ckpt_path=tmp_path / "a.ckpt")
    assert model.dtypes["head"] == torch.float32
    assert resumed.plan is not None and resumed.plan["head"].reason == "by hand"


# -------------------------------------------------------------------- copies, reports


@pytest.mark.parametrize("copy_it", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copy_of_a_used_plugin_goes_on_from_its_scale(copy_it: Any) -> None:
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=8.0, growth_interval=5))
    trainer(plugin).fit(Net(), data())
    other = copy_it(plugin)
    trainer(other).fit(Net(), data())
    assert plugin.history.scales == other.history.scales[:12]
    assert (plugin.applied_steps, other.applied_steps) == (12, 24)
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 32.0


def test_report_shows_the_window_to_people() -> None:
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=8.0))
    trainer(plugin, accumulate_grad_batches=2).fit(Net(), data())
    report = plugin.last_report
    assert report is not None
    assert (report.step, report.window, report.optimizer, report.outcome) == (5, 5, 0, "applied")
    assert "window 5" in str(report) and "scale 8 -> 8" in str(report)
    assert repr(plugin) == "AmpPrecision('16-mixed', loss scale: dynamic)"


def test_first_skip_warns_once_with_no_callback_installed() -> None:
    class Overflowing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (float("inf") if batch_idx < 3 else 1.0)

    with pytest.warns(UserWarning, match="Step 0 was skipped") as record:
        trainer(AmpPrecision("bf16-mixed")).fit(Overflowing(), data())
    assert sum("was skipped" in str(w.message) for w in record) == 1


@pytest.mark.parametrize("clip", [None, 0.1])
def test_complex_parameters_train_as_in_stock(clip: float | None) -> None:
    class Complex(Net):
        def __init__(self) -> None:
            super().__init__(lambda p: torch.optim.SGD(p, lr=0.1))
            self.w = nn.Parameter(torch.ones(4, 3, dtype=torch.cfloat))

        def loss(self, batch: Any) -> Tensor:
            return (batch[0].to(torch.cfloat) @ self.w).abs().pow(2).mean() + super().loss(batch)

    ours, stock = Complex(), Complex()
    trainer(AmpPrecision("32-true"), gradient_clip_val=clip).fit(ours, data())
    trainer(StockPrecision(), gradient_clip_val=clip).fit(stock, data())
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("manual", [False, True])
def test_an_optimizer_that_wraps_another_is_clipped_itself(precision: str, manual: bool) -> None:
    found = []
    for make in (Wrapping, sgd):
        model = TinyRegressor(make, manual=manual, clip=(1e-3, "norm") if manual else None)
        plugin = AmpPrecision(precision)
        fit(model, plugin, gradient_clip_val=None if manual else 1e-3)
        assert plugin.last_report is not None
        found.append(([p.detach() for p in model.parameters()], plugin.last_report.grad_norm))
    (ours, norm), (plain, expected) = found
    assert norm == expected and all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_import_pulls_in_no_optional_package() -> None:
    import subprocess
    import sys

    code = (
        "import sys, lightning_amp_plus\n"
        "print([m for m in ('torchao', 'transformer_engine', 'tensorboard', 'matplotlib') if m in sys.modules])\n"
        "from lightning_amp_plus import AmpPrecision, Trainer, plan\n"
        "print([m for m in ('torchao', 'transformer_engine', 'tensorboard') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["[]", "[]"]


def test_optimizer_that_would_not_move_is_warned_about() -> None:
    model = Net(lambda p: torch.optim.SGD(p, lr=0.1, fused=True))
    if torch.__version__ >= "2.14":
        pytest.skip("mended in torch 2.14")
    with pytest.warns(UserWarning, match=r"SGD\(fused=True\) does not move 16-bit parameters"):
        trainer(AmpPrecision("bf16-true"), max_steps=1).fit(model, data())


@pytest.mark.parametrize(
    ("policy", "eps", "warned"),
    [
        ("16-true", 1e-8, True),
        ("16-true", 1e-4, False),
        ("bf16-true", 1e-8, False),
        (PrecisionPolicy("fp16", params="fp16", master_weights=True), 1e-8, False),
    ],
)
def test_eps_that_fp16_makes_zero_is_warned_about(policy: Any, eps: float, warned: bool) -> None:
    model = Net(lambda p: torch.optim.AdamW(p, lr=1e-3, eps=eps))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(AmpPrecision(policy), max_steps=1).fit(model, data())
    assert any("zero gradient becomes NaN" in str(w.message) for w in caught) is warned
