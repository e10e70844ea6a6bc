"""FSDP2 in particular: the units' mixed precision, the deferred reduction, master weights, and counting collectives."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from tests.support.ranks import run_on_ranks
from tests.support.sharding import (
    RankedRegressor,
    counted_collectives,
    fit_on_rank,
    halves,
    local_of,
    outcomes_of,
    shard_units,
    whole_weights,
)
from tests.support.training import amp_fp16, regression_batches, stock_fp16, weights

UNITS = 4


def strategy() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def mine(count: int) -> Any:
    return halves(regression_batches(count), 2)[dist.get_rank()]


def counted(plugin: Any, accumulate: int) -> dict[str, Any]:
    model = RankedRegressor(layout=shard_units)
    with counted_collectives() as counts:
        trainer = fit_on_rank(model, plugin, strategy(), mine(8), accumulate_grad_batches=accumulate)
    notes = plugin.plan.notes if isinstance(plugin, AmpPrecision) else ()
    return {"counts": dict(counts), "weights": whole_weights(model), "notes": notes, "steps": trainer.global_step}


def without_policy(model: Any) -> None:
    for name in ("net.first", "net.second", "net.third", "net"):
        fully_shard(model.get_submodule(name), mesh=model.device_mesh["data_parallel"])


def norm_as_its_own_unit(model: Any) -> None:
    mesh = model.device_mesh["data_parallel"]
    for name in ("net.norm", "net"):
        unit = model.get_submodule(name)
        fully_shard(unit, mesh=mesh, mp_policy=model.trainer.precision_plugin.fsdp2_policy(unit, name))


def set_up(plugin: AmpPrecision, layout: Any) -> dict[str, Any]:
    """What the plugin says, and the dtypes in which a layer's weight is gathered and its output comes."""
    seen: dict[str, Any] = {}
    model = RankedRegressor(layout=layout)

    def look(name: str) -> Any:
        def hook(module: Any, _: Any, output: Tensor) -> None:
            seen[name] = (str(module.weight.dtype), str(output.dtype))

        return hook

    for name in ("first", "norm"):
        model.net.get_submodule(name).register_forward_hook(look(name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_on_rank(model, plugin, strategy(), mine(2))
    said = [str(w.message) for w in caught if "FSDP2 units" in str(w.message)]
    return {"said": said, "seen": seen, "applied": plugin.applied_steps}


def small_updates(plugin: AmpPrecision, count: int = 20) -> dict[str, Any]:
    """AdamW with a learning rate whose updates are below half an ulp of BF16 for weights near one."""
    model = RankedRegressor(
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0), layout=shard_units
    )
    torch.nn.init.ones_(model.net.norm.weight)
    before = weights(model.net.norm)["weight"]
    fit_on_rank(model, plugin, strategy(), mine(count))
    return {
        "moved": whole_weights(model)["net.norm.weight"] - before,
        "stored": sorted({str(local_of(p).dtype) for p in model.parameters()}),
        "copies": 0 if plugin._masters is None else len(plugin._masters._masters),
        "state": sorted({str(v.dtype) for s in model.optimizers().state.values() for v in s.values() if v.ndim}),
    }


def deferral_under_ddp() -> None:
    fit_on_rank(RankedRegressor(), amp_fp16(sync_each_microbatch=False), DDPStrategy(), mine(2))


def everything() -> dict[str, Any]:
    in_fp32 = (Rule("net.norm", compute="fp32"),)
    bf16 = PrecisionPolicy("bf16", rules=in_fp32)
    masters = PrecisionPolicy("bf16", params="bf16", master_weights=True)
    return outcomes_of(
        {
            "ours, 1": partial(counted, amp_fp16(), 1),
            "ours, 4": partial(counted, amp_fp16(), 4),
            "stock, 1": partial(counted, stock_fp16(), 1),
            "stock, 4": partial(counted, stock_fp16(), 4),
            "deferred, 4": partial(counted, amp_fp16(sync_each_microbatch=False), 4),
            "deferred, 1": partial(counted, amp_fp16(sync_each_microbatch=False), 1),
            "deferred, ddp": deferral_under_ddp,
            "as planned": partial(set_up, AmpPrecision("bf16-mixed"), shard_units),
            "without a policy": partial(set_up, AmpPrecision("bf16-mixed"), without_policy),
            "norm inside": partial(set_up, AmpPrecision(bf16), shard_units),
            "norm alone": partial(set_up, AmpPrecision(bf16), norm_as_its_own_unit),
            "small updates, fp32": partial(small_updates, AmpPrecision("32-true")),
            "small updates, masters": partial(small_updates, AmpPrecision(masters)),
            "small updates, bf16": partial(small_updates, AmpPrecision("bf16-true")),
        }
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 2)


def both(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    assert [rank.get("error") for rank in found] == [None, None]
    return found


def reduce_scatters(counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if "reduce_scatter" in name)


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize("accumulate", [1, 4])
def test_windows_cost_no_collective_more_than_in_stock(ranks: list[dict[str, Any]], accumulate: int) -> None:
    for ours, stock in zip(both(ranks, f"ours, {accumulate}"), both(ranks, f"stock, {accumulate}"), strict=True):
        extra = Counter(ours["counts"])
        extra.subtract(stock["counts"])
        # Once, at the start of a fit, ranks compare a digest of what they hold.
        assert {name: count for name, count in extra.items() if count} == {"allgather_": 1}


def test_stock_reduces_in_every_micro_batch(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "stock, 4"):
        assert reduce_scatters(rank["counts"]) == UNITS * 8


def test_deferring_reduces_once_a_window_to_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    for deferred, ours in zip(both(ranks, "deferred, 4"), both(ranks, "ours, 4"), strict=True):
        assert reduce_scatters(deferred["counts"]) == UNITS * 2
        for name, value in ours["weights"].items():
            torch.testing.assert_close(deferred["weights"][name], value, rtol=1e-4, atol=1e-5)


def test_deferring_without_accumulation_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    for deferred, ours in zip(both(ranks, "deferred, 1"), both(ranks, "ours, 1"), strict=True):
        assert deferred["counts"] == ours["counts"]
        assert all(torch.equal(deferred["weights"][name], value) for name, value in ours["weights"].items())


def test_the_plan_says_what_deferring_holds(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "deferred, 4"):
        assert any("sync_each_microbatch=False holds" in note and "MiB" in note for note in rank["notes"])


def test_deferring_under_ddp_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for words in ("ValueError", "sync_each_microbatch=False", "no module with fully_shard"):
            assert words in rank["deferred, ddp"]["error"]


# ---------------------------------------------------------------- the units' mixed precision


def test_units_as_planned_gather_in_16_bits_without_a_word(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "as planned"):
        assert rank["said"] == []
        assert rank["seen"]["first"] == ("torch.bfloat16", "torch.bfloat16")
        assert rank["applied"] == 2


def test_units_without_a_policy_are_warned_about_with_the_bytes_of_their_copies(ranks: list[dict[str, Any]]) -> None:
    (warning,) = both(ranks, "without a policy")[0]["said"]
    assert "bytes a rank" in warning
    assert "fsdp2_policy" in warning


def test_an_fp32_module_inside_a_bf16_unit_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for words in ("ValueError", "'net'", "'net.norm'", "torch.bfloat16", "fp32", "unit of its own"):
            assert words in rank["norm inside"]["error"]


def test_an_fp32_module_as_a_unit_of_its_own_computes_in_fp32(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "norm alone"):
        assert rank["seen"]["norm"] == ("torch.float32", "torch.float32")
        assert rank["seen"]["first"] == ("torch.bfloat16", "torch.bfloat16")


# ---------------------------------------------------------------- master weights


def test_master_weights_are_the_fp32_shards_and_no_second_copy(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "small updates, masters"):
        assert rank["stored"] == ["torch.float32"]
        assert rank["state"] == ["torch.float32"]
        assert rank["copies"] == 0


def test_small_updates_add_up_with_master_weights_as_in_fp32(ranks: list[dict[str, Any]]) -> None:
    for ours, fp32, bf16 in zip(
        both(ranks, "small updates, masters"),
        both(ranks, "small updates, fp32"),
        both(ranks, "small updates, bf16"),
        strict=True,
    ):
        assert float(fp32["moved"].abs().max()) > 1e-3
        assert float((ours["moved"] - fp32["moved"]).abs().max()) < 5e-4
        assert torch.count_nonzero(bf16["moved"]) == 0
