"""`explain --observe`: one step of a config's model, and what its GEMMs ran in."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from rich.console import Console

import lightning_amp_plus.cli as cli
from lightning_amp_plus.cli import main

MODELS = """
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(pl.LightningModule):
    def __init__(self, small: int = 10):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.odd = nn.Linear(16, small)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        print("noise of the model")
        return self.odd(self.body(batch)).float().square().mean()


class Own(Net):
    def train_dataloader(self):
        return DataLoader(torch.ones(64, 16), batch_size=8)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(torch.ones(64, 16), batch_size=self.batch_size)


class Empty(Own):
    def training_step(self, batch, batch_idx):
        return None


class Logs(Own):
    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_text("batch", str(batch_idx))
        return super().training_step(batch, batch_idx)


class Waits(Own):
    # For what validation logs.
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Saves(Own):
    def configure_callbacks(self):
        from lightning_amp_plus.callbacks import Fp8CoverageMonitor

        checkpoint = pl.callbacks.ModelCheckpoint("saved", every_n_train_steps=1)
        return [pl.callbacks.EarlyStopping("val_loss"), checkpoint, Fp8CoverageMonitor(100)]


class Manual(Own):
    def __init__(self, every: int = 3):
        super().__init__()
        self.automatic_optimization, self.every = False, every

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.every == 0:
            self.optimizers().step()


class Never(Manual):
    def __init__(self):
        super().__init__(every=10**9)


class Fails(Own):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("no such\\n  token")
"""
FP8 = """
trainer:
  accelerator: cpu
  accumulate_grad_batches: {window}
  precision: {{class_path: lightning_amp_plus.AmpPrecision, init_args: {{policy: {{compute: fp8{more}}}}}}}
model: {{class_path: observed_models.{model}}}
{data}
"""
DATA = "data: {class_path: observed_models.Data, init_args: {batch_size: 4}}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "observed_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "observed_models", raising=False)


def run(model: str = "Own", *options: str, window: int = 1, more: str = "", data: str = "") -> int:
    Path("run.yaml").write_text(FP8.format(model=model, window=window, more=more, data=data))
    return main(["explain", "--config", "run.yaml", "--observe", *options])


def observed(capsys: pytest.CaptureFixture[str], model: str = "Own", *options: str, **kwargs: Any) -> dict[str, Any]:
    assert run(model, *options, "--json", **kwargs) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *args: Any, **kwargs: Any) -> str:
    assert run(*args, **kwargs) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("lightning-amp-plus explain: ")
    return err


def flops(found: dict[str, Any], **which: Any) -> int:
    rows = [row for row in found["coverage"]["rows"] if all(row[key] == value for key, value in which.items())]
    return sum(row["flops"] for row in rows)


def test_shows_the_plan_and_what_one_step_ran_in(capsys):
    found = observed(capsys)
    tokens = 8
    assert {route["name"] for route in found["plan"]["routes"]} >= {"body.0", "body.2", "odd"}
    # Three products of each layer, but that the first one's input wants no gradient.
    assert flops(found, module="body.0") == 2 * 2 * tokens * 16 * 32
    assert flops(found, module="body.2", format="e4m3") == 2 * tokens * 16 * 32
    assert flops(found, module="body.2", format="e5m2 x e4m3", engine="emulated") == 2 * 2 * tokens * 16 * 32
    assert flops(found, module="odd", reason="shape") == 3 * 2 * tokens * 16 * 10
    assert found["coverage"]["coverage"]["gemms"] == 5 / 8
    assert found["coverage"]["coverage"]["native_gemms"] == 0


def test_a_data_module_of_the_config_gives_the_batch_and_the_window_is_the_runs(capsys):
    found = observed(capsys, "Net", window=3, data=DATA)
    assert flops(found, module="odd") == 3 * (3 * 2 * 4 * 16 * 10)


def test_a_data_module_can_be_named_on_the_command_line(capsys):
    found = observed(capsys, "Net", "--data", "observed_models:Data", data="data: {batch_size: 2}")
    assert flops(found, module="odd") == 3 * 2 * 2 * 16 * 10


@pytest.mark.parametrize("more", [", fp8_after_steps: 100", ", fp8_when_stable: true"])
def test_fp8_that_begins_later_is_on_and_that_is_said(capsys, more):
    found = observed(capsys, more=more)
    assert found["coverage"]["coverage"]["gemms"] == 5 / 8
    assert any("begin later" in note for note in found["coverage"]["notes"])


def test_plain_text_and_a_terminal_show_both_tables_and_nothing_else(capsys, monkeypatch):
    assert run() == 0
    out, err = capsys.readouterr()
    assert err == "" and "noise" not in out and "Trainer" not in out
    assert out.index("compute of the policy") < out.index("e5m2 x e4m3 (emulated)")
    assert "shape: its sizes do not suit FP8" in out
    monkeypatch.setattr(cli, "Console", lambda: Console(force_terminal=True, width=100, color_system=None))
    assert run() == 0
    out, _ = capsys.readouterr()
    assert "FP8 coverage, step 0" in out and max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("model", ["Logs", "Waits", "Saves"])
def test_what_belongs_to_a_whole_run_is_left_out(capsys, model):
    assert observed(capsys, model)["coverage"] == {**observed(capsys)["coverage"], "time": ANY}
    assert not Path("saved").exists() and not Path("lightning_logs").exists()


def test_manual_optimization_steps_when_it_does(capsys):
    assert flops(observed(capsys, "Manual"), module="odd") == 3 * (3 * 2 * 8 * 16 * 10)
    assert "no optimizer stepped" in refused(capsys, "Never")


def test_logging_is_as_before(capsys):
    before = logging.root.manager.disable
    run()
    assert logging.root.manager.disable == before


def test_says_in_one_line_what_cannot_be_done(capsys):
    assert "needs a batch" in (said := refused(capsys, "Net")) and "--data MODULE:CLASS" in said
    assert "the step failed: no such token" in refused(capsys, "Fails")
    assert "no GEMM ran" in refused(capsys, "Empty")
    assert "does not name the data's class" in refused(capsys, "Net", data="data: {batch_size: 2}")


def test_data_without_a_step_to_train_is_refused(capsys):
    Path("run.yaml").write_text(FP8.format(model="Own", window=1, more="", data=""))
    assert main(["explain", "--config", "run.yaml", "--data", "observed_models:Data"]) == 2
    assert "--data is for --observe" in capsys.readouterr().err
