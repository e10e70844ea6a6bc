"""A resumed run equals the uninterrupted one to the bit: losses, loss scales, weights, optimizer and random state.

A resumed run starts from another seed wherever a test does not say otherwise, so that nothing is equal by chance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset, random_split
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_amp_plus.callbacks import PrecisionCheckpoint
from tests.support.faults import INF, NO_FAULT
from tests.support.models import MakeOptimizer, adamw, fused_adamw, sgd_momentum
from tests.support.resuming import (
    FAULTS,
    KEY,
    NoisyRegressor,
    Rows,
    Training,
    after,
    by_lightning,
    differences,
    manifest_in,
    noisy_precision,
    shuffled,
    unlike,
)
from tests.support.training import ResumableLoader, regression_batches, stock_fp16

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]


# Lightning has them from 2.6 on.
AVERAGES = {
    name: make
    for name, make in {
        "mean": getattr(L.callbacks, "WeightAveraging", None),
        "ema": partial(getattr(L.callbacks, "EMAWeightAveraging", list), decay=0.8),
    }.items()
    if hasattr(L.callbacks, "WeightAveraging")
}


def stateful(**arguments: Any) -> tuple[Any, Any]:
    return shuffled(StatefulDataLoader, **arguments)


def window_saved() -> list[Any]:
    return [PrecisionCheckpoint(save_window=True)]


def robust_adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)  # 1e-8 is 0 in FP16


def robust_fused_adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True)


def went_on(training: Training, folder: Path, save: Callable[[Path], Any]) -> dict[int, list[str]]:
    """Resumes from every checkpoint: the differences, by the number of the micro-batch it went on with."""
    return resumed(training, *training.whole_and_saved(folder, save))


def resumed(training: Training, whole: Any, paths: list[Path]) -> dict[int, list[str]]:
    found = {}
    for path in paths:
        run = training.run(resume=path)
        found[run[1].went_on_at] = differences(whole, run)
    return found


def exact(*numbers: int) -> dict[int, list[str]]:
    return {number: [] for number in numbers}


# ---------------------------------------------------------------- in mid-epoch


@pytest.mark.parametrize(
    ("precision", "make_optimizer"),
    [
        *((precision, robust_adamw) for precision in PRECISIONS),
        *(product(("16-mixed", "bf16-true"), (sgd_momentum, robust_fused_adamw))),
    ],
)
def test_every_precision_and_optimizer_goes_on_in_mid_epoch(
    tmp_path: Path, precision: str, make_optimizer: MakeOptimizer
) -> None:
    training = Training(
        model=lambda: NoisyRegressor(make_optimizer, faults=FAULTS),
        plugin=lambda: noisy_precision(precision),
        loaders=lambda: stateful(rows=Rows(augment=True)),
    )
    whole, paths = training.whole_and_saved(tmp_path, after(4, 8))
    assert resumed(training, whole, paths) == exact(4, 8)
    history = whole[0].precision_plugin.history  # type: ignore[union-attr]
    assert history.skipped == 2
    assert len(set(history.scales)) > 2 or not precision.startswith("16")


@pytest.mark.parametrize(("augment", "validation"), [(True, False), (False, True)])
def test_every_batch_of_an_epoch_is_a_place_to_go_on_from(tmp_path: Path, augment: bool, validation: bool) -> None:
    training = Training(loaders=lambda: stateful(rows=Rows(augment=augment), validation=validation))
    found = went_on(training, tmp_path, by_lightning(every_n_train_steps=1))
    assert {number: bad for number, bad in found.items() if number % 6} == exact(*(n for n in range(18) if n % 6))


def test_workers_of_a_stateful_loader_make_no_difference_in_mid_epoch(tmp_path: Path) -> None:
    training = Training(loaders=lambda: stateful(num_workers=1))
    assert went_on(training, tmp_path, after(2, 9)) == exact(2, 9)


@pytest.mark.parametrize("every", [2, 4])
def test_a_save_at_the_end_of_a_validation_in_mid_epoch(tmp_path: Path, every: int) -> None:
    training = Training(loaders=lambda: stateful(validation=True), arguments={"val_check_interval": every})
    found = went_on(training, tmp_path, by_lightning())
    mid_epoch = {number: bad for number, bad in found.items() if number % 6}
    assert mid_epoch == exact(*(n for n in range(18) if n % 6 and n % 6 % every == 0))


def test_a_save_right_before_a_validation_in_mid_epoch(tmp_path: Path) -> None:
    training = Training(loaders=lambda: stateful(validation=True), arguments={"val_check_interval": 2})
    assert went_on(training, tmp_path, after(2, 8)) == exact(2, 8)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_any_loader_with_a_state_of_its_own_goes_on_in_mid_epoch(tmp_path: Path, accumulate: int) -> None:
    batches = regression_batches(6)
    training = Training(
        loaders=lambda: (ResumableLoader(batches), None), arguments={"accumulate_grad_batches": accumulate}
    )
    assert went_on(training, tmp_path, after(2, 8)) == exact(2, 8)


class Stream(IterableDataset[Any]):
    """Rows in order, without a length; it can go on from any of them."""

    def __init__(self) -> None:
        self.rows, self.at, self.start = Rows(), 0, 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for index in range(start, len(self.rows)):
            self.at = index
            yield self.rows[index]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.at + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"]


def test_a_stateful_loader_without_a_length_is_exact_in_mid_epoch_or_said_not_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning fetches a batch ahead of time where it does not know the length, and the loader's state is past it."""
    training = Training(loaders=lambda: (StatefulDataLoader(Stream(), batch_size=4), None))
    whole, paths = training.whole_and_saved(tmp_path, after(2))
    with caplog.at_level(logging.INFO):
        found = resumed(training, whole, paths)
    assert found == exact(2) or "the resume is not exact" in caplog.text


# ---------------------------------------------------------------- at the end of an epoch


@pytest.mark.parametrize(
    ("precision", "validation", "workers"),
    [("bf16-mixed", False, 0), ("bf16-mixed", True, 0), ("16-mixed", False, 1), ("16-mixed", True, 0)],
)
def test_a_plain_loader_goes_on_from_the_end_of_an_epoch(
    tmp_path: Path, precision: str, validation: bool, workers: int
) -> None:
    training = Training(
        plugin=lambda: noisy_precision(precision),
        loaders=lambda: shuffled(validation=validation, num_workers=workers),
    )
    assert went_on(training, tmp_path, by_lightning()) == exact(6, 12)


@pytest.mark.parametrize(
    ("precision", "make_optimizer"),
    [("32-true", sgd_momentum), ("bf16-true", robust_adamw), ("16-true", robust_fused_adamw)],
)
def test_other_precisions_and_a_dataset_that_draws_go_on_from_the_end_of_an_epoch(
    tmp_path: Path, precision: str, make_optimizer: MakeOptimizer
) -> None:
    training = Training(
        model=lambda: NoisyRegressor(make_optimizer, faults=FAULTS),
        plugin=lambda: noisy_precision(precision),
        loaders=lambda: shuffled(rows=Rows(augment=True)),
    )
    assert went_on(training, tmp_path, by_lightning()) == exact(6, 12)


@pytest.mark.parametrize("loaders", [shuffled, stateful])
@pytest.mark.parametrize("validation", [False, True])
def test_a_trainer_that_was_done_is_saved_and_more_epochs_are_asked_for(
    tmp_path: Path, validation: bool, loaders: Callable[..., Any]
) -> None:
    training = Training(loaders=lambda: loaders(rows=Rows(augment=True), validation=validation))
    assert resumed(training, *training.stop_after_one_epoch(tmp_path)) == exact(6)


@pytest.mark.parametrize("loaders", [shuffled, stateful])
@pytest.mark.parametrize("validation", [False, True])
def test_a_save_on_the_last_batch_of_an_epoch(tmp_path: Path, validation: bool, loaders: Callable[..., Any]) -> None:
    training = Training(loaders=lambda: loaders(validation=validation))
    assert went_on(training, tmp_path, by_lightning(every_n_train_steps=6)) == exact(6, 12)


@pytest.mark.parametrize("loaders", [shuffled, stateful])
@pytest.mark.parametrize("every", [1.0, 3])
def test_a_save_at_the_end_of_the_validation_that_ends_an_epoch(
    tmp_path: Path, every: float, loaders: Callable[..., Any]
) -> None:
    training = Training(loaders=lambda: loaders(validation=True), arguments={"val_check_interval": every})
    found = went_on(training, tmp_path, by_lightning(save_on_train_epoch_end=False))
    assert {number: bad for number, bad in found.items() if number % 6 == 0} == exact(6, 12)


@pytest.mark.parametrize(("validation", "workers"), [(False, 0), (True, 0), (True, 1)])
def test_a_stateful_loader_goes_on_from_the_end_of_an_epoch(tmp_path: Path, validation: bool, workers: int) -> None:
    training = Training(loaders=lambda: stateful(validation=validation, num_workers=workers))
    assert went_on(training, tmp_path, by_lightning()) == exact(6, 12)


def test_a_loader_that_is_made_anew_every_epoch(tmp_path: Path) -> None:
    training = Training(arguments={"reload_dataloaders_every_n_epochs": 1})
    assert went_on(training, tmp_path, by_lightning()) == exact(6, 12)


def test_workers_that_outlive_an_epoch_make_no_difference(tmp_path: Path) -> None:
    training = Training(loaders=lambda: shuffled(num_workers=1, persistent_workers=True))
    assert went_on(training, tmp_path, by_lightning()) == exact(6, 12)


def test_saving_disturbs_nothing(tmp_path: Path) -> None:
    training = Training(
        loaders=lambda: stateful(rows=Rows(augment=True), validation=True),
        callbacks=window_saved,
        arguments={"accumulate_grad_batches": 3},
    )
    assert differences(training.run(), training.run(after(*range(1, 18))(tmp_path))) == []
    assert len(list(tmp_path.glob("*.ckpt"))) == 17


# ---------------------------------------------------------------- draws of the user


class Drawing(NoisyRegressor):
    """Makes its own loaders and draws numbers in one hook."""

    def __init__(self, hook: str, loader: Any = DataLoader, workers: int = 0) -> None:
        super().__init__(adamw, faults=FAULTS)
        self.hook, self.loader, self.workers = hook, loader, workers

    def draw(self, hook: str) -> None:
        if hook == self.hook:
            Rows(1, augment=True)[0]

    def setup(self, stage: str) -> None:
        self.draw("setup")

    def on_fit_start(self) -> None:
        self.draw("on_fit_start")

    def on_train_start(self) -> None:
        self.draw("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.draw("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self.draw("on_train_epoch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.draw("validation_step")
        super().validation_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        self.draw("train_dataloader")
        return self.loader(Rows(), batch_size=4, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        self.draw("val_dataloader")
        return DataLoader(Rows(8), batch_size=4)


HOOKS = ["setup", "on_fit_start", "train_dataloader", "val_dataloader", "on_train_start"]
IN_EPOCH = ["on_train_epoch_start", "on_train_epoch_end", "validation_step"]


# Before training, the sanity check makes loaders and validates; other hooks run as without it.
@pytest.mark.parametrize(
    ("hook", "sanity"),
    [
        *((hook, 0) for hook in (*HOOKS, *IN_EPOCH)),
        *((hook, 1) for hook in ("train_dataloader", "val_dataloader", "on_train_start", "validation_step")),
    ],
)
def test_what_the_user_draws_at_the_start_and_in_hooks_does_not_disturb_an_epoch(
    tmp_path: Path, hook: str, sanity: int
) -> None:
    training = Training(
        model=lambda: Drawing(hook), loaders=lambda: (None, None), arguments={"num_sanity_val_steps": sanity}
    )
    assert went_on(training, tmp_path, by_lightning()) == exact(6, 12)


@pytest.mark.parametrize("hook", [*HOOKS, *IN_EPOCH])
def test_what_the_user_draws_at_the_start_and_in_hooks_does_not_disturb_a_mid_epoch(tmp_path: Path, hook: str) -> None:
    training = Training(model=lambda: Drawing(hook, StatefulDataLoader), loaders=lambda: (None, None))
    assert went_on(training, tmp_path, after(2, 9)) == exact(2, 9)


def test_workers_draw_their_seed_after_what_the_user_draws_at_the_start_of_an_epoch(tmp_path: Path) -> None:
    """A loader with workers draws for its sampler at once, where one without waits for the first batch."""
    training = Training(model=lambda: Drawing("on_train_epoch_start", workers=1), loaders=lambda: (None, None))
    assert went_on(training, tmp_path, by_lightning()) == exact(6, 12)


class Splitting(NoisyRegressor):
    """Splits its data at random in ``train_dataloader``, from the seed that its script starts with."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.part: list[int] = []

    def train_dataloader(self) -> Any:
        part, _ = random_split(Rows(32), [24, 8])
        self.part = list(part.indices)
        return ResumableLoader([part.dataset[i] for i in part.indices])


@pytest.mark.parametrize("stock", [False, True])
def test_a_script_that_seeds_itself_splits_its_data_as_in_the_run_it_resumes(tmp_path: Path, stock: bool) -> None:
    """Otherwise rows held out for validation are trained on after a resume. Stock Lightning has no part in the draw."""
    training = Training(
        model=Splitting,
        plugin=stock_fp16 if stock else noisy_precision,
        loaders=lambda: (None, None),
        seed=1,
        epochs=1,
    )
    (_, whole), (path,) = training.whole_and_saved(tmp_path, after(7))
    _, second = training.run(resume=path)
    assert len(whole.part) == 24
    assert second.part == whole.part


# ---------------------------------------------------------------- schedulers, averages, clipping, accumulation


class Scheduled(NoisyRegressor):
    def __init__(self, interval: str) -> None:
        super().__init__(adamw, faults=FAULTS)
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


PLACES = [
    pytest.param(shuffled, by_lightning(), (6, 12), id="end of epoch"),
    pytest.param(stateful, after(3, 9), (3, 9), id="mid-epoch"),
]


@pytest.mark.parametrize(("loaders", "save", "places"), PLACES)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_learning_rate_schedulers_go_on(
    tmp_path: Path, interval: str, accumulate: int, loaders: Any, save: Any, places: tuple[int, ...]
) -> None:
    training = Training(
        model=lambda: Scheduled(interval), loaders=loaders, arguments={"accumulate_grad_batches": accumulate}
    )
    assert went_on(training, tmp_path, save) == exact(*places)


@pytest.mark.parametrize(("loaders", "save", "places"), PLACES)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("averaging", AVERAGES.values(), ids=AVERAGES)
def test_averages_of_weights_go_on(
    tmp_path: Path, averaging: Any, accumulate: int, loaders: Any, save: Any, places: tuple[int, ...]
) -> None:
    """The window that closed right before each save was skipped, so that the average did not move with it."""
    made: list[Any] = []
    faults = {place - accumulate: INF for place in places}

    def callbacks() -> list[Any]:
        made.append(averaging())
        return [made[-1]]

    training = Training(
        model=lambda: NoisyRegressor(adamw, faults=faults),
        loaders=lambda: loaders(validation=True),
        callbacks=callbacks,
        arguments={"accumulate_grad_batches": accumulate},
    )
    assert went_on(training, tmp_path, save) == exact(*places)
    first, *others = [average._average_model.state_dict() for average in made]
    assert [unlike(first, other) for other in others] == [[] for _ in places]


@pytest.mark.parametrize(("loaders", "save", "places"), PLACES)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("make_optimizer", [sgd_momentum, fused_adamw])
def test_clipped_gradients_of_accumulated_windows_go_on(
    tmp_path: Path, make_optimizer: MakeOptimizer, algorithm: str, loaders: Any, save: Any, places: tuple[int, ...]
) -> None:
    training = Training(
        model=lambda: NoisyRegressor(make_optimizer, faults=FAULTS),
        loaders=loaders,
        arguments={
            "accumulate_grad_batches": 3,
            "gradient_clip_val": 0.05,
            "gradient_clip_algorithm": algorithm,
        },
    )
    assert went_on(training, tmp_path, save) == exact(*places)


# ---------------------------------------------------------------- manual optimization


class Pair(NoisyRegressor):
    """Two optimizers by hand; one steps on every second micro-batch, the other on every third: windows overlap."""

    def __init__(self) -> None:
        super().__init__(faults=FAULTS, manual=True)

    def optimize(self, loss: Any) -> None:
        self.manual_backward(loss)
        for optimizer, every in zip(self.optimizers(), (2, 3), strict=True):  # type: ignore[arg-type]
            if self.seen % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return robust_adamw(self.first.parameters()), sgd_momentum(self.second.parameters())


class Alternating(Pair):
    """Two optimizers by hand, each on a loss of its own with its own dropout, as in a GAN."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        fault = self.faults.get(self.seen, NO_FAULT)
        losses = []
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch, fault)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            losses.append(float(loss.detach()))
        self.trace[self.seen] = losses  # type: ignore[assignment]
        self.seen += 1


@pytest.mark.parametrize("make_model", [Pair, Alternating])
def test_two_optimizers_by_hand_go_on_from_the_end_of_an_epoch(tmp_path: Path, make_model: Any) -> None:
    training = Training(model=make_model, loaders=lambda: shuffled(validation=True))
    assert went_on(training, tmp_path, by_lightning()) == exact(6, 12)


def test_two_optimizers_by_hand_go_on_in_mid_epoch(tmp_path: Path) -> None:
    training = Training(model=Alternating, loaders=stateful)
    assert went_on(training, tmp_path, after(1, 4, 8)) == exact(1, 4, 8)


def test_overlapping_windows_of_two_optimizers_go_on_with_their_gradients(tmp_path: Path) -> None:
    training = Training(model=Pair, loaders=stateful, callbacks=window_saved)
    places = [1, 2, 3, 4, 5, 8, 9]
    whole, paths = training.whole_and_saved(tmp_path, after(*places))
    assert resumed(training, whole, paths) == exact(*places)
    # After 3 micro-batches the first optimizer waits with one of them, after 5 the second one with two.
    assert [manifest_in(path)["window"]["micro_batches"] for path in paths] == [1, 2, 1, 1, 2, 2, 1]


@pytest.mark.parametrize("clip", [None, (0.05, "norm")])
def test_a_window_accumulated_by_hand_goes_on_with_its_gradients(tmp_path: Path, clip: Any) -> None:
    training = Training(
        model=lambda: NoisyRegressor(adamw, faults=FAULTS, manual=True, accumulate=3, clip=clip),
        loaders=stateful,
        callbacks=window_saved,
    )
    assert went_on(training, tmp_path, after(1, 2, 3, 4)) == exact(1, 2, 3, 4)


# ---------------------------------------------------------------- windows that are open


@pytest.mark.parametrize(
    ("precision", "items"),
    [*((precision, False) for precision in PRECISIONS), ("16-mixed", True), ("bf16-mixed", True)],
)
def test_with_save_window_a_window_goes_on_with_its_gradients(tmp_path: Path, precision: str, items: bool) -> None:
    """Five micro-batches an epoch, so that the last window is a shorter one."""
    training = Training(
        model=lambda: NoisyRegressor(robust_adamw, faults=FAULTS, items=items),
        plugin=lambda: noisy_precision(precision),
        loaders=lambda: stateful(rows=Rows(20, augment=True)),
        callbacks=window_saved,
        arguments={"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    )
    whole, paths = training.whole_and_saved(tmp_path, after(1, 2, 4, 9))
    assert resumed(training, whole, paths) == exact(1, 2, 4, 9)
    assert [manifest_in(path)["window"] for path in paths] == [
        {"micro_batches": done, "size": 3, "gradients": "stored"} for done in (1, 2, 1, 1)
    ]


def test_a_window_goes_on_beside_an_average_of_weights(tmp_path: Path) -> None:
    training = Training(
        loaders=stateful,
        callbacks=lambda: [*window_saved(), *(AVERAGES[name]() for name in AVERAGES if name == "ema")],
        arguments={"accumulate_grad_batches": 3},
    )
    assert went_on(training, tmp_path, after(1, 4, 8)) == exact(1, 4, 8)


def test_a_window_that_overflowed_already_is_skipped_after_the_resume(tmp_path: Path) -> None:
    """Micro-batch 3 overflows; the save comes before its window closes."""
    training = Training(loaders=stateful, callbacks=window_saved, arguments={"accumulate_grad_batches": 3}, epochs=1)
    whole, paths = training.whole_and_saved(tmp_path, after(4))
    assert resumed(training, whole, paths) == exact(4)
    assert not torch.load(paths[0], weights_only=True)[KEY]["gradients"]["ranks"][0]["first.weight"].isfinite().all()
    assert whole[0].precision_plugin.history.skipped == 1  # type: ignore[union-attr]


def test_without_save_window_a_lost_window_is_said_at_the_save_and_at_the_resume(tmp_path: Path) -> None:
    training = Training(loaders=stateful, arguments={"accumulate_grad_batches": 3})
    with pytest.warns(UserWarning, match=r"saved in mid-window: the gradients of 1 of 3 micro-batches are not in it"):
        whole, paths = training.whole_and_saved(tmp_path, after(4))
    manifest = manifest_in(paths[0])
    assert manifest["window"] == {"micro_batches": 1, "size": 3, "gradients": "lost"}
    assert "gradients" not in manifest
    with pytest.warns(UserWarning, match="Saved in mid-window without its gradients"):
        run = training.run(resume=paths[0])
    # The data and random numbers go on as they were; what is missing is one micro-batch's gradients in one step.
    assert run[1].trace[4] == whole[1].trace[4]
    assert run[1].trace[5] == whole[1].trace[5]
    assert "micro-batch 6" in differences(whole, run)


@pytest.mark.parametrize("items", [False, True])
def test_between_two_windows_nothing_is_lost_or_said(
    tmp_path: Path, items: bool, recwarn: pytest.WarningsRecorder
) -> None:
    training = Training(
        model=lambda: NoisyRegressor(adamw, faults=FAULTS, items=items),
        loaders=stateful,
        arguments={"accumulate_grad_batches": 3},
    )
    whole, paths = training.whole_and_saved(tmp_path, after(3))
    assert resumed(training, whole, paths) == exact(3)
    assert manifest_in(paths[0])["window"] == {"micro_batches": 0, "size": None, "gradients": "none"}
    assert not [str(warning.message) for warning in recwarn if "window" in str(warning.message)]


# ---------------------------------------------------------------- saves after an interruption


class Interrupting(L.Callback):
    """Interrupts the run from one hook, when the model has seen so many micro-batches."""

    def __init__(self, hook: str, number: int, how: Any = RuntimeError) -> None:
        self.number, self.how = number, how
        setattr(self, hook, self.interrupt)

    def interrupt(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.seen != self.number:
            return
        if self.how == "SIGTERM":
            trainer._signal_connector.received_sigterm = True  # what Lightning's handler of the signal does
        else:
            raise self.how("interrupted")


def savers(kind: str, folder: Path) -> Any:
    if kind == "ModelCheckpoint":
        return by_lightning(save_on_exception=True, every_n_train_steps=100)(folder)
    return OnExceptionCheckpoint(folder)


def interrupted(training: Training, folder: Path, kind: str, *callbacks: Any) -> Path:
    """The checkpoint that the run leaves behind."""
    with pytest.raises((SystemExit, SIGTERMException, RuntimeError)):
        training.run(savers(kind, folder), *callbacks)
    (path,) = folder.rglob("*.ckpt")
    return path


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "OnExceptionCheckpoint"])
@pytest.mark.parametrize("how", [KeyboardInterrupt, RuntimeError, "SIGTERM"])
@pytest.mark.parametrize("number", [5, 9])
def test_an_interruption_at_the_end_of_a_batch_loses_nothing(tmp_path: Path, number: int, how: Any, kind: str) -> None:
    training = Training(loaders=stateful, callbacks=window_saved, arguments={"accumulate_grad_batches": 3})
    path = interrupted(training, tmp_path, kind, Interrupting("on_train_batch_end", number, how))
    gradients = "stored" if number % 3 else "none"
    assert manifest_in(path)["window"]["gradients"] == gradients
    assert resumed(training, training.run(), [path]) == exact(number)


class Raising(NoisyRegressor):
    """Raises in ``training_step``, after it has drawn."""

    def __init__(self, number: int, **arguments: Any) -> None:
        super().__init__(adamw, **arguments)
        self.number = number

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.seen == self.number:
            self.loss(batch)
            raise RuntimeError("training_step")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "OnExceptionCheckpoint"])
@pytest.mark.parametrize("number", [4, 5])
def test_an_exception_in_training_step_leaves_a_window_that_is_lost(tmp_path: Path, number: int, kind: str) -> None:
    training = Training(
        model=lambda: Raising(number),
        loaders=stateful,
        callbacks=window_saved,
        arguments={"accumulate_grad_batches": 3},
    )
    manifest = manifest_in(interrupted(training, tmp_path, kind))
    assert manifest["window"] == {"micro_batches": number - 3, "size": 3, "gradients": "lost"}
    assert "gradients" not in manifest


def test_an_exception_in_training_step_leaves_a_window_that_is_lost_by_hand_too(tmp_path: Path) -> None:
    training = Training(model=lambda: Raising(4, manual=True, accumulate=3), loaders=stateful, callbacks=window_saved)
    assert manifest_in(interrupted(training, tmp_path, "ModelCheckpoint"))["window"]["gradients"] == "lost"


@pytest.mark.parametrize(
    ("hook", "number"),
    [("on_before_backward", 5), ("on_after_backward", 5), ("on_after_backward", 6), ("on_before_optimizer_step", 6)],
)
def test_an_exception_around_backward_or_step_leaves_a_window_that_is_lost(
    tmp_path: Path, hook: str, number: int
) -> None:
    """Gradients then hold a micro-batch that Lightning does not count as done, or are unscaled already."""
    training = Training(
        model=lambda: NoisyRegressor(adamw),
        loaders=stateful,
        callbacks=window_saved,
        arguments={"accumulate_grad_batches": 3},
    )
    manifest = manifest_in(interrupted(training, tmp_path, "ModelCheckpoint", Interrupting(hook, number)))
    assert manifest["window"]["gradients"] == "lost"
    assert "gradients" not in manifest


def test_an_exception_in_the_last_batch_of_an_epoch_leaves_a_checkpoint_of_its_middle(tmp_path: Path) -> None:
    path = interrupted(Training(model=lambda: Raising(5), loaders=stateful), tmp_path, "ModelCheckpoint")
    assert manifest_in(path)["data"]["mid_epoch"] is True


# ---------------------------------------------------------------- what is said, and what the tests can see


def test_a_plain_loader_in_mid_epoch_is_said_at_the_save_and_at_the_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(loaders=shuffled)
    with caplog.at_level(logging.INFO):
        whole, (path,) = training.whole_and_saved(tmp_path, after(3))
    assert "saved in the middle of an epoch, and the loader has no state_dict" in caplog.text
    assert manifest_in(path)["data"] == {"mid_epoch": True, "stateful": False, "moment": "clean"}
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert resumed(training, whole, [path])[3] != []
    assert "The loader has no state_dict, so Lightning starts its data again" in caplog.text


@pytest.mark.parametrize("loaders", [shuffled, stateful])
def test_nothing_is_said_where_the_data_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loaders: Callable[..., Any]
) -> None:
    save = by_lightning() if loaders is shuffled else after(3)
    with caplog.at_level(logging.INFO):
        went_on(Training(loaders=loaders), tmp_path, save)
    assert "loader has no state_dict" not in caplog.text


@pytest.mark.parametrize("generator", ["torch", "numpy", "python"])
@pytest.mark.parametrize(("loaders", "save", "places"), PLACES)
def test_without_the_state_of_one_generator_a_resume_is_another_run(
    tmp_path: Path, loaders: Any, save: Any, places: tuple[int, ...], generator: str
) -> None:
    """The other tests would see it."""
    training = Training(loaders=lambda: loaders(rows=Rows(augment=True)))
    whole, paths = training.whole_and_saved(tmp_path, save)
    checkpoint = torch.load(paths[0], weights_only=True)
    del checkpoint[KEY]["random_state"][0][generator]
    checkpoint[KEY]["random"]["generators"].remove(generator)
    torch.save(checkpoint, paths[0])
    found = resumed(training, whole, paths)
    assert f"micro-batch {places[0]}" in found[places[0]]
    assert found[places[1]] == []


@pytest.mark.parametrize("part", ["gradients", "items"])
def test_with_other_gradients_or_items_of_a_window_a_resume_is_another_run(tmp_path: Path, part: str) -> None:
    training = Training(
        model=lambda: NoisyRegressor(adamw, items=True),
        loaders=stateful,
        callbacks=window_saved,
        arguments={"accumulate_grad_batches": 3},
    )
    whole, (path,) = training.whole_and_saved(tmp_path, after(4))
    checkpoint = torch.load(path, weights_only=True)
    stored = checkpoint[KEY]["gradients"]
    if part == "items":
        stored["items"][0][0] += 1
    else:
        stored["ranks"][0]["second.bias"] *= 1.5
    torch.save(checkpoint, path)
    found = resumed(training, whole, [path])[4]
    assert "micro-batch 5" not in found
    assert "micro-batch 6" in found


def test_with_another_loss_scale_a_resume_is_another_run(tmp_path: Path) -> None:
    training = Training(loaders=stateful)
    whole, (path,) = training.whole_and_saved(tmp_path, after(4))
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[KEY]["scaler"]["scale"] *= 2
    torch.save(checkpoint, path)
    assert any("scale" in name for name in resumed(training, whole, [path])[4])


@pytest.mark.parametrize("seed", [1, 99])
@pytest.mark.parametrize(("loaders", "save", "places"), PLACES)
def test_stock_lightning_draws_other_numbers_after_a_resume(
    tmp_path: Path, loaders: Any, save: Any, places: tuple[int, ...], seed: int
) -> None:
    """It restores no random state; with the seed of the first run it repeats what that drew at its start."""
    training = Training(model=lambda: NoisyRegressor(adamw), plugin=stock_fp16, loaders=loaders, seed=seed)
    (_, whole), paths = training.whole_and_saved(tmp_path, save)
    _, model = training.run(resume=paths[0])
    assert model.went_on_at == places[0]
    assert model.trace[places[0]] != whole.trace[places[0]]
