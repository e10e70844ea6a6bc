"""GradientMonitor: every number against the gradients themselves, what it warns of, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import GradientMonitor, LossScaleMonitor
from lightning_amp_plus.callbacks.gradient_layers import OUTSIDE, OptimizerGradients
from lightning_amp_plus.metrics.exponents import LOWEST
from lightning_amp_plus.scaling.gradients import dense_gradients
from tests.support.faults import INF, NAN
from tests.support.models import TinyRegressor, Wrapping, adamw, fused_adamw, sgd
from tests.support.training import amp_fp16, fit, loader, make_trainer, regression_batches, stock_fp16


class Rows(Logger):
    """Keeps what it is given."""

    name = "rows"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, {k: v for k, v in metrics.items() if k.startswith("precision/")}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def column(self, key: str) -> list[float | None]:
        return [row.get(f"precision/{key}") for _, row in self.rows]


class Truth(L.Callback):
    """The gradients that each optimizer saw, by layer, before clipping; in FP64."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        layers: dict[str, list[Tensor]] = {}
        for name, parameter in pl_module.named_parameters():
            if id(parameter) in mine:
                for gradient in dense_gradients([parameter]):
                    layer = name.replace("_orig_mod.", "").rpartition(".")[0] or "(model)"
                    layers.setdefault(layer, []).append(gradient.detach().double().flatten().clone())
        self.seen.append({layer: torch.cat(parts) for layer, parts in layers.items()})


def look(
    model: L.LightningModule, plugin: AmpPrecision, monitor: GradientMonitor | None = None, **arguments: Any
) -> tuple[Rows, list[dict[str, Tensor]], GradientMonitor]:
    rows, truth, monitor = Rows(), Truth(), monitor or GradientMonitor(every_n_steps=1)
    callbacks = [truth, monitor, *arguments.pop("callbacks", [])]
    fit(model, plugin, arguments.pop("batches", regression_batches(4)), callbacks=callbacks, logger=rows, **arguments)
    return rows, truth.seen, monitor


def agree(row: dict[str, float], truth: dict[str, Tensor], scale: float = 1.0, rel: float = 1e-5) -> None:
    """A row of the log says what the gradients of its window were."""
    for name, gradient in truth.items():
        assert row[f"precision/grad_norm/{name}"] == pytest.approx(float(gradient.norm()), rel=rel)
        assert row[f"precision/zero_grad_fraction/{name}"] == pytest.approx(float((gradient == 0).double().mean()))
    assert {k.rpartition("/")[2] for k in row if k.startswith("precision/grad_norm/")} == truth.keys()
    whole = torch.cat(list(truth.values()))
    assert row["precision/grad_norm"] == pytest.approx(float(whole.norm()), rel=rel)
    lost = (whole != 0) & (whole.abs() * scale <= 2.0**-25)
    assert row["precision/fp16_underflow_fraction"] == pytest.approx(float(lost.sum() / (whole != 0).sum()))
    assert row["precision/nonfinite_gradients"] == 0


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("make_optimizer", [sgd, adamw, fused_adamw])
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 1e-3}])
@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed", "32-true", "bf16-true"])
def test_what_is_logged_is_what_the_optimizer_was_about_to_consume(make_optimizer, arguments, policy):
    plugin = amp_fp16() if policy == "16-mixed" else AmpPrecision(policy)
    rows, truth, monitor = look(TinyRegressor(make_optimizer), plugin, batches=regression_batches(7), **arguments)
    assert len(rows.rows) == len(truth) == (3 if "accumulate_grad_batches" in arguments else 7)
    for (_, row), gradients in zip(rows.rows, truth, strict=True):
        agree(row, gradients, 1024.0 if policy == "16-mixed" else 1.0)
        assert {type(value) for value in row.values()} == {float}
    assert monitor.last is not None and monitor.last.step == rows.rows[-1][0]
    assert monitor.last.scale == (1024.0 if policy == "16-mixed" else 1.0)
    assert set(monitor.last.norms) == {"first", "second"}
    assert monitor.last.histograms.sum() == monitor.last.histogram.sum()


def test_master_weights_show_the_gradients_in_fp32():
    plugin = AmpPrecision(PrecisionPolicy("bf16", params="bf16", master_weights=True))
    rows, truth, _ = look(TinyRegressor(adamw), plugin)
    for (_, row), gradients in zip(rows.rows, truth, strict=True):
        agree(row, gradients)


@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed"])
def test_unchecked_and_manual_windows_are_looked_at_too(policy):
    model = TinyRegressor(manual=True, accumulate=2, clip=(1e-3, "norm"))
    plugin = amp_fp16() if policy == "16-mixed" else AmpPrecision(policy, check_finite=False)
    rows, truth, _ = look(model, plugin, batches=regression_batches(8))
    assert [step for step, _ in rows.rows] == [1, 3, 5, 7] and len(truth) == 4
    for (_, row), gradients in zip(rows.rows, truth, strict=True):
        agree(row, gradients, 1024.0 if policy == "16-mixed" else 1.0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules_keep_their_names(backend):
    class Compiled(TinyRegressor):
        def __init__(self) -> None:
            super().__init__(fused_adamw)
            self.first = torch.compile(self.first, backend=backend)

    rows, truth, _ = look(Compiled(), AmpPrecision("bf16-mixed"))
    assert truth[0].keys() == {"first", "second"}
    for (_, row), gradients in zip(rows.rows, truth, strict=True):
        agree(row, gradients)


class Odd(L.LightningModule):
    """Frozen, unused, tied, empty and own parameters, an embedding, and a layer used in every second step only."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 8, sparse=sparse)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.tied = nn.Linear(8, 50, bias=False)
        self.tied.weight = self.head.weight
        self.nothing = nn.Parameter(torch.zeros(0))
        self.gain = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.frozen(self.embedding(torch.tensor([3, 3, 7 + batch_idx]))) * self.gain
        hidden = self.sometimes(hidden) if batch_idx % 2 else hidden
        return (self.head(hidden) + self.tied(hidden.relu())).square().mean() + self.nothing.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed"])
def test_odd_parameters(sparse, policy):
    plugin = amp_fp16() if policy == "16-mixed" else AmpPrecision(policy)
    rows, truth, monitor = look(Odd(sparse), plugin)
    for number, ((_, row), gradients) in enumerate(zip(rows.rows, truth, strict=True)):
        agree(row, gradients, 1024.0 if policy == "16-mixed" else 1.0)
        used = {"embedding", "head", "(model)"} | ({"sometimes"} if number % 2 else set())
        assert {name for name in monitor.last.norms} >= used - {"sometimes"} and gradients.keys() == used
    assert rows.column("zero_grad_fraction/embedding")[0] == (0.0 if sparse else pytest.approx(48 / 50))


class TwoOptimizers(TinyRegressor):
    """Each optimizer has a layer of its own and both have the first bias."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            if number == 1 and batch_idx == 2:
                continue
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return sgd(self.first.parameters()), sgd([self.first.bias, *self.second.parameters()])


def test_the_gradients_of_an_optimizer_that_wraps_another_are_seen():
    rows, truth, _ = look(TinyRegressor(Wrapping), AmpPrecision("32-true"))
    assert len(rows.rows) == len(truth) == 4
    for (_, row), gradients in zip(rows.rows, truth, strict=True):
        agree(row, gradients)


def test_several_optimizers_show_each_layer_once_and_the_norm_of_the_last():
    rows, truth, _ = look(TwoOptimizers(manual=True), AmpPrecision("bf16-mixed"))
    by_window = [[truth[0], truth[1]], [truth[2], truth[3]], [truth[4]], [truth[5], truth[6]]]
    for (_, row), (first, *second) in zip(rows.rows, by_window, strict=True):
        assert row["precision/grad_norm/first"] == pytest.approx(float(first["first"].norm()), rel=1e-5)
        last = torch.cat(list((second[0] if second else first).values()))
        assert row["precision/grad_norm"] == pytest.approx(float(last.norm()), rel=1e-5)
        assert ("precision/grad_norm/second" in row) == bool(second)


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer)


class NewHead(L.Callback):
    """Gives the model another last layer, and one of a new name, in the second epoch."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.second = nn.Sequential(nn.Linear(8, 1))
            trainer.optimizers[0].add_param_group({"params": list(pl_module.second.parameters())})


@pytest.mark.parametrize("policy", ["16-mixed", "32-true"])
def test_layers_that_are_unfrozen_while_training_join(policy):
    plugin = amp_fp16() if policy == "16-mixed" else AmpPrecision(policy)
    rows, truth, _ = look(TinyRegressor(), plugin, callbacks=[Thaw()], batches=regression_batches(2), max_epochs=2)
    assert [set(gradients) for gradients in truth] == [{"second"}] * 2 + [{"first", "second"}] * 2
    for (_, row), gradients in zip(rows.rows, truth, strict=True):
        agree(row, gradients, plugin.scaler.get_scale() if plugin.scaler else 1.0)


def test_a_layer_of_a_name_that_was_not_there_counts_in_the_norm():
    _, truth, monitor = look(
        TinyRegressor(), AmpPrecision("32-true"), callbacks=[NewHead()], batches=regression_batches(2), max_epochs=2
    )
    assert set(truth[-1]) == {"first", "second.0"}
    assert monitor.last is not None and set(monitor.last.norms) == {"first", OUTSIDE}
    assert monitor.last.norm == pytest.approx(float(torch.cat(list(truth[-1].values())).norm()), rel=1e-5)


def test_parameters_of_nobody_count_in_the_norm():
    outside = nn.Parameter(torch.ones(3))

    class Outside(TinyRegressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + outside.square().sum()

        def configure_optimizers(self) -> Any:
            return sgd([*self.parameters(), outside])

    rows, _, monitor = look(Outside(), AmpPrecision("32-true"))
    assert monitor.last is not None and OUTSIDE in monitor.last.norms
    parts = [value for key, value in rows.rows[0][1].items() if key.startswith("precision/grad_norm/")]
    assert rows.rows[0][1]["precision/grad_norm"] == pytest.approx(math.hypot(*parts))


@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw])
@pytest.mark.parametrize(("fault", "nans", "infs"), [(INF, False, True), (NAN, True, False)])
def test_nonfinite_gradients_are_counted_by_layer(make_optimizer, fault, nans, infs):
    model = TinyRegressor(make_optimizer, faults={3: fault})
    rows, truth, monitor = look(model, amp_fp16(), GradientMonitor(every_n_steps=1))
    bad = sum(int((~gradient.isfinite()).sum()) for gradient in truth[3].values())
    assert rows.column("nonfinite_gradients") == [0, 0, 0, bad] and bad > 0
    assert bool(monitor.last.nans.get("first")) or infs
    assert "second" not in monitor.last.nans and "second" not in monitor.last.infs
    assert monitor.last.window is None and "precision/scale_window_low" not in rows.rows[-1][1]
    assert not math.isfinite(rows.rows[-1][1]["precision/grad_norm"])


# ---------------------------------------------------------------- beside LossScaleMonitor


@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw])
@pytest.mark.parametrize("first", [True, False])
def test_the_global_norm_is_logged_once_and_is_the_same(make_optimizer, first):
    class Said(GradientMonitor):
        def take(self, *args: Any) -> Any:
            values = super().take(*args)
            said.append("precision/grad_norm" in values)
            return values

    said: list[bool] = []
    alone, _, _ = look(TinyRegressor(make_optimizer), amp_fp16(), batches=regression_batches(6))
    monitor, rows = Said(every_n_steps=1), Rows()
    callbacks = [LossScaleMonitor(every_n_steps=2), monitor]
    fit(
        TinyRegressor(make_optimizer),
        amp_fp16(),
        regression_batches(6),
        callbacks=callbacks if first else callbacks[::-1],
        logger=rows,
    )
    assert rows.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-5)
    assert said == [True] * 6


# ---------------------------------------------------------------- clipping


def test_clip_share_is_that_of_the_windows_above_the_threshold():
    def slow(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=1e-6)

    batches = regression_batches(12)
    _, truth, _ = look(TinyRegressor(slow), AmpPrecision("32-true"), batches=batches)
    norms = [float(torch.cat(list(gradients.values())).norm()) for gradients in truth]
    threshold = sum(sorted(norms)[5:7]) / 2
    rows, _, _ = look(TinyRegressor(slow), AmpPrecision("32-true"), batches=batches, gradient_clip_val=threshold)
    above = [norm > threshold for norm in norms]
    assert rows.column("clip_share") == [sum(above[: n + 1]) / (n + 1) for n in range(12)]
    assert sum(above) == 6


def test_clip_share_of_values_is_that_of_the_elements():
    rows, truth, _ = look(
        TinyRegressor(), AmpPrecision("32-true"), gradient_clip_val=0.02, gradient_clip_algorithm="value"
    )
    for share, gradients in zip(rows.column("clip_share"), truth, strict=True):
        whole = torch.cat(list(gradients.values()))
        assert share == pytest.approx(float((whole.abs() > float(torch.tensor(0.02))).double().mean()))
    assert any(0 < share < 1 for share in rows.column("clip_share"))


def test_without_clipping_there_is_no_share():
    rows, _, _ = look(TinyRegressor(), AmpPrecision("32-true"))
    assert rows.column("clip_share") == [None] * 4


# ---------------------------------------------------------------- underflow and scales


class Small(L.LightningModule):
    """A linear layer and a large embedding; gradients are as small as the factor makes them."""

    def __init__(self, factor: float, sparse_rows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(400, 64)
        self.layer = nn.Linear(64, 64)
        self.factor, self.sparse_rows = factor, sparse_rows

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = torch.arange(8) if self.sparse_rows else torch.arange(400)
        output = self.layer(self.embedding(rows)).float()
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(batch_idx))
        return (output * weight).sum() * self.factor

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def warned(caught: Any, words: str) -> list[str]:
    return [str(warning.message) for warning in caught if words in str(warning.message)]


def test_underflow_is_warned_of_once_with_layer_share_scale_and_remedy(recwarn):
    plugin = AmpPrecision("16-mixed", loss_scale=4.0)
    _, truth, monitor = look(Small(2.0**-24), plugin)
    (message,) = warned(recwarn, "underflow in FP16")
    assert "at step 0, with a loss scale of 4" in message and "'embedding'" in message
    assert "raise LossScale(init=" in message and "Said once" in message
    zeros = float((truth[-1]["embedding"] == 0).double().mean())
    assert 0.05 < monitor.last.lost["embedding"] < 0.6 and zeros > 0.05


def test_underflow_names_bf16_where_no_larger_scale_fits(recwarn):
    class Spread(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.large(torch.ones(1, 4)).float().sum() * 12000.0

        def __init__(self) -> None:
            super().__init__(2.0**-24)
            self.large = nn.Linear(4, 4)

    look(Spread(), AmpPrecision("16-mixed", loss_scale=4.0))
    (message,) = warned(recwarn, "underflow in FP16")
    assert "larger loss scale would overflow" in message and "Rule('embedding', compute='bf16')" in message


def test_layers_that_are_all_zero_are_named_beside_others(recwarn):
    class Silenced(Small):
        def on_after_backward(self) -> None:
            self.layer.weight.grad.zero_()
            self.layer.bias.grad.zero_()

    look(Silenced(2.0**-24), AmpPrecision("16-mixed", loss_scale=4.0))
    (message,) = warned(recwarn, "underflow in FP16")
    assert "All gradients are zero in 'layer'" in message


@pytest.mark.parametrize("sparse_rows", [True, False])
def test_zeros_for_another_reason_warn_of_nothing(recwarn, sparse_rows):
    class Masked(Small):
        def __init__(self) -> None:
            super().__init__(1.0 / 64, sparse_rows)
            nn.utils.prune.random_unstructured(self.layer, "weight", amount=0.7)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.layer.bias.data[:32] = -100.0  # dead behind a ReLU
            rows = torch.arange(8) if self.sparse_rows else torch.arange(400)
            return self.layer(self.embedding(rows)).relu().float().square().mean()

    rows, _, monitor = look(Masked(), amp_fp16())
    assert max(rows.column("zero_grad_fraction/layer")) > 0.7
    assert not warned(recwarn, "underflow") and not warned(recwarn, "No loss scale")
    assert max(monitor.last.lost.values(), default=0.0) < 0.05


def test_the_same_small_gradients_in_bf16_warn_of_nothing_and_say_what_fp16_would_lose(recwarn):
    rows, truth, monitor = look(Small(2.0**-24), AmpPrecision("bf16-mixed"))
    assert not warned(recwarn, "underflow") and not warned(recwarn, "No loss scale")
    whole = torch.cat(list(truth[-1].values()))
    lost = float((whole.abs() <= 2.0**-25).double().mean())
    assert rows.column("fp16_underflow_fraction")[-1] == pytest.approx(lost, abs=0.02) and lost > 0.05
    window = monitor.last.window
    assert window is not None and window.exists
    assert (window.low, window.high) == (rows.column("scale_window_low")[-1], rows.column("scale_window_high")[-1])
    assert window.high == pytest.approx(65504 / float(whole.abs().max()))
    kept = float((whole.abs() * window.largest_power_of_two > 2.0**-25).double().mean())
    assert kept >= 0.998


def test_underflow_of_layers_in_bf16_by_rule_is_not_suspected(recwarn):
    policy = PrecisionPolicy("fp16", rules=[Rule("embedding", compute="bf16"), Rule("layer", compute="bf16")])
    look(Small(2.0**-24), AmpPrecision(policy, loss_scale=4.0))
    assert not warned(recwarn, "underflow")


def test_the_warning_can_be_turned_off(recwarn):
    look(Small(2.0**-24), AmpPrecision("16-mixed", loss_scale=4.0), GradientMonitor(1, underflow_threshold=1.0))
    assert not warned(recwarn, "underflow in FP16")


class Apart(L.LightningModule):
    """Two layers whose gradients are 2^50 apart: no loss scale keeps both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = nn.Linear(16, 16), nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(batch_idx))
        return self.large(x).float().sum() * 2.0**5 + self.small(x).float().sum() * 2.0**-45

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_layers_that_no_scale_fits_are_named(recwarn):
    rows, _, monitor = look(Apart(), AmpPrecision("32-true"))
    assert len(monitor.last.unfit) == 1 and not monitor.last.window.exists
    assert "precision/scale_window_low" not in rows.rows[-1][1]
    assert not warned(recwarn, "No loss scale")  # nobody asked for FP16


def test_layers_that_no_scale_fits_are_warned_of_in_fp16(recwarn):
    class Kept(Apart):
        def on_after_backward(self) -> None:
            self.small.weight.grad.fill_(2.0**-45)
            self.small.bias.grad.fill_(2.0**-45)

    look(Kept(), AmpPrecision("16-mixed", loss_scale=1.0))
    (message,) = warned(recwarn, "No loss scale exists")
    assert "use bf16 for these layers" in message and "compute='bf16'" in message and "0.10%" in message


def test_histogram_is_that_of_the_exponents():
    _, truth, monitor = look(TinyRegressor(), AmpPrecision("32-true"))
    whole = torch.cat(list(truth[-1].values())).float()
    exponents = torch.frexp(whole[whole != 0])[1].long() - 1 - LOWEST
    assert monitor.last.histogram.tolist() == torch.bincount(exponents, minlength=64).tolist()


def test_layer_histories_hold_norms_and_zeros():
    rows, _, monitor = look(TinyRegressor(), AmpPrecision("32-true"))
    norms, zeros = monitor.layer_histories()
    assert norms.names == zeros.names == ["first", "second"] and norms.steps == [0, 1, 2, 3]
    assert norms.rows()[0] == pytest.approx([math.log10(n) for n in rows.column("grad_norm/first")])


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every_n_steps": 0}, r"every_n_steps=0\).*at least 1"),
        ({"outliers": 1.0}, r"outliers=1\.0\).*below 1"),
        ({"outliers": -0.1}, r"outliers=-0\.1\)"),
        ({"underflow_threshold": 1.5}, r"underflow_threshold=1\.5\).*between 0 and 1"),
        ({"underflow_threshold": True}, "underflow_threshold=True"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        GradientMonitor(**arguments)


def test_another_precision_plugin_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"GradientMonitor.*MixedPrecision"):
        fit(TinyRegressor(), stock_fp16(), callbacks=[GradientMonitor()])


# ---------------------------------------------------------------- what it costs


class Meter(TorchDispatchMode, L.Callback):
    """Ops and item transfers of each batch, those of callbacks before it included."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[int] = []
        self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._now += 1
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, *_: Any) -> None:
        self._now = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.ops.append(self._now)


class Quiet(TinyRegressor):
    """Keeps no losses, which would transfer in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_between_log_points_nothing_runs_and_no_hook_is_there(make_optimizer, precision):
    def measure(monitors: list[L.Callback]) -> list[int]:
        meter, plugin = Meter(), amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
        trainer = make_trainer(plugin, callbacks=[*monitors, meter], log_every_n_steps=50)
        with meter:
            trainer.fit(Quiet(make_optimizer), loader(regression_batches(12)))
        return meter.ops

    bare, with_it = measure([]), measure([GradientMonitor(every_n_steps=5)])
    assert [b == w for b, w in zip(bare, with_it, strict=True)] == [step not in (4, 9) for step in range(12)]


@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw])
def test_nothing_is_asked_of_the_device_before_the_numbers_are_there(monkeypatch, make_optimizer):
    class NoTransfer(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with NoTransfer(), monkeypatch.context() as patch:
                for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__"):
                    patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a transfer"))
                return method(*args)

        return call

    monitor = GradientMonitor(every_n_steps=1)
    monitor.see_gradients = guarded(monitor.see_gradients)  # type: ignore[method-assign]
    monitor.measure = guarded(monitor.measure)  # type: ignore[method-assign]
    rows, _, _ = look(Odd(), amp_fp16(), monitor)
    assert len(rows.rows) == 4


def test_gradients_are_read_on_the_meta_device_where_every_transfer_raises():
    for dtype in (torch.float32, torch.bfloat16):
        parameters = [nn.Parameter(torch.empty(n, 100, device="meta", dtype=dtype)) for n in (3, 3, 400, 7000)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        layer_of = {id(p): f"layer{i // 2}" for i, p in enumerate(parameters)}
        reader = OptimizerGradients(torch.optim.SGD(parameters), layer_of, ["layer0", "layer1"], lambda _: 2)
        for reported in (frozenset(), {id(parameters[0])}):
            found = reader.read(torch.ones((), device="meta"), 1.0, reported)
            assert found is not None and found.layers.sums.shape[0] == 2


def test_a_step_of_many_layers_takes_few_ops():
    class Many(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(200)])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return fused_adamw(self.parameters())

    def ops(monitors: list[L.Callback]) -> int:
        meter = Meter()
        trainer = make_trainer(AmpPrecision("bf16-mixed"), callbacks=[*monitors, meter])
        with meter:
            trainer.fit(Many(), loader([torch.randn(4, 16)] * 3))
        return meter.ops[-1]

    assert ops([GradientMonitor(every_n_steps=1)]) - ops([]) < 400


def test_gradients_divided_by_the_scale_in_fp16_itself_are_suspected_too(recwarn):
    class Half(Small):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():  # what backward gives, scaled: far from the end of FP16
                generator = torch.Generator().manual_seed(0)
                parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) * 2.0**-9)

    _, _, monitor = look(Half(1.0), AmpPrecision("16-true", loss_scale=2.0**14))
    (message,) = warned(recwarn, "underflow in FP16")
    assert "'embedding'" in message and monitor.last.zeros["embedding"] > 0.05
    assert "no scale helps: use 16-mixed" in message


def test_a_sample_without_a_nonzero_element_names_no_layer():
    class Rare(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(20_000, 8), nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.head(self.table(torch.tensor([12_345]))).sum()

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters())

    rows, _, monitor = look(Rare(), AmpPrecision("bf16-mixed"))
    assert monitor.last.unfit == () and rows.column("scale_window_low") != [None] * 4
