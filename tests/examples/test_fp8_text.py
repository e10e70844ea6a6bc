"""The FP8 example as people run it: three precisions, a table of losses, and a table of layers."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_it_trains_in_three_precisions_and_shows_what_fp8_does_to_each_layer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "fp8_text.py"), "--steps", "8", "--recipe", "rowwise"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    bits = {name: float(value) for name, value in re.findall(r"(32-true|bf16-mixed|fp8-mixed)\W+([\d.]+)", done.stdout)}
    assert set(bits) == {"32-true", "bf16-mixed", "fp8-mixed"} and all(4 < value < 8.5 for value in bits.values())
    layers = re.findall(r"(blocks\.\S+)\W+([\d.]+)\W+([\d.]+)", done.stdout)
    assert len(layers) == 8
    # FP8 keeps four significant bits, BF16 eight.
    assert all(25 < float(fp8) < 45 < float(bf16) for _, bf16, fp8 in layers)
