"""The dtype census over two ranks: what gradients are exchanged in, shards, and ranks that differ."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import DtypeCensus
from tests.support.models import adamw, fused_adamw
from tests.support.sharding import (
    CpuFSDPStrategy,
    RankedRegressor,
    fit_on_rank,
    halves,
    outcomes_of,
    outcomes_or_failure,
    shard_units,
    whole_weights,
)
from tests.support.training import regression_batches, same

LAYERS = ("net.first", "net.norm", "net.second", "net.third")


def fsdp2() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def run(
    policy: Any, strategy: Any, layout: Any = None, make_optimizer: Any = adamw, watch: bool = True, model: Any = None,
    narrow: bool = False,    **arguments: Any,
) -> dict[str, Any]:  # fmt: skip
    made = (model or RankedRegressor)(make_optimizer, layout=layout)
    callback = DtypeCensus()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin = AmpPrecision(policy)
        mine = halves(regression_batches(4), 2)[dist.get_rank()]
        callbacks: list[L.Callback] = [*([callback] if watch else []), *([Narrowing()] if narrow else [])]
        fit_on_rank(made, plugin, strategy(), mine, callbacks=callbacks, **arguments)
    census = callback.last
    return {
        "weights": whole_weights(made),
        "said": [str(w.message) for w in caught if "Ranks" in str(w.message)],
        "rows": None if census is None else {name: dict(row) for name, row in census.modules.items()},
        "flags": None if census is None else [(flag.kind, flag.module, flag.op, flag.found) for flag in census.flags],
        "communication": None if census is None else {o.dtypes for o in census.ops if o.kind == "communication"},
        "stack": torch._C._len_torch_dispatch_stack(),
    }


class Branches(RankedRegressor):
    """One rank computes a layer in FP32."""

    def loss(self, batch: Any) -> Any:
        with torch.autocast("cpu", enabled=False) if dist.get_rank() else torch.autocast("cpu", torch.bfloat16):
            hidden = self.net.first(batch[0])
        return self.net.third(torch.tanh(self.net.second(self.net.norm(hidden)))).float().square().mean()


class Stages(RankedRegressor):
    """Each rank has a layer of its own: not to be compared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self, f"stage_{dist.get_rank()}", nn.Linear(2, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


class Narrowing(L.Callback):
    """Gives DDP a communication hook, which Lightning does on a GPU only."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def everything() -> dict[str, Any]:
    masters = PrecisionPolicy("bf16", params="bf16", master_weights=True)
    narrow = PrecisionPolicy("bf16", reduce="bf16")
    in_fp32 = PrecisionPolicy("bf16", rules=[Rule("net.third", compute="fp32")])
    ddp = DDPStrategy
    unused = partial(DDPStrategy, find_unused_parameters=True)
    return outcomes_of(
        {
            "ddp": partial(run, "bf16-mixed", ddp),
            "ddp, bare": partial(run, "bf16-mixed", ddp, watch=False),
            "ddp, views, accumulated": partial(
                run, "16-mixed", partial(DDPStrategy, gradient_as_bucket_view=True), accumulate_grad_batches=2
            ),
            "ddp, fused": partial(run, "bf16-mixed", ddp, make_optimizer=fused_adamw),
            "ddp, hook": partial(run, "bf16-mixed", ddp, narrow=True),
            "fsdp2": partial(run, "bf16-mixed", fsdp2, shard_units),
            "fsdp2, bare": partial(run, "bf16-mixed", fsdp2, shard_units, watch=False),
            "fsdp2, narrow": partial(run, narrow, fsdp2, shard_units),
            "fsdp2, masters": partial(run, masters, fsdp2, shard_units),
            "fsdp2, accumulated": partial(run, "bf16-mixed", fsdp2, shard_units, accumulate_grad_batches=2),
            "fsdp2, rule": partial(run, in_fp32, fsdp2, shard_units),
            "fsdp1": partial(run, "bf16-mixed", CpuFSDPStrategy),
            "fsdp1, bare": partial(run, "bf16-mixed", CpuFSDPStrategy, watch=False),
            "fsdp1, narrow": partial(run, narrow, CpuFSDPStrategy),
            "branches": partial(run, "bf16-mixed", ddp, model=Branches),
            "stages": partial(run, "bf16-mixed", unused, model=Stages),
        }
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return outcomes_or_failure(everything, 2)


AS_PLANNED = (
    *("ddp", "ddp, views, accumulated", "ddp, fused", "fsdp2", "fsdp2, narrow", "fsdp2, masters", "fsdp2, accumulated"),
    *("fsdp2, rule", "fsdp1", "fsdp1, narrow"),
)


@pytest.mark.parametrize("name", AS_PLANNED)
def test_sharded_or_not_it_is_as_planned_and_ranks_agree(ranks, name):
    for rank in ranks:
        assert "error" not in rank[name], rank[name]["error"]
        assert rank[name]["flags"] == [] and rank[name]["said"] == [] and rank[name]["stack"] == 0


@pytest.mark.parametrize(
    "name", ["ddp", "ddp, views, accumulated", "ddp, fused", "fsdp2", "fsdp2, accumulated", "fsdp1"]
)
def test_gradients_are_exchanged_in_fp32(ranks, name):
    rows = ranks[0][name]["rows"]
    found = {layer: rows[layer]["reduction"] for layer in LAYERS}
    if name == "fsdp1":  # a rank has nothing of some
        assert set(found.values()) <= {"fp32", "-"} and "fp32" in found.values()
    else:
        assert found == dict.fromkeys(LAYERS, "fp32")
    assert rows["net.second"]["parameter"] == rows["net.first"]["optimizer"] == "fp32"


@pytest.mark.parametrize("name", ["fsdp2, narrow", "fsdp1, narrow"])
def test_or_in_what_the_policy_says(ranks, name):
    assert ranks[0][name]["rows"]["net.first"]["reduction"] == "bf16"


def test_a_communication_hook_that_narrows_is_off_plan(ranks):
    flags = ranks[0]["ddp, hook"]["flags"]
    assert {(kind, op) for kind, _, op, _ in flags} == {("off plan", "reduction")}
    assert {module for _, module, _, _ in flags} == set(LAYERS)
    assert all("fp16, planned fp32" in found for *_, found in flags)


def test_fsdp2_gathers_the_weights_that_gemms_read_in_bf16(ranks):
    rows = ranks[0]["fsdp2"]["rows"]
    assert (rows["net.second"]["weight"], rows["net.second"]["parameter"]) == ("bf16", "fp32")
    assert ranks[0]["fsdp2, masters"]["rows"]["net.second"]["parameter"] == "fp32"
    assert ranks[0]["fsdp2, rule"]["rows"]["net.third"]["weight"] == "fp32"


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1"])
def test_the_look_changes_no_number(ranks, name):
    assert same(ranks[0][name]["weights"], ranks[0][f"{name}, bare"]["weights"])


def test_ranks_that_differ_are_named_with_module_and_dtype(ranks):
    [said] = ranks[0]["branches"]["said"]
    assert "Ranks [1] ran in other dtypes than rank 0" in said
    assert "net.first, weight: was bf16, is fp32" in said
    assert ranks[0]["branches"]["rows"]["net.first"]["weight"] == "bf16"


def test_stages_of_a_pipeline_are_not_compared(ranks):
    assert ranks[0]["stages"]["said"] == []
