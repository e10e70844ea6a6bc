"""TE#982: a BF16 checkpoint enters an FP8 run only as a conversion that was asked for, with steps before FP8 begins."""

from pathlib import Path

import pytest

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, PrecisionPolicy
from tests.fp8.test_training import Regressor, batches, fit
from tests.support.training import ResumableLoader, make_trainer


def test_it_is_refused_unless_allowed_and_then_waits_for_the_steps_named(tmp_path: Path) -> None:
    trainer, _ = fit(AmpPrecision("bf16-mixed"), count=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(IncompatiblePrecisionError, match=r"(?s)precision +bf16-mixed +fp8-mixed +refuse"):
        make_trainer(AmpPrecision("fp8-mixed")).fit(
            Regressor(), ResumableLoader(batches()), ckpt_path=tmp_path / "a.ckpt"
        )
    model = Regressor()
    plugin = AmpPrecision(PrecisionPolicy("fp8", fp8_after_steps=5), allow=["precision"])
    with pytest.warns(UserWarning, match="Allowed by"):
        make_trainer(plugin, max_epochs=-1, max_steps=8).fit(
            model, ResumableLoader(batches()), ckpt_path=tmp_path / "a.ckpt"
        )
    # Three steps of the BF16 run count: two more in high precision, then FP8.
    assert model.on == [False, False, True, True, True]
