"""Megatron-Bridge#1730: an FP8 run resumes with the amax histories it had, and with no other recipe unnoticed.

Another recipe or history length is refused, with both shown. Where another length is allowed, the newest part of a longer
history is kept and a shorter one fills up, so every scale still comes from amax values that were seen.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, PrecisionPolicy, Rule
from lightning_amp_plus.fp8 import CurrentScaling, DelayedScaling, Recipe
from lightning_amp_plus.fp8.delayed import histories_of
from tests.fp8.test_training import Regressor, batches, fit
from tests.support.training import ResumableLoader, make_trainer, same, weights

RECIPE = DelayedScaling(history=4)


def plugin(recipe: Recipe = RECIPE, **arguments: Any) -> AmpPrecision:
    return AmpPrecision(PrecisionPolicy("bf16", rules=[Rule("body.*", compute="fp8", recipe=recipe)]), **arguments)


def histories(model: Regressor) -> dict[str, Tensor]:
    [history] = histories_of(model.modules())
    return history.state_dict()


def resume(path: Path, recipe: Recipe = RECIPE, count: int = 6, **arguments: Any) -> Regressor:
    model = Regressor()
    trainer = make_trainer(plugin(recipe, **arguments), max_epochs=-1, max_steps=count)
    trainer.fit(model, ResumableLoader(batches()), ckpt_path=path)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a run of six steps."""
    trainer, _ = fit(plugin(), count=6)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_histories_are_there_again_and_go_on_as_without_the_stop(saved: Path) -> None:
    kept = torch.load(saved, weights_only=True)["lightning_amp_plus"]["fp8_histories"]
    assert same(histories(resume(saved, count=6)), kept)  # its steps are done: nothing is added
    _, whole = fit(plugin(), count=9)
    resumed = resume(saved, count=9)
    assert same(histories(resumed), histories(whole)) and same(weights(resumed), weights(whole))
    assert not same(histories(resumed), kept)


@pytest.mark.parametrize(
    ("other", "before", "now"),
    [
        (CurrentScaling(), "delayed (amax=max, margin=0,", "current (power_of_two=False)"),
        (DelayedScaling(history=4, margin=1), "margin=0", "margin=1"),
        (DelayedScaling(history=4, amax="most_recent"), "amax=max", "amax=most_recent"),
    ],
    ids=["current", "margin", "amax"],
)
def test_another_recipe_is_refused_with_both_shown(saved: Path, other: Recipe, before: str, now: str) -> None:
    content = saved.read_bytes()
    with pytest.raises(IncompatiblePrecisionError) as caught:
        resume(saved, other)
    text = " ".join(str(caught.value).split())
    row = text[text.index("fp8_recipe body.0") : text.index("Scales would be chosen in another way")]
    assert before in row and now in row and "refuse" in row, text  # two columns, each on several lines
    assert "allow=['fp8_recipe']" in text
    assert saved.read_bytes() == content


@pytest.mark.parametrize("length", [2, 8])
def test_another_length_is_refused_with_both_shown_and_may_be_allowed(saved: Path, length: int) -> None:
    kept = torch.load(saved, weights_only=True)["lightning_amp_plus"]["fp8_histories"]
    with pytest.raises(IncompatiblePrecisionError) as caught:
        resume(saved, DelayedScaling(history=length))
    assert re.search(rf"(?s)fp8_history\s.*body\.0 4.*body\.0 {length}.*refuse", str(caught.value)), str(caught.value)
    with pytest.warns(UserWarning, match="fp8_history"):
        found = histories(resume(saved, DelayedScaling(history=length), allow=["fp8_history"]))
    for name, past in found.items():
        shorter = min(length, 4)
        assert torch.equal(past[:, :shorter], kept[name][:, :shorter]) and not past[:, shorter:].any()
