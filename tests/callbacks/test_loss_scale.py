"""LossScaleMonitor: what it logs, when, where to, what it warns about, and what it costs."""

from __future__ import annotations

import csv
import math
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import AmpPrecision, LossScale
from lightning_amp_plus.callbacks import LossScaleMonitor, precision_callbacks
from tests.support.faults import INF, INF_LOSS, NO_FAULT
from tests.support.models import TinyRegressor, adamw, fused_adamw, sgd
from tests.support.training import amp_fp16, fit, loader, make_trainer, regression_batches, reports_of, stock_fp16

SCALE_KEYS = {"precision/loss_scale", "precision/scale_growths", "precision/scale_backoffs"}
KEYS = {"precision/skip_rate", "precision/skip_rate_total", "precision/skipped_steps", "precision/grad_norm"}
CHART = "precision/loss_scale_log2"


class ListLogger(Logger):
    """Keeps what it is given, as it is given."""

    name = "list"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if any(key.startswith("precision/") for key in metrics):
            self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def steps(self) -> list[int | None]:
        return [step for step, _ in self.rows]

    def column(self, key: str) -> list[Any]:
        return [row.get(f"precision/{key}") for _, row in self.rows]


def fp16(**arguments: Any) -> AmpPrecision:
    return AmpPrecision("16-mixed", loss_scale=LossScale(init=8.0, growth_interval=2), **arguments)


def watch(
    model: L.LightningModule, plugin: AmpPrecision, monitor: LossScaleMonitor, batches: int = 20, **arguments: Any
) -> tuple[ListLogger, L.Trainer]:
    logger = ListLogger()
    trainer = fit(model, plugin, regression_batches(batches), logger=logger, callbacks=[monitor], **arguments)
    return logger, trainer


# ---------------------------------------------------------------- what is logged, and when


@pytest.mark.parametrize("make_optimizer", [sgd, adamw, fused_adamw])
def test_logs_what_the_reports_say(make_optimizer):
    plugin = fp16()
    reports = reports_of(plugin)
    model = TinyRegressor(make_optimizer, faults={2: INF, 7: INF_LOSS})
    logger, _ = watch(model, plugin, LossScaleMonitor(every_n_steps=5, window=4), batches=10)

    assert logger.steps == [4, 9]
    skips = [report.outcome == "skipped_overflow" for report in reports]
    assert logger.column("skip_rate") == [sum(skips[1:5]) / 4, sum(skips[6:10]) / 4] == [0.25, 0.25]
    assert logger.column("skip_rate_total") == [0.2, 0.2]
    assert logger.column("skipped_steps") == [1.0, 2.0]
    assert logger.column("loss_scale") == [reports[4].next_scale, reports[9].next_scale]
    assert logger.column("scale_backoffs") == [1.0, 2.0]
    assert logger.column("scale_growths") == [sum(r.next_scale > r.scale for r in reports[:n]) for n in (5, 10)]
    assert logger.column("grad_norm") == [reports[4].grad_norm, reports[9].grad_norm]
    assert all(norm > 0 for norm in logger.column("grad_norm"))


def test_logs_python_floats_under_the_exact_keys():
    logger, _ = watch(TinyRegressor(fused_adamw), fp16(), LossScaleMonitor(every_n_steps=5), batches=5)
    (_, row), *more = logger.rows
    assert not more
    assert row.keys() == KEYS | SCALE_KEYS
    assert {type(value) for value in row.values()} == {float}


@pytest.mark.parametrize("policy", ["bf16-mixed", "32-true", "bf16-true"])
@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw])
def test_without_a_loss_scale_only_skips_and_norm_are_logged(policy, make_optimizer):
    model = TinyRegressor(make_optimizer, faults={2: INF})
    logger, trainer = watch(model, AmpPrecision(policy), LossScaleMonitor(every_n_steps=5), batches=5)
    assert {key for _, row in logger.rows for key in row} == KEYS
    assert logger.column("skip_rate") == [0.2]
    assert logger.column("skipped_steps") == [1.0]
    assert trainer.progress_bar_metrics == {"skip_rate": 0.2}


def test_without_a_finite_check_the_norm_is_there_and_nothing_counts_as_skipped():
    plugin = AmpPrecision("bf16-mixed", check_finite=False)
    logger, _ = watch(TinyRegressor(sgd), plugin, LossScaleMonitor(every_n_steps=5), batches=5)
    assert logger.column("skip_rate") == [0.0]
    assert logger.column("grad_norm")[0] > 0


def test_a_static_scale_is_logged_and_never_changes():
    plugin = AmpPrecision("16-mixed", loss_scale=64.0)
    logger, _ = watch(TinyRegressor(fused_adamw, faults={3: INF}), plugin, LossScaleMonitor(every_n_steps=5), batches=5)
    assert logger.column("loss_scale") == [64.0]
    assert logger.column("scale_backoffs") == [0.0]


def test_interval_defaults_to_that_of_the_trainer():
    logger, _ = watch(TinyRegressor(), fp16(), LossScaleMonitor(), log_every_n_steps=4)
    assert logger.steps == [3, 7, 11, 15, 19]


def test_nothing_is_logged_or_subscribed_where_logging_is_off():
    plugin = fp16()
    logger, trainer = watch(TinyRegressor(), plugin, LossScaleMonitor(), log_every_n_steps=0)
    assert logger.rows == []
    assert not any(key.startswith("precision/") for key in trainer.callback_metrics)


def test_what_is_left_at_the_end_is_logged_once_under_the_last_step():
    logger, _ = watch(TinyRegressor(), fp16(), LossScaleMonitor(every_n_steps=8), batches=10, max_epochs=2)
    assert logger.steps == [7, 15, 19]


def test_accumulating_micro_batches_are_no_log_points():
    logger, _ = watch(TinyRegressor(), fp16(), LossScaleMonitor(every_n_steps=2), batches=12, accumulate_grad_batches=3)
    assert logger.steps == [1, 3]


def test_windows_without_a_backward_count_nowhere():
    class Silent(TinyRegressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx % 2 else None

    logger, _ = watch(Silent(faults={1: INF}), fp16(), LossScaleMonitor(every_n_steps=4), batches=8)
    assert logger.column("skip_rate") == [0.5, 0.25]


def test_manual_optimization_is_logged_by_optimizer_steps():
    model = TinyRegressor(manual=True, accumulate=2, faults={2: INF})
    logger, _ = watch(model, fp16(), LossScaleMonitor(every_n_steps=3), batches=12)
    assert logger.column("skipped_steps") == [1.0, 1.0]
    assert logger.steps == [5, 11]  # loggers count batches


@pytest.mark.parametrize("every_n_steps", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 100])
def test_several_optimizers(every_n_steps, window):
    class Two(TinyRegressor):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for part, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
                loss = self.loss(batch)
                self.toggle_optimizer(optimizer)
                self.manual_backward(loss * math.inf if part is self.first and batch_idx == 1 else loss)
                self.untoggle_optimizer(optimizer)
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return adamw(self.first.parameters()), fused_adamw(self.second.parameters())

    plugin = fp16()
    monitor = LossScaleMonitor(every_n_steps=every_n_steps, window=window)
    logger, _ = watch(Two(manual=True), plugin, monitor, batches=6)
    assert logger.rows[-1][1]["precision/skipped_steps"] == plugin.history.skipped == 1
    assert logger.rows[-1][1]["precision/skip_rate_total"] == 1 / 12
    assert logger.rows[-1][1]["precision/loss_scale"] == plugin.scaler.get_scale()
    # Batches that stepped, as Lightning counts for its loggers; not the steps of both optimizers.
    assert logger.steps == {1: [0, 1, 2, 3, 4, 5], 2: [1, 3, 5], 3: [2, 5]}[every_n_steps]
    assert all(norm is not None for norm in logger.column("grad_norm"))


def test_rate_looks_back_on_its_window_only():
    model = TinyRegressor(faults={0: INF, 1: INF})
    logger, _ = watch(model, fp16(), LossScaleMonitor(every_n_steps=2, window=4), batches=8)
    assert logger.column("skip_rate") == [1.0, 0.5, 0.0, 0.0]
    assert logger.column("skip_rate_total") == [1.0, 0.5, 2 / 6, 0.25]


def test_a_second_fit_goes_on_counting():
    plugin, monitor, logger = fp16(), LossScaleMonitor(every_n_steps=4), ListLogger()
    model = TinyRegressor(faults={1: INF})
    trainer = make_trainer(plugin, callbacks=[monitor], logger=logger)
    trainer.fit(model, loader(regression_batches(4)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(regression_batches(4)))
    assert logger.column("skip_rate") == [0.25, 0.125]
    assert logger.column("skipped_steps") == [1.0, 1.0]


def test_a_run_with_another_plugin_starts_from_zero():
    monitor = LossScaleMonitor(every_n_steps=4)
    watch(TinyRegressor(faults={1: INF}), fp16(), monitor, batches=8)
    logger, _ = watch(TinyRegressor(), fp16(), monitor, batches=4)
    assert logger.column("skip_rate") == [0.0]


def test_fast_dev_run_goes_through_a_log_point():
    monitor = LossScaleMonitor(histogram=True)
    trainer = fit(TinyRegressor(), fp16(), fast_dev_run=3, logger=True, callbacks=[monitor])
    assert trainer.callback_metrics["precision/loss_scale"].item() == 16.0


# ---------------------------------------------------------------- resume


def test_windowed_rate_goes_on_after_a_resume(tmp_path):
    faults = {3: INF, 8: INF, 9: INF, 13: INF}
    whole, _ = watch(TinyRegressor(faults=faults), fp16(), LossScaleMonitor(5, window=12), batches=10, max_epochs=2)

    first = fit(
        TinyRegressor(faults=faults), fp16(), regression_batches(10), callbacks=[LossScaleMonitor(5, window=12)]
    )
    first.save_checkpoint(tmp_path / "half.ckpt")
    later = TinyRegressor(faults={step - 10: fault for step, fault in faults.items() if step >= 10})
    logger = ListLogger()
    second = make_trainer(fp16(), callbacks=[LossScaleMonitor(5, window=12)], logger=logger, max_epochs=2)
    second.fit(later, loader(regression_batches(10)), ckpt_path=tmp_path / "half.ckpt")
    assert logger.rows == whole.rows[2:]
    assert logger.column("skip_rate") == [4 / 12, 3 / 12]


def test_saving_between_log_points_keeps_what_was_not_logged_yet():
    class Save(L.Callback):
        saved: dict[str, Any]

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                self.saved = monitor.state_dict()

    monitor, save, logger = LossScaleMonitor(every_n_steps=5), Save(), ListLogger()
    model = TinyRegressor(fused_adamw, faults={1: INF})
    fit(model, fp16(), regression_batches(8), callbacks=[monitor, save], logger=logger)
    assert save.saved == {"outcomes": [0, 2, 0], "counted": 3}
    assert logger.steps == [4, 7]
    assert logger.column("skipped_steps") == [1.0, 1.0]


def test_a_shorter_window_takes_the_newest_part_of_a_saved_one():
    monitor = LossScaleMonitor(window=2)
    monitor.load_state_dict({"outcomes": [2, 2, 0, 1], "counted": 4})
    assert monitor.state_dict() == {"outcomes": [0, 1], "counted": 4}


# ---------------------------------------------------------------- where it goes


def test_users_can_monitor_the_keys(tmp_path):
    checkpoint = ModelCheckpoint(
        tmp_path,
        monitor="precision/loss_scale",
        mode="max",
        save_top_k=1,
        every_n_train_steps=4,
        filename="best-{step}",
    )
    stop = EarlyStopping("precision/skip_rate_total", patience=1, check_on_train_epoch_end=True)
    callbacks = [LossScaleMonitor(every_n_steps=4), checkpoint, stop]
    trainer = fit(
        TinyRegressor(), fp16(), regression_batches(8), callbacks=callbacks, enable_checkpointing=True, max_epochs=5
    )
    assert checkpoint.best_model_score.item() == trainer.callback_metrics["precision/loss_scale"].item()
    assert trainer.current_epoch < 5
    assert all(value.device.type == "cpu" for value in trainer.callback_metrics.values())
    assert trainer.logged_metrics.keys() >= KEYS | SCALE_KEYS


def test_works_without_a_logger():
    trainer = fit(TinyRegressor(), fp16(), callbacks=[LossScaleMonitor(every_n_steps=5, histogram=True)], logger=False)
    assert trainer.callback_metrics.keys() >= KEYS | SCALE_KEYS


def test_csv_logger_gets_every_log_point(tmp_path):
    fit(TinyRegressor(), fp16(), callbacks=precision_callbacks("full", 5), logger=CSVLogger(tmp_path, "", "run"))
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    rows = [row for row in rows if row["precision/loss_scale"]]
    assert [int(row["step"]) for row in rows] == [4, 9, 14, 19]
    assert float(rows[0]["precision/loss_scale"]) == 32.0


def events(folder: Path) -> Any:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulators.EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0}).Reload()


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_tensorboard_gets_scalars_and_a_histogram_an_epoch(tmp_path, make_optimizer):
    plugin = fp16()
    reports = reports_of(plugin)
    logger = TensorBoardLogger(tmp_path, "", "run")
    model = TinyRegressor(make_optimizer, faults={4: INF})
    fit(model, plugin, regression_batches(9), callbacks=precision_callbacks("full", 5), logger=logger, max_epochs=2)

    log = events(tmp_path / "run")
    assert [(event.step, event.value) for event in log.Scalars("precision/loss_scale")] == [
        (step, reports[step].next_scale) for step in (4, 9, 14, 17)
    ]
    charts = log.Histograms(CHART)
    assert [chart.step for chart in charts] == [8, 17]
    for chart, windows in zip(charts, (reports[:9], reports[9:]), strict=True):
        value = chart.histogram_value
        found = {edge - 0.5: count for edge, count in zip(value.bucket_limit, value.bucket, strict=True) if count}
        assert found == Counter(math.log2(report.next_scale) for report in windows)


def test_light_level_and_runs_without_a_scale_write_no_histogram(tmp_path):
    for number, (plugin, level) in enumerate([(fp16(), "light"), (AmpPrecision("bf16-mixed"), "full")]):
        fit(
            TinyRegressor(),
            plugin,
            callbacks=precision_callbacks(level, 5),
            logger=TensorBoardLogger(tmp_path, "", str(number)),
        )
        assert events(tmp_path / str(number)).Tags()["histograms"] == []


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bar_shows_scale_and_rate_through_validation_beside_the_users_own(bar):
    shown: list[dict[str, Any]] = []

    class Logs(TinyRegressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("mine", loss, prog_bar=True)
            return loss

    class Bar(bar):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            shown.append(self.get_metrics(trainer, pl_module))

    monitor = LossScaleMonitor(every_n_steps=4)
    trainer = make_trainer(
        fp16(),
        callbacks=[monitor, Bar()],
        enable_progress_bar=True,
        num_sanity_val_steps=1,
        val_check_interval=2,
        max_epochs=2,
    )
    data = loader(regression_batches(6))
    trainer.fit(Logs(), data, data)
    assert all("loss_scale" not in metrics for metrics in shown[:3])
    assert all({"loss_scale", "skip_rate"} <= metrics.keys() for metrics in shown[3:])
    assert all("mine" in metrics for metrics in shown[1:])
    assert shown[3]["loss_scale"] == 32.0
    assert all(type(metrics["loss_scale"]) is float for metrics in shown[3:])


def test_progress_bar_can_be_left_alone():
    trainer = fit(TinyRegressor(), fp16(), callbacks=[LossScaleMonitor(every_n_steps=4, prog_bar=False)])
    assert trainer.progress_bar_metrics == {}


# ---------------------------------------------------------------- warnings and errors


def warnings_of(caught: Any, words: str) -> list[str]:
    return [str(warning.message) for warning in caught if words in str(warning.message)]


def every_other(fault: Any) -> dict[int, Any]:
    return {step: fault for step in range(0, 40, 2)}


@pytest.mark.parametrize(
    ("fault", "origin", "remedy"),
    [(INF, "backward", "growth_interval"), (INF_LOSS, "forward", "no loss scale can mend")],
)
@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw])
def test_warns_once_when_too_many_windows_are_skipped(recwarn, fault, origin, remedy, make_optimizer):
    model = TinyRegressor(make_optimizer, faults=every_other(fault))
    watch(model, fp16(), LossScaleMonitor(every_n_steps=5, window=10))
    (message,) = warnings_of(recwarn, "of the last")
    assert "5 of the last 10 windows (50.0%)" in message
    assert "up to step 9" in message
    assert f"in 5 of them the overflow began in the {origin} pass" in message
    assert remedy in message


def test_warning_without_a_loss_scale_does_not_speak_of_one(recwarn):
    model = TinyRegressor(faults=every_other(INF))
    watch(model, AmpPrecision("bf16-mixed"), LossScaleMonitor(every_n_steps=5, window=10))
    (message,) = warnings_of(recwarn, "of the last")
    assert "learning rate" in message
    assert "scale" not in message


@pytest.mark.parametrize("monitor", [LossScaleMonitor(5, window=10, skip_rate_threshold=0.5), LossScaleMonitor(5)])
def test_no_warning_at_the_threshold_or_before_the_window_is_full(recwarn, monitor):
    watch(TinyRegressor(faults=every_other(INF)), fp16(), monitor)
    assert not warnings_of(recwarn, "of the last")


def test_warns_once_when_the_scale_comes_near_its_floor(recwarn):
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=64.0, min=2.0, growth_interval=4))
    watch(TinyRegressor(faults={step: INF for step in range(4)}), plugin, LossScaleMonitor(every_n_steps=1))
    (message,) = warnings_of(recwarn, "floor")
    assert "came down to 8 by step 2" in message
    assert "LossScale(min=2)" in message
    assert "bf16-mixed" in message


def test_a_visit_near_the_floor_between_log_points_is_seen(recwarn):
    plugin = AmpPrecision("16-mixed", loss_scale=LossScale(init=16.0, min=2.0, growth_interval=2))
    watch(TinyRegressor(fused_adamw, faults={0: INF}), plugin, LossScaleMonitor(every_n_steps=10))
    assert len(warnings_of(recwarn, "came down to 8")) == 1


@pytest.mark.parametrize("scale", [LossScale(init=2.0, min=2.0, growth_interval=4), 2.0])
def test_no_floor_warning_where_the_run_was_put_there(recwarn, scale):
    watch(TinyRegressor(), AmpPrecision("16-mixed", loss_scale=scale), LossScaleMonitor(every_n_steps=1))
    assert not warnings_of(recwarn, "floor")


def test_another_precision_plugin_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"MixedPrecision.*'16-mixed'.*plugins=\[AmpPrecision"):
        fit(TinyRegressor(), stock_fp16(), callbacks=[LossScaleMonitor()])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every_n_steps": 0}, r"every_n_steps=0\).*at least 1"),
        ({"every_n_steps": True}, "every_n_steps=True"),
        ({"window": 0}, r"window=0\).*at least 1"),
        ({"window": None}, "window=None"),
        ({"skip_rate_threshold": 1.5}, r"skip_rate_threshold=1.5\).*between 0 and 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        LossScaleMonitor(**arguments)


def test_unknown_level_is_refused():
    with pytest.raises(ValueError, match=r"level='loud'.*'light' or 'full'"):
        precision_callbacks("loud")


def test_suite_passes_its_arguments_on():
    (light, *others), (full, *_) = precision_callbacks(every_n_steps=7), precision_callbacks("full")
    assert all(callback.every_n_steps == 7 for callback in others)
    assert (light.every_n_steps, light.histogram) == (7, False)
    assert (full.every_n_steps, full.histogram) == (None, True)


# ---------------------------------------------------------------- what it costs


class Meter(TorchDispatchMode, L.Callback):
    """Operations and device-to-host transfers of each training batch, the monitor's hooks included (it comes before).

    ``tolist`` dispatches nothing, so it is counted where Python calls it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.ops: list[int] = []
        self.transfers: list[int] = []
        self._now = [0, 0]
        whole = torch.Tensor.tolist
        monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: self._transfer() or whole(tensor))

    def _transfer(self) -> None:
        self._now[1] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._now[0] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            self._now[1] += 1
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, *_: Any) -> None:
        self._now = [0, 0]

    def on_train_batch_end(self, *_: Any) -> None:
        self.ops.append(self._now[0])
        self.transfers.append(self._now[1])


class Quiet(TinyRegressor):
    """Keeps no losses, which would transfer in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, self.faults.get(batch_idx, NO_FAULT))


def measure(
    make_optimizer: Any, plugin: AmpPrecision, callbacks: list[L.Callback], monkeypatch: Any, faults: Any = None
) -> Meter:
    with monkeypatch.context() as patch:
        meter = Meter(patch)
        trainer = make_trainer(plugin, callbacks=[*callbacks, meter], log_every_n_steps=50)
        with meter:
            trainer.fit(Quiet(make_optimizer, faults=faults), loader(regression_batches(12)))
    return meter


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw, fused_adamw])
def test_between_log_points_nothing_runs_and_nothing_is_transferred(monkeypatch, precision, make_optimizer):
    def plugin() -> AmpPrecision:
        return fp16() if precision == "16-mixed" else AmpPrecision(precision)

    bare = measure(make_optimizer, plugin(), [], monkeypatch)
    with_it = measure(make_optimizer, plugin(), [LossScaleMonitor(every_n_steps=5, histogram=True)], monkeypatch)
    between = [step for step in range(12) if (step + 1) % 5]
    assert len(bare.ops) == len(with_it.ops) == 12
    assert [with_it.ops[step] for step in between] == [bare.ops[step] for step in between]
    assert [with_it.transfers[step] for step in between] == [bare.transfers[step] for step in between]
    fused = make_optimizer is fused_adamw
    # A log point: one transfer for all that the device alone knew; a verdict read on the host brings the norm along.
    assert [with_it.transfers[step] for step in (4, 9)] == [bare.transfers[step] + fused for step in (4, 9)]
    if make_optimizer is not adamw:  # on the CPU it reads its own step counters
        assert bare.transfers == [0 if fused else 1] * 12


@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw])
def test_overflows_cost_at_most_one_transfer_more_at_the_log_point(monkeypatch, make_optimizer):
    faults = {1: INF, 2: INF_LOSS, 6: INF, 7: INF}
    bare = measure(make_optimizer, fp16(), [], monkeypatch, faults)
    with_it = measure(make_optimizer, fp16(), [LossScaleMonitor(every_n_steps=5)], monkeypatch, faults)
    log_points = (4, 9)
    assert all(with_it.transfers[step] == bare.transfers[step] for step in range(12) if step not in log_points)
    assert all(with_it.transfers[step] <= bare.transfers[step] + 1 for step in log_points)


def test_users_progress_bar_values_are_not_converted_again(monkeypatch):
    class Logs(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("mine", loss, prog_bar=True)
            return loss

    def run(callbacks: list[L.Callback]) -> list[int]:
        with monkeypatch.context() as patch:
            meter = Meter(patch)
            with meter:
                fit(
                    Logs(fused_adamw),
                    fp16(),
                    regression_batches(6),
                    callbacks=[*callbacks, meter],
                    log_every_n_steps=50,
                )
        return meter.transfers

    assert run([LossScaleMonitor(every_n_steps=3)]) == [n + (step in (2, 5)) for step, n in enumerate(run([]))]


def test_what_waits_between_log_points_is_bounded():
    class Look(L.Callback):
        most = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.most = max(self.most, len(monitor._waiting))

    monitor, look = LossScaleMonitor(every_n_steps=1000, window=6), Look()
    logger = ListLogger()
    model = TinyRegressor(fused_adamw, faults={16: INF})
    fit(model, amp_fp16(), callbacks=[monitor, look], logger=logger)
    assert look.most == 6
    assert logger.column("skip_rate") == [1 / 6]
    assert logger.column("skip_rate_total") == [1 / 20]
