"""Makes the checkpoints in this folder: one tiny file for each kind that a run of today must be able to continue.

Run from the root of a clone: ``python tests/data/checkpoints/make.py``. Every run trained the same model on the same
seven batches (:func:`batches`); its loss scale went from 512 to 1024, was halved by an overflow and has a tracker of 1.

- ``stock-*``: written by Lightning itself, with the precision plugin in the name.
- ``hand-*``: what cannot be run here, put together by hand from the stock one of the same precision. FSDPPrecision keeps
  the same scaler state under its own name; Lightning before 1.6 kept it under ``native_amp_scaling_state``; Transformer
  Engine adds an ``_extra_state`` entry for each of its modules to the state_dict.
- ``ours-1-*``: written by the last commit with schema version 1, out of a git archive. The clone must hold that commit.
- ``ours-2-*``: written by the package as it is. Once there is a version 3, that becomes an archive too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LAST_OF_VERSION_1 = "475f98c"
INIT, GROWTH_INTERVAL, OVERFLOW_AT, BATCHES = 512.0, 3, 5, 7


def _train(plugin: Any, path: Path, **arguments: Any) -> None:
    from tests.support.faults import INF
    from tests.support.models import TinyRegressor, sgd_momentum
    from tests.support.training import loader, make_trainer, regression_batches

    faults = {OVERFLOW_AT: INF} if getattr(plugin, "scaler", None) is not None else None
    model = TinyRegressor(sgd_momentum, faults=faults)
    trainer = make_trainer(plugin, **arguments)
    trainer.fit(model, loader(regression_batches(BATCHES)))
    trainer.save_checkpoint(path)


def _stock_scaler() -> Any:
    import torch

    return torch.amp.GradScaler("cpu", init_scale=INIT, growth_interval=GROWTH_INTERVAL)


def make_stock(folder: Path) -> None:
    """What Lightning's own plugins write."""
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision

    _train(MixedPrecision("16-mixed", "cpu", _stock_scaler()), folder / "stock-16-mixed.pt")
    _train(MixedPrecision("bf16-mixed", "cpu"), folder / "stock-bf16-mixed.pt")
    _train(None, folder / "stock-32-true.pt", precision="32-true")
    _train(None, folder / "stock-64-true.pt", precision="64-true")
    _train(HalfPrecision("bf16-true"), folder / "stock-bf16-true.pt")
    _train(HalfPrecision("16-true"), folder / "stock-16-true.pt")


def make_by_hand(folder: Path) -> None:
    """Variants of the stock files; see the head of this file."""
    import torch

    def variant(source: str, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
        checkpoint = torch.load(folder / source, weights_only=True)
        edit(checkpoint)
        torch.save(checkpoint, folder / name)

    def fsdp(checkpoint: dict[str, Any]) -> None:
        checkpoint["FSDPPrecision"] = checkpoint.pop("MixedPrecision")

    def before_1_6(checkpoint: dict[str, Any]) -> None:
        checkpoint["native_amp_scaling_state"] = checkpoint.pop("MixedPrecision")
        checkpoint["pytorch-lightning_version"] = "1.5.10"
        checkpoint.pop("loops")

    def transformer_engine(checkpoint: dict[str, Any]) -> None:
        for name in ("first", "second"):
            checkpoint["state_dict"][f"{name}._extra_state"] = torch.arange(64, dtype=torch.uint8)

    variant("stock-16-mixed.pt", "hand-fsdp-16-mixed.pt", fsdp)
    variant("stock-16-mixed.pt", "hand-native-amp.pt", before_1_6)
    variant("stock-bf16-mixed.pt", "hand-transformer-engine.pt", transformer_engine)


def make_ours(folder: Path, version: int) -> None:
    """What AmpPrecision writes, of whatever version is imported."""
    from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy, Rule

    scale = LossScale(init=INIT, growth_interval=GROWTH_INTERVAL, hysteresis=1)
    head_in_fp32 = PrecisionPolicy(compute="fp16", rules=[Rule("second", compute="fp32")])
    _train(AmpPrecision(head_in_fp32, loss_scale=scale), folder / f"ours-{version}-16-mixed.pt")
    if version == 1:
        masters = PrecisionPolicy(compute="bf16", params="bf16", master_weights=True)
        _train(AmpPrecision(masters), folder / "ours-1-bf16-true-masters.pt")
        moved = AmpPrecision("bf16-mixed")
        _train(moved, folder / "ours-1-moved.pt", callbacks=[_mover(moved)])


def _mover(plugin: Any) -> Any:
    from lightning.pytorch import Callback

    class Move(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                plugin.set_route("second", "fp32", "unstable")

    return Move()


def _in_archive(commit: str, folder: Path, what: str) -> None:
    """Runs this script once more with the package of another commit."""
    with tempfile.TemporaryDirectory() as code:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", code], input=archive, check=True)
        environment = {**os.environ, "PYTHONPATH": code}
        subprocess.run([sys.executable, __file__, what, str(folder)], cwd=code, env=environment, check=True)


def main() -> None:
    if len(sys.argv) > 1:
        import lightning_amp_plus

        assert not Path(lightning_amp_plus.__file__).is_relative_to(ROOT), "the package of the archive is not in use"
        make_ours(Path(sys.argv[2]), int(sys.argv[1]))
        return
    sys.path.insert(0, str(ROOT))
    make_stock(HERE)
    make_by_hand(HERE)
    make_ours(HERE, 2)
    _in_archive(LAST_OF_VERSION_1, HERE, "1")
    for path in sorted(HERE.glob("*.pt")):
        print(f"{path.stat().st_size:6,} {path.name}")


if __name__ == "__main__":
    main()
