"""The sidecar: a checkpoint's manifest as JSON beside it, ``<checkpoint>.precision.json``.

It is written by ``PrecisionCheckpoint`` and read where the checkpoint itself is far away or holds none. It replaces
what was there in one move, so that a reader sees a whole one, old or new, whatever happens to the writer.
"""

from __future__ import annotations

import os
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

SUFFIX = ".precision.json"


def sidecar_of(checkpoint: str | Path) -> str:
    """Where the sidecar of a checkpoint lies. A link, such as ``save_last="link"`` makes, has that of its target."""
    address = str(checkpoint).rstrip("/")
    filesystem, location = url_to_fs(address)
    if isinstance(filesystem, LocalFileSystem):
        address = os.path.realpath(location)
    return f"{address}{SUFFIX}"


def write_sidecar(checkpoint: str | Path, text: str) -> str:
    """Writes a sidecar and returns where it lies."""
    place = sidecar_of(checkpoint)
    filesystem, location = url_to_fs(place)
    data = text.encode()
    if not isinstance(filesystem, LocalFileSystem):
        filesystem.makedirs(filesystem._parent(location), exist_ok=True)
        filesystem.pipe_file(location, data)  # one request, which object stores carry out whole or not at all
        return place
    # fsspec's own transaction goes through the system's temporary folder, and a move from there is a copy.
    os.makedirs(os.path.dirname(location), exist_ok=True)
    temporary = f"{location}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, location)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return place


def remove_sidecar(place: str) -> None:
    """Removes a sidecar, if it is there."""
    filesystem, location = url_to_fs(place)
    if filesystem.exists(location):
        filesystem.rm(location)
