"""Counts over the run, and the run-length encoded scales."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_amp_plus.history import History, RunLengths
from lightning_amp_plus.step_report import StepReport, Values, Verdictless


def report(
    overflow: bool = False, scale: float = 8.0, after: float | None = None, verdictless: Verdictless | None = None
) -> StepReport:
    return StepReport(0, 0, 0, Values(overflow, scale=scale, next_scale=scale if after is None else after), verdictless)


def sequence(values: list[float], **options: Any) -> RunLengths:
    runs = RunLengths(**options)
    for value in values:
        runs._append(value)
    return runs


# ---------------------------------------------------------------- RunLengths


@given(values=st.lists(st.sampled_from([1.0, 2.0, 4.0])), data=st.data())
def test_it_reads_like_the_list_it_stands_for(values: list[float], data: st.DataObject) -> None:
    runs = sequence(values)
    assert len(runs) == len(values)
    assert list(runs) == values
    assert list(reversed(runs)) == values[::-1]
    assert [runs[i] for i in range(-len(values), len(values))] == values + values
    cut = data.draw(st.slices(len(values)))
    assert runs[cut] == values[cut]
    assert runs == values
    assert runs == tuple(values)
    assert runs == RunLengths(runs.runs)
    assert (2.0 in runs) == (2.0 in values)


@pytest.mark.parametrize("index", [3, -4, 100])
def test_an_index_outside_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=str(index)):
        sequence([1.0, 1.0, 2.0])[index]


def test_equal_neighbors_share_a_run() -> None:
    assert sequence([8.0, 8.0, 4.0, 8.0]).runs == [(8.0, 2), (4.0, 1), (8.0, 1)]


def test_millions_of_windows_at_one_scale_take_one_run() -> None:
    runs = RunLengths([(8.0, 5_000_000)])
    runs._append(8.0)
    runs._append(4.0)
    assert runs.runs == [(8.0, 5_000_001), (4.0, 1)]
    assert (len(runs), runs[5_000_000], runs[-1]) == (5_000_002, 8.0, 4.0)


def test_beyond_the_bound_the_oldest_runs_are_dropped() -> None:
    runs = sequence([1.0, 1.0, 2.0, 4.0, 8.0], max_runs=3)
    assert runs.runs == [(2.0, 1), (4.0, 1), (8.0, 1)]
    assert len(runs) == 3


def test_a_scale_that_changes_every_window_stays_within_the_default_bound() -> None:
    runs = sequence([float(i) for i in range(5000)])
    assert len(runs) == 4096
    assert (runs[0], runs[-1]) == (904.0, 4999.0)


def test_it_differs_from_other_values_and_from_other_types() -> None:
    runs = sequence([1.0, 2.0])
    assert runs != [1.0]
    assert runs != [2.0, 1.0]
    assert runs != "1.0 2.0"


def test_it_has_no_hash_since_it_grows() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(RunLengths())


def test_it_prints_its_runs() -> None:
    assert repr(sequence([65536.0, 32768.0, 32768.0])) == "65536 32768*2"
    assert repr(RunLengths()) == "(empty)"


# ---------------------------------------------------------------- History


def test_before_the_first_window_everything_is_zero() -> None:
    history = History()
    assert history.skip_rate == 0.0
    assert len(history.scales) == 0
    counts = (history.applied, history.skipped, history.growths, history.backoffs, history.consecutive_skips)
    assert counts == (0, 0, 0, 0, 0)


def filled() -> History:
    """8 16 8 8 16: five windows with an overflow in the third, and a skip more."""
    history = History()
    for overflow, before, after in [
        (False, 8, 8),
        (False, 8, 16),
        (True, 16, 8),
        (False, 8, 8),
        (False, 8, 16),
        (True, 16, 8),
        (True, 8, 8),
    ]:
        history.absorb(report(overflow, before, after))
    return history


def test_scales_are_those_after_each_window_and_every_change_is_counted() -> None:
    history = filled()
    assert history.scales == [8, 16, 8, 8, 16, 8, 8]
    assert (history.applied, history.skipped) == (4, 3)
    assert (history.growths, history.backoffs) == (2, 2)
    assert history.skip_rate == pytest.approx(3 / 7)


def test_the_run_of_skips_grows_until_a_step_is_applied() -> None:
    history = filled()
    assert history.consecutive_skips == 2
    history.absorb(report())
    assert history.consecutive_skips == 0


@pytest.mark.parametrize("verdictless", ["skipped_no_grads", "skipped_no_backward"])
def test_a_window_without_a_verdict_counts_nowhere(verdictless: Verdictless) -> None:
    history = filled()
    before = history.state_dict()
    history.absorb(report(scale=8.0, after=4.0, verdictless=verdictless))
    assert history.state_dict() == before


def test_the_state_is_plain_json_and_goes_on_where_it_was() -> None:
    history = filled()
    resumed = History()
    resumed.absorb(report(True, 1.0, 0.5))
    resumed.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for one in (history, resumed):
        one.absorb(report(True, 8.0, 4.0))
    assert resumed.state_dict() == history.state_dict()
    assert resumed.scales == [8, 16, 8, 8, 16, 8, 8, 4]
    assert resumed.consecutive_skips == 3
    assert resumed.scales.runs[-2:] == [(8.0, 2), (4.0, 1)]


def test_the_saved_state_does_not_move_with_the_history() -> None:
    history = filled()
    state = history.state_dict()
    copied = json.loads(json.dumps(state))
    history.absorb(report(False, 8.0, 8.0))
    assert state == copied


def test_it_prints_its_counts() -> None:
    text = repr(filled())
    for part in ("applied=4", "skipped=3", "skip_rate=42.86%", "growths=2", "backoffs=2", "8 16 8*2 16 8*2"):
        assert part in text
