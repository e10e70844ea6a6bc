"""Accelerate convert_model: of Linear(16, 10), (16, 32), (32, 64) the last two convert, the first says why not."""

from torch import nn

from lightning_amp_plus import PrecisionPolicy, plan


def test_the_last_two_convert_and_the_first_is_listed_with_its_reason() -> None:
    routes = plan(nn.ModuleList([nn.Linear(16, 10), nn.Linear(16, 32), nn.Linear(32, 64)]), PrecisionPolicy("fp8"))
    assert [routes[name].compute for name in "012"] == ["bf16", "fp8", "fp8"]
    assert routes["0"].reason == "shape: out_features=10 is no multiple of 16"
    assert "out_features=10" in str(routes)
