"""Fp8CoverageMonitor in a Trainer: what it logs and says, every reason that occurs, and what it leaves behind."""

from __future__ import annotations

import copy
import csv
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import ActivationMonitor, DtypeCensus
from lightning_amp_plus.callbacks.fp8_coverage import Fp8CoverageMonitor
from lightning_amp_plus.fp8 import DelayedScaling
from lightning_amp_plus.fp8.backends import BACKENDS
from lightning_amp_plus.fp8.coverage.report import REASONS, Coverage
from lightning_amp_plus.fp8.obstacle import Obstacle
from tests.support.models import adamw, fused_adamw, sgd
from tests.support.training import WeightTrace, loader, make_trainer, same

TOKENS = 16
WIDE, NARROW = 2 * TOKENS * 16 * 32, 2 * TOKENS * 16 * 10  # FLOPs of a GEMM of each layer


class Model(L.LightningModule):
    """16 to 32 to 16 to 10; draws random numbers, so that a callback that draws one too is found out."""

    def __init__(self, make_optimizer: Any = sgd) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.up, self.down, self.last = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 10)
        self.make_optimizer = make_optimizer
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.up(x).relu(), 0.1, training=self.training)
        return self.last(self.down(hidden))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).float().square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)

    def on_train_end(self) -> None:
        self.state = torch.get_rng_state()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def batches(count: int = 4, tokens: int = TOKENS) -> list[Tensor]:
    return list(torch.randn(count, tokens, 16, generator=torch.Generator().manual_seed(0)))


def in_fp8(*names: str, backend: str | None = None, **settings: Any) -> PrecisionPolicy:
    return PrecisionPolicy("bf16", rules=[Rule(name, compute="fp8", backend=backend) for name in names], **settings)


FP8 = in_fp8("up", "down")
# up has no gradient for its input: two GEMMs. down and last have three.
IN_FP8, ALL_OF_IT = 5 * WIDE, 5 * WIDE + 3 * NARROW


class Looks(L.Callback):
    """The batches that are watched, what each came to, and all that was logged."""

    def __init__(self, monitor: Fp8CoverageMonitor) -> None:
        self.monitor = monitor
        self.batches: list[int] = []
        self.found: list[Coverage] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if hooked(trainer, pl_module):
            self.batches.append(batch_idx)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        last = self.monitor.last
        if last is not None and (not self.found or self.found[-1] is not last):
            self.found.append(last)
            self.logged.append({k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("fp8/")})


def hooked(trainer: L.Trainer, model: L.LightningModule) -> bool:
    parts = list(model.modules())
    found = any(part._forward_hooks or part._forward_pre_hooks or part._forward_hooks_always_called for part in parts)
    found |= any(opt._optimizer_step_pre_hooks or opt._optimizer_step_post_hooks for opt in trainer.optimizers)
    return found or any(verb in vars(trainer.strategy) for verb in ("backward", "optimizer_step"))


def watched(
    model: L.LightningModule,
    plugin: Any = FP8,
    data: Any = None,
    every: int | None = 1,
    what_if: Any = (),
    **arguments: Any,
) -> Looks:
    monitor = Fp8CoverageMonitor(every, what_if=what_if)
    looks = Looks(monitor)
    plugin = plugin if isinstance(plugin, AmpPrecision) else AmpPrecision(plugin)
    callbacks = [monitor, looks, *arguments.pop("callbacks", [])]
    trainer = make_trainer(plugin, callbacks=callbacks, **arguments)
    trainer.fit(
        model,
        loader(batches() if data is None else data),
        *([loader(batches())] if "val_check_interval" in arguments else []),
    )
    assert not hooked(trainer, model) and torch._C._len_torch_dispatch_stack() == 0
    return looks


# ---------------------------------------------------------------- what is logged


def documented_keys() -> set[str]:
    """Those of the table, with the words that stand for others filled in; the scale's history is of delayed scaling."""
    found = set()
    for key in re.findall(r"``(fp8/[^`]+)``", Fp8CoverageMonitor.__doc__ or ""):
        for name, tensor in itertools.product(("up", "down"), ("input", "weight", "grad_output")):
            filled = key.replace("NAME", name).replace("TENSOR", tensor).replace("RECIPE", "rowwise")
            found |= {filled.replace("REASON", reason) for reason in REASONS}
    return found


def test_the_keys_are_those_of_the_table_and_the_numbers_those_by_hand():
    looks = watched(Model(), what_if=["rowwise"])
    logged = looks.logged[0]
    sometimes = {key for key in documented_keys() if "fallback" in key or "scale_updates" in key}
    assert documented_keys() - sometimes <= set(logged) <= documented_keys()
    without_time = {key: value for key, value in logged.items() if key.count("/") < 3 and "time" not in key}
    share = pytest.approx(IN_FP8 / ALL_OF_IT)
    assert without_time == {
        "fp8/coverage_flops": share,
        "fp8/coverage_gemms": pytest.approx(5 / 8),
        "fp8/coverage_flops_without_attention": share,
        "fp8/coverage_gemms_without_attention": pytest.approx(5 / 8),
        "fp8/native_flops": 0.0,
        "fp8/native_gemms": 0.0,
        "fp8/fallback/rule": pytest.approx(3 * NARROW / ALL_OF_IT),
    }
    assert sum(logged[f"fp8/time_{kind}"] for kind in ("gemm", "cast", "rest")) == pytest.approx(1.0)
    assert all(logged[f"fp8/time_{kind}"] > 0 for kind in ("gemm", "cast", "rest"))


def test_a_logger_gets_a_row_for_each_log_point(tmp_path: Path):
    watched(Model(), data=batches(6), every=2, logger=CSVLogger(tmp_path, "", "csv"))
    rows = list(csv.DictReader((tmp_path / "csv" / "metrics.csv").open()))
    shown = [row for row in rows if row.get("fp8/coverage_flops")]
    assert [int(row["step"]) for row in shown] == [1, 3, 5]
    assert {float(row["fp8/coverage_flops"]) for row in shown} == {IN_FP8 / ALL_OF_IT}
    assert {float(row["fp8/fallback/rule"]) for row in shown} == {3 * NARROW / ALL_OF_IT}


@pytest.mark.parametrize(
    ("every", "arguments", "seen"),
    [
        (2, {}, [1, 3, 5, 7]),
        (None, {"log_every_n_steps": 3}, [2, 5]),
        (None, {"log_every_n_steps": 0}, []),
        (2, {"accumulate_grad_batches": 2}, [2, 3, 6, 7]),
        (100, {"fast_dev_run": 2}, [0, 1]),
    ],
)
def test_it_looks_at_windows_that_end_an_interval_and_at_no_other(every, arguments, seen):
    looks = watched(Model(), data=batches(8), every=every, **arguments)
    assert looks.batches == seen
    assert (looks.monitor.last is None) == (not seen)


class OfAnotherPackage(nn.Linear):
    __module__ = "torchao.float8.float8_linear"


class DerivedFromIt(OfAnotherPackage):
    pass


@pytest.mark.parametrize(
    ("policy", "up", "looks"),
    [
        ("bf16-mixed", nn.Linear, False),
        (FP8, nn.Linear, True),
        ("bf16-mixed", OfAnotherPackage, True),
        ("bf16-mixed", DerivedFromIt, True),
    ],
)
def test_without_always_it_keeps_out_of_runs_that_have_no_fp8(policy, up, looks):
    monitor, model = Fp8CoverageMonitor(1, always=False), Model()
    model.up = up(16, 32)
    make_trainer(AmpPrecision(policy), callbacks=[monitor]).fit(model, loader(batches()))
    assert (monitor.last is not None) == looks


def test_two_micro_batches_are_twice_the_work_and_one_log_point():
    one, two = watched(Model(), data=batches(2)), watched(Model(), data=batches(2), accumulate_grad_batches=2)
    assert len(one.found) == 2 and len(two.found) == 1
    assert sum(row.flops for row in one.found[0].rows) == ALL_OF_IT
    assert [(r.module, r.role, r.count, r.flops) for r in two.found[0].rows] == [
        (r.module, r.role, 2 * r.count, 2 * r.flops) for r in one.found[0].rows
    ]
    assert two.logged[0]["fp8/coverage_flops"] == pytest.approx(IN_FP8 / ALL_OF_IT)


def test_layers_have_histories():
    looks = watched(Model(), data=batches(3))
    history, *fits = looks.monitor.layer_histories()
    assert [fit.title for fit in fits] == ["SQNR in dB", "Saturation", "Underflow"]
    assert all(
        fit.names == [f"{n}/{t}" for n in ("up", "down") for t in ("input", "weight", "grad_output")] for fit in fits
    )
    assert history.steps == [0, 1, 2]
    by_name = dict(zip(history.names, history.rows(), strict=True))
    assert by_name["up"] == by_name["down"] == [1.0] * 3 and by_name["last"] == [0.0] * 3
    assert set(by_name) == {"up", "down", "last"}


def test_it_says_once_what_it_found(caplog, capsys):
    with caplog.at_level("INFO"):
        watched(Model())
    assert caplog.text.count("FP8 coverage at step") == 1
    assert "62.5 % of 8 GEMMs; not in FP8: rule 15.8 %" in caplog.text
    assert "FP8 coverage, step 3" in capsys.readouterr().out


def test_an_epoch_of_nothing_and_a_model_without_gemms_are_no_zero():
    class Sums(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (batch * self.weight).sum()

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters())

    looks = watched(Sums(), "bf16-mixed")
    assert not any("coverage" in key or "native" in key for key in looks.logged[0])
    assert looks.found[0].rows == () and math.isnan(looks.found[0].shares().flops)
    assert "no GEMM ran" in str(looks.found[0])


def test_bad_settings_and_other_plugins_are_refused():
    with pytest.raises(ValueError, match=r"every_n_steps=0.*at least 1"):
        Fp8CoverageMonitor(0)
    with pytest.raises(MisconfigurationException, match="AmpPrecision"):
        make_trainer(callbacks=[Fp8CoverageMonitor()]).fit(Model(), loader(batches()))


# ---------------------------------------------------------------- reasons


def why(coverage: Coverage) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in coverage.rows:
        found.setdefault(row.module, set()).add(row.reason)
    return found


def test_shape_and_op_and_rule():
    class More(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            y = self(batch)
            return (y @ y.t()).float().square().mean()

    policy = PrecisionPolicy("fp8", rules=[Rule("down", compute="bf16")])
    looks = watched(More(), policy)
    assert why(looks.found[0]) == {"up": {""}, "down": {"rule"}, "last": {"shape"}, "": {"op"}}
    pairs = 2 * TOKENS * 10 * TOKENS
    total = ALL_OF_IT + 3 * pairs
    assert looks.found[0].fallbacks() == {
        "rule": 3 * WIDE / total,
        "shape": 3 * NARROW / total,
        "op": 3 * pairs / total,
    }
    assert looks.logged[0]["fp8/fallback/shape"] == pytest.approx(3 * NARROW / total)


@pytest.mark.parametrize("reason", ["backend", "hardware"])
def test_backend_and_hardware(reason, monkeypatch):
    if reason == "hardware":  # what a GPU before Ada answers
        old = Obstacle("hardware", "it needs compute capability 8.9")
        monkeypatch.setattr(type(BACKENDS["torchao"]), "obstacle", lambda *_: old)
    rules = [Rule("down", compute="fp8", backend="torchao", recipe=DelayedScaling()), Rule("up", compute="fp8")]
    looks = watched(Model(), PrecisionPolicy("bf16", rules=rules, fallback="bf16"))
    assert why(looks.found[0]) == {"up": {""}, "down": {reason}, "last": {"rule"}}
    assert looks.logged[0][f"fp8/fallback/{reason}"] == pytest.approx(3 * WIDE / ALL_OF_IT)
    assert looks.logged[0]["fp8/coverage_flops"] == pytest.approx(2 * WIDE / ALL_OF_IT)


class Moves(L.Callback):
    def __init__(self, at: int, module: str, compute: str) -> None:
        self.at, self.module, self.compute = at, module, compute

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            trainer.precision_plugin.set_route(self.module, self.compute, reason="a test")


@pytest.mark.parametrize("wait", [0, 2])
def test_demoted_from_the_batch_on_and_logged_ever_since(wait):
    looks = watched(Model(), callbacks=[Moves(wait, "down", "bf16"), Moves(2, "down", "fp8")])
    found = [why(coverage)["down"] for coverage in looks.found]
    moved = [{""}, {"demoted"}, {"demoted"}, {""}] if wait == 0 else [{""}] * 4
    assert found == moved
    logged = [row.get("fp8/fallback/demoted") for row in looks.logged]
    share = pytest.approx(3 * WIDE / ALL_OF_IT)
    assert logged == ([None, share, share, 0.0] if wait == 0 else [None] * 4)


def test_eval_where_a_layer_is_frozen():
    class Frozen(Model):
        def on_train_batch_start(self, *_: Any) -> None:
            self.down.eval()

    looks = watched(Frozen())
    assert why(looks.found[0]) == {"up": {""}, "down": {"eval"}, "last": {"rule"}}
    assert looks.logged[0]["fp8/fallback/eval"] == pytest.approx(3 * WIDE / ALL_OF_IT)
    stays = watched(Frozen(), in_fp8("up", "down", fp8_in_evaluation=True))
    assert why(stays.found[0])["down"] == {""}


def test_warmup_until_fp8_begins():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FP8 coverage is 0")  # that is as planned
        looks = watched(Model(), in_fp8("up", "down", fp8_after_steps=2))
    assert [why(coverage)["down"] for coverage in looks.found] == [{"warmup"}] * 2 + [{""}] * 2
    shares = [row["fp8/coverage_flops"] for row in looks.logged]
    assert shares == [0.0, 0.0, *[pytest.approx(IN_FP8 / ALL_OF_IT)] * 2]
    assert [row["fp8/fallback/warmup"] for row in looks.logged] == [*[pytest.approx(IN_FP8 / ALL_OF_IT)] * 2, 0.0, 0.0]


def test_every_reason_occurs_in_these_tests():
    text = Path(__file__).read_text()
    assert all(f'"{reason}"' in text for reason in REASONS)


class Bypassed(Model):
    """Multiplies the weights itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.linear(nn.functional.linear(x, self.up.weight), self.down.weight))


def test_coverage_0_is_warned_about_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        looks = watched(Bypassed())
    said = [str(w.message) for w in caught if "FP8 coverage is 0" in str(w.message)]
    assert len(said) == 1
    assert "at step 0: the plan has 2 layers in FP8, and no GEMM ran in it" in said[0] and "op 84.2 %" in said[0], said
    assert looks.logged[0]["fp8/coverage_flops"] == 0.0
    assert looks.logged[0]["fp8/fallback/op"] == pytest.approx(IN_FP8 / ALL_OF_IT)


def test_a_batch_without_elements_is_no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FP8 coverage is 0")
        looks = watched(Model(), in_fp8("up", "down", backend="torchao"), data=[torch.zeros(0, 16)])
    assert looks.logged[0]["fp8/coverage_gemms"] == 0.0 and "fp8/coverage_flops" not in looks.logged[0]


def test_work_without_a_formula_is_named_in_a_note(monkeypatch):
    from lightning_amp_plus.fp8.coverage import gemms

    monkeypatch.delitem(gemms._RULES, "addmm")
    looks = watched(Model(), "bf16-mixed", data=batches(1))
    assert any(note == "Of unknown work, counted without FLOPs: aten.addmm." for note in looks.found[0].notes)
    assert sum(row.count for row in looks.found[0].rows) == 8
    assert sum(row.flops for row in looks.found[0].rows) == ALL_OF_IT - (2 * WIDE + NARROW)


def test_no_fp8_in_the_policy_is_no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FP8 coverage is 0")
        watched(Model(), "bf16-mixed")


# ---------------------------------------------------------------- loops of every kind


def by_role(coverage: Coverage) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for row in coverage.rows:
        count, flops = found.get(row.role, (0, 0))
        found[row.role] = count + row.count, flops + row.flops
    return found


PLAIN = {
    "fprop": (3, 2 * WIDE + NARROW),
    "dgrad": (2, WIDE + NARROW),
    "wgrad": (3, 2 * WIDE + NARROW),
}


def test_manual_optimization_with_two_optimizers():
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self(batch).float().square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [adamw(self.up.parameters()), sgd([*self.down.parameters(), *self.last.parameters()])]

    looks = watched(Two())
    assert by_role(looks.found[0]) == {role: (2 * count, 2 * flops) for role, (count, flops) in PLAIN.items()}
    assert looks.logged[0]["fp8/coverage_flops"] == pytest.approx(IN_FP8 / ALL_OF_IT)


@pytest.mark.parametrize("check_finite", [True, False])
def test_a_closure_that_an_optimizer_calls_several_times(check_finite):
    calls = []

    class Counted(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

    def lbfgs(parameters: Any) -> Any:
        return torch.optim.LBFGS(parameters, lr=1e-3, max_iter=3)

    looks = watched(Counted(lbfgs), AmpPrecision("32-true", check_finite=check_finite), data=batches(1))
    times = len(calls)
    found = by_role(looks.found[0])
    found.pop("optimizer", None)  # products of two vectors are no GEMMs, but nobody promised that
    assert times > 1 and found == {role: (times * count, times * flops) for role, (count, flops) in PLAIN.items()}


def test_an_optimizers_own_products_count_in_no_share():
    class Multiplying(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.ndim == 2:
                            p.add_((p @ p.t()) @ p, alpha=1e-6)
            return loss

    looks = watched(Model(lambda parameters: Multiplying(parameters, lr=0.1)), data=batches(1))
    found = by_role(looks.found[0])
    assert found.pop("optimizer") == (6, 2 * 2 * (32 * 16 * 32 + 16 * 32 * 16 + 10 * 16 * 10))
    assert found == PLAIN
    assert looks.logged[0]["fp8/coverage_flops"] == pytest.approx(IN_FP8 / ALL_OF_IT)
    assert looks.found[0].fallbacks() == {"rule": 3 * NARROW / ALL_OF_IT}


def test_clipping_adds_no_gemm():
    looks = watched(Model(), gradient_clip_val=0.1)
    assert by_role(looks.found[0]) == PLAIN


def test_a_skipped_window_of_fp16_counts_what_it_did():
    class Overflows(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 else loss

    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=8.0))
    looks = watched(Overflows(), plugin)
    assert plugin.history.skipped == 1
    assert [by_role(coverage) for coverage in looks.found] == [PLAIN] * 4
    assert {row.format for row in looks.found[1].rows} == {"fp16"}


def test_validation_in_mid_epoch_is_not_counted():
    looks = watched(Model(), every=1, val_check_interval=2)
    assert [by_role(coverage) for coverage in looks.found] == [PLAIN] * 4
    assert [coverage.step for coverage in looks.found] == [0, 1, 2, 3]


def test_an_unequal_last_batch_counts_its_own_work():
    looks = watched(Model(), data=[*batches(1), *batches(1, tokens=32)])
    assert [sum(row.flops for row in coverage.rows) for coverage in looks.found] == [ALL_OF_IT, 2 * ALL_OF_IT]


# ---------------------------------------------------------------- what it leaves behind


@pytest.mark.parametrize("where", ["forward", "training_step", "backward", "optimizer"])
def test_an_exception_in_mid_step_leaves_nothing(where):
    class Fails(Model):
        def fail(self, here: str) -> None:
            if where == here:
                raise RuntimeError("the model failed")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.fail("training_step")
            return loss

        def on_after_backward(self) -> None:
            self.fail("backward")

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            self.fail("optimizer")

    model = Fails()
    if where == "forward":
        model.down.register_forward_hook(lambda *_: model.fail("forward"))
    hooks = len(model.down._forward_hooks)
    monitor = Fp8CoverageMonitor(1)
    trainer = make_trainer(AmpPrecision(FP8), callbacks=[monitor])
    with pytest.raises(RuntimeError, match="the model failed"):
        trainer.fit(model, loader(batches()))
    assert len(model.down._forward_hooks) == hooks and not model.up._forward_hooks and not model._forward_pre_hooks
    assert not {"training_step", "backward", "optimizer_step"} & set(vars(trainer.strategy))
    assert torch._C._len_torch_dispatch_stack() == 0
    again = make_trainer(AmpPrecision(FP8), callbacks=[monitor])
    again.fit(Model(), loader(batches()))
    assert monitor.last is not None and by_role(monitor.last) == PLAIN


class Watching(L.Callback):
    """What lies on the strategy after each batch."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append({"backward", "optimizer_step"} & set(vars(trainer.strategy)))


ORDERS = list(itertools.permutations(["coverage", "census", "activation"]))


@pytest.mark.parametrize("order", ORDERS, ids=["-".join(order) for order in ORDERS])
def test_beside_other_monitors_in_any_order(order):
    made = {"coverage": Fp8CoverageMonitor(2), "census": DtypeCensus(2), "activation": ActivationMonitor(2)}
    watching = Watching()
    trainer = make_trainer(AmpPrecision(FP8), callbacks=[*(made[name] for name in order), watching])
    model = Model()
    trainer.fit(model, loader(batches()))
    assert watching.seen == [set()] * 4 and not hooked(trainer, model)
    assert "training_step" not in vars(trainer.strategy)
    coverage, census = made["coverage"].last, made["census"].last
    assert coverage is not None and by_role(coverage) == PLAIN
    assert census is not None and not census.flags


def test_two_of_them_see_the_same():
    monitors = Fp8CoverageMonitor(1), Fp8CoverageMonitor(2)
    make_trainer(AmpPrecision(FP8), callbacks=list(monitors)).fit(Model(), loader(batches()))
    first, second = (monitor.last for monitor in monitors)
    assert first is not None and second is not None and first.rows == second.rows and by_role(first) == PLAIN


def trained(policy: Any, callbacks: list[L.Callback], make_optimizer: Any = fused_adamw) -> tuple[Any, Any]:
    torch.manual_seed(5)
    trace, model = WeightTrace(), Model(make_optimizer)
    trainer = make_trainer(AmpPrecision(policy), callbacks=[*callbacks, trace], accumulate_grad_batches=2)
    trainer.fit(model, loader(batches(8)))
    return trace.weights, model.state


@pytest.mark.parametrize("backend", ["reference", "torchao"])
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_training_is_the_same_to_the_bit_with_and_without(backend, make_optimizer):
    if backend == "torchao":
        pytest.importorskip("torchao")
    policy = in_fp8("up", "down", backend=backend)
    bare, state = trained(policy, [], make_optimizer)
    with_it, state_with_it = trained(policy, [Fp8CoverageMonitor(2)], make_optimizer)
    assert len(bare) == len(with_it) == 9 and all(same(a, b) for a, b in zip(bare, with_it, strict=True))
    assert torch.equal(state, state_with_it)


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class OpsOf(L.Callback):
    """The operations of one batch."""

    def __init__(self, batch: int) -> None:
        self.batch, self.mode = batch, Recording()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.mode.__exit__(None, None, None)


@pytest.mark.parametrize("batch", [0, 2])
def test_between_log_points_the_same_operations_run(batch):
    ops = []
    for callbacks in ([], [Fp8CoverageMonitor(2)]):
        recorder = OpsOf(batch)
        make_trainer(AmpPrecision(FP8), callbacks=[recorder, *callbacks]).fit(Model(), loader(batches()))
        ops.append(recorder.mode.ops)
    assert ops[0] == ops[1] and len(ops[0]) > 20


def copies(thing: Any) -> list[Any]:
    return [copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))]


def test_copies_of_the_monitor_keep_what_it_found_and_train():
    looks = watched(Model())
    for twin in copies(looks.monitor):
        assert twin.last == looks.monitor.last and twin.every_n_steps == 1 and twin.state_key == looks.monitor.state_key
        make_trainer(AmpPrecision(FP8), callbacks=[twin]).fit(Model(), loader(batches(2)))
        assert twin.last.step == 1 and by_role(twin.last) == PLAIN


class CopiesInMidStep(Model):
    """Copies itself while it is watched, and trains on."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.zero_grad()
            vars(self)["twin"] = self.make(self.up), self.make(self.down)
        return super().training_step(batch, batch_idx)


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_copies_of_a_module_that_is_watched_are_watched_by_nobody(make):
    model = CopiesInMidStep(make)
    looks = watched(model)
    assert [by_role(coverage) for coverage in looks.found] == [PLAIN] * 4
    up, down = vars(model)["twin"]
    x = torch.randn(TOKENS, 16)
    with torch.no_grad():
        assert down(up(x)).isfinite().all()
    assert [by_role(coverage) for coverage in looks.found] == [PLAIN] * 4


def test_what_a_copy_computes_in_the_watched_step_is_the_models():
    class Mean(CopiesInMidStep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                with torch.no_grad():
                    vars(self)["twin"][0](batch)
            return loss

    found = watched(Mean(copy.deepcopy)).found[1]
    [row] = [row for row in found.rows if row.module == ""]
    assert (row.role, row.count, row.flops, row.format) == ("fprop", 1, WIDE, "e4m3")
