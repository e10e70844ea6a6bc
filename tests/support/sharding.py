"""Strategies, models and faults for tests that run on several gloo ranks on a CPU."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from tests.support.faults import NO_FAULT, Fault
from tests.support.models import MakeOptimizer, MakeScheduler, sgd
from tests.support.ranks import RanksFailed, run_on_ranks
from tests.support.training import loader, make_trainer


class CpuFSDPStrategy(FSDPStrategy):
    """Lightning's FSDPStrategy without its demand for a GPU: a subclass passes the check, and the device is named."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if any(isinstance(unit, FullyShardedDataParallel) for unit in model.modules()):
            return model
        return FullyShardedDataParallel(
            model,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


class Body(nn.Module):
    """Four features in, one number out. The last layer has fewer rows than there are ranks: some shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.first = nn.Linear(4, 6)
            self.norm = nn.LayerNorm(6)
            self.second = nn.Linear(6, 6)
            self.third = nn.Linear(6, 1)

    def forward(self, x: Tensor, fault: Fault = NO_FAULT) -> Tensor:
        hidden = fault.on_hidden(self.norm(self.first(x)))
        return self.third(torch.tanh(self.second(hidden)))


class RankedRegressor(L.LightningModule):
    """A :class:`Body` on batches of ``(4 features, 1 target)``; faults by micro-batch, from 0, and only on this rank.

    Args:
        make_optimizer: Makes the optimizer.
        faults: What goes wrong before ranks have exchanged gradients.
        make_scheduler: Makes a scheduler that steps with every optimizer step.
        layout: Shards ``self.net``; called in ``configure_model`` with this module.
    """

    def __init__(
        self,
        make_optimizer: MakeOptimizer = sgd,
        faults: Mapping[int, Fault] | None = None,
        make_scheduler: MakeScheduler | None = None,
        layout: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        self.net = Body()
        self.make_optimizer, self.make_scheduler, self.layout = make_optimizer, make_scheduler, layout
        self.faults = dict(faults or {})
        self.seen = 0
        self.laid_out = False

    def configure_model(self) -> None:
        if self.layout is not None and not self.laid_out:
            self.laid_out = True
            self.layout(self)

    def loss(self, batch: Any) -> Tensor:
        fault = self.faults.get(self.seen, NO_FAULT)
        self.seen += 1
        return fault.on_loss(nn.functional.mse_loss(self.net(batch[0], fault).float(), batch[1]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }


def shard_units(model: Any) -> None:
    """Every layer but the norm is an FSDP2 unit; the norm belongs to the root unit. As the plugin's policy wants it."""
    mesh = model.device_mesh["data_parallel"]
    policy = getattr(model.trainer.precision_plugin, "fsdp2_policy", None)
    for name in ("net.first", "net.second", "net.third", "net"):
        unit = model.get_submodule(name)
        fully_shard(unit, mesh=mesh, **({} if policy is None else {"mp_policy": policy(unit, name)}))


class GradientFault(L.Callback):
    """Writes ``value`` into a gradient after ranks have exchanged gradients, in the micro-batches named."""

    def __init__(self, batches: set[int], value: float = float("inf"), pick: str = "") -> None:
        self.batches, self.value, self.pick = batches, value, pick
        self.seen = 0

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.seen in self.batches:
            local = [
                local_of(p.grad)
                for name, p in pl_module.named_parameters()
                if p.grad is not None and name.endswith(self.pick)
            ]
            next(gradient for gradient in local if gradient.numel()).reshape(-1)[0] = self.value
        self.seen += 1


def local_of(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Any) -> Tensor:
    """All parts of a DTensor put together, or the tensor itself. A collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_weights(model: L.LightningModule) -> dict[str, Tensor]:
    """Every parameter of the model as it was before sharding; a collective where it is sharded."""
    wrapped = model.trainer.strategy.model
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: whole(p) for name, p in model.named_parameters()}


def halves(batches: list[tuple[Tensor, Tensor]], world_size: int) -> list[list[tuple[Tensor, Tensor]]]:
    """The batches of each rank: equal parts of each of ``batches``."""
    return [[(x.chunk(world_size)[rank], y.chunk(world_size)[rank]) for x, y in batches] for rank in range(world_size)]


def fit_on_rank(model: L.LightningModule, plugin: Any, strategy: Any, batches: Any, **arguments: Any) -> L.Trainer:
    """Trains this rank's part of a distributed run over ``batches`` once."""
    trainer = make_trainer(
        plugin,
        **{"strategy": strategy, "devices": dist.get_world_size(), "use_distributed_sampler": False, **arguments},
    )
    trainer.fit(model, loader(batches))
    return trainer


class WholeWeights(L.Callback):
    """The whole model's weights before the first batch and after each; a collective where they are sharded."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights.append(whole_weights(pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.weights.append(whole_weights(pl_module))


def stock_fsdp1(scale: float) -> FSDPPrecision:
    """Lightning's own FP16 plugin for FSDP1, with torch's ShardedGradScaler made to work on a CPU."""
    plugin = FSDPPrecision("16-mixed")
    plugin.scaler = ShardedGradScaler(device="cpu", init_scale=scale)
    return plugin


def outcomes_of(jobs: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each job returns, or ``{"error": text}``; for jobs that raise on every rank alike, if at all."""
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        print(f"=== {name}", flush=True)  # where this rank was, should it hang
        try:
            found[name] = job()
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


class _Unknown(dict[str, Any]):
    """Stands for what a rank would have found, where ranks failed: every look at it fails with their output."""

    def __init__(self, failure: RanksFailed) -> None:
        self.failure = failure

    def __missing__(self, name: str) -> Any:
        raise RanksFailed(str(self.failure))


def outcomes_or_failure(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """As :func:`run_on_ranks`, but ranks that failed are not started anew for every test that asks."""
    try:
        return run_on_ranks(function, world_size, *args)
    except RanksFailed as failure:
        return [_Unknown(failure)] * world_size


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Counts the collectives that this process starts, by the name of the c10d operator, also those made in C++.

    The operators are seen by torch's profiler, since DDP's reducer never passes through Python.
    """
    counts: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield counts
    for event in profile.events():
        if event.name.startswith("c10d::"):
            counts[event.name.removeprefix("c10d::")] += 1
