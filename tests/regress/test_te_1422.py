"""TE#1422, ao#571: 15 tokens through Linear(32, 64) compute in FP8 exactly as the same tokens padded to 16 do."""

import pytest
import torch
from torch import nn

from lightning_amp_plus import PrecisionPolicy, Rule, plan


@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "mx"])
def test_fifteen_tokens_are_what_they_are_among_sixteen(recipe: str) -> None:
    layer = nn.Linear(32, 64)
    plan(nn.Sequential(layer), PrecisionPolicy("bf16", rules=[Rule("0", compute="fp8", recipe=recipe)])).apply(
        model := nn.Sequential(layer)
    )
    tokens = torch.randn(15, 32, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([tokens, torch.zeros(1, 32)])
    found, wanted = model(tokens), model(padded)[:15]
    assert torch.equal(found, wanted)
    gradients = []
    for output in (found, wanted):
        layer.weight.grad = None
        output.float().square().sum().backward()
        gradients.append(layer.weight.grad.clone())  # type: ignore[union-attr]
    assert torch.equal(*gradients)
    assert "fp8" in repr(layer)
