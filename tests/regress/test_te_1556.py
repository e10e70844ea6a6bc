"""TE#1556: an FP8 policy that converts nothing is an error, not a run in another precision."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule, plan
from lightning_amp_plus.callbacks.fp8_coverage import Fp8CoverageMonitor
from tests.support.models import TinyRegressor
from tests.support.training import fit, make_trainer, regression_batches, same, weights


def test_a_run_that_would_be_without_fp8_does_not_begin() -> None:
    model = TinyRegressor()
    before = weights(model)
    with pytest.raises(ValueError, match=r"asks for FP8, but no module would compute in it.*in_features=4"):
        make_trainer(AmpPrecision("fp8-mixed")).fit(model, regression_batches())
    assert same(weights(model), before) and type(model.first) is nn.Linear


def test_the_plan_alone_refuses_it_too() -> None:
    with pytest.raises(ValueError, match=r"asks for FP8, but no module would compute in it"):
        plan(TinyRegressor(), PrecisionPolicy.from_string("fp8-mixed"))


class Uncalled(TinyRegressor):
    """Has a layer that FP8 suits and that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 32)


class Called(Uncalled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0 * self.spare(x.repeat(1, 4)).sum()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]).float(), batch[1])


@pytest.mark.parametrize("model", [Uncalled, Called])
def test_a_plan_with_fp8_layers_that_forward_never_calls_is_warned_about(model: type[TinyRegressor]) -> None:
    monitor = Fp8CoverageMonitor(1)
    policy = PrecisionPolicy("bf16", rules=[Rule("spare", compute="fp8")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(model(), AmpPrecision(policy), regression_batches(3), callbacks=[monitor])
    said = [str(w.message) for w in caught if "FP8 coverage is 0" in str(w.message)]
    coverage = trainer.callback_metrics["fp8/coverage_gemms"]
    if model is Uncalled:
        assert (
            len(said) == 1 and "the plan has 1 layer in FP8" in said[0] and "layers that forward never calls" in said[0]
        )
        assert coverage == 0.0
    else:
        # Of 7 GEMMs: two layers' three and two, and the spare one's output and weight's gradient.
        assert not said and torch.isclose(coverage, torch.tensor(2 / 7))
