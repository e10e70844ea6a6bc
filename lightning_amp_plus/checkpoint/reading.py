"""Reads what a checkpoint says about its precision, without its tensors and without running anything stored in it.

A single file is a zip whose small record ``data.pkl`` holds everything but the numbers; a sharded one is a folder with
a small ``meta.pt``. Both are parsed by an unpickler that imports nothing: tensors come as shape and dtype, any other
object as an inert stand-in. So the size of the checkpoint does not matter, nor where it comes from.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from fsspec.core import url_to_fs

from lightning_amp_plus.casts import dtype_name
from lightning_amp_plus.checkpoint.sidecar import sidecar_of
from lightning_amp_plus.errors import IncompatiblePrecisionError

_METADATA = "meta.pt"
_STORAGES = {
    "FloatStorage": "fp32",
    "DoubleStorage": "fp64",
    "HalfStorage": "fp16",
    "BFloat16Storage": "bf16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_DESCRIPTOR = struct.Struct("<4sI")
_LARGEST = 2**30  # bytes of a data.pkl; beyond any model, and short of what a crafted file could make us read


@dataclass(frozen=True)
class TensorStub:
    """What is known of a tensor without reading it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """What a checkpoint says.

    Attributes:
        path: Where it lies.
        contents: The checkpoint, tensors replaced by :class:`TensorStub`; ``None`` where only a sidecar could be read.
        sidecar: The document of its sidecar; ``None`` without one.
        trouble: Why the checkpoint or the sidecar could not be read, where one of them could.
    """

    path: str
    contents: Mapping[str, Any] | None
    sidecar: Mapping[str, Any] | None
    trouble: str | None = None


def read(path: str | Path) -> Reading:
    """Reads a checkpoint (a file, a folder, or any address that fsspec knows) and its sidecar.

    Raises:
        FileNotFoundError: If neither is there.
        IncompatiblePrecisionError: If both cannot be read, or the checkpoint is there and damaged.
    """
    address = str(path)
    try:
        filesystem, location = url_to_fs(address)
    except (ValueError, ImportError) as error:
        raise IncompatiblePrecisionError(f"{address} cannot be opened: {' '.join(str(error).split())}") from error
    document, sidecar_trouble = _sidecar(address)
    if not filesystem.exists(location):
        if document is None:
            raise FileNotFoundError(f"Checkpoint not found: {address}. {sidecar_trouble or ''}".rstrip())
        return Reading(address, None, document, f"{address} itself is not there")
    if filesystem.isdir(location):
        inner = f"{location.rstrip('/')}/{_METADATA}"
        if not filesystem.exists(inner):
            if document is not None:
                return Reading(address, None, document, f"the folder has no {_METADATA}")
            raise IncompatiblePrecisionError(
                f"The folder {address} holds no {_METADATA}, so it is no checkpoint of a Lightning Trainer, or its save "
                "was interrupted. Resume from another one."
            )
        location = inner
    contents = _contents(lambda: filesystem.open(location, "rb"), address)
    return Reading(address, contents, document, sidecar_trouble)


def _sidecar(address: str) -> tuple[Mapping[str, Any] | None, str | None]:
    place = sidecar_of(address)
    filesystem, location = url_to_fs(place)
    if not filesystem.exists(location):
        return None, None
    try:
        document = json.loads(filesystem.cat_file(location))
    except (ValueError, OSError, RecursionError) as error:
        return None, f"the sidecar {place} cannot be read ({error})"
    if not isinstance(document, Mapping):
        return None, f"the sidecar {place} holds no manifest"
    return document, None


def _contents(opened: Callable[[], IO[bytes]], address: str) -> Mapping[str, Any]:
    try:
        with opened() as file:
            value = _parse(file)
    except (EOFError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError, AttributeError,
            pickle.UnpicklingError, MemoryError, OverflowError) as error:  # fmt: skip
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise IncompatiblePrecisionError(
            f"{address} cannot be read as a checkpoint: it is damaged, cut off by an interrupted save or copy, or "
            f"something else ({said}). Resume from another one."
        ) from error
    if not isinstance(value, Mapping):
        raise IncompatiblePrecisionError(
            f"{address} holds {type(value).__name__} where the checkpoint of a Lightning Trainer holds a mapping."
        )
    return value


def _parse(file: IO[bytes]) -> Any:
    start = file.read(4)
    file.seek(0)
    if start[:2] == b"PK":
        return _Inert(io.BytesIO(_record(file))).load()
    # What torch.save wrote before 1.6: magic number, version, system, then the object, and the numbers behind it.
    if _Inert(file).load() != _LEGACY_MAGIC:
        raise ValueError("neither a zip nor an old torch file")
    for _ in range(2):
        _Inert(file).load()
    return _Inert(file).load()


def _record(file: IO[bytes]) -> bytes:
    """The record ``data.pkl`` of a zip, its size bounded and its checksum compared, which torch's reader does not do."""
    reader = torch._C.PyTorchFileReader(file)
    size, end = reader.get_record_size("data.pkl"), file.seek(0, os.SEEK_END)
    if size > min(end, _LARGEST):
        raise ValueError(f"its data.pkl claims {size:,} bytes in a file of {end:,}")
    record: bytes = reader.get_record("data.pkl")
    file.seek(reader.get_record_offset("data.pkl") + size)  # type: ignore[attr-defined]
    mark, checksum = _DESCRIPTOR.unpack(file.read(_DESCRIPTOR.size))  # torch.save writes it behind the data
    if mark == b"PK\x07\x08" and checksum != zlib.crc32(record):
        raise ValueError("the checksum of its data.pkl is another")
    return record


class _Inertia(type):
    """What stand-ins do when a pickle calls them, sets their state or fills them: nothing."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __setstate__(cls, state: Any) -> None:
        pass

    def append(cls, item: Any) -> None:
        """Pickles of list subclasses call this."""

    def extend(cls, items: Any) -> None:
        """Pickles of list subclasses call this."""

    def add(cls, item: Any) -> None:
        """Pickles of set subclasses call this."""

    def __setitem__(cls, key: Any, value: Any) -> None:
        pass


class _Stand(metaclass=_Inertia):
    """Base of what stands for a class or function that is not imported, and for whatever calling it would have made.

    One class for both, since pickle takes nothing but classes in some places, and the result of any call in others.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls


class _Storage:
    """A storage's dtype, where the pickle names it."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


def _tensor(storage: Any, offset: Any, size: Any, *rest: Any) -> TensorStub:
    named = [dtype_name(item) for item in rest if isinstance(item, torch.dtype)]
    dtype = named[0] if named else str(getattr(storage, "dtype", "unknown"))
    return TensorStub(dtype, tuple(int(length) for length in size))


def _parameter(data: Any, *rest: Any) -> Any:
    return data


def _subclass(rebuild: Any, cls: Any, args: Any, state: Any = None) -> Any:
    """A tensor of another class, or with attributes: what counts is the tensor that it is made from."""
    return rebuild(*args) if rebuild in (_tensor, _parameter) and isinstance(args, tuple) else _Stand


def _dtype_of_storage(name: str) -> str:
    return _STORAGES.get(name, name.removesuffix("Storage").lower())


class _Inert(pickle.Unpickler):
    """Rebuilds plain types and nothing else; no name in the file is ever imported or called."""

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor"): _tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
        ("torch", "Size"): tuple,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._KNOWN:
            return self._KNOWN[module, name]
        if module == "torch" and name.endswith("Storage"):
            return _Storage(_dtype_of_storage(name))
        known = vars(torch).get(name) if module == "torch" else None  # not getattr, which may import
        return known if isinstance(known, torch.dtype) else _Inertia(f"{module}.{name}", (_Stand,), {})

    def persistent_load(self, pid: Any) -> Any:
        kind = pid[1] if isinstance(pid, tuple) and len(pid) > 1 else None
        if isinstance(pid, tuple) and pid[:1] == ("module",):
            return kind  # the class of a module, with its source, as saved before torch 1.6
        return kind if isinstance(kind, _Storage) else _Storage("unknown")


def tensors(value: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Dotted name, short dtype and shape of the tensors in nested mappings and lists, loaded or read as stubs."""
    pending = [("", value)]
    while pending:  # no recursion: a file may nest deeper than Python's stack
        name, item = pending.pop()
        if isinstance(item, TensorStub):
            yield name, item.dtype, item.shape
        elif isinstance(item, torch.Tensor):
            yield name, dtype_name(item.dtype), tuple(item.shape)
        elif isinstance(item, (Mapping, list, tuple)):
            inner = list(item.items()) if isinstance(item, Mapping) else list(enumerate(item))
            pending += ((f"{name}.{key}" if name else str(key), part) for key, part in reversed(inner))
