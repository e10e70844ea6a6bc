"""What is read off a strategy, and which strategies are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_amp_plus import AmpPrecision, Trainer
from lightning_amp_plus.integration.strategies import (
    consensus_of,
    device_type,
    refuse_second_precision,
    refuse_strategy,
)
from lightning_amp_plus.scaling.consensus import Consensus, GroupConsensus
from tests.support.models import TinyRegressor
from tests.support.training import amp_fp16, fit, regression_batches

# ---------------------------------------------------------------- refusals


def bare(kind: type) -> Any:
    """An instance without its constructor, which needs packages that are not installed."""
    return object.__new__(kind)


@pytest.mark.parametrize("strategy", ["deepspeed", "deepspeed_stage_2", "DeepSpeed_stage_3_offload"])
def test_deepspeed_by_name_is_refused_and_what_to_use_instead_is_said(strategy: str) -> None:
    with pytest.raises(ValueError, match=rf"does not work with '{strategy}'.*DeepSpeed's engine.*ddp.*16-mixed"):
        refuse_strategy(strategy)


def test_a_deepspeed_strategy_object_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not work with .*DeepSpeedStrategy.*never calls the plugin"):
        refuse_strategy(bare(DeepSpeedStrategy))


@pytest.mark.parametrize("strategy", ["xla", "single_xla", "xla_debug", "XLA_FSDP"])
def test_xla_by_name_is_refused_and_what_to_use_instead_is_said(strategy: str) -> None:
    with pytest.raises(ValueError, match=rf"does not work with '{strategy}'.*XLAPrecision only.*bf16-true"):
        refuse_strategy(strategy)


@pytest.mark.parametrize("kind", [XLAStrategy, SingleDeviceXLAStrategy])
def test_an_xla_strategy_object_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match=f"does not work with .*{kind.__name__}.*XLAPrecision"):
        refuse_strategy(bare(kind))


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_spawn", "fsdp", "fsdp_cpu_offload"])
def test_other_strategies_are_taken_by_name_and_as_objects(strategy: str) -> None:
    refuse_strategy(strategy)
    for taken in (SingleDeviceStrategy(), DDPStrategy(), bare(FSDPStrategy)):
        refuse_strategy(taken)


def test_our_trainer_refuses_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="does not work with 'deepspeed_stage_2'"):
        Trainer(precision="16-mixed", strategy="deepspeed_stage_2", accelerator="cpu", logger=False)


def test_a_precision_given_twice_is_refused_naming_both() -> None:
    ours, theirs = AmpPrecision("bf16-mixed"), MixedPrecision("bf16-mixed", "cpu")
    with pytest.raises(ValueError, match=r"precision=AmpPrecision.*and plugins=.*MixedPrecision.*Keep one of the two"):
        refuse_second_precision(ours, [object(), theirs])
    refuse_second_precision(ours, [object()])
    refuse_second_precision(ours, [])


# ---------------------------------------------------------------- the device


def test_the_device_is_that_of_the_strategy_and_not_the_name_of_an_accelerator() -> None:
    assert device_type(SingleDeviceStrategy(torch.device("cpu"))) == "cpu"
    assert device_type(SingleDeviceStrategy(torch.device("cuda", 1))) == "cuda"


@pytest.mark.parametrize("accelerator", ["cpu", CPUAccelerator()], ids=["name", "instance"])
def test_an_accelerator_given_as_an_instance_trains_in_fp16_on_its_device(accelerator: Any) -> None:
    seen: list[torch.dtype] = []
    model = TinyRegressor()
    model.first.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    plugin = amp_fp16()
    fit(model, plugin, regression_batches(2), accelerator=accelerator)
    assert plugin.device == "cpu"
    assert seen == [torch.float16] * 2


# ---------------------------------------------------------------- who agrees


@pytest.fixture
def world_of_four() -> Iterator[None]:
    """A process group of four ranks of which only this one is there: enough to be counted."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


def test_without_process_groups_a_process_decides_alone() -> None:
    for strategy in (SingleDeviceStrategy(), DDPStrategy()):
        assert type(consensus_of(strategy, None)) is Consensus


def test_a_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"process_group=.*not initialized"):
        consensus_of(DDPStrategy(), object())


@pytest.mark.usefixtures("world_of_four")
def test_under_a_parallel_strategy_all_ranks_agree() -> None:
    consensus = consensus_of(DDPStrategy(), None)
    assert isinstance(consensus, GroupConsensus)
    assert (consensus.world_size, consensus.group) == (4, None)


@pytest.mark.usefixtures("world_of_four")
def test_a_single_device_strategy_decides_alone_although_a_process_group_exists() -> None:
    assert type(consensus_of(SingleDeviceStrategy(), None)) is Consensus


@pytest.mark.usefixtures("world_of_four")
def test_a_group_that_is_named_agrees_whatever_the_strategy() -> None:
    group = dist.new_group([0, 2])
    consensus = consensus_of(SingleDeviceStrategy(), group)
    assert isinstance(consensus, GroupConsensus)
    assert consensus.group is group
    assert consensus.world_size == 2


@pytest.mark.usefixtures("world_of_four")
@pytest.mark.parametrize(("shape", "size"), [((4,), 4), ((2, 2), 4)])
def test_a_device_mesh_stands_for_all_its_ranks(shape: tuple[int, ...], size: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    consensus = consensus_of(DDPStrategy(), mesh)
    assert isinstance(consensus, GroupConsensus)
    assert consensus.world_size == size


@pytest.mark.usefixtures("world_of_four")
def test_a_group_of_one_needs_no_collective() -> None:
    assert type(consensus_of(DDPStrategy(), dist.new_group([0]))) is Consensus


@pytest.mark.usefixtures("world_of_one")
def test_a_world_of_one_needs_no_collective() -> None:
    assert type(consensus_of(DDPStrategy(), None)) is Consensus
