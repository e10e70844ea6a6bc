"""Lightning#21755, #20803: a LayerNorm without affine parameters and a Linear without bias go through an FP8 policy."""

import torch
from torch import nn

from lightning_amp_plus import PrecisionPolicy, plan


def test_the_norm_is_left_as_it_is_and_the_layer_converts() -> None:
    model = nn.Sequential(nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 32, bias=False))
    routes = plan(model, PrecisionPolicy("fp8"))
    routes.apply(model)
    assert (routes["0"].compute, routes["1"].compute) == ("bf16", "fp8")
    assert "only Linear layers" in routes["0"].reason and type(model[0]) is nn.LayerNorm
    model(torch.randn(4, 32)).sum().backward()
    assert model[1].bias is None and model[1].weight.grad is not None
