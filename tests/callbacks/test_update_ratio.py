"""UpdateRatioMonitor: its numbers against weights before and after each step, what it says of layers that stand still."""

from __future__ import annotations

import itertools
import math
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy
from lightning_amp_plus.callbacks import UpdateRatioMonitor
from lightning_amp_plus.metrics import update_ratio
from tests.support.faults import INF
from tests.support.models import TinyRegressor, adamw, fused_adamw, sgd, sgd_momentum
from tests.support.training import WeightTrace, fit, loader, make_trainer, regression_batches, same

RATIO, LOST, MEDIAN = "precision/update_ratio/", "precision/rounded_away/", "precision/update_ratio_median"


class Rows(Logger):
    """Keeps what it is given."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, {k: v for k, v in metrics.items() if k.startswith("precision/")}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def watch(
    model: L.LightningModule, plugin: Any = "bf16-mixed", batches: int = 6, **arguments: Any
) -> tuple[list[tuple[int | None, dict[str, Any]]], UpdateRatioMonitor, list[dict[str, Tensor]]]:
    plugin = plugin if isinstance(plugin, AmpPrecision) else AmpPrecision(plugin)
    rows, trace = Rows(), WeightTrace()
    monitor = arguments.pop("monitor", None) or UpdateRatioMonitor(arguments.pop("every_n_steps", 1))
    fit(model, plugin, regression_batches(batches), logger=rows, callbacks=[trace, monitor], **arguments)
    return rows.rows, monitor, trace.weights


def expected(before: dict[str, Tensor], after: dict[str, Tensor], layer: str) -> float:
    names = [name for name in before if name.rpartition(".")[0] == layer]
    return float(update_ratio([before[n] for n in names], [after[n] for n in names]))


def rmsprop(parameters: Any) -> Any:
    return torch.optim.RMSprop(parameters, lr=0.01)


def adafactor(parameters: Any) -> Any:
    return torch.optim.Adafactor(parameters, lr=0.01)  # its eps are two numbers


class ThreeBetas(torch.optim.SGD):
    """As of other packages: three betas, and a learning rate that only the step knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0].update(betas=(0.9, 0.99, 0.999), lr=None)

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["lr"] = 0.1
        loss = super().step(closure)
        group["lr"] = None
        return loss


def two_groups(parameters: Any) -> Any:
    first, *others = parameters
    return torch.optim.AdamW(
        [{"params": [first], "lr": 0.05, "weight_decay": 0.5}, {"params": others, "name": "others"}], lr=0.01
    )


@pytest.mark.parametrize("make", [sgd, sgd_momentum, adamw, fused_adamw, rmsprop, adafactor, ThreeBetas, two_groups])
@pytest.mark.parametrize("policy", ["32-true", "bf16-mixed", "16-mixed"])
def test_ratios_are_those_of_the_weights_before_and_after(make: Any, policy: str) -> None:
    plugin = AmpPrecision(policy, **({"loss_scale": LossScale(init=8.0)} if policy == "16-mixed" else {}))
    rows, monitor, weights = watch(TinyRegressor(make), plugin)
    assert [step for step, _ in rows] == list(range(6))
    for step, row in rows:
        ratios = {layer: expected(weights[step], weights[step + 1], layer) for layer in ("first", "second")}
        assert {k for k in row if k.startswith(RATIO)} == {RATIO + layer for layer in ratios}
        for layer, ratio in ratios.items():
            assert row[RATIO + layer] == pytest.approx(ratio, rel=1e-4)
        assert row[MEDIAN] == pytest.approx(sum(ratios.values()) / 2, rel=1e-4)
    assert monitor.last is not None and monitor.last.at_zero == {} and monitor.last.step == 5
    assert {type(value) for _, row in rows for value in row.values()} == {float}
    (history,) = monitor.layer_histories()
    assert history.names == ["first", "second"] and history.steps == list(range(6))
    assert history.rows()[0][3] == pytest.approx(math.log10(rows[3][1][RATIO + "first"]))


@pytest.mark.parametrize("make", [adamw, fused_adamw, rmsprop])
@pytest.mark.parametrize("manual", [False, True])
def test_accumulation_counts_the_steps(make: Any, manual: bool) -> None:
    options: dict[str, Any] = {"manual": True, "accumulate": 3} if manual else {}
    arguments = {} if manual else {"accumulate_grad_batches": 3}
    rows, _, weights = watch(TinyRegressor(make, **options), batches=9, **arguments)
    taken = [i for i, (a, b) in enumerate(itertools.pairwise(weights)) if not same(a, b)]
    assert len(rows) == len(taken) == 3
    for (_, row), i in zip(rows, taken, strict=True):
        assert row[RATIO + "first"] == pytest.approx(expected(weights[i], weights[i + 1], "first"), rel=1e-4)


@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize("make", [sgd, adamw, rmsprop])
def test_master_weights_are_what_moves(make: Any, check_finite: bool) -> None:
    plugin = AmpPrecision(PrecisionPolicy("bf16", params="bf16", master_weights=True), check_finite=check_finite)
    masters: list[list[Tensor]] = []

    class Masters(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.on_train_batch_end(trainer, pl_module)

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            state = plugin._masters.state_dict(pl_module.named_parameters())
            masters.append([state[f"first.{name}"].clone() for name in ("weight", "bias")])

    rows, monitor = Rows(), UpdateRatioMonitor(1)
    fit(TinyRegressor(make), plugin, regression_batches(4), logger=rows, callbacks=[Masters(), monitor])
    for (_, row), before, after in zip(rows.rows, masters[:-1], masters[1:], strict=True):
        assert row[RATIO + "first"] == pytest.approx(float(update_ratio(before, after)), rel=1e-4)
        assert LOST + "first" not in row


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), lambda p: torch.optim.SGD(p, 1e-3)]
)
def test_what_is_stored_in_16_bits_moves_by_what_rounding_leaves(make: Any) -> None:
    rows, monitor, weights = watch(TinyRegressor(make), "bf16-true", batches=3)
    for step, row in rows:
        before, after = weights[step], weights[step + 1]
        assert row[RATIO + "first"] == pytest.approx(expected(before, after, "first"), rel=1e-4, abs=1e-12)
        kept = sum(int((before[n] == after[n]).sum()) for n in ("first.weight", "first.bias"))
        assert row[LOST + "first"] == pytest.approx(kept / 40) and kept > 0
    assert monitor.last is not None and monitor.last.rounded_away["first"] > 0


@pytest.mark.parametrize("make", [sgd, adamw, fused_adamw, rmsprop])
def test_a_skipped_step_has_no_ratio(make: Any) -> None:
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=8.0))
    model = TinyRegressor(make, faults={0: INF, 2: INF})
    rows, _, weights = watch(model, plugin, batches=4)
    assert [step for step, row in rows if row] == [1, 3]
    for step, row in rows:
        if row:
            assert row[RATIO + "second"] == pytest.approx(
                expected(weights[step], weights[step + 1], "second"), rel=1e-4
            )


def test_per_parameter_and_per_group() -> None:
    rows, _, weights = watch(TinyRegressor(two_groups), monitor=UpdateRatioMonitor(1, per="parameter"))
    step, row = rows[2]
    for name in ("first.weight", "second.bias"):
        wanted = float(update_ratio(weights[step][name], weights[step + 1][name]))
        assert row[RATIO + name] == pytest.approx(wanted, rel=1e-4)
    rows, _, weights = watch(TinyRegressor(two_groups), monitor=UpdateRatioMonitor(1, per="group"))
    step, row = rows[2]
    names = [name for name in weights[step] if name != "first.weight"]
    others = float(update_ratio([weights[step][n] for n in names], [weights[step + 1][n] for n in names]))
    assert row[RATIO + "others"] == pytest.approx(others, rel=1e-4) and RATIO + "group_0" in row


class Parts(TinyRegressor):
    """Two layers that learn, one frozen, unused, masked, shared and empty each, and a parameter of its own."""

    def __init__(self, make: Any = adamw) -> None:
        super().__init__(make)
        self.frozen, self.unused, self.masked = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(4, 8)
        self.frozen.requires_grad_(False)
        self.again, self.empty, self.own = self.first, nn.Linear(0, 0), nn.Parameter(torch.ones(8))

    def loss(self, batch: Any, fault: Any = None) -> Tensor:
        x, y = batch
        hidden = self.first(x) + self.frozen(x) + self.masked(x) * 0.0 + self.empty(x[:, :0]).sum()
        return nn.functional.mse_loss(self.second(torch.tanh(self.again(x) + hidden * self.own)).float(), y)


@pytest.mark.parametrize("make", [sgd, sgd_momentum, adamw, fused_adamw, rmsprop])
def test_layers_that_stand_still_are_told_apart_and_named_once(make: Any, recwarn: Any) -> None:
    rows, monitor, _ = watch(Parts(make))
    last = monitor.last
    assert last is not None
    assert last.at_zero == {"frozen": "frozen", "unused": "unused", "masked": "masked"}
    assert last.ratios.keys() == {"first", "second", "unused", "masked", "(model)"}
    assert last.ratios["unused"] == 0.0 and (last.ratios["masked"] == 0.0) == (make not in (adamw, fused_adamw))
    said = [str(w.message) for w in recwarn if "did not learn" in str(w.message)]
    assert len(said) == 2
    assert any("1 of 5 layers" in text and "(unused)" in text and "no gradient at all" in text for text in said)
    assert any("(masked)" in text and "zero throughout" in text for text in said)
    assert set(rows[-1][1]) >= {RATIO + name for name in last.ratios}


@pytest.mark.parametrize("make", [sgd, adamw, rmsprop])
def test_a_learning_rate_of_zero_is_no_fault_of_a_layer(make: Any, recwarn: Any) -> None:
    def stopped(parameters: Any) -> Any:
        optimizer = make(parameters)
        optimizer.param_groups[0]["lr"] = 0.0
        return optimizer

    for policy in ("bf16-mixed", "bf16-true"):
        _, monitor, _ = watch(TinyRegressor(stopped), policy)
        assert monitor.last is not None and monitor.last.at_zero == {"first": "zero", "second": "zero"}
        assert not any(monitor.last.rounded_away.values())
    assert not [w for w in recwarn if "did not learn" in str(w.message)]


def test_a_jump_of_all_layers_is_something_else(recwarn: Any) -> None:
    def jumps(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1000.0 if step in (8, 9) else 1.0)

    monitor = UpdateRatioMonitor(1, jump=20.0)
    seen: list[float | None] = []

    class See(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(monitor.last.jump if monitor.last else None)

    model = TinyRegressor(lambda p: torch.optim.Adam(p, lr=1e-4), jumps)
    fit(model, AmpPrecision("32-true"), regression_batches(12), callbacks=[monitor, See()])
    said = [str(w.message) for w in recwarn if "jumped" in str(w.message)]
    assert len(said) == 1 and "at step 8" in said[0] and "times its running median" in said[0]
    assert seen[:5] == [None] * 5 and 0.3 < (seen[6] or 0) < 3 and (seen[8] or 0) > 20
    assert not [w for w in recwarn if "did not learn" in str(w.message)]
    twin = UpdateRatioMonitor(1)
    twin.load_state_dict(monitor.state_dict())
    assert twin.state_dict() == monitor.state_dict() and len(monitor.state_dict()["medians"]) == 12


def test_several_optimizers_are_logged_together() -> None:
    class Two(TinyRegressor):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for part, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
                self.toggle_optimizer(optimizer)
                loss = self.loss(batch)
                self.manual_backward(loss * math.inf if part is self.first and batch_idx == 1 else loss)
                self.untoggle_optimizer(optimizer)
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return rmsprop(self.first.parameters()), fused_adamw(self.second.parameters())

    rows, monitor, weights = watch(Two(manual=True))
    for step, row in rows:
        wanted = {"second"} if step == 1 else {"first", "second"}
        assert {key.removeprefix(RATIO) for key in row if key.startswith(RATIO)} == wanted
        for layer in wanted:
            assert row[RATIO + layer] == pytest.approx(expected(weights[step], weights[step + 1], layer), rel=1e-4)
    assert monitor.last is not None and monitor.last.at_zero == {}
    rows, _, _ = watch(Two(manual=True), monitor=UpdateRatioMonitor(1, per="group"))
    assert {RATIO + "optimizer_0/group_0", RATIO + "optimizer_1/group_0"} <= rows[0][1].keys()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_named_as_itself(backend: str) -> None:
    model = TinyRegressor(fused_adamw)
    model.first = torch.compile(model.first, backend=backend)  # type: ignore[assignment]
    rows, _, weights = watch(model)
    step, row = rows[3]
    assert row[RATIO + "first"] == pytest.approx(
        expected(weights[step], weights[step + 1], "first._orig_mod"), rel=1e-4
    )


def test_groups_added_while_training_join() -> None:
    class Unfreezes(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.second.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": list(pl_module.second.parameters())})

    for per in ("layer", "group"):
        model = TinyRegressor(lambda p: adamw([q for q in p if q.requires_grad]))
        model.second.requires_grad_(False)
        rows, monitor = Rows(), UpdateRatioMonitor(1, per=per)  # type: ignore[arg-type]
        callbacks = [Unfreezes(), monitor]
        fit(model, AmpPrecision("32-true"), regression_batches(2), max_epochs=2, logger=rows, callbacks=callbacks)
        added = "second" if per == "layer" else "group_1"
        assert [RATIO + added in row for _, row in rows.rows] == [False, False, True, True]


def test_a_layer_that_takes_the_place_of_another_joins(recwarn: Any) -> None:
    class NewHead(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.second = torch.nn.Sequential(torch.nn.Linear(8, 1))
                trainer.optimizers[0].add_param_group({"params": list(pl_module.second.parameters())})

    rows, monitor = Rows(), UpdateRatioMonitor(1)
    callbacks = [NewHead(), monitor]
    fit(
        TinyRegressor(adamw),
        AmpPrecision("32-true"),
        regression_batches(2),
        max_epochs=2,
        logger=rows,
        callbacks=callbacks,
    )
    assert [RATIO + "second.0" in row for _, row in rows.rows] == [False, False, True, True]
    assert monitor.last is not None and not monitor.last.at_zero
    assert not [w for w in recwarn if "did not learn" in str(w.message)]


# ---------------------------------------------------------------- what it costs


class Ops(TorchDispatchMode):
    """Counts ops by batch, and hooks on the model at the end of each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Counted(L.Callback):
    def __init__(self) -> None:
        self.ops: list[int] = []
        self.hooks: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.mode = Ops()
        self.mode.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.ops.append(self.mode.count)
        (optimizer,) = trainer.optimizers
        hooks = [len(m._forward_hooks) + len(m._backward_hooks) for m in pl_module.modules()]
        self.hooks.append(sum(hooks) + len(optimizer._optimizer_step_post_hooks))


@pytest.mark.parametrize("make", [fused_adamw, rmsprop])
def test_between_log_points_nothing_runs(make: Any) -> None:
    def ops(callbacks: list[L.Callback]) -> Counted:
        counted = Counted()
        fit(TinyRegressor(make), AmpPrecision("bf16-mixed"), callbacks=[*callbacks, counted])
        return counted

    bare, watched = ops([]), ops([UpdateRatioMonitor(5)])
    more = [b - a for a, b in zip(bare.ops, watched.ops, strict=True)]
    assert [i for i, extra in enumerate(more) if extra] == [4, 9, 14, 19]
    assert bare.hooks == watched.hooks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"per": "tensor"}, r"per='tensor'.*'layer', 'parameter' or 'group'"),
        ({"sample": 0}, r"sample=0\).*1/16"),
        ({"sample": 0.3}, "1 over a whole number"),
        ({"jump": 1}, r"jump=1\).*above 1"),
        ({"every_n_steps": 0}, "at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        UpdateRatioMonitor(**arguments)


def test_works_without_logger_and_at_a_resume(tmp_path: Any) -> None:
    trainer = fit(TinyRegressor(), AmpPrecision("bf16-mixed"), callbacks=[UpdateRatioMonitor(5)])
    assert {RATIO + "first", MEDIAN} <= trainer.callback_metrics.keys()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = make_trainer(AmpPrecision("bf16-mixed"), callbacks=[UpdateRatioMonitor(5)], max_epochs=2)
    again.fit(TinyRegressor(), loader(regression_batches()), ckpt_path=tmp_path / "a.ckpt")
    assert again.callback_metrics[MEDIAN] > 0
