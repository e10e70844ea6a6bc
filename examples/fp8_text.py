"""Trains the byte transformer of ``train_text.py`` in FP32, BF16 and FP8, on a CPU, and shows what FP8 does to each layer.

The three runs see the same batches from the same start. At the end: validation bits per byte of each, and for every layer
in FP8 how far its output is from FP32 (signal to quantization noise), beside the same layer in BF16.

    python examples/fp8_text.py
    python examples/fp8_text.py --steps 50 --recipe rowwise
"""

import argparse
import copy
from typing import Any

import lightning.pytorch as pl
import torch
from rich.table import Table
from torch import Tensor, nn
from train_text import ByteTransformer, StandardLibrary, console, quiet

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import Fp8CoverageMonitor
from lightning_amp_plus.fp8.quantize import sqnr
from lightning_amp_plus.routing import plan


def policy_of(name: str, recipe: str) -> PrecisionPolicy:
    if name != "fp8-mixed":
        return PrecisionPolicy.from_string(name)
    # Every Linear in a block; embeddings, norms and the head stay in BF16.
    return PrecisionPolicy("bf16", rules=[Rule("blocks", compute="fp8", recipe=recipe)])


def train(name: str, recipe: str, steps: int, seed: int) -> tuple[ByteTransformer, float]:
    pl.seed_everything(seed, verbose=False)
    model, data = ByteTransformer(), StandardLibrary(seed=seed)
    # Says which GEMMs really ran in FP8, and which recipe would have fitted each layer better; prints both at the end.
    what_if = [other for other in ("current", "rowwise", "mx") if other != recipe]
    monitor = Fp8CoverageMonitor(every_n_steps=max(1, steps // 10), what_if=what_if)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[AmpPrecision(policy_of(name, recipe))],
        callbacks=[monitor] if name == "fp8-mixed" else [],
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    trainer.limit_val_batches = 1.0
    bits = trainer.validate(model, data, verbose=False)[0]["validation/bits_per_byte"]
    return model, float(bits)


def layer_quality(model: ByteTransformer, policy: PrecisionPolicy, batch: Tensor) -> dict[str, float]:
    """SQNR in dB of every layer's output against the same layer in FP32, on the inputs that it gets in this precision."""
    net = copy.deepcopy(model).train()
    plan(net, policy).apply(net)
    exact = dict(copy.deepcopy(model).float().named_modules())
    found: dict[str, float] = {}

    def compare(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            with torch.autocast("cpu", enabled=False):
                found[name] = sqnr(nn.functional.linear(args[0].float(), *_weights(exact[name])), output.float())

        return hook

    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("blocks"):
            module.register_forward_hook(compare(name))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        net(batch[:, :-1])
    return found


def _weights(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipe", default="current", choices=["current", "rowwise", "block", "mx"])
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    losses = Table(title=f"After {arguments.steps} steps")
    for column in ("precision", "validation bits per byte", "over BF16"):
        losses.add_column(column, justify="left" if column == "precision" else "right")
    results = {}
    for name in ("32-true", "bf16-mixed", "fp8-mixed"):
        with console.status(f"training in {name}"):
            results[name] = train(name, arguments.recipe, arguments.steps, arguments.seed)
    for name, (_, bits) in results.items():
        losses.add_row(name, f"{bits:.3f}", f"{bits / results['bf16-mixed'][1]:.3f}")
    console.print(losses)
    model = results["fp8-mixed"][0]
    batch = torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(0))
    qualities = [layer_quality(model, policy_of(name, arguments.recipe), batch) for name in ("bf16-mixed", "fp8-mixed")]
    table = Table(title=f"Output of each layer against FP32, in dB ({arguments.recipe} scaling)")
    for column in ("layer", "BF16", "FP8"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for name in qualities[0]:
        table.add_row(name, *(f"{quality[name]:.1f}" for quality in qualities))
    console.print(table)


if __name__ == "__main__":
    main()
