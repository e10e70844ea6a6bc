"""TE#1556: an FP8 policy that converts nothing is an error, not a run in another precision."""

import pytest
from torch import nn

from lightning_amp_plus import AmpPrecision
from tests.support.models import TinyRegressor
from tests.support.training import make_trainer, regression_batches, same, weights


def test_a_run_that_would_be_without_fp8_does_not_begin() -> None:
    model = TinyRegressor()
    before = weights(model)
    with pytest.raises(ValueError, match=r"asks for FP8, but no module would compute in it.*in_features=4"):
        make_trainer(AmpPrecision("fp8-mixed")).fit(model, regression_batches())
    assert same(weights(model), before) and type(model.first) is nn.Linear
