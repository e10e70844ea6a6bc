"""Why a GEMM of a layer that is to compute in FP8 did not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_amp_plus.fp8 import CurrentScaling
from lightning_amp_plus.fp8.coverage.fallback import Fallbacks, Layer
from lightning_amp_plus.fp8.coverage.gemms import Product
from lightning_amp_plus.fp8.recipes import GEMMS
from lightning_amp_plus.fp8.selection import Fp8Route
from lightning_amp_plus.fp8.switch import switch_fp8
from lightning_amp_plus.routed import ModuleRoute, route_module


def why(flops: int | None = 8, role: str = "fprop", gemms: Any = GEMMS, training: bool = True, on: bool = True) -> str:
    module, route = nn.Linear(16, 16), Fp8Route(CurrentScaling(), gemms, "reference", False)
    route_module(module, ModuleRoute("bf16", True, "cpu", False, route))
    switch_fp8(module, on)
    module.train(training)
    return Fallbacks({"a": Layer(module, route, "op")}, {}).why(Product("gemm", None, None, None, flops), "a", role)


def test_what_keeps_a_layer_from_fp8_for_a_time_comes_before_what_it_multiplies() -> None:
    assert why(0, on=False, training=False) == "warmup"
    assert why(0, training=False) == "eval"


@pytest.mark.parametrize(("role", "reason"), [("fprop", "demoted"), ("wgrad", "rule"), ("backward", "rule")])
def test_gemms_that_a_rule_leaves_out(role: str, reason: str) -> None:
    assert why(role=role, gemms=("fprop", "dgrad")) == reason


def test_a_batch_without_elements_is_one_of_shape_and_unknown_work_is_not() -> None:
    assert (why(0), why(None)) == ("shape", "demoted")
