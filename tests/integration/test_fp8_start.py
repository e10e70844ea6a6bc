"""``fp8_when_stable`` in a real Trainer: FP8 begins once training is quiet, stays on, and a resume decides alike."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import AmpPrecision, PrecisionPolicy
from lightning_amp_plus.callbacks import PrecisionCheckpoint
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY
from lightning_amp_plus.routed import FP8_SWITCH
from tests.support.training import ResumableLoader, make_trainer, same, weights

STABLE = PrecisionPolicy("fp8", fp8_when_stable=True)


class Model(L.LightningModule):
    """Guesses noise, so its loss and gradients stay where they are; ``on`` says which steps were in FP8."""

    def __init__(self, lr: float = 1e-4, fused: bool = False, manual: int = 0, raw: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Linear(16, 16)
            self.head = nn.Linear(16, 1)
        self.lr, self.fused, self.manual, self.raw = lr, fused, manual, raw
        self.automatic_optimization = not manual
        self.on: list[bool] = []
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.on.append(not hasattr(self.body, FP8_SWITCH))
        loss = (self.head(self.body(batch[:, :16])).float() - batch[:, 16:]).square().mean()
        self.losses.append(loss.item())
        if self.manual:
            self.step(loss)
        return loss

    def step(self, loss: Tensor) -> None:
        optimizer: Any = self.optimizers()
        if self.raw:
            loss.backward()
        else:
            self.manual_backward(loss)
        if len(self.on) % self.manual == 0:
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.body(batch[:, :16])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, fused=self.fused)


def noise(count: int = 400, scale: dict[int, float] | None = None) -> list[Tensor]:
    batches = list(torch.randn(count, 32, 17, generator=torch.Generator().manual_seed(1)))
    return [batch * (scale or {}).get(index, 1.0) for index, batch in enumerate(batches)]


def fit(
    model: Model, steps: int, plugin: AmpPrecision | None = None, batches: Any = None, **arguments: Any
) -> L.Trainer:
    loop = {"max_steps": steps, "max_epochs": -1, "log_every_n_steps": 20}
    trainer = make_trainer(plugin or AmpPrecision(STABLE), **{**loop, **arguments})
    trainer.fit(model, ResumableLoader(noise() if batches is None else batches))
    return trainer


def resume(path: Path, model: Model, steps: int, plugin: AmpPrecision | None = None, **arguments: Any) -> L.Trainer:
    loop = {"max_steps": steps, "max_epochs": -1, "log_every_n_steps": 20}
    trainer = make_trainer(plugin or AmpPrecision(STABLE), **{**loop, **arguments})
    trainer.fit(model, ResumableLoader(noise()), ckpt_path=path)
    return trainer


def begun(model: Model) -> int | None:
    """Micro-batches before FP8 began; checks that it stayed on."""
    first = model.on.index(True) if True in model.on else None
    assert first is None or all(model.on[first:])
    return first


# ---------------------------------------------------------------- when it begins


@pytest.mark.parametrize("fused", [False, True])
def test_fp8_begins_at_the_log_point_at_which_the_last_100_steps_were_quiet(fused: bool) -> None:
    model = Model(fused=fused)
    fit(model, 130)
    assert begun(model) == 100


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_makes_it_look_at_100_new_ones(fused: bool) -> None:
    model = Model(fused=fused)
    fit(model, 180, batches=noise(scale={45: float("inf")}))
    assert begun(model) == 160  # 46 to 145, and then the next log point


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (Model(), noise(scale=dict.fromkeys(range(0, 400, 30), 30.0))),
        (Model(lr=0.4), noise(scale=dict.fromkeys(range(400), 4.0))),
    ],
    ids=["spiky batches", "a learning rate that is too large"],
)
def test_it_does_not_begin_while_training_is_wild(model: Model, batches: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(model, 300, AmpPrecision(STABLE, max_consecutive_skips=1000), batches)
    assert begun(model) is None
    assert "FP8 has not begun: " in caplog.text


def test_a_loss_that_falls_fast_is_waited_for() -> None:
    model = Model(lr=5e-4)
    target = torch.arange(16.0)
    batches = [torch.cat([x[:, :16], x[:, :16] @ target[:, None] + x[:, 16:]], 1) for x in noise()]
    fit(model, 400, batches=batches)
    first = begun(model)
    assert first is not None and first > 100
    assert sum(model.losses[50:100]) > 2 * sum(model.losses[first - 50 : first])


@pytest.mark.parametrize(("after", "expected"), [(50, 100), (110, 120), (230, 240)])
def test_it_begins_no_earlier_than_fp8_after_steps(after: int, expected: int) -> None:
    model = Model()
    fit(model, 260, AmpPrecision(PrecisionPolicy("fp8", fp8_when_stable=True, fp8_after_steps=after)))
    assert begun(model) == expected


@pytest.mark.parametrize("manual", [False, True])
def test_a_window_of_several_micro_batches_is_one_observation(manual: bool) -> None:
    model = Model(manual=3 if manual else 0)
    fit(model, 110, **({} if manual else {"accumulate_grad_batches": 3}))
    assert begun(model) == 300


def test_a_backward_past_the_plugin_leaves_the_gradient_norm_to_decide() -> None:
    model = Model(manual=1, raw=True)
    fit(model, 110)
    assert begun(model) == 100


def test_without_a_finite_check_it_begins_too() -> None:
    model = Model()
    fit(model, 110, AmpPrecision(STABLE, check_finite=False))
    assert begun(model) == 100


def test_summed_losses_are_looked_at_by_item() -> None:
    class Summed(Model):
        """Batches of very different sizes: their sums jump, their means do not."""

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            rows = 32 if batch_idx % 50 == 7 else 2
            loss = super().training_step(batch[:rows], batch_idx) * rows
            return {"loss": loss, "num_items": rows}

    model = Summed()
    fit(model, 110, accumulate_grad_batches=2)
    assert begun(model) == 200


def test_every_optimizer_has_to_be_quiet() -> None:
    class Two(Model):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=self.lr) for part in (self.body, self.head)]

        def step(self, loss: Tensor) -> None:
            self.manual_backward(loss)
            for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
                if number == 0 or len(self.on) % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    model = Two(manual=1)
    fit(model, 320)
    assert begun(model) == 200  # the second one steps every other time


def test_evaluation_neither_looks_nor_begins() -> None:
    model, plugin = Model(), AmpPrecision(STABLE)
    trainer = fit(model, 60, plugin, val_check_interval=25, check_val_every_n_epoch=None, limit_val_batches=2)
    before = plugin.state_dict()["fp8_start"]
    trainer.validate(model, ResumableLoader(noise(4)), verbose=False)
    assert plugin.state_dict()["fp8_start"] == before and len(before["observed"][0]["norms"]) == 60


# ---------------------------------------------------------------- what is said


def test_it_is_said_once_when_fp8_begins(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(Model(), 130)
        assert caplog.text.count("FP8 begins: 100 steps have been applied, the last 100 of them quiet") == 1
        caplog.clear()
        fit(Model(), 10, AmpPrecision(PrecisionPolicy("fp8", fp8_after_steps=4)))
        assert caplog.text.count("FP8 begins: 4 steps have been applied.") == 1
        caplog.clear()
        fit(Model(), 10, AmpPrecision("fp8-mixed"))
        assert "FP8" not in caplog.text


def test_a_fit_that_waited_in_vain_says_what_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(Model(), 30)
        assert (
            "FP8 has not begun: 30 steps have been applied; 20 of 100 applied steps in a row are known" in caplog.text
        )
        fit(Model(), 5, AmpPrecision(PrecisionPolicy("fp8", fp8_after_steps=9)))
        assert "FP8 has not begun: 5 steps have been applied; fp8_after_steps=9 waits for more" in caplog.text


# ---------------------------------------------------------------- what it costs


class Transfers(TorchDispatchMode):
    """Counts numbers that go to the host one by one; on a CPU lists are read without an op."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def lists_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    read: list[int] = []
    original = Tensor.tolist

    def tolist(self: Tensor) -> Any:
        read.append(self.numel())
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", tolist)
        yield read


def test_a_fused_optimizer_reads_nothing_between_log_points(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.head(self.body(batch[:, :16])).float() - batch[:, 16:]).square().mean()

    counts = []
    for policy in (STABLE, "bf16-mixed"):
        with lists_read(monkeypatch) as read, Transfers() as transfers:
            fit(Silent(fused=True), 60, AmpPrecision(policy), log_every_n_steps=30)
        counts.append((transfers.count, len(read)))
    (waiting, lists), (plain, verdicts) = counts
    assert waiting == plain  # Lightning's own, before the first step
    assert (lists, verdicts) == (4, 2)  # at each of two log points the verdicts, and what was observed


def test_norms_are_taken_only_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = AmpPrecision(PrecisionPolicy("fp8", fp8_when_stable=True, fp8_after_steps=120))
    norms: list[bool] = []
    plugin.subscribe(lambda report: norms.append(report.values.grad_norm is not None))
    fit(Model(), 150, plugin)
    assert norms == [False] * 20 + [True] * 100 + [False] * 30


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("save_at", [37, 93, 100, 121])
def test_a_resume_decides_at_the_same_step_to_the_bit(tmp_path: Path, save_at: int, fused: bool) -> None:
    whole, first, second = Model(fused=fused), Model(fused=fused), Model(fused=fused)
    plugins = AmpPrecision(STABLE), AmpPrecision(STABLE)
    fit(whole, 150, plugins[0])
    fit(first, save_at).save_checkpoint(tmp_path / "a.ckpt")
    resume(tmp_path / "a.ckpt", second, 150, plugins[1])
    assert first.on + second.on == whole.on and begun(whole) == 100
    assert first.losses + second.losses == whole.losses and same(weights(second), weights(whole))
    assert plugins[0].state_dict()["fp8_start"] == plugins[1].state_dict()["fp8_start"]


def test_what_was_observed_in_an_open_window_is_saved_with_it(tmp_path: Path) -> None:
    class SaveInWindow(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == 3 * 40 + 1:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    whole, plugins = Model(), (AmpPrecision(STABLE), AmpPrecision(STABLE))
    keep = PrecisionCheckpoint(save_window=True)
    fit(whole, 70, plugins[0], accumulate_grad_batches=3, callbacks=[SaveInWindow(), keep])
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)[CHECKPOINT_KEY]["fp8_start"]
    assert saved["open_loss"] == [pytest.approx(sum(whole.losses[120:122])), 2.0]
    second = Model()
    resume(tmp_path / "a.ckpt", second, 70, plugins[1], accumulate_grad_batches=3, callbacks=[keep])
    assert second.losses == whole.losses[122:]
    states = [plugin.state_dict()["fp8_start"]["observed"] for plugin in plugins]
    assert states[0] == states[1] and len(states[0][0]["losses"]) == 60  # up to the last log point


def test_an_open_window_with_a_loss_that_is_not_finite_can_be_saved(tmp_path: Path) -> None:
    class SaveInWindow(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    callbacks = [SaveInWindow(), PrecisionCheckpoint(save_window=True)]
    fit(Model(), 3, batches=noise(scale={4: float("inf")}), accumulate_grad_batches=3, callbacks=callbacks)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)[CHECKPOINT_KEY]["fp8_start"]
    assert saved["open_loss"] == [0.0, 0.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_resume_of_a_start_after_steps_waits_for_the_same_log_point(tmp_path: Path, fused: bool) -> None:
    """Seven steps are known at the save; only at a log point the uninterrupted run with a fused optimizer knows them."""
    policy = PrecisionPolicy("fp8", fp8_after_steps=4)
    whole, first, second = Model(fused=fused), Model(fused=fused), Model(fused=fused)
    fit(whole, 40, AmpPrecision(policy))
    fit(first, 7, AmpPrecision(policy)).save_checkpoint(tmp_path / "a.ckpt")
    resume(tmp_path / "a.ckpt", second, 40, AmpPrecision(policy))
    assert first.on + second.on == whole.on and begun(whole) == (20 if fused else 4)
    assert first.losses + second.losses == whole.losses


def without_state(path: Path) -> None:
    """Takes out what an older version would not have written."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint[CHECKPOINT_KEY]["fp8_start"]
    torch.save(checkpoint, path)


def test_an_older_checkpoint_of_a_run_in_fp8_goes_on_in_fp8(tmp_path: Path) -> None:
    fit(Model(), 5, AmpPrecision("fp8-mixed")).save_checkpoint(tmp_path / "a.ckpt")
    without_state(tmp_path / "a.ckpt")
    model = Model()
    resume(tmp_path / "a.ckpt", model, 10)
    assert model.on == [True] * 5


def test_an_older_checkpoint_before_the_start_is_observed_anew(tmp_path: Path) -> None:
    fit(Model(), 30, AmpPrecision(PrecisionPolicy("fp8", fp8_after_steps=50))).save_checkpoint(tmp_path / "a.ckpt")
    without_state(tmp_path / "a.ckpt")
    model = Model()
    resume(tmp_path / "a.ckpt", model, 150)
    assert begun(model) == 110  # 30 before, so the first log point with 100 new steps is step 140


def test_fp8_goes_on_where_a_run_that_does_not_wait_is_resumed_by_one_that_does(tmp_path: Path) -> None:
    fit(Model(), 5, AmpPrecision("fp8-mixed")).save_checkpoint(tmp_path / "a.ckpt")
    model = Model()
    resume(tmp_path / "a.ckpt", model, 10)
    assert model.on == [True] * 5


def test_a_run_that_waits_no_longer_begins_at_the_resume(tmp_path: Path) -> None:
    fit(Model(), 5).save_checkpoint(tmp_path / "a.ckpt")
    model = Model()
    resume(tmp_path / "a.ckpt", model, 10, AmpPrecision("fp8-mixed"))
    assert model.on == [True] * 5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
def test_a_copy_of_the_plugin_knows_that_fp8_has_begun(copied: Any) -> None:
    plugin = AmpPrecision(STABLE)
    fit(Model(), 110, plugin)
    model = Model()
    fit(model, 5, copied(plugin))
    assert model.on == [True] * 5
