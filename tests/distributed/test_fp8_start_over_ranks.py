"""``fp8_when_stable`` over ranks: each sees its own losses, and all begin FP8 at the same step, resumed or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_amp_plus import AmpPrecision, PrecisionPolicy
from lightning_amp_plus.routed import FP8_SWITCH
from tests.support.sharding import counted_collectives, outcomes_of, outcomes_or_failure, whole_weights
from tests.support.training import ResumableLoader, make_trainer

STABLE = PrecisionPolicy("fp8", fp8_when_stable=True)
JOBS = ("ddp", "ddp, fused", "fsdp2", "one rank is wild", "one rank is wild, fused", "ddp, resumed", "fused, resumed")


class Model(L.LightningModule):
    """Guesses noise. With ``sharded`` its body is an FSDP2 unit."""

    def __init__(self, fused: bool, sharded: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
        self.fused, self.sharded = fused, sharded
        self.on: list[bool] = []
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.sharded and not isinstance(self.net[0].weight, torch.distributed.tensor.DTensor):
            plugin: Any = self.trainer.precision_plugin
            for name in ("net.0", "net"):
                unit = self.get_submodule(name)
                fully_shard(unit, mesh=self.device_mesh["data_parallel"], mp_policy=plugin.fsdp2_policy(unit, name))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.on.append(not hasattr(self.net[0], FP8_SWITCH))
        loss = (self.net(batch[:, :16]).float() - batch[:, 16:]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4, fused=self.fused)


def train(
    fused: bool = False, sharded: bool = False, wild: bool = False, steps: int = 130, path: str = "", save: str = ""
) -> dict[str, Any]:
    rank = dist.get_rank()
    batches = list(torch.randn(150, 32, 17, generator=torch.Generator().manual_seed(1 + rank)))
    if wild and rank == 1:
        batches = [batch * (20.0 if index % 40 == 0 else 1.0) for index, batch in enumerate(batches)]
    model, plugin = Model(fused, sharded), AmpPrecision(STABLE)
    trainer = make_trainer(
        plugin,
        strategy=ModelParallelStrategy(2, 1) if sharded else DDPStrategy(),
        devices=2,
        use_distributed_sampler=False,
        max_steps=steps,
        max_epochs=-1,
        log_every_n_steps=20,
    )
    trainer.fit(model, ResumableLoader(batches), ckpt_path=path or None)
    if save:
        trainer.save_checkpoint(save)
    return {
        "on": model.on,
        "losses": model.losses,
        "weights": whole_weights(model),
        "state": plugin.state_dict()["fp8_start"],
    }


def resumed(folder: str, fused: bool) -> dict[str, Any]:
    place = f"{folder}/{fused}.ckpt"
    first = train(fused, steps=57, save=place)
    second = train(fused, path=place)
    return {**second, "on": first["on"] + second["on"], "losses": first["losses"] + second["losses"]}


def read_on_one_rank() -> list[bool]:
    """Somebody on rank 0 only, such as a logger, asks for each verdict at once; the other rank knows them later."""
    model, plugin = Model(True, False), AmpPrecision(PrecisionPolicy("fp8", fp8_after_steps=4))
    if dist.get_rank() == 0:
        plugin.subscribe(lambda report: print(report.outcome))
    batches = list(torch.randn(30, 32, 17, generator=torch.Generator().manual_seed(dist.get_rank())))
    trainer = make_trainer(
        plugin, strategy=DDPStrategy(), devices=2, use_distributed_sampler=False, log_every_n_steps=20
    )
    trainer.fit(model, ResumableLoader(batches))
    return model.on


def collectives(policy: Any) -> dict[str, int]:
    batches = list(torch.randn(40, 32, 17, generator=torch.Generator().manual_seed(dist.get_rank())))
    trainer = make_trainer(
        AmpPrecision(policy), strategy=DDPStrategy(), devices=2, use_distributed_sampler=False, log_every_n_steps=20
    )
    with counted_collectives() as counts:
        trainer.fit(Model(True, False), ResumableLoader(batches))
    return dict(counts)


def jobs(folder: str) -> dict[str, Any]:
    return outcomes_of(
        {
            "ddp": train,
            "ddp, fused": partial(train, True),
            "fsdp2": partial(train, sharded=True),
            "one rank is wild": partial(train, wild=True),
            "one rank is wild, fused": partial(train, True, wild=True),
            "ddp, resumed": partial(resumed, folder, False),
            "fused, resumed": partial(resumed, folder, True),
            "read on one rank": read_on_one_rank,
            "collectives": partial(collectives, STABLE),
            "collectives of bf16": partial(collectives, "bf16-mixed"),
        }
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_or_failure(jobs, 2, str(Path(tmp_path_factory.mktemp("ranks"))))


@pytest.mark.parametrize("job", JOBS)
def test_ranks_decide_alike_from_losses_of_their_own(ranks: list[dict[str, Any]], job: str) -> None:
    first, second = (rank[job] for rank in ranks)
    assert first["losses"] != second["losses"]
    assert first["on"] == second["on"] and first["state"] == second["state"]
    expected = [False] * 130 if "wild" in job else [False] * 100 + [True] * 30
    assert first["on"] == expected
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


def test_what_is_looked_at_is_the_mean_loss_over_ranks(ranks: list[dict[str, Any]]) -> None:
    both = [rank["one rank is wild"]["losses"] for rank in ranks]
    mean = [(left + right) / 2 for left, right in zip(*both, strict=True)]
    observed = ranks[0]["one rank is wild"]["state"]["observed"][0]["losses"]
    assert observed == pytest.approx(mean[20:120])  # up to the last log point


@pytest.mark.parametrize("job", ["ddp", "fused"])
def test_a_resume_equals_the_run_that_was_never_stopped(ranks: list[dict[str, Any]], job: str) -> None:
    for rank in ranks:
        whole, again = rank["ddp" if job == "ddp" else "ddp, fused"], rank[f"{job}, resumed"]
        assert whole["losses"] == again["losses"] and whole["state"] == again["state"]
        assert all(torch.equal(whole["weights"][name], again["weights"][name]) for name in whole["weights"])


def test_what_one_rank_reads_makes_it_begin_no_earlier(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["read on one rank"] == [False] * 20 + [True] * 10


def test_waiting_costs_one_collective_a_log_point(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        waiting, plain = rank["collectives"], rank["collectives of bf16"]
        assert waiting.pop("allreduce_") - plain.pop("allreduce_") == 2 and waiting == plain
