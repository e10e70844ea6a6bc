"""PrecisionCheckpoint: a readable sidecar beside every checkpoint, and the gradients of a window that is open."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, Manifest
from lightning_amp_plus.checkpoint.sidecar import remove_sidecar, sidecar_of, write_sidecar
from lightning_amp_plus.integration.guard import guard_resume
from lightning_amp_plus.integration.instance_hooks import InstanceHooks
from lightning_amp_plus.integration.sharding import fsdp2_units
from lightning_amp_plus.precision import AmpPrecision


class PrecisionCheckpoint(pl.Callback):
    """Writes ``<checkpoint>.precision.json`` beside every checkpoint of the run, whoever saves it.

    ``AmpPrecision`` alone already writes its state into the checkpoint and refuses what does not fit. The sidecar holds the
    same manifest as JSON: readable by people and tools without torch, at a remote path without fetching the checkpoint, and
    there for ``save_weights_only=True`` too, where Lightning writes no plugin's state. It is removed together with its
    checkpoint, and a link (``save_last="link"``) has that of its target. It logs nothing.

    Args:
        sidecar: Write sidecars.
        save_window: Also store the gradients accumulated so far where a checkpoint is saved in mid-window, per rank, so
            that a resume on as many ranks is exact. Takes memory for the gradients of all ranks on rank 0. A save after an
            exception cannot store them. Not for FSDP1, nor for FSDP2 with ``sync_each_microbatch=False``, which hold
            gradients unsharded.

    Raises:
        MisconfigurationException: In ``setup``, if the Trainer's precision is not an ``AmpPrecision``, or if
            ``save_window`` cannot work with the strategy.

    Example::

        trainer = L.Trainer(plugins=[AmpPrecision("16-mixed")], callbacks=[PrecisionCheckpoint(save_window=True)])
    """

    def __init__(self, sidecar: bool = True, save_window: bool = False) -> None:
        for name, flag in (("sidecar", sidecar), ("save_window", save_window)):
            if not isinstance(flag, bool):
                raise ValueError(f"PrecisionCheckpoint({name}={flag!r}): expected True or False.")
        self.sidecar = sidecar
        self.save_window = save_window
        self._hooks = InstanceHooks()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Watches what the strategy saves and removes."""
        plugin = trainer.precision_plugin
        if not isinstance(plugin, AmpPrecision):
            if stage != "fit":
                return
            raise MisconfigurationException(
                f"{type(self).__name__} writes what AmpPrecision knows, but this Trainer's precision plugin is "
                f"{type(plugin).__name__} (precision {plugin.precision!r}). Pass plugins=[AmpPrecision(...)] to the "
                "Trainer in place of precision=..., or remove the callback."
            )
        guard_resume(trainer)
        if self.save_window and isinstance(trainer.strategy, FSDPStrategy):
            raise MisconfigurationException(
                "PrecisionCheckpoint(save_window=True) does not work with FSDPStrategy, which holds the gradients of an "
                "open window unsharded and out of sight. Use ModelParallelStrategy (FSDP2), or leave save_window out."
            )
        if self.save_window:
            plugin.keep_gradients()
        self._hooks.undo()  # not in teardown: trainer.save_checkpoint() after a fit is to have a sidecar too
        if self.sidecar:
            self._hooks.wrap(trainer.strategy, "save_checkpoint", partial(self._saving, trainer, plugin))
            self._hooks.wrap(trainer.strategy, "remove_checkpoint", partial(self._removing, trainer))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuses what can be seen only once the model is sharded."""
        plugin = trainer.precision_plugin
        deferred = isinstance(plugin, AmpPrecision) and not plugin.sync_each_microbatch
        if self.save_window and deferred and fsdp2_units(pl_module):
            raise MisconfigurationException(
                "PrecisionCheckpoint(save_window=True) does not work with AmpPrecision(sync_each_microbatch=False), which "
                "holds the gradients of an open window unsharded. Leave one of the two out."
            )

    def _saving(self, trainer: Any, plugin: AmpPrecision, save: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
            document = checkpoint.get(CHECKPOINT_KEY)
            if document is None:  # save_weights_only=True: Lightning asked no plugin
                manifest = plugin.manifest(trainer).model_copy(update={"weights_only": True})
            else:
                manifest = Manifest.from_dict(document, "this run")
            result = save(checkpoint, filepath, *args, **kwargs)
            if trainer.is_global_zero:
                try:
                    write_sidecar(filepath, manifest.to_json())
                except OSError as error:  # the checkpoint itself is saved, and training is worth more than its sidecar
                    rank_zero_warn(
                        f"The sidecar of {filepath} could not be written ({error}). The checkpoint is saved and holds the "
                        "same; make the place writable, or pass PrecisionCheckpoint(sidecar=False)."
                    )
            return result

        return save_checkpoint

    def _removing(self, trainer: Any, remove: Callable[..., Any]) -> Callable[..., Any]:
        def remove_checkpoint(filepath: Any) -> Any:
            place = sidecar_of(filepath) if not os.path.islink(str(filepath)) else None  # a link's target stays
            result = remove(filepath)
            if trainer.is_global_zero and place is not None:
                remove_sidecar(place)
            return result

        return remove_checkpoint

    def __getstate__(self) -> dict[str, Any]:
        return {"sidecar": self.sidecar, "save_window": self.save_window}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hooks = InstanceHooks()
