"""The examples on two ranks, as people run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, script: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_fsdp2_example_learns_and_its_ranks_agree(tmp_path: Path) -> None:
    out = run(tmp_path, "fsdp2_text.py", "--steps", "12")
    assert "All ranks agree on every verdict." in out
    ranks = re.findall(r"^ +[01] +(\d+) +(\d+) +(\S+) +(\S+)$", out, flags=re.MULTILINE)
    assert len(ranks) == 2 and ranks[0] == ranks[1]
    assert int(ranks[0][0]) + int(ranks[0][1]) == 12 and int(ranks[0][1]) > 0
    assert re.search(r"net\.lm_head +fp32 ", out)
    assert "MiB of unsharded gradients a rank" in out
    (bits,) = re.findall(r"validation: ([\d.]+) bits per byte", out)
    assert float(bits) < 7.5


def test_demo_runs_under_ddp(tmp_path: Path) -> None:
    short = ["--trainer.max_steps=8", "--data.batches_per_epoch=16", "--data.validation_windows=16", "--model.depth=1"]
    out = run(tmp_path, "train_text.py", *short, "--stop_at=4", "--trainer.strategy", "ddp", "--trainer.devices", "2")
    assert "finished at step 8\n" in out
    assert re.search(r"\d+ of 8 windows skipped", out)
