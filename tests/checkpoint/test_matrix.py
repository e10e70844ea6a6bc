"""Every precision resumed in every other one, for real: who goes on, who is refused, and what the refusal's advice does."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch

from lightning_amp_plus import IncompatiblePrecisionError
from tests.support.refusals import (
    BATCHES,
    INIT,
    PRECISIONS,
    STATIC,
    AtStart,
    allow_of,
    assert_refused,
    listening,
    make_model,
    plugin_for,
    resume,
    rows_of,
    verdicts,
)
from tests.support.training import fit, regression_batches, same, weights

OTHERS = [pair for pair in product(PRECISIONS, PRECISIONS) if pair[0] != pair[1]]
STORED = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
SCALE = {"16-mixed": "dynamic", "16-true": "static"}


def stored(precision: str) -> torch.dtype:
    return STORED.get(precision, torch.float32)


def expected(saved: str, resumed: str) -> dict[str, str]:
    """Verdict by field, from what the two precisions are; the optimizer has a state, and buffers follow parameters."""
    found = {"precision": "refuse"}
    before, now = stored(saved), stored(resumed)
    if before != now:
        found["parameters"] = found["buffers"] = "convert" if now == torch.float32 else "refuse"
        found["optimizer_state"] = "refuse"
    if SCALE.get(saved) != SCALE.get(resumed):
        found["loss_scale"] = "convert"
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_precision_goes_on_as_if_never_stopped(checkpoints: dict[str, Path], precision: str) -> None:
    whole = make_model()
    fit(whole, plugin_for(precision), regression_batches(BATCHES), max_epochs=2)
    model = make_model()
    with listening() as said:
        resume(checkpoints[precision], plugin_for(precision), model)
    assert model.losses == whole.losses[BATCHES:]
    assert same(weights(model), weights(whole))
    assert said.converts() == ""


@pytest.mark.parametrize(("saved", "resumed"), OTHERS)
def test_any_other_precision_is_refused_and_nothing_is_touched(
    checkpoints: dict[str, Path], saved: str, resumed: str
) -> None:
    error = assert_refused(checkpoints[saved], plugin_for(resumed))
    assert verdicts(error) == expected(saved, resumed)
    assert rows_of(error) == expected(saved, resumed)
    [row] = [line for line in str(error).splitlines() if line.startswith("precision ") and line.endswith("refuse")]
    assert row.split() == ["precision", saved, resumed, "refuse"]
    assert str(checkpoints[saved]) in str(error)
    assert f"AmpPrecision({saved!r})" in str(error)


@pytest.mark.parametrize(("saved", "resumed"), OTHERS)
def test_the_printed_allow_names_every_refusal_and_lets_the_run_go_on(
    checkpoints: dict[str, Path], saved: str, resumed: str
) -> None:
    with pytest.raises(IncompatiblePrecisionError) as refusal:
        resume(checkpoints[saved], plugin_for(resumed))
    allow = allow_of(refusal.value)
    assert allow == sorted(field for field, verdict in expected(saved, resumed).items() if verdict == "refuse")

    model, start, plugin = make_model(), AtStart(), plugin_for(resumed, allow=allow)
    with listening() as said:
        resume(checkpoints[saved], plugin, model, callbacks=[start])

    assert len(model.losses) == BATCHES and all(map(math.isfinite, model.losses))
    assert start.step == BATCHES and plugin.applied_steps == 2 * BATCHES
    for field in allow:
        assert f"Allowed by allow=['{field}']" in said.converts()
    checkpoint = torch.load(checkpoints[saved], weights_only=True)
    assert same(start.weights, {name: w.to(stored(resumed)) for name, w in checkpoint["state_dict"].items()})
    moments = [v.to(stored(resumed)) for s in checkpoint["optimizer_states"][0]["state"].values() for v in s.values()]
    moments = [moment for moment in moments if moment.ndim]
    assert len(moments) == len(start.moments) == 8
    assert all(map(torch.equal, start.moments, moments))
    wanted = {("16-mixed", "16-true"): STATIC, ("16-true", "16-mixed"): STATIC}.get((saved, resumed))
    assert start.scale == (wanted or {"16-mixed": INIT, "16-true": STATIC}.get(resumed))


@pytest.mark.parametrize(("saved", "resumed"), [pair for pair in OTHERS if STORED.get(pair[0]) != STORED.get(pair[1])])
def test_allowing_the_precision_alone_does_not_allow_what_else_is_refused(
    checkpoints: dict[str, Path], saved: str, resumed: str
) -> None:
    others = {f for f, verdict in expected(saved, resumed).items() if verdict == "refuse"} - {"precision"}
    assert others
    error = assert_refused(checkpoints[saved], plugin_for(resumed, allow=["precision"]))
    assert verdicts(error) == {**expected(saved, resumed), "precision": "convert"}
    assert set(allow_of(error)) == {"precision", *others}


@pytest.mark.parametrize(
    ("saved", "resumed", "reason"),
    [
        ("bf16-mixed", "16-mixed", "65504"),
        ("32-true", "bf16-mixed", "8 significant bits"),
        ("16-mixed", "32-true", "without the loss scale"),
        ("32-true", "16-true", "half an ulp"),
        ("bf16-true", "32-true", "would go on in FP32"),
    ],
)
def test_a_refusal_says_why_it_matters(checkpoints: dict[str, Path], saved: str, resumed: str, reason: str) -> None:
    with pytest.raises(IncompatiblePrecisionError, match=reason):
        resume(checkpoints[saved], plugin_for(resumed))
