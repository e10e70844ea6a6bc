"""Trains the byte model of ``train_text.py`` sharded over two ranks with FSDP2, in FP16, on a CPU, in half a minute.

Every rank takes the same verdict on every step: at the end the ranks' scales, counts and norms are shown side by side.
Gradients of a window are reduced once, when it closes (``sync_each_microbatch=False``).

    python examples/fsdp2_text.py
    python examples/fsdp2_text.py --steps 60
"""

import argparse
import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from train_text import Block, StandardLibrary, quiet

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy, Rule, Trainer


class Network(nn.Module):
    """Embedding, two transformer layers, head."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


class ShardedTransformer(pl.LightningModule):
    """A language model over bytes whose layers are FSDP2 units, gathered in the formats of the plugin's policy."""

    def __init__(self, width: int = 32, context: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Network(width, context)
        self.sharded = False

    def configure_model(self) -> None:
        if self.sharded:  # Lightning calls this hook for every stage
            return
        self.sharded = True
        plugin, mesh = self.trainer.precision_plugin, self.device_mesh["data_parallel"]
        assert isinstance(plugin, AmpPrecision)
        # The head has a rule of its own (fp32), so it has to be a unit of its own.
        for name in ("net.blocks.0", "net.blocks.1", "net.lm_head", "net"):
            unit = self.get_submodule(name)
            fully_shard(unit, mesh=mesh, mp_policy=plugin.fsdp2_policy(unit, name))

    def training_step(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor) -> None:
        bits = self.training_step(batch) / math.log(2)
        self.log("bits_per_byte", bits, batch_size=len(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = PrecisionPolicy(compute="fp16", rules=[Rule("net.lm_head", compute="fp32", reason="logits")])
    # The first scale is far too high, on purpose: the ranks back off together.
    plugin = AmpPrecision(
        policy,
        loss_scale=LossScale(init=2.0**24, growth_interval=20),
        sync_each_microbatch=False,
        check_ranks_every=10,
    )
    model = ShardedTransformer()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        precision=plugin,
        max_steps=arguments.steps,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=4 * arguments.steps,
    )
    trainer.fit(model, datamodule=StandardLibrary(context=64, batch_size=8))

    history, report = plugin.history, plugin.last_report
    assert report is not None
    mine = (history.applied, history.skipped, report.next_scale, report.grad_norm)
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, mine)
    if trainer.is_global_zero:
        print("\nRoutes")
        print(plugin.plan)
        print("\nScales (scale*windows)")
        print(f"  {history.scales!r}")
        print("\nRanks")
        print("  rank  applied  skipped  loss scale  gradient norm")
        for rank, (applied, skipped, scale, norm) in enumerate(everyone):
            print(f"  {rank:>4}  {applied:>7}  {skipped:>7}  {scale:>10g}  {norm:>13.6f}")
        print(f"\n  {'All ranks agree on every verdict.' if len(set(everyone)) == 1 else 'Ranks disagree!'}")
        print(f"  validation: {trainer.callback_metrics['bits_per_byte']:.3f} bits per byte (untrained: 8.2)")
    dist.barrier()


if __name__ == "__main__":
    main()
