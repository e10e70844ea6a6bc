"""metaseq#3: a checkpoint written between two growths of the scale."""

from pathlib import Path
from typing import Any

import pytest

from lightning_amp_plus import AmpPrecision, LossScale
from tests.support.faults import INF
from tests.support.models import TinyRegressor, adamw, fused_adamw
from tests.support.training import PLAIN_TYPES_ONLY, fit, loader, make_trainer, regression_batches

STEPS = 20
FAULTS = {6: INF, 14: INF, 15: INF}


def plugin() -> AmpPrecision:
    return AmpPrecision("16-mixed", loss_scale=LossScale(init=64.0, growth_interval=4, hysteresis=2))


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("stop", [2, 7, 9, 15])
def test_the_scale_history_goes_on_to_the_step(tmp_path: Path, stop: int, make_optimizer: Any, manual: bool) -> None:
    whole = plugin()
    fit(TinyRegressor(make_optimizer, faults=FAULTS, manual=manual), whole, regression_batches(STEPS))
    assert whole.history.growths >= 2 and whole.history.backoffs >= 1

    first = TinyRegressor(make_optimizer, faults=FAULTS, manual=manual)
    trainer = fit(first, plugin(), regression_batches(STEPS), max_epochs=-1, max_steps=stop)
    trainer.save_checkpoint(tmp_path / "run.ckpt")

    second, resumed = TinyRegressor(make_optimizer, faults=FAULTS, manual=manual), plugin()
    second.seen = stop
    trainer = make_trainer(resumed, max_epochs=-1, max_steps=STEPS)
    trainer.fit(second, loader(regression_batches(STEPS)), ckpt_path=tmp_path / "run.ckpt", **PLAIN_TYPES_ONLY)

    assert resumed.history.scales == list(whole.history.scales)
    assert resumed.history.state_dict() == whole.history.state_dict()
    assert resumed.scaler is not None and whole.scaler is not None
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()
