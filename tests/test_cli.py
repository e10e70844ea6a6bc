"""The command: `explain` finds model and precision in a config and prints the plan, or says in one line why not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lightning_amp_plus.cli as cli
import lightning_amp_plus.commands.run_config as run_config
from lightning_amp_plus.cli import main
from lightning_amp_plus.fp8 import DelayedScaling
from lightning_amp_plus.routing import RoutePlan

MODELS = """
import lightning.pytorch as pl
from torch import nn


class Net(pl.LightningModule):
    def __init__(self, width: int = 4, bias: bool = True):
        super().__init__()
        self.body = nn.Linear(width, width, bias=bias)
        self.head = nn.Linear(width, 2)


class Late(pl.LightningModule):
    def configure_model(self):
        self.late = nn.Linear(2, 2)


class Broken(pl.LightningModule):
    def __init__(self):
        raise RuntimeError("no such\\n  vocabulary")


def not_a_class():
    pass
"""
MODEL = "model: {class_path: cli_models.Net, init_args: {width: 3}}\n"
PLUGIN = """
class_path: lightning_amp_plus.AmpPrecision
init_args: {policy: {compute: fp16, rules: [{match: head, compute: fp32, reason: logits}]}, loss_scale: {init: 1024}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    return tmp_path


def config(text: str) -> str:
    Path("run.yaml").write_text(text)
    return "run.yaml"


def indent(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.strip().splitlines())


def explained(capsys: pytest.CaptureFixture[str], text: str, *options: str) -> RoutePlan:
    code = main(["explain", "--config", config(text), "--json", *options])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return RoutePlan.from_json(out)


def refused(capsys: pytest.CaptureFixture[str], text: str, *options: str) -> str:
    assert main(["explain", "--config", config(text), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lightning-amp-plus explain: ")
    assert err.count("\n") == 1
    return err


def computes(routes: RoutePlan) -> dict[str, str]:
    return {route.name: route.compute for route in routes.routes if route.name}


def test_prints_the_plan_as_plain_text_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"trainer:\n  precision:\n{indent(PLUGIN, 4)}\n{MODEL}"
    assert main(["explain", "--config", config(text)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["module", "compute"]
    [head] = [line for line in lines if line.startswith("head")]
    assert head.split()[1] == "fp32" and head.endswith("logits")


def test_says_what_fp8_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    model = MODEL.replace("width: 3", "width: 16")
    assert (
        main(
            ["explain", "--config", config(f"trainer: {{precision: {{compute: fp8, fp8_when_stable: true}}}}\n{model}")]
        )
        == 0
    )
    assert "FP8 begins once loss and gradient norm are quiet" in capsys.readouterr().out


@pytest.mark.parametrize(
    "trainer",
    [
        f"precision:\n{indent(PLUGIN, 2)}",
        f"plugins:\n{indent(PLUGIN, 2)}",
        "plugins:\n  - class_path: lightning.pytorch.plugins.io.TorchCheckpointIO\n  -\n" + indent(PLUGIN, 4),
        "precision: {compute: fp16, rules: [{match: head, compute: fp32, reason: logits}]}",
        "precision: {class_path: lightning_amp_plus.PrecisionPolicy, init_args: {compute: fp16, rules: [{match: head, "
        "compute: fp32, reason: logits}]}}",
    ],
    ids=["precision", "plugin", "plugin list", "policy", "policy by class path"],
)
def test_finds_the_policy_wherever_the_trainer_takes_it(capsys: pytest.CaptureFixture[str], trainer: str) -> None:
    routes = explained(capsys, f"trainer:\n{indent(trainer, 2)}\n{MODEL}")
    assert computes(routes) == {"body": "fp16", "head": "fp32"}
    assert routes["head"].reason == "logits"


@pytest.mark.parametrize(
    "recipe",
    [
        "{class_path: lightning_amp_plus.fp8.DelayedScaling, init_args: {history: 8}}",
        "{class_path: lightning_amp_plus.fp8.recipes.DelayedScaling, init_args: {history: 8}}",
        "{name: delayed, history: 8}",
    ],
)
@pytest.mark.parametrize("by_class", [True, False])
def test_reads_a_recipe_however_the_run_takes_it(
    capsys: pytest.CaptureFixture[str], recipe: str, by_class: bool
) -> None:
    rule = f"{{match: body, compute: fp8, recipe: {recipe}, backend: reference}}"
    rule = f"{{class_path: lightning_amp_plus.Rule, init_args: {rule}}}" if by_class else rule
    model = MODEL.replace("width: 3", "width: 16")
    routes = explained(capsys, f"trainer: {{precision: {{compute: bf16, rules: [{rule}]}}}}\n{model}")
    assert routes["body"].fp8 is not None and routes["body"].fp8.recipe == DelayedScaling(history=8)


@pytest.mark.parametrize(
    ("trainer", "compute"),
    [
        ("{precision: bf16-mixed}", "bf16"),
        ("{precision: 16}", "fp16"),
        ("{precision: 32-true}", "fp32"),
        ("{}", "fp32"),
    ],
)
def test_understands_strings_and_their_absence(capsys: pytest.CaptureFixture[str], trainer: str, compute: str) -> None:
    assert computes(explained(capsys, f"trainer: {trainer}\n{MODEL}")) == {"body": compute, "head": compute}


def test_no_trainer_section_means_lightnings_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(capsys, MODEL)["body"].compute == "fp32"


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_understands_the_section_of_a_subcommand(capsys: pytest.CaptureFixture[str], command: str) -> None:
    text = f"{command}:\n  trainer: {{precision: bf16-mixed}}\n  {MODEL}"
    assert explained(capsys, text)["body"].compute == "bf16"


def test_reads_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"trainer": {"precision": "bf16-mixed"}, "model": {"class_path": "cli_models.Net"}})
    assert explained(capsys, text)["body"].compute == "bf16"


def test_ignores_what_does_not_bear_on_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = "trainer: {precision: bf16-mixed, callbacks: [{class_path: gone.Gone}]}"
    text = f"seed_everything: 1\n{trainer}\nmine: 3\n{MODEL}"
    assert explained(capsys, text)["body"].compute == "bf16"


@pytest.mark.parametrize("section", ["", "model: {width: 3, bias: false}", "model: {class_path: __main__.Net}"])
def test_takes_the_models_class_from_the_command_line(capsys: pytest.CaptureFixture[str], section: str) -> None:
    text = f"trainer: {{precision: bf16-mixed}}\n{section}"
    assert set(computes(explained(capsys, text, "--model", "cli_models:Net"))) == {"body", "head"}


def test_a_class_path_without_arguments_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(capsys, "model: cli_models.Net")["body"].compute == "fp32"


def test_layers_made_in_configure_model_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(computes(explained(capsys, "model: {class_path: cli_models.Late}"))) == {"late"}


@pytest.mark.parametrize(("accelerator", "device"), [("cpu", "cpu"), ("gpu", "cuda"), ("cuda", "cuda")])
def test_plans_for_the_trainers_accelerator(capsys: pytest.CaptureFixture[str], accelerator: str, device: str) -> None:
    assert explained(capsys, f"trainer: {{accelerator: {accelerator}}}\n{MODEL}").device_type == device


def test_reads_the_config_a_run_saved(capsys: pytest.CaptureFixture[str]) -> None:
    script = """
import cli_models
from lightning.pytorch.cli import LightningCLI
from lightning_amp_plus import Trainer

cli = LightningCLI(cli_models.Net, trainer_class=Trainer, run=False)
cli.parser.save(cli.config, "saved.yaml", skip_none=False)
"""
    text = f"trainer:\n  precision:\n{indent(PLUGIN, 4)}\n  accelerator: cpu\nmodel: {{width: 5}}\n"
    subprocess.run(
        [sys.executable, "-c", script, "--config", config(text)], check=True, capture_output=True, timeout=60
    )
    assert main(["explain", "--config", "saved.yaml", "--model", "cli_models:Net", "--json"]) == 0
    assert computes(RoutePlan.from_json(capsys.readouterr().out)) == {"body": "fp16", "head": "fp32"}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("trainer: {}\nmodel: {width: 3}", (), ("only its arguments", "--model MODULE:CLASS")),
        ("trainer: {}", (), ("does not name the model's class", "--model MODULE:CLASS")),
        ("optimizer: {}\ndata: {}", (), ("neither 'trainer' nor 'model'", "optimizer, data")),
        ("", (), ("not a LightningCLI config",)),
        ("a: [", (), ("neither YAML nor JSON",)),
        ("- 1", (), ("expected a mapping",)),
        ("trainer: 3\n" + MODEL, (), ("'trainer' must be a mapping",)),
        ("trainer: {precision: 64-true}\n" + MODEL, (), ("trainer.precision: ", "64-true")),
        ("trainer: {precision: fp17}\n" + MODEL, (), ("trainer.precision", "fp17")),
        ("trainer: {precision: {compute: fp17}}\n" + MODEL, (), ("trainer.precision: compute must be", "fp17")),
        (
            "trainer: {precision: {class_path: lightning_amp_plus.AmpPrecision, init_args: {policy: {rules: []}}}}\n"
            + MODEL,
            (),
            ("the policy of trainer.precision", "'compute'"),
        ),
        (
            "trainer: {plugins: [{class_path: gone.Gone}]}\n" + MODEL,
            (),
            ("trainer.plugins: cannot import 'gone.Gone'",),
        ),
        (
            "trainer: {precision: 16-mixed, plugins: {class_path: lightning_amp_plus.AmpPrecision, init_args: {policy: "
            "16-mixed}}}\n" + MODEL,
            (),
            ("given twice",),
        ),
        (
            "trainer: {plugins: {class_path: lightning.pytorch.plugins.precision.DoublePrecision}}\n" + MODEL,
            (),
            ("DoublePrecision", "expected AmpPrecision"),
        ),
        (
            "trainer: {precision: {compute: bf16, rules: [{match: tail, compute: fp32}]}}\n" + MODEL,
            (),
            ("there is no plan", "'tail'"),
        ),
        ("model: {class_path: gone.Net}", (), ("the model: cannot import 'gone.Net'",)),
        (
            "model: {class_path: cli_models.Net, init_args: {height: 3}}",
            (),
            ("the model Net cannot be built", "height"),
        ),
        ("model: {class_path: cli_models.Broken}", (), ("the model Broken cannot be built", "no such vocabulary")),
        ("trainer: {}", ("--model", "cli_models"), ("expected 'module:Class'",)),
        ("trainer: {}", ("--model", "gone:Net"), ("--model: cannot import", "gone")),
        ("trainer: {}", ("--model", "cli_models:Gone"), ("--model: cannot import", "Gone")),
        ("trainer: {}", ("--model", "cli_models:not_a_class"), ("expected a class",)),
    ],
)
def test_says_in_one_line_what_cannot_be_done(
    capsys: pytest.CaptureFixture[str], text: str, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = refused(capsys, text, *options)
    assert all(word in message for word in words), message


def test_a_missing_config_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--config", "gone.yaml"]) == 2
    assert "gone.yaml" in capsys.readouterr().err


def test_without_jsonargparse_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_config, "find_spec", lambda name: None)
    assert "pip install lightning_amp_plus[cli]" in refused(capsys, MODEL)


@pytest.mark.parametrize("argv", [[], ["explain"], ["frobnicate"], ["explain", "--config"]])
def test_wrong_usage_is_exit_code_two(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 2
    assert "usage: lightning-amp-plus" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["explain", "--help"]])
def test_help_is_exit_code_zero(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 0
    assert "explain" in capsys.readouterr().out


@pytest.mark.parametrize(("width", "left_out"), [(60, True), (200, False)])
def test_the_table_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, left_out: bool
) -> None:
    def terminal(**options: Any) -> Console:
        return Console(force_terminal=True, color_system=None, width=width, **options)

    monkeypatch.setattr(cli, "Console", terminal)
    assert main(["explain", "--config", config(f"trainer: {{precision: bf16-mixed}}\n{MODEL}")]) == 0
    out = capsys.readouterr().out
    assert "━" in out and "body" in out
    assert max(map(len, out.splitlines())) <= width
    assert ("no room for" in out) is left_out
    assert ("accumulator ┃" in out) is not left_out


def test_the_installed_command_runs_and_finds_modules_in_the_current_directory() -> None:
    command = Path(sys.executable).parent / "lightning-amp-plus"
    done = subprocess.run(
        [str(command), "explain", "--config", config(f"trainer: {{precision: bf16-mixed}}\n{MODEL}")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "body" in done.stdout
