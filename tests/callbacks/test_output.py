"""What people see of monitors: TensorBoard's dashboard and heat maps, the table at the end, one place to log."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus import AmpPrecision, StepReport
from lightning_amp_plus.callbacks import (
    ActivationMonitor,
    Fp8CoverageMonitor,
    GradientMonitor,
    LossScaleMonitor,
    UpdateRatioMonitor,
)
from lightning_amp_plus.callbacks.layers import LayerHistory
from lightning_amp_plus.callbacks.monitor import Monitor
from lightning_amp_plus.callbacks.output import LayerTable, heat_map, layer_columns
from lightning_amp_plus.callbacks.readout import Measurement
from tests.support.models import TinyRegressor
from tests.support.training import fit


class Largest(Monitor):
    """The largest element of each parameter, after the step."""

    def __init__(self, every_n_steps: int | None = None, title: str = "largest") -> None:
        super().__init__(every_n_steps)
        self.title, self.seen = title, 0
        self.picture = LayerHistory(title)
        self.last: dict[str, float] = {}

    @override
    def see_step(self, report: StepReport, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.amax = torch.stack([p.detach().abs().amax() for p in parameters])
        self.seen += 1

    @override
    def measure(self) -> Sequence[Measurement]:
        return (Measurement(self.amax.unsqueeze(1), ("max",)),)

    @override
    def take(self, numbers: Sequence[Tensor], step: int) -> Mapping[str, float]:
        self.last = {f"p{row}": value for row, value in enumerate(numbers[0].flatten().tolist())}
        self.picture.add(step, self.last)
        return {f"precision/parameter_amax/{name}": value for name, value in self.last.items()}

    @override
    def layer_histories(self) -> Sequence[LayerHistory]:
        return (self.picture,)


def events(folder: str) -> EventAccumulator:
    accumulator = EventAccumulator(folder, {"images": 0, "tensors": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_gets_scalars_a_dashboard_and_a_heat_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = TensorBoardLogger(tmp_path)
    monitors = [LossScaleMonitor(every_n_steps=2), Largest(2)]
    fit(TinyRegressor(), AmpPrecision("16-mixed", loss_scale=8.0), logger=logger, callbacks=monitors)
    found = events(logger.log_dir)
    assert [event.step for event in found.Scalars("precision/parameter_amax/p0")] == list(range(1, 20, 2))
    assert [event.step for event in found.Scalars("precision/loss_scale")] == list(range(1, 20, 2))
    assert len(found.Images("precision/largest")) == 1 and len(
        found.Images("precision/largest")[0].encoded_image_string
    )
    layout = layout_pb2.Layout()
    layout.ParseFromString(found.Tensors(metadata.CONFIG_SUMMARY_TAG)[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts["largest parameter by layer"] == ["precision/parameter_amax/.*"]
    assert "scale" in charts and "zeros by layer" not in charts
    shown = capsys.readouterr().out
    assert "Last log point" in shown and "p0" in shown


def test_other_loggers_get_the_scalars_and_an_epoch_of_many_log_points_a_picture(tmp_path: Path) -> None:
    csv, board = CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")
    fit(TinyRegressor(), AmpPrecision("32-true"), logger=[csv, board], callbacks=[Largest(1)], max_epochs=2)
    csv.save()
    assert "precision/parameter_amax/p0" in Path(csv.log_dir, "metrics.csv").read_text()
    assert [event.step for event in events(board.log_dir).Images("precision/largest")] == [19, 39]


@pytest.mark.parametrize("kind", [ActivationMonitor, Fp8CoverageMonitor, GradientMonitor, UpdateRatioMonitor])
def test_every_monitor_of_layers_is_drawn_at_the_end_of_an_epoch(kind: type[Monitor], tmp_path: Path) -> None:
    monitor, board = kind(1), TensorBoardLogger(tmp_path)
    fit(TinyRegressor(), AmpPrecision("32-true"), logger=board, callbacks=[monitor], max_epochs=2)
    histories = monitor.layer_histories()
    assert histories
    for history in histories:
        assert [event.step for event in events(board.log_dir).Images(f"{history.group}/{history.title}")] == [19, 39]


def test_monitors_with_intervals_of_their_own_are_read_together_where_they_meet() -> None:
    often, seldom = Largest(2), Largest(6)
    fit(TinyRegressor(), AmpPrecision("32-true"), callbacks=[often, seldom])
    assert often.picture.steps == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19] and seldom.picture.steps == [5, 11, 17]
    assert often.seen == 10 and seldom.seen == 3


def test_a_heat_map_leaves_out_what_was_not_there_and_names_what_can_be_read() -> None:
    history = LayerHistory("ratio")
    for step in (0, 10, 30):
        history.add(step, {f"layer{i}": (math.nan if i == 1 else float(i + step)) for i in range(4)})
    axes = heat_map(history).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"layer{i}" for i in range(4)]
    mesh = axes.collections[0]
    assert mesh.get_array().mask[1].all() and not mesh.get_array().mask[[0, 2, 3]].any()
    assert axes.yaxis_inverted()  # the first layer on top
    many = LayerHistory("ratio")
    for step in (0, 1):
        many.add(step, {f"layer{i}": 1.0 for i in range(100)})
    assert "100 layers, layer0 to layer99" in heat_map(many).axes[0].get_ylabel()


def test_of_many_layers_the_table_shows_the_ends_of_each_column() -> None:
    columns = {
        "ratio": {f"layer{i}": float(i) for i in range(100)},
        "amax": {f"layer{i}": float((i * 37) % 100) for i in range(90)},
    }
    table = LayerTable(columns)
    names = [row[0] for row in table.rows[1:]]
    assert {"layer0", "layer99"} <= set(names) and len(names) <= 30 and "of 100 layers" in table.notes[0]
    assert names == sorted(names, key=lambda name: int(name.removeprefix("layer")))
    assert LayerTable({"x": {"a": 0.5, "b": math.nan}}).rows == [["layer", "x"], ["a", "0.5"], ["b", "-"]]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_table_keeps_the_layers_and_leaves_out_columns_where_there_is_no_room(width: int) -> None:
    keys = ("update_ratio", "rounded_away", "grad_norm", "zero_grad_fraction", "activation_amax", "parameter_amax")
    values = {f"precision/{key}/blocks.10.attention.query_key_value": 0.00123 for key in keys}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(LayerTable(layer_columns(values)))
    text = console.export_text()
    assert "blocks.10.attention.query_key_value" in text and "update ratio" in text
    assert ("no room for" in text) == (width < 140) and max(map(len, text.splitlines())) <= width


def test_the_ends_of_a_pictures_colors_can_be_given() -> None:
    shares = LayerHistory("share", ["a"], [0, 1], [[0.5], [0.5]], ceiling=1.0, floor=0.0)
    assert heat_map(shares).axes[0].collections[0].get_clim() == (0.0, 1.0)
