"""pytorch#74739, bitsandbytes#945: a module cast with ``.half()`` under ``16-mixed``."""

from typing import Any

import pytest
import torch

from lightning_amp_plus import AmpPrecision, PrecisionPolicy
from tests.support.models import TinyRegressor, adamw, fused_adamw
from tests.support.training import amp_fp16, fit, outcomes, regression_batches, reports_of, stock_fp16


class HalfSecond(TinyRegressor):
    def __init__(self, make_optimizer: Any = adamw) -> None:
        super().__init__(make_optimizer)
        self.second.half()
        self.prepared = False

    def on_train_start(self) -> None:
        self.prepared = True


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_trainable_half_module_is_refused_at_setup_by_name_with_the_remedy(
    precision: str, manual: bool, make_optimizer: Any
) -> None:
    model = HalfSecond(make_optimizer)
    model.automatic_optimization = not manual
    with pytest.raises(ValueError, match=r"'second'.*FP16.*\.half\(\)"):
        fit(model, AmpPrecision(precision), regression_batches(2))
    assert model.seen == 0 and not model.prepared


def test_a_whole_model_cast_to_half_is_refused_too() -> None:
    with pytest.raises(ValueError, match=r"'first'.*FP16"):
        fit(TinyRegressor().half(), amp_fp16(), regression_batches(2))


def test_a_half_parameter_of_the_lightning_module_itself_is_named() -> None:
    class Scaled(TinyRegressor):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))

    with pytest.raises(ValueError, match=r"'Scaled'.*'gain'"):
        fit(Scaled(), amp_fp16(), regression_batches(2))


def test_a_frozen_half_module_trains_as_the_remedy_says() -> None:
    model = HalfSecond()
    model.second.requires_grad_(False)
    plugin = amp_fp16()
    reports = reports_of(plugin)
    fit(model, plugin, regression_batches(2))
    assert outcomes(reports) == ["applied"] * 2
    assert model.second.weight.dtype == torch.float16


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_the_policy_named_in_the_remedy_trains(make_optimizer: Any) -> None:
    plugin = AmpPrecision(PrecisionPolicy(compute="fp16", params="fp16", master_weights=True), loss_scale=1024.0)
    reports = reports_of(plugin)
    model = TinyRegressor(make_optimizer)
    before = model.first.weight.detach().clone()
    fit(model, plugin, regression_batches(2))
    assert outcomes(reports) == ["applied"] * 2
    assert model.first.weight.dtype == torch.float16
    assert not torch.equal(model.first.weight.float(), before.half().float())


def test_stock_finds_out_in_the_first_step_and_names_no_module() -> None:
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as error:
        fit(HalfSecond(), stock_fp16(), regression_batches(2))
    assert "second" not in str(error.value)


def test_stock_with_a_fused_optimizer_says_nothing() -> None:
    model = HalfSecond(fused_adamw)
    fit(model, stock_fp16(), regression_batches(2))
    assert model.seen == 2
