"""Where reports go: subscribers, the history, one warning each, and an error if a run only skips."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus.errors import ScaleCollapseError, SkipLimitError
from lightning_amp_plus.journal import Journal
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.step_report import StepReport, Values, Verdictless


def scalar(value: float, device: str = "cpu") -> Tensor:
    return torch.full((), float(value), device=device)


class Run:
    """A journal that is fed with windows; the scale halves with each overflow."""

    def __init__(
        self, *, scaled: bool = True, limit: int = 100, on_device: bool = False, scale: float = 1024.0
    ) -> None:
        self.warnings: list[str] = []
        self.journal = Journal(scaled, limit, self.warnings.append)
        self.on_device = on_device
        self.scale = scale

    def window(self, overflow: bool = False, *, on_device: bool | None = None, loss: float = 1.0) -> StepReport:
        after = self.scale / 2 if overflow and self.journal.scaled else self.scale
        values = Values(overflow, losses=(scalar(loss),), scale=self.scale, next_scale=after)
        if self.on_device if on_device is None else on_device:
            values.found_inf, values.scale, values.next_scale = scalar(overflow), scalar(self.scale), scalar(after)
        self.scale = after
        report = StepReport(10 + self.journal.windows, self.journal.windows, 0, values)
        self.journal.take(report)
        return report

    def skips(self, count: int, **options: Any) -> None:
        for _ in range(count):
            self.window(True, **options)


def named(*gradients: float | None) -> list[tuple[str, Tensor]]:
    result = []
    for name, value in zip("abcdef", gradients, strict=False):
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = None if value is None else torch.tensor([1.0, value])
        result.append((f"layers.{name}", parameter))
    return result


BOTH = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])


# ---------------------------------------------------------------- subscribers


def test_every_subscriber_gets_every_report_once_in_order() -> None:
    run = Run()
    first: list[StepReport] = []
    second: list[StepReport] = []
    run.journal.subscribe(first.append)
    run.window()
    run.journal.subscribe(second.append)
    reports = [run.window(True), run.window()]
    assert [r.window for r in first] == [0, 1, 2]
    assert second == reports
    assert run.journal.last_report is reports[-1]


def test_reports_are_delivered_unresolved_and_without_a_transfer() -> None:
    run = Run()
    seen: list[Any] = []
    run.journal.subscribe(lambda report: seen.append(report.values.found_inf))
    nowhere = scalar(1.0, "meta")
    for _ in range(3):
        run.journal.take(StepReport(0, 0, 0, Values(nowhere, scale=nowhere, next_scale=nowhere, losses=(nowhere,))))
    assert all(value is nowhere for value in seen)
    assert len(seen) == 3


def test_whoever_unsubscribes_gets_no_more_reports() -> None:
    run = Run()
    seen: list[StepReport] = []
    unsubscribe = run.journal.subscribe(seen.append)
    run.window()
    unsubscribe()
    unsubscribe()
    run.window()
    assert len(seen) == 1


def test_a_subscriber_may_unsubscribe_while_it_is_called() -> None:
    run = Run()
    seen: list[str] = []

    def once(report: StepReport) -> None:
        seen.append("once")
        unsubscribe()

    unsubscribe = run.journal.subscribe(once)
    run.journal.subscribe(lambda report: seen.append("always"))
    run.window()
    run.window()
    assert seen == ["once", "always", "always"]


def test_a_norm_is_wanted_for_the_windows_that_a_subscriber_names() -> None:
    journal = Run().journal
    journal.subscribe(lambda report: None)
    assert not journal.wants_grad_norm(4)
    unsubscribe = journal.subscribe(lambda report: None, lambda window: window == 4)
    journal.subscribe(lambda report: None, lambda window: False)
    assert journal.wants_grad_norm(4)
    assert not journal.wants_grad_norm(5)
    unsubscribe()
    assert not journal.wants_grad_norm(4)


# ---------------------------------------------------------------- the history


@BOTH
def test_the_history_counts_every_window_wherever_its_verdict_was(on_device: bool) -> None:
    run = Run(on_device=on_device)
    for overflow in (False, True, True, False):
        run.window(overflow)
    history = run.journal.settle()
    assert (history.applied, history.skipped, history.backoffs) == (2, 2, 2)
    assert history.scales == [1024, 512, 256, 256]
    assert run.journal.windows == 4


def test_verdicts_of_both_kinds_are_counted_in_order() -> None:
    run = Run()
    for overflow, on_device in [(True, True), (False, False), (True, False), (True, True)]:
        run.window(overflow, on_device=on_device)
    assert run.journal.settle().scales == [512, 512, 256, 128]


def test_a_verdict_that_the_host_knows_is_counted_at_once() -> None:
    run = Run()
    run.window()
    assert run.journal.history.applied == 1


def test_device_verdicts_wait_for_the_log_point_and_then_cost_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: calls.append(1) or original(tensor))
    run = Run(on_device=True)
    run.journal.settle_every = 4
    for expected in (0, 0, 0, 4, 4, 4, 4, 8):
        run.window()
        assert run.journal.history.applied == expected
    assert len(calls) == 2
    run.journal.settle()
    assert len(calls) == 2


def test_a_window_without_a_verdict_is_delivered_and_numbered_and_counts_nowhere() -> None:
    run = Run()
    seen: list[StepReport] = []
    run.journal.subscribe(seen.append)
    for verdictless in ("skipped_no_grads", "skipped_no_backward"):
        kind: Verdictless = verdictless  # type: ignore[assignment]
        run.journal.take(StepReport(0, run.journal.windows, 0, Values(scale=0.5, next_scale=0.5), kind))
    history = run.journal.settle()
    assert (history.applied, history.skipped, len(history.scales)) == (0, 0, 0)
    assert [r.window for r in seen] == [0, 1]
    assert run.warnings == []


# ---------------------------------------------------------------- warnings


@BOTH
@pytest.mark.parametrize(("loss", "origin"), [(1.0, "backward"), (math.nan, "forward")])
def test_the_first_skip_warns_once_with_its_step_origin_and_scales(on_device: bool, loss: float, origin: str) -> None:
    run = Run(on_device=on_device)
    run.window()
    run.skips(2, loss=loss)
    run.journal.settle()
    (text,) = run.warnings
    for words in (
        "Step 11 was skipped",
        "a gradient is not finite",
        f"overflow in the {origin} pass",
        "from 1024 to 512",
        "few skips",
        "Said once",
        "plugin.history",
    ):
        assert words in text


def test_without_a_scale_the_first_skip_says_that_nothing_was_changed() -> None:
    run = Run(scaled=False)
    run.skips(2)
    (text,) = run.warnings
    for words in (
        "Step 10 was skipped",
        "backward pass",
        "Weights, optimizer state and per-step schedulers",
        "Said once",
    ):
        assert words in text
    assert "loss scale" not in text


@BOTH
def test_a_scale_below_1_warns_once_with_the_step_and_what_to_do(on_device: bool) -> None:
    run = Run(on_device=on_device, scale=2.0)
    run.skips(4)
    run.journal.settle()
    assert len(run.warnings) == 2
    text = run.warnings[1]
    for words in ("is 0.5, below 1, at step 11", "65504", "bf16-mixed", "rule"):
        assert words in text


def test_without_a_scale_or_at_1_nobody_warns_about_the_scale() -> None:
    at_one, without = Run(scale=1.0), Run(scaled=False, scale=0.5)
    for run in (at_one, without):
        run.window()
        run.journal.settle()
        assert run.warnings == []


def test_no_overflow_no_warning() -> None:
    run = Run()
    for _ in range(3):
        run.window()
    assert run.warnings == []


def test_by_default_the_warning_is_one_of_python() -> None:
    run = Run()
    run.journal = Journal(True, 100)
    with pytest.warns(UserWarning, match="was skipped"):
        run.window(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.window(True)


# ---------------------------------------------------------------- too many skips


@BOTH
def test_a_run_that_only_skips_is_stopped_at_the_limit(on_device: bool) -> None:
    run = Run(limit=5, on_device=on_device)
    run.journal.settle_every = 8
    run.window()
    run.window(True)
    run.window()
    with pytest.raises(ScaleCollapseError, match="5 windows in a row"):
        run.skips(10)
    assert run.journal.windows == 8


def test_a_window_that_is_applied_starts_the_count_anew() -> None:
    run = Run(limit=3)
    for _ in range(5):
        run.skips(2)
        run.window()
    assert run.journal.history.skipped == 10


def test_the_collapse_of_a_scale_names_skips_scale_layer_history_and_remedy() -> None:
    run = Run(limit=4)
    run.journal.named_parameters = lambda: named(1.0, math.inf, math.nan, 1.0, None)
    run.window()
    with pytest.raises(ScaleCollapseError) as caught:
        run.skips(4)
    text = str(caught.value)
    for words in (
        "4 windows in a row",
        "up to step 14",
        "the loss scale is down to 64",
        "the backward pass still overflowed",
        "'layers.c' (of 2 non-finite, back to 'layers.b')",
        "1024*1 512*1 256*1 128*1 64*1",
        "bf16-mixed",
        "keeps this layer in fp32",
        "learning rate",
        "max_consecutive_skips",
    ):
        assert words in text
    assert isinstance(caught.value, SkipLimitError)


def test_a_loss_that_overflows_is_called_what_no_scale_can_mend() -> None:
    run = Run(limit=2)
    with pytest.raises(ScaleCollapseError) as caught:
        run.skips(2, loss=math.inf)
    text = str(caught.value)
    for words in ("the forward pass still overflowed", "no loss scale can mend", "65504", "bf16-mixed", "fp32"):
        assert words in text


def test_a_long_history_is_cut_to_its_last_12_runs() -> None:
    run = Run(limit=20, scale=2.0**20)
    with pytest.raises(ScaleCollapseError, match=r"\.\.\. 2048\*1 1024\*1 .* 2\*1 1\*1\.") as caught:
        run.skips(20)
    assert "4096*1" not in str(caught.value)


def test_when_the_gradients_are_gone_the_message_says_so() -> None:
    run = Run(limit=1)
    run.journal.named_parameters = lambda: named(None, 1.0)
    with pytest.raises(ScaleCollapseError, match=r"gradients are gone.*first bad layer is not known"):
        run.skips(1)


@BOTH
def test_without_a_scale_the_error_names_the_layer_the_limit_and_what_to_do(on_device: bool) -> None:
    run = Run(scaled=False, limit=3, on_device=on_device)
    run.journal.settle_every = 3
    run.journal.named_parameters = lambda: named(math.nan)
    with pytest.raises(SkipLimitError) as caught:
        run.skips(3)
    text = str(caught.value)
    for words in (
        "3 windows in a row were skipped, up to step 12",
        "gradients were not finite",
        "overflow in the backward pass",
        "'layers.a' (of 1 non-finite",
        "data",
        "learning rate",
        "gradient_clip_val",
        "max_consecutive_skips",
    ):
        assert words in text
    assert not isinstance(caught.value, ScaleCollapseError)


def test_whoever_catches_the_error_gets_the_same_patience_again() -> None:
    run = Run(limit=3)
    for _ in range(2):
        run.skips(2)
        with pytest.raises(ScaleCollapseError, match="3 windows in a row"):
            run.skips(1)
    assert run.journal.history.skipped == 6


@pytest.mark.parametrize("reads", ["in a subscriber", "after the window"])
def test_reading_the_history_in_every_window_does_not_put_off_the_limit(reads: str) -> None:
    run = Run(limit=5)
    if reads == "in a subscriber":
        run.journal.subscribe(lambda report: run.journal.settle())
    with pytest.raises(ScaleCollapseError, match="5 windows in a row"):
        for _ in range(60):
            run.window(True)
            run.journal.settle()
    assert run.journal.windows == 5


@pytest.mark.parametrize("reads", ["in a subscriber", "after the window"])
def test_with_device_verdicts_reading_the_history_puts_off_the_limit_to_the_log_point_at_most(reads: str) -> None:
    run = Run(limit=5, on_device=True)
    run.journal.settle_every = 10
    if reads == "in a subscriber":
        run.journal.subscribe(lambda report: run.journal.settle())
    with pytest.raises(ScaleCollapseError, match="windows in a row"):
        for _ in range(60):
            run.window(True)
            run.journal.settle()
    assert run.journal.windows <= 10


@BOTH
def test_the_limit_holds_though_a_subscriber_reads_every_report(on_device: bool) -> None:
    run = Run(limit=5, on_device=on_device)
    run.journal.settle_every = 10
    outcomes: list[str] = []
    run.journal.subscribe(lambda report: outcomes.append(report.outcome))
    with pytest.raises(ScaleCollapseError, match="windows in a row"):
        run.skips(60)
    assert outcomes == ["skipped_overflow"] * (10 if on_device else 5)


# ---------------------------------------------------------------- several ranks


class Ranks(Consensus):
    """This rank, which is 0, and one more, whose row is what ``other`` makes of ours."""

    world_size = 2

    def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
        self.other = other
        self.gathers = 0

    def gather(self, values: Tensor) -> Tensor:
        self.gathers += 1
        return torch.stack([values, self.other(values)])


@BOTH
def test_the_ranks_of_overflows_are_asked_once_for_all_reports_at_the_log_point_or_at_once(on_device: bool) -> None:
    run = Run(on_device=on_device)
    run.journal.settle_every = 3
    ranks = run.journal.consensus = Ranks(lambda flags: 1.0 - flags)
    reports = []
    for found, here in [(True, True), (False, False), (True, False)]:
        values = Values(scalar(found) if on_device else found, found_here=scalar(here), losses=(scalar(1.0),))
        reports.append(StepReport(0, run.journal.windows, 0, values))
        run.journal.take(reports[-1])
    assert [report.overflow_ranks for report in reports] == [(0,), (), (1,)]
    assert ranks.gathers == (1 if on_device else 2)


def test_without_an_overflow_no_rank_is_asked() -> None:
    run = Run()
    ranks = run.journal.consensus = Ranks(lambda flags: flags)
    for window in range(3):
        run.journal.take(StepReport(0, window, 0, Values(False, found_here=scalar(0.0))))
    assert ranks.gathers == 0


@pytest.mark.parametrize(
    ("field", "name"),
    enumerate(["number of windows", "number of applied steps", "loss scale", "growth tracker", "hysteresis"]),
)
def test_ranks_that_differ_are_told_where_with_both_values(field: int, name: str) -> None:
    def other(row: Tensor) -> Tensor:
        return row + torch.nn.functional.one_hot(torch.tensor(field), len(row))

    run = Run()
    run.journal.consensus = Ranks(other)
    with pytest.raises(RuntimeError) as caught:
        run.journal.compare_ranks((5, 6, 7, 8, 9), "at step 30")
    text = str(caught.value)
    for words in (
        "Ranks disagree at step 30",
        f"the {name} is {5 + field} on rank 0 and {6 + field} on rank 1".replace("the hyst", "hyst"),
        "drift apart",
        "resume from a checkpoint",
        "scaler.update()",
    ):
        assert words in text


def test_ranks_that_agree_go_on_and_a_single_process_asks_nobody() -> None:
    run = Run()
    alone = run.journal.consensus = Ranks(lambda row: row + 1)
    alone.world_size = 1
    run.journal.compare_ranks((1, 2, 3, 4, 5), "now")
    assert alone.gathers == 0
    ranks = run.journal.consensus = Ranks(lambda row: row.clone())
    run.journal.compare_ranks((1, 2, 2.0**24 + 1, 4, 5), "now")
    assert ranks.gathers == 1


# ---------------------------------------------------------------- checkpoint and copies


@BOTH
def test_the_state_is_plain_json_holds_what_was_waiting_and_goes_on_where_it_was(on_device: bool) -> None:
    run = Run(limit=4, on_device=on_device)
    run.window()
    run.skips(2)
    state = json.loads(json.dumps(run.journal.state_dict()))
    assert state["windows"] == 3
    resumed = Run(limit=4, scale=run.scale)
    resumed.window()
    resumed.journal.load_state_dict(state)
    assert resumed.journal.last_report is None
    assert resumed.journal.history.scales == [1024, 512, 256]
    assert resumed.window(True).window == 3
    with pytest.raises(ScaleCollapseError, match="4 windows in a row"):
        resumed.window(True)


def test_loading_drops_reports_that_wait() -> None:
    run = Run(on_device=True)
    saved = run.journal.state_dict()
    run.skips(3)
    run.journal.load_state_dict(saved)
    assert (run.journal.settle().skipped, run.journal.windows) == (0, 0)


def _keep(message: str) -> None:
    _kept.append(message)


_kept: list[str] = []


def test_a_pickled_journal_keeps_counts_and_settings_and_forgets_its_process() -> None:
    run = Run(limit=7, on_device=True)
    run.journal.warn = _keep
    run.journal.settle_every = 9
    run.journal.named_parameters = lambda: named(1.0)
    seen: list[StepReport] = []
    run.journal.subscribe(seen.append)
    run.skips(2)
    clone: Journal = pickle.loads(pickle.dumps(run.journal))
    assert (clone.max_consecutive_skips, clone.settle_every, clone.windows, clone.scaled) == (7, 9, 2, True)
    assert clone.history.scales == [512, 256]
    assert clone.last_report is None
    assert list(clone.named_parameters()) == []
    clone.take(StepReport(0, 2, 0, Values(True, scale=256.0, next_scale=128.0)))
    assert len(seen) == 2
    assert sum("was skipped" in message for message in _kept) == 1  # the clone knows that it was said
    _kept.clear()
