"""fairseq#4555: the norm of large gradients, taken in a format or a scale in which it overflows."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision

from lightning_amp_plus import AmpPrecision, PrecisionPolicy
from tests.support.models import ExactLinear
from tests.support.training import fit, outcomes, reports_of, stock_bf16

WIDTH = 256


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_scaled_fp16_gradients_whose_norm_passes_the_range_of_fp16_have_a_finite_true_norm(
    precision: str, clip: float | None, make_optimizer: Any
) -> None:
    """48 * 1024 = 49152 fits FP16; the norm over 256 of them, 786432, does not."""
    plugin = AmpPrecision(precision, loss_scale=1024.0)
    reports = reports_of(plugin)
    norms: list[float | None] = []

    class Model(ExactLinear):
        def on_train_batch_end(self, *_: Any) -> None:
            norms.append(reports[-1].grad_norm)

    model = Model(WIDTH, make_optimizer)
    fit(model, plugin, [torch.full((WIDTH,), 48.0)], gradient_clip_val=clip)
    assert outcomes(reports) == ["applied"]
    assert norms == [pytest.approx(48.0 * math.sqrt(WIDTH), rel=1e-3)]
    expected = 48.0 if clip is None else 1.0 / math.sqrt(WIDTH)
    if precision == "16-true" and make_optimizer is fused and torch.__version__ < "2.14":
        expected = 0.0  # torch's own fault, see below
    assert model.moved().float().mean().item() == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("params", ["fp16", "bf16"])
def test_with_master_weights_the_norm_is_as_finite(params: Any) -> None:
    plugin = AmpPrecision(PrecisionPolicy(params, params=params, master_weights=True), loss_scale=1024.0)
    reports = reports_of(plugin)
    model = ExactLinear(WIDTH)
    fit(model, plugin, [torch.full((WIDTH,), 48.0)], gradient_clip_val=1.0)
    assert outcomes(reports) == ["applied"]
    assert reports[0].grad_norm == pytest.approx(48.0 * math.sqrt(WIDTH), rel=1e-3)


class Huge(ExactLinear):
    """FP32 gradients of 1e25: finite, but their squares are not."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layer.weight[0] * batch).sum()


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_finite_gradients_with_infinite_squares_are_clipped_not_dropped(precision: str, make_optimizer: Any) -> None:
    plugin = AmpPrecision(precision, loss_scale=1024.0 if precision == "16-mixed" else "auto")
    reports = reports_of(plugin)
    model = Huge(4, make_optimizer)
    fit(model, plugin, [torch.full((4,), 1e25)], gradient_clip_val=1.0)
    assert outcomes(reports) == ["applied"]
    assert reports[0].grad_norm == pytest.approx(2e25)
    assert model.moved().tolist() == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("scale", [None, 4.0])
def test_fp16_gradients_with_a_true_norm_beyond_fp16_are_clipped_not_dropped(scale: float | None) -> None:
    plugin = AmpPrecision("16-true", loss_scale=scale)
    reports = reports_of(plugin)
    model = ExactLinear(WIDTH)
    fit(model, plugin, [torch.full((WIDTH,), 8192.0)], gradient_clip_val=16.0)
    assert outcomes(reports) == ["applied"]
    assert reports[0].grad_norm == pytest.approx(8192.0 * math.sqrt(WIDTH), rel=1e-3)
    assert model.moved().float().mean().item() == pytest.approx(1.0, rel=2e-3)


def test_stock_takes_the_norm_in_fp16_and_clips_to_nothing() -> None:
    model = ExactLinear(WIDTH)
    fit(model, HalfPrecision("16-true"), [torch.full((WIDTH,), 8192.0)], gradient_clip_val=16.0)
    assert model.moved().abs().max() == 0


def test_stock_clips_such_gradients_to_nothing() -> None:
    model = Huge(4)
    fit(model, stock_bf16(), [torch.full((4,), 1e25)], gradient_clip_val=1.0)
    assert model.moved().tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_fused_sgd_before_2_14_moves_no_16_bit_parameter_on_a_cpu(dtype: torch.dtype) -> None:
    """Of 16 elements or more, without any plugin; mended in torch 2.14."""
    parameter = torch.nn.Parameter(torch.zeros(16, dtype=dtype))
    parameter.grad = torch.ones(16, dtype=dtype)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    assert parameter.tolist() == ([0.0] if torch.__version__ < "2.14" else [-1.0]) * 16
