"""The example as people run it: a process of its own, from start over stop and resume to the summary."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Sixteen steps of a quarter of the work; the machinery around them is all there.
SHORT = ["--trainer.max_steps=16", "--data.batches_per_epoch=16", "--data.validation_windows=32", "--model.depth=1"]


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "train_text.py"), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def bits_per_byte(output: str) -> tuple[float, float]:
    start = re.search(r"validation before training: ([\d.]+) bits per byte", output)
    end = re.search(r"validation after training: ([\d.]+) bits per byte \(before: ([\d.]+)\)", output)
    assert start and end, output
    assert end[2] == start[1]
    return float(start[1]), float(end[1])


def check(done: subprocess.CompletedProcess[str], folder: Path, stop: int, steps: int) -> None:
    assert done.returncode == 0, done.stderr
    start, end = bits_per_byte(done.stdout)
    assert 7.5 < start < 9
    assert end < start - 0.5
    assert f"resumed at step {stop}: loss scale" in done.stdout
    assert f"finished at step {steps}\n" in done.stdout
    assert re.search(r"\d+ of \d+ windows skipped: skip rate [\d.]+%", done.stdout)
    log = folder / "logs" / "lightning_logs" / "version_0"
    assert list(log.glob("events.out.tfevents.*"))
    assert (log / f"step={stop}.ckpt").exists()
    assert f"tensorboard --logdir {log.relative_to(folder)}" in done.stdout


def route(output: str, module: str) -> list[str]:
    [line] = [line for line in output.splitlines() if line.startswith(f"{module} ")]
    return line.split()


def test_by_default_it_trains_in_fp16_and_shows_what_the_loss_scale_did(tmp_path: Path) -> None:
    done = run(tmp_path, *SHORT, "--stop_at=7")
    check(done, tmp_path, 7, 16)
    assert "AmpPrecision('16-mixed', loss scale: dynamic)" in done.stdout
    assert route(done.stdout, "lm_head")[1] == "fp16"
    assert re.search(r"start +1,048,576 ", done.stdout)
    assert re.search(r"window 0 +524,288 .*overflow, skipped", done.stdout)
    # What is said on stderr is the one notice about the first skip, and no warning from elsewhere.
    notices = [line for line in done.stderr.splitlines() if line.strip()]
    assert all("was skipped: a gradient is not finite" in line for line in notices), done.stderr


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_other_precisions_by_option(tmp_path: Path, precision: str) -> None:
    done = run(tmp_path, *SHORT, "--precision", precision)
    check(done, tmp_path, 8, 16)
    assert f"none in use with {precision}" in done.stdout
    assert route(done.stdout, "lm_head")[1] == {"bf16-mixed": "bf16", "32-true": "fp32"}[precision]
    assert done.stderr == ""


def test_by_config_with_a_rule(tmp_path: Path) -> None:
    done = run(tmp_path, "--config", str(EXAMPLES / "train_text.yaml"), *SHORT)
    check(done, tmp_path, 8, 16)
    assert route(done.stdout, "blocks.0.attention.qkv")[1] == "bf16"
    assert route(done.stdout, "lm_head")[1] == "fp32"
    assert done.stderr == ""


def test_the_saved_config_runs_again(tmp_path: Path) -> None:
    first = run(tmp_path, *SHORT, "--precision=bf16-mixed")
    again = run(tmp_path, "--config=logs/lightning_logs/version_0/config.yaml")
    assert (first.returncode, again.returncode) == (0, 0), again.stderr
    assert bits_per_byte(first.stdout) == bits_per_byte(again.stdout)


def test_what_cannot_be_meant_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("train_text", EXAMPLES / "train_text.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    config = str(EXAMPLES / "train_text.yaml")
    for options, words in [
        (["--config", config, "--precision=16-mixed"], "the precision is given twice"),
        (["--trainer.max_steps=10", "--stop_at=10"], "--stop_at must lie between"),
        (["--trainer.max_steps=10", "--stop_at=0"], "--stop_at must lie between"),
    ]:
        monkeypatch.setattr(sys, "argv", ["train_text.py", *options])
        with pytest.raises(SystemExit) as stop:
            example.main()
        assert stop.value.code == 2
        assert words in capsys.readouterr().err
