"""ActivationMonitor over ranks: the same rows and numbers on each, whatever each one saw; one collective for all."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_amp_plus import AmpPrecision
from lightning_amp_plus.callbacks import ActivationMonitor
from lightning_amp_plus.callbacks.sightings import Sightings
from tests.support.models import adamw, fused_adamw
from tests.support.ranks import run_on_ranks
from tests.support.sharding import (
    CpuFSDPStrategy,
    RankedRegressor,
    counted_collectives,
    fit_on_rank,
    halves,
    outcomes_of,
    shard_units,
    whole_weights,
)
from tests.support.training import regression_batches

STEPS = 4


def mine() -> Any:
    return halves(regression_batches(STEPS), 2)[dist.get_rank()]


def strategies() -> dict[str, tuple[Any, Any]]:
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return {"ddp": (DDPStrategy(), None), "fsdp2": (sharded, shard_units), "fsdp1": (CpuFSDPStrategy(), None)}


def described(monitor: ActivationMonitor) -> dict[str, Any]:
    found = {}
    for name, layer in monitor.last.items():
        output = layer.output
        numbers = None if output is None else (output.amax, output.smallest, output.nonfinite, output.elements)
        found[name] = (numbers, layer.parameter_amax, layer.note)
    return found


class Keep(L.Callback):
    """What the layers returned in the last batch."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, index: int) -> None:
        if index == STEPS - 1:
            for name in ("first", "norm", "second", "third"):
                layer = model.get_submodule(f"net.{name}") if name in dict(model.net.named_children()) else None
                if layer is not None:
                    layer.register_forward_hook(
                        lambda m, args, output, name=name: self.outputs.update({name: output.detach().clone()})
                    )


def watched(how: str, make_optimizer: Any, accumulate: int = 1) -> dict[str, Any]:
    strategy, layout = strategies()[how]
    model = RankedRegressor(make_optimizer, layout=layout)
    monitor, keep = ActivationMonitor(every_n_steps=STEPS // accumulate), Keep()
    plugin = AmpPrecision("bf16-mixed")
    with counted_collectives() as counts:
        trainer = fit_on_rank(
            model, plugin, strategy, mine(), callbacks=[keep, monitor], accumulate_grad_batches=accumulate
        )
    whole = whole_weights(model)
    return {
        "last": described(monitor),
        "outputs": keep.outputs,
        "amax": {name: float(value.abs().max()) for name, value in whole.items() if value.numel()},
        "weights": whole,
        "logged": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "counts": dict(counts),
    }


def bare(how: str, make_optimizer: Any, accumulate: int = 1) -> dict[str, Any]:
    strategy, layout = strategies()[how]
    model = RankedRegressor(make_optimizer, layout=layout)
    with counted_collectives() as counts:
        fit_on_rank(model, AmpPrecision("bf16-mixed"), strategy, mine(), callbacks=[Keep()],
                    accumulate_grad_batches=accumulate)  # fmt: skip
    return {"weights": whole_weights(model), "counts": dict(counts)}


class OnlyOnOne(RankedRegressor):
    """A layer runs on rank 1 only, and there it returns infinity."""

    def __init__(self) -> None:
        super().__init__(fused_adamw)
        self.extra = torch.nn.Linear(4, 4)
        self.extra.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            self.extra(batch[0] * 1e38 * 1e3 if self.seen == STEPS - 1 else batch[0])
        return super().loss(batch)


def only_on_one() -> dict[str, Any]:
    model, monitor = OnlyOnOne(), ActivationMonitor(every_n_steps=STEPS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_on_rank(model, AmpPrecision("bf16-mixed"), DDPStrategy(), mine(), callbacks=[monitor])
    said = [str(w.message) for w in caught if "The output of" in str(w.message)]
    return {"last": described(monitor), "said": said}


def distributed_tensors() -> dict[str, Any]:
    """What is seen of DTensors, as modules hand them on under tensor parallelism."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.tensor([1.0, -3.0]) * (dist.get_rank() + 1)
    seen = Sightings(3, torch.device("cpu"))
    with counted_collectives() as counts:
        for module, placement in enumerate((Shard(0), Replicate(), Partial())):
            tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
            seen.see(seen.call(module), 2 * module + 1, (tensor, tensor))
        before = DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)
        seen.see(seen.call(0), 0, before)
        before.add_(1.0)
        maxima, sums = seen.totals()
    return {"maxima": maxima, "sums": sums, "notes": seen.unreadable, "counts": dict(counts)}


def everything() -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for how in strategies():
        for accumulate in (1, 2):
            for name, optimizer in (("adamw", adamw), ("fused", fused_adamw)):
                if (accumulate == 2) == (name == "fused"):
                    jobs[f"{how}, {accumulate}"] = partial(watched, how, optimizer, accumulate)
                    jobs[f"{how}, {accumulate}, bare"] = partial(bare, how, optimizer, accumulate)
    return outcomes_of({**jobs, "only on one": only_on_one, "dtensors": distributed_tensors})


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 2)


def both(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    assert [rank.get("error") for rank in found] == [None, None]
    return found


HOW = ["ddp", "fsdp2", "fsdp1"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_numbers_are_those_of_all_ranks_together(ranks: list[dict[str, Any]], how: str, accumulate: int) -> None:
    first, second = both(ranks, f"{how}, {accumulate}")
    assert first["last"] == second["last"] and first["logged"] == second["logged"]
    for name in ("first", "norm", "second", "third"):
        (amax, smallest, nonfinite, elements), parameters, note = first["last"][f"net.{name}"]
        own = [value for key, value in first["amax"].items() if key.startswith(f"net.{name}.")]
        assert parameters == pytest.approx(max(own)) and nonfinite == 0.0 and note == ""
        if accumulate == 1:
            outputs = torch.cat([rank["outputs"][name].double().abs().flatten() for rank in (first, second)])
            assert amax == float(outputs.max()) and smallest == float(outputs[outputs > 0].min())
            assert elements == len(outputs)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_training_is_the_same_and_a_log_point_costs_one_collective(
    ranks: list[dict[str, Any]], how: str, accumulate: int
) -> None:
    for with_it, without in zip(
        both(ranks, f"{how}, {accumulate}"), both(ranks, f"{how}, {accumulate}, bare"), strict=True
    ):
        assert all(torch.equal(with_it["weights"][name], value) for name, value in without["weights"].items())
        more = {name: count - without["counts"].get(name, 0) for name, count in with_it["counts"].items()}
        # The other one is at the start of the fit: whether ranks have the same layers.
        assert {name: count for name, count in more.items() if count} == {"allgather_": 1 + 1}


def test_what_one_rank_alone_saw_is_known_on_all(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "only on one")
    for rank in (first, second):
        (amax, _, nonfinite, elements), _, _ = rank["last"]["extra"]
        assert not math.isfinite(amax) and nonfinite > 0 and elements == 2 * 4
    (message,) = first["said"]
    assert "'extra'" in message and second["said"] == []


def test_of_a_dtensor_the_local_part_is_looked_at_without_a_collective(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(both(ranks, "dtensors")):
        assert found["counts"] == {}
        for module in (0, 1):
            assert float(found["maxima"][2 * module + 1, 0]) == 3.0 * (rank + 1)
        assert float(found["sums"][5, 1]) == 0 and "summand" in found["notes"][5]
        assert float(found["maxima"][0, 0]) == 3.0 * (rank + 1) and 0 not in found["notes"]  # as it was when seen
