"""torchtitan#651: a checkpoint of an FP8 run loads where neither torchao nor transformer_engine is installed."""

import subprocess
import sys
from pathlib import Path

from lightning_amp_plus import AmpPrecision
from tests.fp8.test_training import fit

READER = """
import sys
sys.modules["torchao"] = sys.modules["transformer_engine"] = sys.modules["lightning_amp_plus"] = None
import torch
from torch import nn
checkpoint = torch.load(sys.argv[1], weights_only=True)
assert all(type(value) is torch.Tensor for value in checkpoint["state_dict"].values())
model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)), "head": nn.Linear(32, 1)})
model.load_state_dict(checkpoint["state_dict"], strict=True)
print(sorted({str(p.dtype) for p in model.parameters()}))
"""


def test_every_tensor_is_plain_and_loads_into_the_unconverted_model(tmp_path: Path) -> None:
    trainer, _ = fit(AmpPrecision("fp8-mixed"), count=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    command = [sys.executable, "-c", READER, str(tmp_path / "a.ckpt")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "['torch.float32']"
