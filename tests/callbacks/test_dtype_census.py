"""DtypeCensus in a Trainer: when it looks, what it leaves behind, what a checkpoint keeps and what a resume says."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import DtypeCensus, PrecisionCheckpoint
from lightning_amp_plus.census import Census
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY
from lightning_amp_plus.checkpoint.saved import saved_precision
from lightning_amp_plus.cli import main
from tests.support.faults import INF
from tests.support.models import TinyRegressor, adamw, fused_adamw, sgd
from tests.support.training import fit, loader, make_trainer, regression_batches

RUN = {"logger": False}


def taken(model: L.LightningModule, policy: Any = "bf16-mixed", **arguments: Any) -> Census:
    callback = DtypeCensus()
    plugin = policy if isinstance(policy, AmpPrecision) else AmpPrecision(policy)
    fit(model, plugin, callbacks=[callback], **arguments)
    assert callback.last is not None
    return callback.last


class Looks(L.Callback):
    """Notes in which batches something was watched, and that nothing stays anywhere."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if hooked(trainer, pl_module):
            self.batches.append(batch_idx)


def hooked(trainer: L.Trainer, model: L.LightningModule) -> bool:
    parts = list(model.modules())
    found = any(part._forward_hooks or part._forward_pre_hooks or part._forward_hooks_always_called for part in parts)
    found |= any(opt._optimizer_step_pre_hooks or opt._optimizer_step_post_hooks for opt in trainer.optimizers)
    return found or "backward" in vars(trainer.strategy)


# ---------------------------------------------------------------- when it looks


@pytest.mark.parametrize(
    ("every", "arguments", "batches"),
    [
        (None, {}, [0]),
        (None, {"log_every_n_steps": 0}, [0]),
        (None, {"accumulate_grad_batches": 3}, [2]),
        (4, {}, [0, 3, 7]),
        (2, {"accumulate_grad_batches": 2}, [1, 3, 7]),
    ],
)
def test_it_looks_at_the_batch_that_closes_a_window_and_at_no_other(every, arguments, batches):
    looks, callback = Looks(), DtypeCensus(every)
    model = TinyRegressor(adamw)
    trainer = fit(model, AmpPrecision("bf16-mixed"), regression_batches(8), callbacks=[callback, looks], **arguments)
    assert looks.batches == batches
    assert not hooked(trainer, model)
    assert callback.last is not None and callback.last.modules["first"]["optimizer"] == "fp32"


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class OpsOf(L.Callback):
    """Counts the operations of the batches from ``first`` on."""

    def __init__(self, first: int) -> None:
        self.first, self.mode, self.entered = first, Counting(), False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.mode.__enter__()
            self.entered = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.entered:
            self.mode.__exit__(None, None, None)


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_later_steps_have_no_operation_more(make_optimizer):
    counts = []
    for callbacks in ([], [DtypeCensus()]):
        counter = OpsOf(1)
        fit(TinyRegressor(make_optimizer), AmpPrecision("16-mixed"), callbacks=[*callbacks, counter])
        counts.append(counter.mode.count)
    assert counts[0] == counts[1] > 0


def test_a_window_that_is_skipped_is_looked_at_again():
    looks = Looks()
    callback = DtypeCensus()
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=8.0))
    fit(TinyRegressor(adamw, faults={0: INF, 1: INF}), plugin, callbacks=[callback, looks])
    assert looks.batches == [0, 1, 2]
    assert callback.last is not None and callback.last.step == 2 and not callback.last.notes
    assert plugin.census is callback.last


def test_where_no_optimizer_ever_steps_it_says_so(caplog):
    callback = DtypeCensus()
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=8.0))
    with caplog.at_level(logging.INFO):
        fit(TinyRegressor(adamw, faults={0: INF, 1: INF}), plugin, regression_batches(2), callbacks=[callback])
    assert callback.last is not None and callback.last.modules["first"]["optimizer"] == "-"
    assert any("No optimizer stepped" in note for note in callback.last.notes)
    assert "Dtype census at step" in caplog.text and plugin.census is None


def test_an_exception_in_the_watched_step_leaves_nothing():
    class Fails(TinyRegressor):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            self.first(batch[0])
            raise RuntimeError("the model failed")

    model = Fails()
    trainer = make_trainer(AmpPrecision("bf16-mixed"), callbacks=[DtypeCensus()])
    with pytest.raises(RuntimeError, match="the model failed"):
        trainer.fit(model, loader(regression_batches()))
    assert not hooked(trainer, model)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_another_look_when_fp8_begins():
    policy = PrecisionPolicy("bf16", rules=[Rule("net.0", compute="fp8")], fp8_after_steps=3)

    class Wide(TinyRegressor):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1))

        def loss(self, batch: Any, *_: Any) -> Tensor:
            return self.net(batch[0].repeat(1, 8)).float().square().mean()

    seen: list[Census | None] = []
    callback = DtypeCensus()

    class Keep(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(callback.last)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dtypes differ")
        fit(Wide(), AmpPrecision(policy), callbacks=[callback, Keep()], log_every_n_steps=1)
    before, after = seen[0], callback.last
    assert before is not None and after is not None and after.step >= 3
    assert before.modules["net.0"]["weight"] == "bf16" and any("had not begun" in note for note in before.notes)
    assert after.modules["net.0"]["weight"] == "e4m3" and not after.notes
    assert not before.flags and not after.flags


# ---------------------------------------------------------------- models of every kind


def test_manual_optimization_with_two_optimizers():
    class Two(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                loss = self.two(self.one(batch[0])).float().square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [adamw(self.one.parameters()), sgd(self.two.parameters())]

    census = taken(Two(), "16-mixed")
    assert [census.modules[name]["optimizer"] for name in ("one", "two")] == ["fp32", "-"]
    assert all(census.modules[name]["gradient"] == "fp32" for name in ("one", "two"))
    assert {op.phase for op in census.ops if op.kind == "gemm" and op.module == "one"} == {"forward", "backward"}
    assert not census.flags, str(census)


def test_raw_backwards_and_steps():
    model = TinyRegressor(adamw, manual=True, accumulate=2, clip=(1.0, "norm"))
    census = taken(model, "bf16-mixed")
    assert census.modules["second"]["gradient"] == "fp32" and not census.flags


class Strange(TinyRegressor):
    """Tied, frozen, unused and empty parameters, and one that has no module's forward around it."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.tied = nn.Linear(4, 8)
        self.tied.weight = self.first.weight
        self.frozen, self.unused, self.empty = nn.Linear(4, 8), nn.Linear(3, 3), nn.Linear(4, 0)
        self.frozen.requires_grad_(False)
        self.alone = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.tied(x) + self.frozen(x) + self.empty(x).sum() + self.alone
        return self.second(torch.tanh(hidden))

    def loss(self, batch: Any, *_: Any) -> Tensor:
        return self(batch[0]).float().square().mean()


def test_strange_parameters():
    census = taken(Strange(), PrecisionPolicy("bf16", params="bf16", master_weights=True))
    rows = census.modules
    assert (rows["tied"]["weight"], rows["tied"]["gradient"]) == ("bf16", "bf16")
    assert (rows["frozen"]["gradient"], rows["frozen"]["weight"]) == ("-", "bf16")
    assert (rows["unused"]["input"], rows["unused"]["parameter"]) == ("-", "bf16")
    assert rows["first"]["optimizer"] == "fp32"
    assert not census.flags, str(census)


def test_sparse_gradients():
    class Words(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 4, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.words(torch.arange(3)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert taken(Words(), "32-true").modules["words"]["gradient"] == "fp32"


@pytest.mark.parametrize("check_finite", [True, False])
def test_what_the_training_step_computes_by_itself_is_the_models(check_finite):
    census = taken(TinyRegressor(adamw), AmpPrecision("bf16-mixed", check_finite=check_finite))
    losses = {(op.module, op.phase, op.dtypes) for op in census.ops if op.kind == "loss"}
    assert losses == {("", "forward", "fp32 -> fp32"), ("", "backward", "fp32 -> fp32")}


def test_lbfgs():
    model = TinyRegressor(lambda parameters: torch.optim.LBFGS(parameters, max_iter=4))
    assert taken(model, "32-true").modules["first"]["gradient"] == "fp32"


def test_modules_put_in_other_dtypes_behind_the_plans_back_are_off_plan():
    class Halved(TinyRegressor):
        def on_train_start(self) -> None:
            self.second.bfloat16()

    census = taken(Halved(), "bf16-mixed")
    flags = {(flag.kind, flag.module, flag.op) for flag in census.flags}
    assert ("off plan", "second", "parameter") in flags
    assert census.as_planned == len(census.modules) - 1
    assert "bf16 (fp32)" in str(census)


# ---------------------------------------------------------------- what people see


def test_one_line_is_logged_and_the_table_if_asked(caplog):
    with caplog.at_level(logging.INFO):
        fit(TinyRegressor(), AmpPrecision("bf16-mixed"), callbacks=[DtypeCensus()])
    assert caplog.text.count("Dtype census at step 0: 3 of 3 modules as planned, 0 flags.") == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fit(TinyRegressor(), AmpPrecision("bf16-mixed"), callbacks=[DtypeCensus(verbose=True)])
    assert "aten.mse_loss" in caplog.text and "accumulator" in caplog.text


@pytest.mark.parametrize("width", [60, 100, 250])
def test_in_a_terminal_the_table_fits(width):
    from rich.console import Console

    with open("/dev/null", "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        console.print(taken(TinyRegressor(adamw)))
        text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "fingerprint" in text and "first" in text
    assert ("no room for" in text) == (width < 250)


def test_printed_it_names_module_planned_and_found_versions_and_fingerprint():
    census = taken(TinyRegressor(adamw))
    text = str(census)
    for part in ("fp32 measured", "aten.addmm", f"torch {torch.__version__}", census.fingerprint):
        assert part in text, part


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"every_n_steps=0.*at least 1"):
        DtypeCensus(0)
    with pytest.raises(ValueError, match=r"verbose='yes'.*True or False"):
        DtypeCensus(verbose="yes")  # type: ignore[arg-type]


# ---------------------------------------------------------------- checkpoints


def test_the_census_is_in_the_checkpoint_in_plain_types_and_in_the_sidecar(tmp_path: Path):
    plugin = AmpPrecision("bf16-mixed")
    callback = DtypeCensus()
    trainer = fit(TinyRegressor(adamw), plugin, callbacks=[callback, PrecisionCheckpoint()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    document = torch.load(tmp_path / "a.ckpt", weights_only=True)[CHECKPOINT_KEY]["census"]
    assert callback.last is not None and document == callback.last.to_dict()
    json.dumps(document)
    found = saved_precision(tmp_path / "a.ckpt").manifest.census
    assert found is not None and found.fingerprint == callback.last.fingerprint
    sidecar = json.loads((tmp_path / "a.ckpt.precision.json").read_text())
    assert sidecar["census"] == document


def test_inspect_shows_a_row(tmp_path: Path, capsys):
    plugin, callback = AmpPrecision("bf16-mixed"), DtypeCensus()
    trainer = fit(TinyRegressor(adamw), plugin, callbacks=[callback])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 0
    assert "at step 0: 3 of 3 modules as planned, 0 flags; fingerprint" in " ".join(capsys.readouterr().out.split())


def test_a_run_without_the_callback_hands_the_census_on(tmp_path: Path):
    trainer = fit(TinyRegressor(adamw), AmpPrecision("bf16-mixed"), callbacks=[DtypeCensus()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    plugin = AmpPrecision("bf16-mixed")
    resumed = make_trainer(plugin, max_epochs=2)
    resumed.fit(TinyRegressor(adamw), loader(regression_batches()), ckpt_path=tmp_path / "a.ckpt")
    assert plugin.census is not None and plugin.census.step == 0
    resumed.save_checkpoint(tmp_path / "b.ckpt")
    a, b = (saved_precision(tmp_path / name).manifest.census for name in ("a.ckpt", "b.ckpt"))
    assert a == b


def test_another_model_has_no_census():
    plugin = AmpPrecision("bf16-mixed")
    fit(TinyRegressor(adamw), plugin, callbacks=[DtypeCensus()])
    assert plugin.census is not None
    fit(TinyRegressor(adamw), plugin)
    assert plugin.census is None


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    checkpoint = torch.load(path, weights_only=True)
    yield checkpoint[CHECKPOINT_KEY]["census"]
    torch.save(checkpoint, path)


def resumed_warnings(path: Path, policy: str = "bf16-mixed") -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(AmpPrecision(policy), max_epochs=2, callbacks=[DtypeCensus()])
        trainer.fit(TinyRegressor(adamw), loader(regression_batches()), ckpt_path=path)
    assert trainer.global_step == 40
    return [str(w.message) for w in caught if "dtypes differ" in str(w.message)]


def test_a_resume_reports_what_an_upgrade_changed(tmp_path: Path):
    path = tmp_path / "a.ckpt"
    fit(TinyRegressor(adamw), AmpPrecision("bf16-mixed"), callbacks=[DtypeCensus()]).save_checkpoint(path)
    assert resumed_warnings(path) == []
    with edited(path) as census:
        census["modules"]["second"]["weight"] = "fp16"
        census["versions"]["torch"] = "2.9.0"
        census["hardware"]["name"] = "another chip"
    [said] = resumed_warnings(path)
    for part in (
        "1 dtypes differ from the census of step 0",
        "second, weight: was fp16, is bf16",
        f"torch 2.9.0 -> {torch.__version__}",
        "another chip -> ",
    ):
        assert part in said, said


def test_without_an_upgrade_the_model_is_suspected(tmp_path: Path):
    path = tmp_path / "a.ckpt"
    fit(TinyRegressor(adamw), AmpPrecision("bf16-mixed"), callbacks=[DtypeCensus()]).save_checkpoint(path)
    with edited(path) as census:
        census["modules"]["second"]["output"] = "fp32"
    [said] = resumed_warnings(path)
    assert "second, output: was fp32, is bf16" in said and "Libraries and hardware are the same" in said


def test_a_checkpoint_from_before_the_census_resumes_without_a_word(tmp_path: Path):
    path = tmp_path / "a.ckpt"
    fit(TinyRegressor(adamw), AmpPrecision("bf16-mixed")).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint[CHECKPOINT_KEY].pop("census") is None
    torch.save(checkpoint, path)
    assert resumed_warnings(path) == []
