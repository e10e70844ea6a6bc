"""Lightning#15501, #21435: fused optimizers with clipping; stock Lightning refuses both, in BF16 too."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision
from tests.support.models import TinyRegressor, adamw, fused_adamw, fused_sgd_momentum, sgd_momentum
from tests.support.training import amp_fp16, fit, regression_batches, stock_bf16, stock_fp16, weights

PAIRS = [(adamw, fused_adamw), (sgd_momentum, fused_sgd_momentum)]


def trained(make_optimizer: Any, plugin: Any, algorithm: str, clip: float, manual: bool) -> dict[str, Tensor]:
    if manual:
        model = TinyRegressor(make_optimizer, manual=True, clip=(clip, algorithm))
        fit(model, plugin, regression_batches(5))
    else:
        model = TinyRegressor(make_optimizer)
        fit(model, plugin, regression_batches(5), gradient_clip_val=clip, gradient_clip_algorithm=algorithm)
    return weights(model)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize(("plain", "fused"), PAIRS)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_fused_and_plain_optimizers_end_with_equal_parameters_after_five_clipped_steps(
    precision: str, plain: Any, fused: Any, algorithm: str, manual: bool
) -> None:
    results = []
    for make_optimizer in (plain, fused):
        plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
        results.append(trained(make_optimizer, plugin, algorithm, 0.1, manual))
        assert plugin.applied_steps == 5
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make_optimizer", [sgd_momentum, fused_sgd_momentum])
def test_the_threshold_is_felt(make_optimizer: Any) -> None:
    clipped = trained(make_optimizer, amp_fp16(), "norm", 0.01, False)
    free = trained(make_optimizer, amp_fp16(), "norm", 1e6, False)
    start = weights(TinyRegressor())

    def distance(end: dict[str, Tensor]) -> float:
        return sum(float((end[name] - start[name]).norm()) for name in end)

    assert distance(clipped) < 0.2 * distance(free)


@pytest.mark.parametrize("plugin", [stock_fp16, stock_bf16])
def test_stock_refuses(plugin: Any) -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trained(fused_adamw, plugin(), "norm", 0.1, False)
