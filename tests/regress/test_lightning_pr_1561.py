"""Lightning PR#1561: LBFGS evaluates the loss many times in one step."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF
from tests.support.models import TinyRegressor
from tests.support.training import (
    amp_fp16,
    fit,
    outcomes,
    regression_batches,
    reports_of,
    same,
    stock_bf16,
    stock_fp16,
    weights,
)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)


class DerivedLbfgs(torch.optim.LBFGS):
    pass


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(
    "plugin",
    [amp_fp16, lambda: AmpPrecision("16-mixed", loss_scale=64.0), lambda: AmpPrecision("bf16-mixed", loss_scale=64.0)],
    ids=["dynamic", "static", "a scale in BF16"],
)
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, DerivedLbfgs])
def test_a_loss_scale_refuses_lbfgs_before_the_first_step_and_says_what_to_use(
    kind: Any, plugin: Any, manual: bool
) -> None:
    model = TinyRegressor(lambda parameters: kind(parameters), manual=manual)
    with pytest.raises(MisconfigurationException, match=rf"{kind.__name__}.*bf16-mixed.*32-true"):
        fit(model, plugin(), regression_batches(2))
    assert model.seen == 0


@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize(
    "trainer", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}], ids=["plain", "accumulation", "clip"]
)
def test_bf16_lbfgs_trains_as_stock_does(check_finite: bool, trainer: dict[str, Any]) -> None:
    ours, stock = TinyRegressor(lbfgs), TinyRegressor(lbfgs)
    plugin = AmpPrecision("bf16-mixed", check_finite=check_finite)
    reports = reports_of(plugin)
    batches = [regression_batches(1, size=16)[0]] * 6
    fit(ours, plugin, batches, **trainer)
    fit(stock, stock_bf16(), batches, **trainer)
    assert ours.losses == stock.losses
    assert same(weights(ours), weights(stock))
    assert len(ours.losses) > 6
    assert ours.losses[-1] < ours.losses[0]
    assert set(outcomes(reports)) == {"applied"}


def test_bf16_lbfgs_skips_a_window_whose_first_evaluation_overflows() -> None:
    plugin = AmpPrecision("bf16-mixed")
    reports = reports_of(plugin)
    model = TinyRegressor(lbfgs, faults={0: INF})
    fit(model, plugin, regression_batches(1))
    assert outcomes(reports) == ["skipped_overflow"]
    assert same(weights(model), weights(TinyRegressor()))


def test_stock_refuses_fp16_only_after_the_run_has_begun() -> None:
    model = TinyRegressor(lbfgs)
    with pytest.raises(MisconfigurationException, match="LBFGS optimizer are not compatible"):
        fit(model, stock_fp16(), regression_batches(2))
