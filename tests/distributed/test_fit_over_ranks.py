"""Watching FP8 layers on two ranks: sharded weights, and numbers that mean the same when taken together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lightning_amp_plus.fp8 import CurrentScaling, DelayedScaling
from lightning_amp_plus.fp8.fit.measure import FIT_COLUMNS, measured
from lightning_amp_plus.fp8.fit.watch import FitWatch
from tests.fp8.fit.test_watch import Net, batch, linears, routed
from tests.support.ranks import run_on_ranks


def largest(values: Tensor) -> None:
    dist.all_reduce(values, op=dist.ReduceOp.MAX)


def watched_on_a_rank(sharded: bool) -> dict[str, Any]:
    model = routed(Net(), CurrentScaling())
    weights = {name: layer.weight.detach().clone() for name, layer in linears(model).items()}
    if sharded:
        for layer in linears(model).values():
            fully_shard(layer)
        fully_shard(model)
    watch = FitWatch(linears(model), torch.device("cpu"), hidden=["b"], what_if=[DelayedScaling()])
    watch.begin()
    model(batch(dist.get_rank()) * (1 + 9 * dist.get_rank())).backward()
    watch.end()
    watch.end_window(True, largest)
    first = watch.numbers()
    watch.begin()
    model(batch(0)).backward()
    watch.end()
    return {"first": first, "second": watch.numbers(), "weights": weights, "hooks": len(model.a._forward_hooks)}


def test_of_a_gathered_weight_all_is_measured_and_of_a_hidden_one_each_rank_s_part() -> None:
    for rank, found in enumerate(run_on_ranks(watched_on_a_rank, 2, True)):
        own = found["first"].view(2, 2, 3, len(FIT_COLUMNS) + 1)[0, :, :, :-1]
        whole, part = found["weights"]["a"], found["weights"]["b"].chunk(2)[rank]
        assert torch.equal(own[0, 1], measured(whole, "weight", CurrentScaling()))
        assert torch.equal(own[1, 1], measured(part, "weight", CurrentScaling()))
        assert (own[0, :, 5] > 0).all()


def test_ranks_share_the_history_of_a_recipe_that_is_tried() -> None:
    scales, amaxes = [], []
    for found in run_on_ranks(watched_on_a_rank, 2, False):
        first, second = (found[name].view(2, 2, 3, len(FIT_COLUMNS) + 1)[1, 0, 0] for name in ("first", "second"))
        amaxes.append(first[0].item())
        scales.append(second[1].item())
    assert amaxes[1] > 2 * amaxes[0]
    assert scales == [torch.tensor(448 / max(amaxes), dtype=torch.float32).item()] * 2
