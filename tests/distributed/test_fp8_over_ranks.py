"""FP8 under DDP and FSDP2: it runs on every rank, ranks stay equal, and both strategies train the same model."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.fp8 import DelayedScaling
from lightning_amp_plus.fp8.delayed import histories_of
from lightning_amp_plus.fp8.weights import KEPT, WindowWeights
from lightning_amp_plus.routed import route_of
from tests.support.sharding import fit_on_rank, outcomes_of, outcomes_or_failure, whole_weights

LAYERS = ("net.0", "net.2")


class Regressor(L.LightningModule):
    """Two layers that FP8 takes, both FSDP2 units where ``sharded``, made on the meta device where ``meta``."""

    def __init__(self, sharded: bool = False, meta: bool = False, gather: bool = False) -> None:
        super().__init__()
        self.sharded, self.meta, self.gather = sharded, meta, gather
        with torch.random.fork_rng(), torch.device("meta" if meta else "cpu"):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 1))

    def configure_model(self) -> None:
        if not self.sharded:
            return
        plugin: Any = self.trainer.precision_plugin
        if self.gather:
            assert plugin.gather_in_fp8(self) == list(LAYERS)
        for name in (*LAYERS, "net"):
            unit = self.get_submodule(name)
            fully_shard(unit, mesh=self.device_mesh["data_parallel"], mp_policy=plugin.fsdp2_policy(unit, name))
        if self.meta:
            self.to_empty(device="cpu")
            torch.manual_seed(0)
            for name in ("net.0", "net.2", "net.3"):
                self.get_submodule(name).reset_parameters()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch).float(), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


TORCHAO = PrecisionPolicy("bf16", rules=[Rule("net.[02]", compute="fp8", recipe="current", backend="torchao")])
DELAYED = PrecisionPolicy("bf16", rules=[Rule("net.[02]", compute="fp8", recipe=DelayedScaling(history=8))])


def train(
    sharded: bool, precision: Any = "fp8-mixed", meta: bool = False, inf: bool = False, gather: bool = False
) -> dict[str, Any]:
    batches = list(torch.randn(6, 32, 16, generator=torch.Generator().manual_seed(1)))
    mine = [pair[dist.get_rank()] for pair in (batch.chunk(2) for batch in batches)]
    if inf and dist.get_rank() == 1:
        mine[2] = mine[2] * float("inf")
    strategy = ModelParallelStrategy(2, 1) if sharded else DDPStrategy()
    model, plugin = Regressor(sharded, meta, gather), AmpPrecision(precision)
    fit_on_rank(model, plugin, strategy, mine)
    in_fp8 = [n for n, m in model.named_modules() if (r := route_of(m)) is not None and r.fp8 is not None]
    histories = [history.state_dict() for history in histories_of(model.modules())]
    return {
        "weights": whole_weights(model),
        "fp8": in_fp8,
        "skipped": plugin.history.skipped,
        "histories": histories[0] if histories else {},
        "amax of all inputs": [batch.abs().max().item() for batch in batches],
    }


def accumulate(sharded: bool, recipe: str, keep: bool) -> dict[str, Any]:
    """Trains two windows of four micro-batches, with weights kept for a window or not."""

    class Watched(Regressor):
        held = 0

        def on_after_backward(self) -> None:
            places = [vars(m)[KEPT] for m in self.modules() if KEPT in vars(m)]
            self.held = max(self.held, sum(len(place.entries) for place in places))

    batches = list(torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(1)))
    mine = [batch.chunk(2)[dist.get_rank()] for batch in batches]
    policy = PrecisionPolicy("bf16", rules=[Rule("net.[02]", compute="fp8", recipe=recipe)])
    model = Watched(sharded)
    with patch.object(WindowWeights, "begin", WindowWeights.begin if keep else lambda self, several: self.end()):
        strategy = ModelParallelStrategy(2, 1) if sharded else DDPStrategy()
        fit_on_rank(model, AmpPrecision(policy), strategy, mine, accumulate_grad_batches=4)
    return {"weights": whole_weights(model), "held": model.held}


def jobs() -> dict[str, Any]:
    return outcomes_of(
        {
            "ddp": partial(train, False),
            "fsdp2": partial(train, True),
            "fsdp2, meta": partial(train, True, meta=True),
            "ddp, delayed": partial(train, False, DELAYED),
            "fsdp2, delayed": partial(train, True, DELAYED),
            "ddp, torchao": partial(train, False, TORCHAO),
            "fsdp2, torchao": partial(train, True, TORCHAO),
            "fsdp2, torchao, gathered": partial(train, True, TORCHAO, gather=True),
            "fsdp2, torchao, gathered, meta": partial(train, True, TORCHAO, gather=True, meta=True),
            "ddp in bf16": partial(train, False, "bf16-mixed"),
            "ddp, inf on one rank": partial(train, False, inf=True),
            "fsdp2, inf on one rank": partial(train, True, inf=True),
        }
        | {
            f"{'fsdp2' if sharded else 'ddp'}, {recipe}, {'kept' if keep else 'anew'}": partial(
                accumulate, sharded, recipe, keep
            )
            for sharded in (False, True)
            for recipe in ("delayed", "rowwise")
            for keep in (True, False)
        }
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return outcomes_or_failure(jobs, 2)


def close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> bool:
    return all(torch.allclose(left[name], right[name], rtol=tolerance, atol=tolerance) for name in left)


@pytest.mark.parametrize(
    "job",
    [
        "ddp",
        "fsdp2",
        "fsdp2, meta",
        "ddp, delayed",
        "fsdp2, delayed",
        "ddp, torchao",
        "fsdp2, torchao",
        "fsdp2, torchao, gathered",
        "fsdp2, torchao, gathered, meta",
    ],
)
def test_fp8_runs_on_every_rank_and_ranks_stay_equal(ranks: list[dict[str, Any]], job: str) -> None:
    first, second = (rank[job] for rank in ranks)
    assert first["fp8"] == second["fp8"] == list(LAYERS)
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


def test_ddp_and_fsdp2_train_the_same_model_and_not_that_of_bf16(ranks: list[dict[str, Any]]) -> None:
    weights = {job: ranks[0][job]["weights"] for job in ("ddp", "fsdp2", "ddp in bf16")}
    # FSDP2 gathers weights in BF16, from which they are quantized, so a few of them round to the neighbor in FP8.
    assert close(weights["ddp"], weights["fsdp2"], 2e-3)
    assert not close(weights["ddp"], weights["ddp in bf16"], 1e-5)


@pytest.mark.parametrize("job", ["ddp, delayed", "fsdp2, delayed"])
def test_ranks_share_amax_values_so_that_scales_are_those_of_one_rank(ranks: list[dict[str, Any]], job: str) -> None:
    """ao#4300: the amax of an input is that of both ranks' halves of the batch."""
    first, second = (rank[job]["histories"] for rank in ranks)
    assert set(first) == set(LAYERS) and all(torch.equal(first[name], second[name]) for name in first)
    past = first["net.0"][0]
    wanted = [torch.tensor(amax).bfloat16().item() for amax in ranks[0][job]["amax of all inputs"]]
    assert past[:6].tolist() == wanted[::-1] and (first["net.2"] > 0).sum(dim=1).tolist() == [6, 6, 6]


@pytest.mark.parametrize("job", ["ddp, inf on one rank", "fsdp2, inf on one rank"])
def test_an_infinite_input_on_one_rank_skips_the_window_on_all(ranks: list[dict[str, Any]], job: str) -> None:
    for rank in ranks:
        assert rank[job]["skipped"] == 1
        assert all(weight.isfinite().all() for weight in rank[job]["weights"].values())


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_weights_kept_for_a_window_change_no_bit_and_no_shard_is_kept_in_whole(
    ranks: list[dict[str, Any]], strategy: str, recipe: str
) -> None:
    for rank in ranks:
        kept, anew = (rank[f"{strategy}, {recipe}, {how}"] for how in ("kept", "anew"))
        assert all(torch.equal(kept["weights"][name], anew["weights"][name]) for name in kept["weights"])
        # Two layers; by columns only the second, since the input of the first needs no gradient.
        assert kept["held"] == (0 if strategy == "fsdp2" else 2 if recipe == "delayed" else 3) and anew["held"] == 0
