"""LayerHistory: bounded, in order, and honest about what a layer did not have."""

import math

from lightning_amp_plus.callbacks.layers import LayerHistory


def test_late_layers_and_gaps_are_nan() -> None:
    history = LayerHistory("x")
    history.add(0, {"a": 1.0})
    history.add(5, {"a": 2.0, "b": 3.0})
    history.add(9, {"b": 4.0})
    assert history.names == ["a", "b"] and history.steps == [0, 5, 9]
    first, second = history.rows()
    assert first[:2] == [1.0, 2.0] and math.isnan(first[2]) and math.isnan(second[0]) and second[1:] == [3.0, 4.0]


def test_it_stays_bounded_and_covers_the_whole_run() -> None:
    history = LayerHistory("x")
    for step in range(5000):
        history.add(step, {"a": float(step)})
    assert len(history.steps) <= 512 and history.steps[0] == 0 and history.steps[-1] > 4900
    gaps = {after - before for before, after in zip(history.steps, history.steps[1:], strict=False)}
    assert len(gaps) == 1 and history.rows()[0] == [float(step) for step in history.steps]
