"""Why a module does not compute in FP8: the kind of each obstacle, and what it reads as in a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp_plus.fp8 import CurrentScaling, RowwiseScaling
from lightning_amp_plus.fp8.backends import BACKENDS
from lightning_amp_plus.fp8.backends.base import native_obstacle
from lightning_amp_plus.fp8.obstacle import Obstacle, ObstacleKind
from lightning_amp_plus.fp8.recipes import GEMMS
from lightning_amp_plus.fp8.selection import better_high, obstacle, too_small


class Lora(nn.Linear):
    def forward(self, input: Any) -> Any:
        return super().forward(input) + 1


@pytest.mark.parametrize("kind", ["shape", "hardware", "backend"])
def test_a_kind_that_the_text_does_not_say_stands_before_it(kind: ObstacleKind) -> None:
    assert str(Obstacle(kind, "not so")) == f"{kind}: not so"


@pytest.mark.parametrize("kind", ["op", "rule"])
def test_what_a_module_is_or_is_for_reads_without_its_kind(kind: ObstacleKind) -> None:
    assert str(Obstacle(kind, "a head: small differences")) == "a head: small differences"


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.ReLU(), "op / only Linear layers compute in FP8"),
        (Lora(32, 32), "op / Lora has a forward of its own"),
        (nn.Linear(32, 32, dtype=torch.float64), "op / its weight is stored in float64"),
        (
            type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch"})(),
            "op / it is Transformer Engine's own: whether it computes in FP8 is up to te.autocast around it",
        ),
        (nn.LazyLinear(32), "shape / it has no size yet; run a batch through the model first"),
        (nn.Linear(10, 32), "shape / in_features=10 is no multiple of 16"),
        (nn.Linear(10, 5), "shape / in_features=10 and out_features=5 are no multiple of 16"),
    ],
    ids=["no Linear", "own forward", "FP64", "TE", "lazy", "one size", "both sizes"],
)
def test_what_is_no_linear_is_an_op_and_what_does_not_fit_a_shape(module: nn.Module, expected: str) -> None:
    found = obstacle(module, CurrentScaling())
    assert found is not None and " / ".join(found) == expected


def test_a_layer_too_small_to_gain_is_a_shape() -> None:
    found = too_small(nn.Linear(64, 32), CurrentScaling())
    assert found is not None and found.kind == "shape"
    assert found.text == "64 to 32 is too small to be faster with current scaling than in BF16"


def test_a_head_a_router_and_a_tied_weight_stay_high_by_rule() -> None:
    layer = nn.Linear(32, 32)
    found = [
        better_high(["lm_head"], layer, set(), "", own=False),
        better_high(["blocks.0.router"], layer, set(), "", own=False),
        better_high(["out"], layer, {id(layer.weight)}, "", own=False),
    ]
    assert [why.kind for why in found if why is not None] == ["rule"] * 3
    assert better_high(["out"], layer, set(), "", own=False) is None


def test_backends_tell_what_they_lack_from_what_the_device_lacks() -> None:
    assert native_obstacle(CurrentScaling(), "cpu") == ("hardware", "it needs a GPU, and this runs on cpu")
    lacking = BACKENDS["transformer_engine"].obstacle(RowwiseScaling(), GEMMS, "cpu")
    assert lacking == Obstacle("backend", "Transformer Engine has no rowwise scaling")
    assert BACKENDS["reference"].obstacle(RowwiseScaling(), GEMMS, "cpu") is None
