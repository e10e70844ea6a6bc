"""Which tensors a conversion of storage retypes, and which it leaves alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_amp_plus.policy import PrecisionPolicy, Rule
from lightning_amp_plus.routing import apply, plan
from lightning_amp_plus.storage import convert_storage

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.exact = nn.BatchNorm1d(2)
        self.metric = torchmetrics.MeanSquaredError()
        self.wide = nn.Parameter(torch.ones(2, dtype=FP64))
        self.spectrum = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("inv_freq", torch.ones(2))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("absent", None)


def converted(compute: Any, *rules: Rule, **options: Any) -> Stored:
    model = Stored()
    convert_storage(model, plan(model, PrecisionPolicy(compute, rules=rules, **options)))
    return model


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize(("params", "dtype"), [("bf16", BF16), ("fp16", FP16)])
def test_parameters_and_buffers_take_the_stored_format(params: Any, dtype: torch.dtype) -> None:
    found = dtypes(converted(params, params=params))
    for name in ("layer.weight", "layer.bias", "norm.weight", "norm.running_mean", "scale", "inv_freq"):
        assert found[name] is dtype


def test_what_is_not_16_or_32_bit_floating_is_left_alone() -> None:
    found = dtypes(converted("bf16", params="bf16"))
    assert found["wide"] is FP64
    assert found["spectrum"] is torch.complex64
    assert found["mask"] is torch.bool
    assert found["norm.num_batches_tracked"] is torch.int64


def test_metric_states_keep_their_format_with_16_bit_buffers_too() -> None:
    model = converted("bf16", params="bf16", buffers="bf16")
    assert model.metric.sum_squared_error.dtype is FP32


def test_buffers_of_fp32_modules_and_named_buffers_keep_their_format() -> None:
    found = dtypes(converted("bf16", Rule("exact", compute="fp32"), Rule("inv_freq"), params="bf16"))
    assert found["exact.running_mean"] is found["inv_freq"] is FP32
    assert found["norm.running_mean"] is found["scale"] is BF16
    assert found["exact.weight"] is BF16


def test_buffers_can_have_a_format_of_their_own() -> None:
    wide = dtypes(converted("bf16", params="bf16", buffers="fp32"))
    assert (wide["layer.weight"], wide["norm.running_mean"], wide["scale"]) == (BF16, FP32, FP32)
    narrow = dtypes(converted("bf16", buffers="fp16"))
    assert (narrow["layer.weight"], narrow["norm.running_mean"]) == (FP32, FP16)


def test_a_buffer_shared_with_an_fp32_module_keeps_its_format() -> None:
    model = Stored()
    model.norm.running_mean = model.exact.running_mean
    convert_storage(model, plan(model, PrecisionPolicy("bf16", params="bf16", rules=[Rule("exact", compute="fp32")])))
    assert model.norm.running_mean is model.exact.running_mean
    assert model.norm.running_mean.dtype is FP32


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_with_fp32_storage_nothing_is_touched_and_nothing_widened(compute: Any) -> None:
    model = Stored()
    model.layer.to(BF16)
    before = {name: (value, value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()}
    convert_storage(model, plan(model, PrecisionPolicy(compute)))
    assert {name: (value, value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()} == before
    assert model.layer.weight.dtype is BF16


def test_parameters_stay_the_same_objects_tied_frozen_and_named() -> None:
    model = Stored()
    model.exact.weight = model.norm.weight
    model.layer.bias.requires_grad_(False)
    model.layer.weight.grad = torch.ones(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(model.named_parameters(remove_duplicate=False))
    keys = list(model.state_dict())
    apply(plan(model, PrecisionPolicy("bf16", params="bf16")), model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert model.exact.weight is model.norm.weight
    assert not model.layer.bias.requires_grad
    assert model.layer.weight.grad.dtype is BF16
    assert any(parameter is model.layer.weight for parameter in optimizer.param_groups[0]["params"])
    assert list(model.state_dict()) == keys


def test_converting_twice_changes_nothing_more() -> None:
    model = converted("bf16", params="bf16")
    storage = {name: value.data_ptr() for name, value in model.state_dict().items()}
    apply(plan(model, PrecisionPolicy("bf16", params="bf16")), model)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == storage


def test_storage_can_be_planned_and_converted_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    apply(plan(model, PrecisionPolicy("fp16", params="fp16")), model)
    assert model.weight.dtype is FP16
    assert model.weight.is_meta


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_sharded_parameters_are_converted_down_to_their_local_tensors(alone: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=alone)
    fully_shard(model, mesh=alone)
    weight = model[0].weight
    apply(plan(model, PrecisionPolicy("bf16", params="bf16", rules=[Rule("0", compute="fp32")])), model)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.ones(1, 4, dtype=BF16)).sum().backward()
    assert seen == [FP32]
    assert model[0].weight is weight
    assert weight.dtype is weight.to_local().dtype is weight.grad.dtype is BF16


def test_the_plan_shows_what_storage_becomes() -> None:
    model = Stored()
    made = plan(model, PrecisionPolicy("bf16", params="bf16", rules=[Rule("exact", compute="fp32")]))
    apply(made, model)
    for name in ("layer", "norm", "exact"):
        module = model.get_submodule(name)
        assert {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters(recurse=False)} == {
            "bfloat16"
        }
        assert made[name].params == "bf16"
    assert made[""].params == "complex64+fp64"
