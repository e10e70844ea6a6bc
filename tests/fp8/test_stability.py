"""When training counts as quiet: the definition against an obvious one, and on series made by hand."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_amp_plus.fp8.stability import WINDOW, Stability

Step = tuple[float, float | None] | None  # a norm and a loss, or a step that was skipped


def quiet_by_the_book(steps: Sequence[Step]) -> bool:
    """The definition, computed anew from all steps, in the words of the class."""
    finite = [s if s and all(math.isfinite(n) for n in s if n is not None) else None for s in steps]
    last = finite[-100:]
    if len(last) < 100 or None in last:
        return False
    norms = [step[0] for step in last if step]
    losses = [step[1] for step in last if step]
    if max(norms) > 5 * (sorted(norms)[49] + sorted(norms)[50]) / 2:
        return False
    if None in losses:
        return True
    known: list[float] = [loss for loss in losses if loss is not None]
    ordered = sorted(known)
    middle = (ordered[49] + ordered[50]) / 2

    def decile(tenth: int) -> float:  # exclusive, as statistics.quantiles has it
        whole, part = divmod(tenth * 101, 10)
        return ordered[whole - 1] + (ordered[whole] - ordered[whole - 1]) * part / 10

    deviation = max((decile(9) - decile(1)) / 2.563, abs(middle) / 512)
    if max(known) - middle > 7 * deviation:
        return False
    means = [sum(half) / 50 for half in (known[:50], known[50:])]
    spread = [sum((x - m) ** 2 for x in h) / 49 for h, m in zip((known[:50], known[50:]), means, strict=True)]
    error = math.sqrt(sum(spread) / 50)
    if means[1] - means[0] > 3 * error:
        return False
    levels = []
    for end in range(50, len(finite) + 1):
        part = [step[1] if step else None for step in finite[end - 50 : end]]
        if None not in part:
            ranked = sorted(loss for loss in part if loss is not None)
            levels.append((ranked[24] + ranked[25]) / 2)
    return means[0] - means[1] <= 3 * error or means[0] - means[1] <= 0.1 * (max(levels) - means[1])


def run(steps: Sequence[Step]) -> Stability:
    seen = Stability()
    for step in steps:
        if step is None:
            seen.interrupt()
        else:
            seen.observe(*step)
    return seen


def why(steps: Sequence[Step]) -> str:
    return run(steps).unrest() or "quiet"


def series(
    loss: Callable[[int], float], norm: Callable[[int], float] = lambda step: 1.0, steps: int = 100
) -> list[Any]:
    return [(norm(step), loss(step)) for step in range(steps)]


def noisy(level: float, deviation: float, seed: int = 0) -> Callable[[int], float]:
    draw = random.Random(seed)
    return lambda step: level + draw.gauss(0, deviation)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(90, 260),
    slope=st.sampled_from([0.0, -0.05, -0.005, 0.005]),
    fast=st.sampled_from([0.0, 5.0]),
    spikes=st.sampled_from([0.0, 0.01]),
    skips=st.sampled_from([0.0, 0.004]),
    missing=st.sampled_from([0.0, 0.01]),
)
def test_it_is_what_the_definition_says(
    seed: int, length: int, slope: float, fast: float, spikes: float, skips: float, missing: float
) -> None:
    draw = random.Random(seed)
    steps: list[Step] = []
    for step in range(length):
        spike = draw.random() < spikes
        loss: float | None = 1 + fast * math.exp(-step / 15) + slope * step + draw.gauss(0, 0.1) + spike
        loss = None if draw.random() < missing else loss
        norm = math.exp(draw.gauss(0, 0.3)) * (1 + 5 * spike)
        kind = draw.random()
        steps.append(None if kind < skips else (math.nan, loss) if kind < 1.5 * skips else (norm, loss))
    assert (run(steps).unrest() is None) == quiet_by_the_book(steps)


@pytest.mark.parametrize("level", [2.0, 0.0, -5.0, 1e-6, 1e6])
def test_a_level_series_is_quiet_wherever_it_lies(level: float) -> None:
    assert why(series(noisy(level, 0.1, 1))) == "quiet"


@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e8])
def test_the_unit_of_the_loss_does_not_matter(unit: float) -> None:
    calm, rising = noisy(2.0, 0.1, 1), noisy(2.0, 0.1, 1)
    assert why(series(lambda step: unit * calm(step))) == "quiet"
    assert "rising" in why(series(lambda step: unit * (rising(step) + 0.01 * step)))


def test_a_constant_loss_is_quiet_and_so_is_one_that_bf16_rounds_to_neighbors() -> None:
    assert why(series(lambda step: 0.5)) == "quiet"
    assert why(series(lambda step: 2.3125 + (step % 25 == 0) / 64)) == "quiet"


def test_it_waits_for_a_whole_window_in_a_row() -> None:
    calm = series(noisy(2.0, 0.1, 1), steps=WINDOW - 1)
    assert why(calm) == "99 of 100 applied steps in a row are known"
    assert why([*calm, None, *calm]).startswith("99 of 100")
    assert why([*calm, (math.inf, 2.0), *calm]).startswith("99 of 100")
    assert why([*calm, (1.0, math.nan), *calm]).startswith("99 of 100")
    assert why([*calm, calm[0]]) == "quiet"


def test_a_spike_of_the_gradient_norm_or_of_the_loss_is_named_until_it_is_a_window_ago() -> None:
    calm = series(noisy(2.0, 0.1, 1), steps=2 * WINDOW)
    assert "gradient norm went up to 8" in why([*calm, (8.0, 2.0), *calm[:99]])
    assert "loss went up to 4" in why([*calm, (1.0, 4.0), *calm[:99]])
    assert why([*calm, (8.0, 4.0), *calm[:100]]) == "quiet"


def test_noise_of_single_samples_is_no_spike() -> None:
    """Norms as the absolute values of a normal variable, one from each hundredth of them."""
    spread = [NormalDist().inv_cdf(0.5 + (step + 0.5) / 200) for step in range(100)]
    assert why(series(noisy(2.0, 0.1, 1), lambda step: spread[step * 37 % 100])) == "quiet"


def test_a_loss_that_falls_fast_is_not_quiet_and_becomes_so_as_it_calms() -> None:
    noise = noisy(0.0, 0.02)
    falling = series(lambda step: 2 + 8 * math.exp(-step / 100) + noise(step), steps=600)
    assert "still falling fast" in why(falling[:100]) and "still falling fast" in why(falling[:200])
    assert why(falling[:400]) == "quiet"


def test_a_slow_and_even_fall_is_quiet_in_the_end() -> None:
    """As of a resume that knows nothing of the fast phase, or of fine-tuning with little noise."""
    falling = series(lambda step: 10 - 1e-3 * step, steps=700)
    assert "still falling fast" in why(falling[:300]) and why(falling) == "quiet"


def test_one_huge_loss_at_the_start_does_not_make_a_fast_fall_look_slow() -> None:
    falling = series(lambda step: 10 - 0.01 * step, steps=150)
    assert "still falling fast" in why([(1.0, 1e9), *falling])


def test_norms_decide_alone_where_a_step_has_no_loss() -> None:
    rising = series(lambda step: float(step))
    assert "rising" in why(rising)
    assert why([(norm, None) for norm, _ in rising]) == "quiet"
    assert why([*rising[:50], (1.0, None), *rising[51:]]) == "quiet"
    assert "gradient norm" in why([*((1.0, None),) * 99, (6.0, None)])


def test_its_state_is_plain_json_and_goes_on_as_if_never_saved() -> None:
    steps = series(lambda step: 2 + 8 * math.exp(-step / 60), steps=400)
    whole = Stability()
    for number, step in enumerate(steps):
        again = Stability()
        again.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
        for seen in (whole, again):
            seen.observe(*step)
        assert again.state_dict() == whole.state_dict() and again.unrest() == whole.unrest(), number
