"""Every layout of a model over ranks: the gradient norm is the single process's, and so is what clipping does."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from lightning_amp_plus import AmpPrecision, LossScale
from tests.support.models import adamw
from tests.support.sharding import (
    CpuFSDPStrategy,
    GradientFault,
    RankedRegressor,
    fit_on_rank,
    outcomes_of,
    outcomes_or_failure,
    shard_units,
    stock_fsdp1,
    whole_weights,
)
from tests.support.training import SCALE, amp_fp16, regression_batches, reports_of, stock_bf16, stock_fp16, weights

UNITS = ("net.first", "net.second", "net.third", "net")


class Regressor(RankedRegressor):
    """Its loss, and with it every gradient, can be made enormous; ``sequence`` makes one sequence of a batch's rows."""

    def __init__(self, *args: Any, factor: float = 1.0, sequence: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor, self.sequence = factor, sequence

    def loss(self, batch: Any) -> Tensor:
        if self.sequence:
            batch = [tensor.unsqueeze(0) for tensor in batch]
        return super().loss(batch) * self.factor


class ManualRegressor(Regressor):
    """Optimizes by hand and clips right before the step, while gradients still carry the scale."""

    def __init__(self, *args: Any, algorithm: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.algorithm = algorithm

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.clip_gradients(self.optimizers(), LIMIT, self.algorithm)
        self.optimizers().step()
        self.optimizers().zero_grad()


def shard_over(model: Any, meshes: dict[str, Any]) -> None:
    for name, mesh in meshes.items():
        fully_shard(model.get_submodule(name), mesh=mesh)


def by_replicas(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    shard_over(model, dict.fromkeys(UNITS, mesh))


def several_meshes(model: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    shard_over(model, {"net.first": grid, "net.second": line, "net.third": grid, "net": line})


def two_submeshes(model: Any) -> None:
    """Each half of the ranks shards a whole model of its own and knows nothing of the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("halves", "shards"))["shards"]
    shard_over(model, dict.fromkeys(UNITS, mesh))


def tensor_parallel(model: Any) -> None:
    """Columns and rows are sharded; the norm's parameters stay plain tensors."""
    styles = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "second": ColwiseParallel(),
        "third": RowwiseParallel(),
    }
    parallelize_module(model.net, model.device_mesh["tensor_parallel"], styles)


def sequence_parallel(model: Any) -> None:
    """The norm sees a part of the sequence on each rank, so that its gradients are sums over ranks still to be made."""
    styles = {
        "first": ColwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "second": ColwiseParallel(input_layouts=Shard(1)),
        "third": RowwiseParallel(),
    }
    parallelize_module(model.net, model.device_mesh["tensor_parallel"], styles)


def tensor_parallel_in_shards(model: Any) -> None:
    styles = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "second": ColwiseParallel(),
        "third": RowwiseParallel(),
    }
    parallelize_module(model.net, model.device_mesh["tensor_parallel"], styles)
    shard_over(model, dict.fromkeys(UNITS, model.device_mesh["data_parallel"]))


def hybrid() -> CpuFSDPStrategy:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return CpuFSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=mesh)


def model_parallel(data: int, tensor: int = 1) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)


# name: (ranks, strategy, layout, data parallel ranks, more for the model)
LAYOUTS: dict[str, tuple[int, Callable[[], Any], Any, int, dict[str, Any]]] = {
    "ddp": (2, DDPStrategy, None, 2, {}),
    "fsdp1": (2, CpuFSDPStrategy, None, 2, {}),
    "fsdp1, gradients only": (2, lambda: CpuFSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), None, 2, {}),
    "fsdp1, not sharded": (2, lambda: CpuFSDPStrategy(sharding_strategy="NO_SHARD"), None, 2, {}),
    "fsdp2": (2, lambda: model_parallel(2), shard_units, 2, {}),
    "tensor parallel": (2, lambda: model_parallel(1, 2), tensor_parallel, 1, {}),
    "sequence parallel": (2, lambda: model_parallel(1, 2), sequence_parallel, 1, {"sequence": True}),
    "fsdp1, hybrid": (4, hybrid, None, 4, {}),
    "fsdp2, empty shards": (4, lambda: model_parallel(4), shard_units, 4, {}),
    "replicas of shards": (4, lambda: model_parallel(4), by_replicas, 4, {}),
    "several meshes": (4, lambda: model_parallel(4), several_meshes, 4, {}),
    "two submeshes": (4, lambda: model_parallel(4), two_submeshes, 2, {}),
    "tensor parallel in shards": (4, lambda: model_parallel(2, 2), tensor_parallel_in_shards, 2, {}),
}
BY_HAND = ["ddp", "fsdp2", "tensor parallel", "sequence parallel"]  # Lightning has FSDP1 in automatic mode only
LIMIT = 0.05


def batches_of(name: str, count: int = 2) -> list[Any]:
    """This rank's share of the batches; ranks that hold parts of one replica of the model see the same rows."""
    world, parts = LAYOUTS[name][0], LAYOUTS[name][3]
    part = dist.get_rank() % parts if name == "two submeshes" else dist.get_rank() * parts // world
    return [(x.chunk(parts)[part], y.chunk(parts)[part]) for x, y in regression_batches(count)]


def trained(
    name: str, plugin: Any, make_optimizer: Any = None, factor: float = 1.0, **arguments: Any
) -> dict[str, Any]:
    _, strategy, layout, _, more = LAYOUTS[name]
    model = Regressor(make_optimizer or one_for_one, layout=layout, factor=factor, **more)
    norms: list[Any] = []
    if isinstance(plugin, AmpPrecision):
        plugin.subscribe(norms.append, grad_norm=lambda window: True)
    fit_on_rank(model, plugin, strategy(), batches_of(name), **arguments)
    return {
        "norms": [report.grad_norm for report in norms],
        "outcomes": [report.outcome for report in norms],
        "overflow_ranks": [report.overflow_ranks for report in norms],
        "scale": None if plugin.scaler is None else plugin.scaler.get_scale(),
        "weights": {key.removeprefix("_fsdp_wrapped_module."): w for key, w in whole_weights(model).items()},
    }


def by_hand(name: str, algorithm: str) -> dict[str, Any]:
    _, strategy, layout, _, more = LAYOUTS[name]
    model = ManualRegressor(one_for_one, layout=layout, algorithm=algorithm, **more)
    plugin = AmpPrecision("32-true", loss_scale=LossScale(init=SCALE))
    fit_on_rank(model, plugin, strategy(), batches_of(name))
    return {"weights": whole_weights(model)}


def one_for_one(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=1.0)


def split(name: str) -> dict[str, Any]:
    """An overflow on one rank after gradients were exchanged; of four ranks the last may hold nothing at all."""
    fault = GradientFault({1} if dist.get_rank() == dist.get_world_size() - 2 else set())
    return trained(name, amp_fp16(), adamw, callbacks=[fault])


def stock(name: str, **arguments: Any) -> dict[str, Any]:
    fault = GradientFault({1} if dist.get_rank() == dist.get_world_size() - 2 else set())
    plugin = stock_fsdp1(SCALE) if name.startswith("fsdp1") else stock_fp16()
    return trained(name, plugin, adamw, callbacks=[fault], **arguments)


class Stage(RankedRegressor):
    """Each rank holds a layer of its own, as in pipeline parallelism."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.sharded = sharded
        del self.net

    def configure_model(self) -> None:
        stage = nn.Linear(4, 1)
        nn.init.constant_(stage.weight, 1.0 + dist.get_rank())
        self.add_module(f"stage{dist.get_rank()}", stage)
        if self.sharded:
            fully_shard(stage, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))["shards"])

    def loss(self, batch: Any) -> Tensor:
        return next(self.children())(batch[0]).float().sum()


def stages(sharded: bool, named: bool) -> dict[str, Any]:
    plugin = AmpPrecision("32-true", process_group=dist.group.WORLD if named else None)
    reports = reports_of(plugin)
    model = Stage(sharded)
    batches = [(torch.full((1, 4), 1.0 + dist.get_rank()), torch.zeros(1, 1))]
    fit_on_rank(model, plugin, model_parallel(2), batches, gradient_clip_val=1.0)
    return {"norms": [report.grad_norm for report in reports]}


def everything(world_size: int) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for name, (ranks, *_) in LAYOUTS.items():
        if ranks != world_size:
            continue
        jobs[f"norm: {name}"] = partial(trained, name, AmpPrecision("32-true"), gradient_clip_val=LIMIT)
        jobs[f"1e25: {name}"] = partial(trained, name, AmpPrecision("32-true"), factor=1e25, gradient_clip_val=LIMIT)
        jobs[f"value: {name}"] = partial(
            trained, name, amp_fp16(), gradient_clip_val=LIMIT, gradient_clip_algorithm="value"
        )
        jobs[f"split: {name}"] = partial(split, name)
    if world_size == 2:
        jobs["stock: tensor parallel"] = partial(stock, "tensor parallel")
        jobs["stock clip: tensor parallel"] = partial(trained, "tensor parallel", stock_bf16(), gradient_clip_val=LIMIT)
        jobs["stock clip: fsdp1"] = partial(stock, "fsdp1", gradient_clip_val=LIMIT)
        for name in BY_HAND:
            for algorithm in ("norm", "value"):
                jobs[f"by hand, {algorithm}: {name}"] = partial(by_hand, name, algorithm)
        jobs["stages"] = partial(stages, True, False)
        jobs["stages, plain"] = partial(stages, False, False)
        jobs["stages, named"] = partial(stages, True, True)
    else:
        jobs["stock: replicas of shards"] = partial(stock, "replicas of shards")
        jobs["stock clip: several meshes"] = partial(trained, "several meshes", stock_bf16(), gradient_clip_val=LIMIT)
    return outcomes_of(jobs)


@pytest.fixture(scope="module")
def results() -> Any:
    known: dict[int, list[dict[str, Any]]] = {}

    def of(job: str, name: str) -> list[Any]:
        world = LAYOUTS[name][0] if name in LAYOUTS else 2
        if world not in known:
            known[world] = outcomes_or_failure(everything, world, world)
        return [rank[f"{job}: {name}" if job else name] for rank in known[world]]

    return of


def fine(ranks: list[Any]) -> list[Any]:
    assert [rank.get("error") for rank in ranks] == [None] * len(ranks)
    return ranks


def reference(algorithm: str, factor: float = 1.0) -> tuple[list[float], dict[str, Tensor]]:
    """Norms in FP64 and the final weights of one process on the whole batches, clipped by torch."""
    model = Regressor(one_for_one, factor=factor)
    norms: list[float] = []
    optimizer = one_for_one(model.parameters())
    for batch in regression_batches(2):
        optimizer.zero_grad()
        model.loss(batch).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        norms.append(norm)
        for gradient in gradients:
            if algorithm == "norm":
                gradient.mul_(min(1.0, LIMIT / (norm + 1e-6)))
            else:
                gradient.clamp_(-LIMIT, LIMIT)
        optimizer.step()
    return norms, weights(model)


@pytest.mark.parametrize("factor", [1.0, 1e25])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norm_is_that_of_one_process(results: Any, name: str, factor: float) -> None:
    norms, _ = reference("norm", factor)
    assert norms[0] > LIMIT
    for rank in fine(results("norm" if factor == 1.0 else "1e25", name)):
        assert rank["norms"] == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_clipping_moves_the_weights_as_in_one_process(results: Any, name: str, algorithm: str) -> None:
    _, wanted = reference(algorithm)
    bound = 1e-5 if algorithm == "norm" else 1e-2  # clipping by value runs in FP16
    for rank in fine(results(algorithm, name)):
        assert_moved_alike(rank["weights"], wanted, bound)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("name", BY_HAND)
def test_clipping_by_hand_before_the_step_moves_them_so_too(results: Any, name: str, algorithm: str) -> None:
    _, wanted = reference(algorithm)
    for rank in fine(results(f"by hand, {algorithm}", name)):
        assert_moved_alike(rank["weights"], wanted, 1e-5)


def assert_moved_alike(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    start = weights(Regressor())
    for key, value in wanted.items():
        moved = (value - start[key]).norm()
        assert (found[key] - value).norm() <= bound * moved + 1e-6


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_one_rank_that_overflow_skip_the_step_on_all(results: Any, name: str) -> None:
    ranks = fine(results("split", name))
    for rank in ranks:
        assert rank["outcomes"] == ["applied", "skipped_overflow"]
        assert rank["scale"] == SCALE / 2
        assert rank["overflow_ranks"] == [(), (len(ranks) - 2,)]
        assert all(torch.equal(rank["weights"][key], value) for key, value in ranks[0]["weights"].items())
        assert all(torch.isfinite(value).all() for value in rank["weights"].values())


# ---------------------------------------------------------------- ranks that hold different parameters


@pytest.mark.parametrize("name", ["stages", "stages, plain"])
def test_ranks_with_different_parameters_need_their_group_named(results: Any, name: str) -> None:
    for rank in results("", name):
        error = rank.get("error", "no error")
        assert "ValueError" in error
        assert "'stage0.bias'" in error
        assert "process_group" in error


def test_with_the_group_named_the_norm_goes_over_all_stages(results: Any) -> None:
    for rank in fine(results("", "stages, named")):
        # weights get the inputs as gradients, biases get ones: 4 * 1 + 1 on rank 0, 4 * 4 + 1 on rank 1
        assert rank["norms"] == pytest.approx([math.sqrt(5 + 17)], rel=1e-6)


# ---------------------------------------------------------------- what stock Lightning does


def test_stock_stops_at_sharded_and_plain_parameters_in_one_optimizer(results: Any) -> None:
    for rank in results("stock", "tensor parallel"):
        assert "error" in rank


def test_stock_stops_at_clipping_sharded_and_plain_gradients(results: Any) -> None:
    for rank in results("stock clip", "tensor parallel"):
        assert "error" in rank


def test_stock_stops_at_clipping_over_several_meshes(results: Any) -> None:
    for rank in results("stock clip", "several meshes"):
        assert "error" in rank


def test_stock_refuses_to_clip_by_norm_under_fsdp1(results: Any) -> None:
    for rank in results("stock clip", "fsdp1"):
        assert "not supported for `FSDPPrecision`" in rank["error"]


def test_stock_takes_different_verdicts_on_the_replicas_of_a_shard(results: Any) -> None:
    ranks = fine(results("stock", "replicas of shards"))
    assert {rank["scale"] for rank in ranks} == {SCALE, SCALE / 2}
