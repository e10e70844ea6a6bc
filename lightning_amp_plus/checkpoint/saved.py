"""What a checkpoint on disk says of its precision: its own manifest, or that of its sidecar, brought up to date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, TENSOR_PARTS, Manifest
from lightning_amp_plus.checkpoint.migrations import document_of, upgrade
from lightning_amp_plus.checkpoint.parts import Shapes, fault_of_parts, shapes_of_masters, sizes_of_gradients
from lightning_amp_plus.checkpoint.reading import Reading, read
from lightning_amp_plus.checkpoint.sidecar import sidecar_of
from lightning_amp_plus.errors import IncompatiblePrecisionError


@dataclass(frozen=True)
class SavedPrecision:
    """What was found.

    Attributes:
        path: The checkpoint.
        manifest: Its manifest; for one of stock Lightning what can be told from it.
        source: Where the manifest comes from.
        weights_only: Whether the checkpoint holds weights and no training state.
        notes: What else to say, a sentence each.
        fault: What is wrong with the tensors beside the manifest; ``None`` if nothing is.
        masters: Shapes of the master weights in it, by name.
        gradients: Elements of the stored gradients of an open window, by parameter name.
    """

    path: str
    manifest: Manifest
    source: str
    weights_only: bool
    notes: tuple[str, ...] = ()
    fault: str | None = None
    masters: Shapes | None = None
    gradients: Mapping[str, int] = field(default_factory=dict)

    def why_no_fit(self) -> str | None:
        """Why no fit can continue the checkpoint, whatever it allows; ``None`` if one may."""
        if self.weights_only:
            return (
                f"{self.path} holds weights only (it was saved with save_weights_only=True, or not by a Trainer): neither "
                "optimizer state nor the state of the precision is there to continue. Load its state_dict into the model "
                "and start a new fit, or resume from a full checkpoint."
            )
        if self.fault is not None:
            return f"{self.path} is damaged, or was edited: {self.fault}. Resume from another checkpoint."
        return None


def saved_precision(path: str | Path) -> SavedPrecision:
    """Reads the precision of a checkpoint, of whatever size, without its tensors.

    Args:
        path: A file, a folder, or any address that fsspec knows; the sidecar itself may be named too.

    Raises:
        FileNotFoundError: If there is neither checkpoint nor sidecar.
        IncompatiblePrecisionError: If what is there is damaged, of a newer version, or if a sidecar contradicts the
            checkpoint that it belongs to.
    """
    address = str(path).removesuffix(".precision.json")
    reading = read(address)
    notes = [f"Note: {reading.trouble}."] if reading.trouble else []
    if reading.contents is None:
        return _of_sidecar(reading, notes)
    weights_only = not _has_training_state(reading)
    ours = reading.contents.get(CHECKPOINT_KEY)
    document = document_of(reading.contents)
    manifest = Manifest.from_dict(document, f"the checkpoint {address}")

    def of_checkpoint() -> SavedPrecision:
        fault = fault_of_parts(document, manifest)
        masters, gradients = shapes_of_masters(document), sizes_of_gradients(document) if fault is None else {}
        return SavedPrecision(address, manifest, "checkpoint", weights_only, tuple(notes), fault, masters, gradients)

    if reading.sidecar is None:
        return of_checkpoint()
    place = sidecar_of(address)
    if isinstance(ours, Mapping):
        if ours.get("save_id") is None or ours.get("save_id") != reading.sidecar.get("save_id"):
            notes.append(f"The sidecar {place} is stale (of another save) and was ignored.")
        elif _plain(ours) != dict(reading.sidecar):
            raise IncompatiblePrecisionError(
                f"The sidecar {place} carries the save_id of the checkpoint {address}, but says something else in "
                f"{_differing(_plain(ours), reading.sidecar)}: one of the two was edited or damaged. Remove the sidecar "
                "if you trust the checkpoint."
            )
        return of_checkpoint()
    beside = Manifest.from_dict(upgrade(reading.sidecar), f"the sidecar {place}")
    step = reading.contents.get("global_step")
    same_step = beside.progress is not None and beside.progress.global_step == step
    if not beside.weights_only or not weights_only or not same_step:
        notes.append(f"The sidecar {place} is stale (of another save) and was ignored.")
        return of_checkpoint()
    notes.append("The checkpoint was saved with save_weights_only=True and holds no precision state; its sidecar does.")
    return SavedPrecision(address, beside, "sidecar", True, tuple(notes))


def _of_sidecar(reading: Reading, notes: list[str]) -> SavedPrecision:
    manifest = Manifest.from_dict(upgrade(reading.sidecar), f"the sidecar {sidecar_of(reading.path)}")
    return SavedPrecision(reading.path, manifest, "sidecar", manifest.weights_only, tuple(notes))


def _has_training_state(reading: Reading) -> bool:
    # A sharded checkpoint keeps its optimizer states in other files of the folder.
    contents = reading.contents or {}
    return "optimizer_states" in contents or "lr_schedulers" in contents or CHECKPOINT_KEY in contents


def _plain(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in TENSOR_PARTS}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)))
