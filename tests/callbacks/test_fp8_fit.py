"""The fit of FP8 scales in a Trainer: what is logged, tried and printed, with whom it agrees and what it leaves alone."""

from __future__ import annotations

import json
import math
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import Fp8CoverageMonitor
from lightning_amp_plus.fp8 import CurrentScaling, DelayedScaling, RowwiseScaling
from lightning_amp_plus.fp8.fit.measure import Fit
from lightning_amp_plus.fp8.fit.report import FitReport
from tests.support.training import loader, make_trainer, same, weights

TENSORS = ("input", "weight", "grad_output")


class Two(L.LightningModule):
    """Two layers and a dropout, which would tell of a random number drawn by somebody else."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.lr = lr
        self.inputs: list[Tensor] = []
        self.up_weights: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.inputs.append(batch.clone())
        self.up_weights.append(self.up.weight.detach().clone())
        return self.down(nn.functional.dropout(self.up(batch).relu(), 0.1)).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def batches(count: int = 4) -> list[Tensor]:
    return list(torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(0)))


def policy(recipe: Any = None, **settings: Any) -> PrecisionPolicy:
    return PrecisionPolicy("bf16", rules=[Rule("*", compute="fp8", recipe=recipe)], **settings)


def fitted(
    model: Any, recipe: Any = None, every: int = 1, data: Any = None, trainer: Any = None, **options: Any
) -> Any:
    """The monitor, and the keys logged last."""
    monitor = Fp8CoverageMonitor(every, **options)
    torch.manual_seed(5)
    run = make_trainer(AmpPrecision(policy(recipe)), callbacks=[monitor], **(trainer or {}))
    run.fit(model, loader(batches() if data is None else data))
    return monitor, {key: float(value) for key, value in run.callback_metrics.items() if key.startswith("fp8/")}


def test_the_numbers_are_those_of_the_live_tensors():
    model = Two()
    monitor, logged = fitted(model, CurrentScaling())
    x, w = model.inputs[-1].bfloat16().float(), model.up_weights[-1]
    for name, value in (("input", x), ("weight", w)):
        amax = value.abs().max()
        scale = 448 / amax
        rounded = (value * scale).to(torch.float8_e4m3fn).float() / scale
        noise = (rounded.double() - value.double()).square().sum()
        assert logged[f"fp8/amax/up/{name}"] == pytest.approx(amax.item(), rel=1e-6)
        assert logged[f"fp8/scale/up/{name}"] == pytest.approx(scale.item(), rel=1e-6)
        assert logged[f"fp8/sqnr/up/{name}"] == pytest.approx(
            (10 * torch.log10(value.double().square().sum() / noise)).item(), abs=1e-3
        )
        lost = ((rounded == 0) & (value != 0)).sum() / (value != 0).sum()
        assert logged[f"fp8/underflow/up/{name}"] == pytest.approx(lost.item(), abs=1e-6)
        assert logged[f"fp8/saturation/up/{name}"] == 0
    assert {fit for layer in monitor.last_fit.own.values() for fit in layer} == set(TENSORS)


def test_a_scale_that_lags_behind_saturates_and_another_recipe_would_not():
    quiet, loud = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), 64.0
    data = [quiet, quiet, quiet * loud]
    monitor, logged = fitted(Two(lr=0.0), DelayedScaling(history=4), data=data, what_if=["current"])
    assert logged["fp8/saturation/up/input"] > 0.5
    assert logged["fp8/what_if/current/up/input"] > logged["fp8/sqnr/up/input"] + 20
    label, gain = monitor.last_fit.best("up", "input")
    assert label == "current" and gain > 20
    assert "current +" in str(monitor.last_fit)
    assert monitor.last_fit.best("up", "weight") is None  # it never changed, so its scale fits


def test_updates_are_counted_over_the_interval_also_where_nobody_looks():
    model = Two()
    _, logged = fitted(model, DelayedScaling(history=1, amax="most_recent"), every=4, data=batches(8))
    # In each window another batch, so another scale; weights move in each too.
    assert logged["fp8/scale_updates/up/input"] in (4, 8) and logged["fp8/scale_updates/up/weight"] in (4, 8)
    _, logged = fitted(Two(lr=0.0), DelayedScaling(history=4), every=2, data=[batches(1)[0]] * 6)
    assert logged["fp8/scale_updates/up/weight"] == 0
    _, logged = fitted(Two(), CurrentScaling())
    assert not any("scale_updates" in key for key in logged)


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(history=4), RowwiseScaling()])
def test_training_is_the_same_to_the_bit_and_so_are_histories(recipe):
    def trained(watch: bool) -> Any:
        model, torch_seed = Two(), 5
        monitor = Fp8CoverageMonitor(
            1, what_if=["rowwise" if recipe.name != "rowwise" else "mx", DelayedScaling(history=2)]
        )
        plugin = AmpPrecision(policy(recipe))
        torch.manual_seed(torch_seed)
        trainer = make_trainer(plugin, callbacks=[monitor] if watch else [], accumulate_grad_batches=2)
        trainer.fit(model, loader(batches(8)))
        return weights(model), plugin.state_dict().get("fp8_histories") or {}, torch.get_rng_state()

    (own, histories, state), (others, others_histories, others_state) = trained(True), trained(False)
    assert same(own, others) and torch.equal(state, others_state)
    assert histories.keys() == others_histories.keys()
    assert all(torch.equal(histories[name], others_histories[name]) for name in histories)


def test_without_fit_there_is_coverage_alone():
    monitor, logged = fitted(Two(), fit=False)
    assert monitor.last is not None and monitor.last_fit is None
    assert logged["fp8/coverage_gemms"] == 1 and not any("amax" in key for key in logged)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"what_if": ["fast"]}, "fast"),
        ({"what_if": [3]}, "3"),
        ({"what_if": ["mx", "mx"]}, "twice"),
        ({"what_if": ["mx"], "fit": False}, "a part of the fit"),
        ({"fit": 1}, "True or False"),
        ({"always": "no"}, "True or False"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Fp8CoverageMonitor(**options)


def test_layers_moved_while_training_come_and_go():
    class Moves(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(set(monitor.last_fit.own))
            if batch_idx < 2:
                trainer.precision_plugin.set_route("up", "bf16" if batch_idx == 0 else "fp8")

    seen: list[set[str]] = []
    monitor = Fp8CoverageMonitor(1, what_if=[DelayedScaling(history=2)])
    make_trainer(AmpPrecision(policy()), callbacks=[monitor, Moves()]).fit(Two(), loader(batches(3)))
    assert seen == [{"up", "down"}, {"down"}, {"up", "down"}]


def test_what_is_tried_keeps_its_history_where_another_layer_is_moved():
    class Moves(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                trainer.precision_plugin.set_route("down", "bf16")

    [quiet] = batches(1)
    monitor = Fp8CoverageMonitor(1, what_if=[DelayedScaling(history=4)])
    trainer = make_trainer(AmpPrecision(policy("current")), callbacks=[monitor, Moves()])
    trainer.fit(Two(lr=0.0), loader([quiet, 64 * quiet]))
    tried = monitor.last_fit.what_if["delayed(history=4)"]["up"]["input"]
    assert tried.scale == pytest.approx(448 / quiet.bfloat16().abs().max().item()) and tried.saturation > 0.5


def test_an_overflow_is_shown_and_does_no_harm():
    data = batches(3)
    data[1] = data[1].clone()
    data[1][0, 0] = math.inf
    seen: list[float] = []

    class Amax(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(float(trainer.callback_metrics["fp8/amax/up/input"]))

    monitor = Fp8CoverageMonitor(1, what_if=[DelayedScaling(history=2)])
    trainer = make_trainer(AmpPrecision(policy(DelayedScaling(history=2))), callbacks=[monitor, Amax()])
    trainer.fit(Two(), loader(data))
    assert trainer.precision_plugin.history.skipped == 1
    assert [math.isinf(amax) for amax in seen] == [False, True, False]
    fits = [*monitor.last_fit.own["up"].values(), *monitor.last_fit.what_if["delayed(history=2)"]["up"].values()]
    assert len(fits) == 6 and all(math.isfinite(fit.sqnr) for fit in fits)


def report(count: int = 2, shown: int | None = None) -> FitReport:
    fit = Fit(1.0, 448.0, 0.0, 0.25, 30.0, 3)
    bad = Fit(math.inf, 1.0, 0.5, 0.0, math.nan, None)
    exact = Fit(1.0, 448.0, 0.0, 0.0, math.inf, None)
    own: Any = {f"blocks.{n}.up": {"input": fit, "weight": exact, "grad_output": bad} for n in range(count)}
    tried: Any = {"mx": {name: {"input": Fit(1.0, 1.0, 0.0, 0.0, 33.0, None), "weight": exact} for name in own}}
    return FitReport(7, own, tried, dict.fromkeys(own, "delayed(history=16)"), shown)


def test_the_report_is_a_table_and_plain_types():
    text = str(report())
    assert (
        "blocks.1.up" in text and "mx +3.0 dB" in text and "not finite" in text and "exact" in text and "25 %" in text
    )
    plain = json.loads(json.dumps(report().to_dict(), allow_nan=False))
    assert plain["own"]["blocks.0.up"]["grad_output"]["sqnr"] == "nan" and plain["step"] == 7
    assert report().best("blocks.0.up", "grad_output") is None and report().best("blocks.0.up", "weight") is None
    assert "No layer quantized" in str(FitReport(0, {}))


def test_of_many_layers_the_worst_are_shown_and_a_narrow_terminal_gets_what_matters():
    text = str(report(30, shown=4))
    assert text.count("not finite") == 4 and "The 4 of 90 with the lowest SQNR" in text
    console = Console(width=72, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(report())
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 72
    assert "would fit better" in shown and "SQNR" in shown and "no room for" in shown
