"""Where the fit loop and its loader stand, at a save and at a resume: what has to know the inside of Lightning's loops."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus

from lightning_amp_plus.checkpoint.manifest import Data


def data_entry(trainer: Any) -> Data | None:
    """Where the training data stands; ``None`` before the loader is there."""
    loop = trainer.fit_loop
    if loop._combined_loader is None:
        return None
    batches = loop.epoch_loop.batch_progress
    fetcher = loop._data_fetcher
    # A loader without a length is read one batch ahead, so its state is one ahead too.
    ahead = fetcher is not None and fetcher.length is None
    stateful = not ahead and all(map(_continues, loop._combined_loader.flattened))
    in_batch = batch_in_flight(trainer)
    ended = batches.is_last_batch and not in_batch
    mid_epoch = (batches.current.processed > 0 or in_batch) and not ended
    moment: Any = "batch" if in_batch else "clean"
    epochs = loop.epoch_progress.current
    if not in_batch and epochs.ready != epochs.started and epochs.completed > 0:
        moment = "epoch_start"
    elif not in_batch and mid_epoch and trainer.state.status == TrainerStatus.FINISHED:
        moment = "stopped"
    return Data(mid_epoch=mid_epoch, stateful=stateful, moment=moment)


def _continues(loader: Any) -> bool:
    """Whether a loader can go on in the middle of an epoch."""
    saves = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    # Lightning's own wrapper around a shuffling sampler has no state that the loader could save.
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    return saves and all(type(sampler).__name__ != "DistributedSamplerWrapper" for sampler in samplers)


def batch_in_flight(trainer: Any) -> bool:
    """Whether a training batch has begun and not ended: an exception came between, or its own step saves."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(current.ready != current.processed)


def micro_batches_done(trainer: Any) -> int:
    """Micro-batches in the window that is open in automatic optimization, from where a resume would go on."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    done = batches.current.processed
    if batches.is_last_batch and not batch_in_flight(trainer):
        return 0
    return int(done % trainer.accumulate_grad_batches)


@contextmanager
def at_epoch_start(trainer: Any) -> Generator[None, None, None]:
    """Surrounds the restoring of random states for a run that goes on with a new epoch.

    Lightning makes the loader's iterator, which draws a seed, while it sets the loops up: before the hooks of the new
    epoch, which come first in a run that was never stopped. And it leaves a stateful loader's state aside where an epoch
    had ended, or loads it and never makes the iterator of the next epoch, which then ends without a batch. So the state
    is loaded before, and the iterator made anew after, where a whole run makes it.
    """
    loop = trainer.fit_loop
    epoch, fetcher, left = loop.epoch_loop, loop._data_fetcher, loop._combined_loader_states_to_load
    if left:
        loop._combined_loader._load_state_dicts(left)
        loop._combined_loader_states_to_load = []
        iter(fetcher)  # takes the finished epoch's state up, so that samplers go on from it
    yield
    if left and not loop.resumed_on_epoch_end and not loop.restarting:
        return  # saved after a fit: the loader began its next epoch in state_dict(), and drew its seed there
    if epoch.restarting and epoch.restarted_on_train_batch_end and epoch.batch_progress.is_last_batch:
        iter(fetcher)  # saved on the last batch: Lightning goes straight into the new epoch
    elif not epoch.restarting and hasattr(loop, "_resuming_from_checkpoint"):  # Lightning 2.6
        loop._resuming_from_checkpoint = False  # or Lightning would not make the iterator where a whole run does
