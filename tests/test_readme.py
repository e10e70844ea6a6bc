"""The README's code runs as it stands, and the tests it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from rich.console import Console

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError
from lightning_amp_plus.commands.observe import observe
from lightning_amp_plus.commands.run_config import RunConfig
from tests.support.models import TinyRegressor
from tests.support.training import loader, make_trainer, regression_batches

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_python_blocks_run_in_order_and_print_the_plan_shown(tmp_path: Path) -> None:
    code = "\n".join(blocks("python"))
    assert code.count("import") > 3
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-3000:]
    table, *_ = blocks("text")
    assert table.strip() in run.stdout


def test_the_refusal_shown_is_the_one_that_is_raised(tmp_path: Path) -> None:
    def fit(precision: str, **resume: Any) -> L.Trainer:
        trainer = make_trainer(AmpPrecision(precision), max_epochs=2)
        trainer.fit(TinyRegressor(), loader(regression_batches(2)), **resume)
        return trainer

    fit("bf16-mixed").save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(IncompatiblePrecisionError) as error:
        fit("16-mixed", ckpt_path=tmp_path / "last.ckpt")
    _, shown, _ = blocks("text")
    assert str(error.value).replace(f"{tmp_path}/", "").split() == shown.split()


def test_the_coverage_shown_is_that_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    *_, shown = blocks("text")
    coverage = observe(RunConfig.read(Path("fp8_text.yaml")), None, None).coverage
    console = Console(width=112, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(coverage)
    lines = [line.strip() for line in captured.get().splitlines() if not line.startswith(("Time", "no room"))]
    assert [line.strip() for line in shown.strip().splitlines()] == lines


def test_console_commands_are_targets_of_the_makefile() -> None:
    (commands,) = blocks("console")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = re.findall(r"^make (\w+)", commands, flags=re.MULTILINE)
    assert named == ["demo", "test"] and set(named) <= set(targets)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|examples|docs)/[\w./]+)`", README))))
def test_files_that_the_readme_names_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_pictures_of_the_readme_exist() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)
