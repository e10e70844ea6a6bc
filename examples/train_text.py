"""Trains a small transformer on the sources of Python's own standard library: in FP16, on a CPU, in a minute or two.

The run is stopped half-way and resumed from its checkpoint with a new Trainer, a new model and a new plugin. At the end
it shows what the loss scale did, how many windows were skipped, and what every module computed in.

    python examples/train_text.py
    python examples/train_text.py --precision bf16-mixed
    python examples/train_text.py --config examples/train_text.yaml
    python examples/train_text.py --trainer.max_steps 100 --stop_at 60
    python examples/train_text.py --trainer.strategy ddp --trainer.devices 2

All options are those of a LightningCLI: see ``--help``.
"""

import logging
import math
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, Namespace
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, Trainer

console = Console()

MONITORS = ("LossScaleMonitor", "GradientMonitor", "UpdateRatioMonitor", "ActivationMonitor")
PRECISIONS: dict[str, dict[str, Any]] = {
    # Begins too high and grows often, so that a run of a minute shows overflow, backoff and growth.
    "16-mixed": {"policy": "16-mixed", "loss_scale": {"init": 2.0**20, "growth_interval": 30}},
    "bf16-mixed": {"policy": "bf16-mixed"},
    "32-true": {"policy": "32-true"},
}


class RandomBatches:
    """Batches of random byte windows, each rank its own. Knows its position, so that a resume goes on right there."""

    def __init__(
        self, data: Tensor, context: int, batch_size: int, batches: int, seed: int, rank: int, world_size: int
    ) -> None:
        self.data, self.context, self.batch_size, self.batches = data, context, batch_size, batches
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        if self.position == self.batches:  # here, because a Trainer that knows the length never asks for one more
            self.epoch, self.position = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        shape = (self.batches, self.world_size, self.batch_size, 1)
        starts = torch.randint(len(self.data) - self.context, shape, generator=generator)[:, self.rank]
        window = torch.arange(self.context + 1)
        while self.position < self.batches:
            self.position += 1
            yield self.data[starts[self.position - 1] + window].long()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Batches:
    """Batches made beforehand. A list will not do: Lightning takes its items for loaders."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class StandardLibrary(pl.LightningDataModule):
    """The top-level modules of Python's standard library as bytes; every eighth file is kept for validation.

    Args:
        context: Bytes that are predicted in one window.
        batch_size: Windows in one batch on one device.
        batches_per_epoch: What is called an epoch here; windows are drawn at random.
        validation_windows: Windows to validate on, evenly spread over the validation files.
        seed: Of the random windows.
    """

    def __init__(
        self,
        context: int = 64,
        batch_size: int = 8,
        batches_per_epoch: int = 200,
        validation_windows: int = 512,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.context, self.batch_size, self.batches_per_epoch = context, batch_size, batches_per_epoch
        self.validation_windows, self.seed = validation_windows, seed
        self.folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(self.folder.glob("*.py"))
        self.validation_files = files[::8]
        self.training_files = [file for file in files if file not in self.validation_files]
        self.training, self.validation = _read(self.training_files), _read(self.validation_files)

    def train_dataloader(self) -> RandomBatches:
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        return RandomBatches(
            self.training, self.context, self.batch_size, self.batches_per_epoch, self.seed, rank, ranks
        )

    def val_dataloader(self) -> Batches:
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        starts = torch.linspace(0, len(self.validation) - self.context - 1, self.validation_windows).long()
        windows = self.validation[starts[:, None] + torch.arange(self.context + 1)].long()
        return Batches(windows[rank::ranks].split(4 * self.batch_size))


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteTransformer(pl.LightningModule):
    """A language model over bytes.

    Args:
        width: Size of the residual stream.
        depth: Number of layers.
        heads: Attention heads of a layer.
        context: Longest window in bytes; taken over from the data.
        learning_rate: Peak learning rate.
        warmup_steps: Steps of linear warm-up, followed by a decay with the inverse square root.
    """

    def __init__(
        self,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        context: int = 64,
        learning_rate: float = 5e-3,
        warmup_steps: int = 40,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        bits = self.loss(batch) / math.log(2)
        self.log("validation/bits_per_byte", bits, batch_size=len(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        warmup = max(1, self.hparams.warmup_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StopAndResume(pl.Callback):
    """Saves a checkpoint where a part stops, and says where the next begins, once everything has been restored."""

    checkpoint: Path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            self.checkpoint = Path(trainer.log_dir) / f"step={trainer.global_step}.ckpt"
            trainer.save_checkpoint(self.checkpoint)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plugin = trainer.precision_plugin
        if trainer.global_step and isinstance(plugin, AmpPrecision):
            scale = "none" if plugin.scaler is None else f"{plugin.scaler.get_scale():,.8g}"
            skipped = plugin.history.skipped
            say(f"resumed at step {trainer.global_step}: loss scale {scale}, {skipped} windows skipped so far")


class Bar(RichProgressBar):
    """Lightning's progress bar with room for the loss, the loss scale and the skip rate on a line of 80 characters."""

    def __init__(self) -> None:
        super().__init__(theme=RichProgressBarTheme(metrics_format=".6g"))

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        description, bar, batches, _time, _speed = super().configure_columns(trainer)
        bar.bar_width = 12
        return [description, bar, batches]

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics | {"loss": round(metrics["loss"], 3)} if "loss" in metrics else metrics


class TextCLI(LightningCLI):
    """A LightningCLI with two options of its own, ``--precision`` and ``--stop_at``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--precision",
            type=Literal["16-mixed", "bf16-mixed", "32-true"] | None,
            default=None,
            help="Short for an AmpPrecision under trainer.precision. (default: 16-mixed, unless the Trainer has one)",
        )
        parser.add_argument(
            "--stop_at", type=int | None, default=None, help="Step to stop and resume at. (default: half-way)"
        )
        parser.link_arguments("data.context", "model.context")
        parser.set_defaults(
            {
                "trainer.accumulate_grad_batches": 2,
                "trainer.gradient_clip_val": 1.0,
                "trainer.num_sanity_val_steps": 0,
                "trainer.log_every_n_steps": 10,
                "trainer.devices": 1,
                "trainer.default_root_dir": "logs",
                "trainer.enable_checkpointing": False,
                "trainer.enable_model_summary": False,
                "trainer.enable_progress_bar": sys.stdout.isatty(),
                "trainer.callbacks": [{"class_path": f"lightning_amp_plus.callbacks.{name}"} for name in MONITORS],
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        config = self.config
        given = config.trainer.precision is not None or bool(config.trainer.plugins)
        if given and config.precision is not None:
            parser.error(
                "the precision is given twice: leave out --precision, or trainer.precision and trainer.plugins"
            )
        if not given:
            plugin = {"class_path": "lightning_amp_plus.AmpPrecision"}
            plugin["init_args"] = PRECISIONS[config.precision or "16-mixed"]
            self.config = parser.parse_object({"trainer": {"precision": plugin}, "precision": None}, config)
        self._set_length(self.config.trainer, self.config.data.batches_per_epoch)
        steps = self.config.trainer.max_steps
        stop = self.config.stop_at = steps // 2 if self.config.stop_at is None else self.config.stop_at
        if not 0 < stop < steps:
            parser.error(f"--stop_at must lie between 0 and the last step, {steps}; found {stop}")
        self.part: dict[str, Any] = {"max_steps": stop}
        self.stopping = StopAndResume()
        self.trainer_defaults["callbacks"] = [self.stopping]
        if self.config.trainer.enable_progress_bar:
            self.trainer_defaults["callbacks"].append(Bar())

    @staticmethod
    def _set_length(trainer: Namespace, batches: int) -> None:
        """Sets the limit that was not given, steps or epochs, by the other; without either it is four epochs."""
        steps = batches // trainer.accumulate_grad_batches
        if trainer.max_steps == -1:
            trainer.max_epochs = trainer.max_epochs or 4
            trainer.max_steps = steps * trainer.max_epochs
        elif trainer.max_epochs is None:
            trainer.max_epochs = math.ceil(trainer.max_steps / steps)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer of the part at hand."""
        return super().instantiate_trainer(**self.part, **kwargs)


@rank_zero_only
def heading(text: str) -> None:
    console.print(f"\n{text}", style="bold", markup=False, highlight=False)


@rank_zero_only
def say(text: str) -> None:
    console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)


def bits_per_byte(cli: TextCLI) -> float:
    [metrics] = cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
    return metrics["validation/bits_per_byte"]


def show_scales(plugin: AmpPrecision, most: int = 30) -> None:
    """The history of the loss scale, a line for each change."""
    history = plugin.history
    heading("Loss scale")
    if plugin.scaler is None:
        say(f"none in use with {plugin.precision}")
    else:
        window, before, lines = 0, plugin.scaler.config.init, []
        lines.append(_scale_line("start", before, ""))
        for scale, windows in history.scales.runs:
            if scale != before:
                event = "growth" if scale > before else "overflow, skipped"
                lines.append(_scale_line(f"window {window}", scale, event))
            window, before = window + windows, scale
        if len(lines) > most:
            say(f"... {len(lines) - most} earlier changes")
        for line in lines[-most:]:
            say(line)
        say(f"{history.growths} growths, {history.backoffs} backoffs")
    windows = history.applied + history.skipped
    say(f"{history.skipped} of {windows} windows skipped: skip rate {history.skip_rate:.1%}")


def _scale_line(when: str, scale: float, event: str) -> str:
    return f"{when:<12}  {scale:>12,.8g}  {'#' * round(math.log2(scale)):<24}  {event}".rstrip()


@rank_zero_only
def show_routes(plugin: AmpPrecision) -> None:
    heading("Routes")
    if console.is_terminal:
        console.print(plugin.plan)  # as many columns as the terminal has room for
    else:
        print(plugin.plan)


def short(path: str | Path) -> str:
    """A path as seen from here."""
    path = Path(path).resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def quiet() -> None:
    """Of Lightning's log only warnings: what matters of the rest is printed, once and not per Trainer or rank."""
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Lightning 2.6 calls what torch 2.13 is about to rename; nothing that a run could do about.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.* is deprecated")


def main() -> None:
    quiet()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # a second one gains little on matrices this small, and loses much on a busy machine
    cli = TextCLI(
        ByteTransformer,
        StandardLibrary,
        trainer_class=Trainer,
        run=False,
        seed_everything_default=1,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},  # both parts write into one log directory
    )
    stop, steps = cli.config.stop_at, cli.config.trainer.max_steps
    data = cli.datamodule
    heading("Data and model")
    say(f"training    {len(data.training_files)} files, {len(data.training) / 1e6:.1f} MB, from {data.folder}")
    say(f"validation  {len(data.validation_files)} files, {len(data.validation) / 1e6:.1f} MB")
    say(f"model       {sum(parameter.numel() for parameter in cli.model.parameters()):,} parameters")
    say(f"precision   {cli.trainer.precision_plugin!r}")

    heading(f"Part 1: steps 0 to {stop}")
    start = bits_per_byte(cli)
    say(f"validation before training: {start:.3f} bits per byte")
    cli.trainer.fit(cli.model, cli.datamodule)
    say(f"stopped at step {cli.trainer.global_step}: {bits_per_byte(cli):.3f} bits per byte")
    say(f"checkpoint: {short(cli.stopping.checkpoint)}")

    heading(f"Part 2: steps {stop} to {steps}")
    # As in a new process: model, data and plugin are made anew. Only the log goes on where it was.
    cli.part = {"max_steps": steps, "logger": cli.trainer.loggers or False}
    cli.instantiate_classes()
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=cli.stopping.checkpoint)
    say(f"finished at step {cli.trainer.global_step}")
    say(f"validation after training: {bits_per_byte(cli):.3f} bits per byte (before: {start:.3f})")

    plugin = cli.trainer.precision_plugin
    show_scales(plugin)
    show_routes(plugin)
    heading("TensorBoard")
    say(f"tensorboard --logdir {short(cli.trainer.log_dir)}")


if __name__ == "__main__":
    main()
