"""Holds saves back while a resume may still fail: :class:`HeldSaves`, used by ``resume``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info

from lightning_amp_plus.integration.instance_hooks import InstanceHooks


class HeldSaves:
    """Nothing is saved on an exception between the load of a checkpoint and the first batch.

    Callbacks that save then would overwrite the refused file, or one that could not be restored, with an untrained model,
    and ModelCheckpoint would remove older ones for it.
    """

    def __init__(self) -> None:
        self._hooks = InstanceHooks()
        self._holding = False

    def hold(self, trainer: Any) -> None:
        """Begins; calling it again changes nothing."""
        if self._holding:
            return
        self._holding = True

        def unless_held(on_exception: Callable[..., Any]) -> Callable[..., Any]:
            def saving(*args: Any, **kwargs: Any) -> Any:
                if not self._holding:
                    return on_exception(*args, **kwargs)
                rank_zero_info("Nothing is saved: the run failed before it began, and nothing was trained.")

            return saving

        def unless_interrupted(save: Callable[..., Any]) -> Callable[..., Any]:
            def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._holding or trainer.state.status != TrainerStatus.INTERRUPTED:
                    return save(filepath, *args, **kwargs)
                rank_zero_info(f"Not saved: {filepath}. The run failed before it began, and nothing was trained.")

            return save_checkpoint

        for callback in trainer.checkpoint_callbacks:
            self._hooks.wrap(callback, "on_exception", unless_held)
        self._hooks.wrap(trainer, "save_checkpoint", unless_interrupted)

    def release(self) -> None:
        """Everything that comes before the first batch has happened."""
        self._holding = False

    def close(self) -> None:
        """Takes back what was wrapped; the run is over."""
        self._hooks.undo()
        self._holding = False
