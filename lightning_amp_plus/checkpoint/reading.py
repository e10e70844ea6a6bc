"""Reads what a checkpoint says about its precision, without its tensors and without running anything stored in it.

A single file is a zip whose small record ``data.pkl`` holds everything but the numbers; a sharded one is a folder with
a small ``meta.pt``. Both are parsed by an unpickler that imports nothing: tensors come as shape and dtype, any other
object as an inert stand-in. So the size of the checkpoint does not matter, nor where it comes from.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Self

import torch
from fsspec.core import url_to_fs

from lightning_amp_plus.casts import dtype_name
from lightning_amp_plus.checkpoint.sidecar import sidecar_of
from lightning_amp_plus.errors import IncompatiblePrecisionError

_METADATA = "meta.pt"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
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
    document, sidecar_trouble = _sidecar(address)
    filesystem, location = url_to_fs(address)
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
    except (ValueError, OSError) as error:
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
        reader = torch._C.PyTorchFileReader(file)
        record = reader.get_record("data.pkl")
        if len(record) > _LARGEST:
            raise ValueError(f"its data.pkl takes {len(record):,} bytes")
        return _Inert(io.BytesIO(record)).load()
    # What torch.save wrote before 1.6: magic number, version, system, then the object, and the numbers behind it.
    if _Inert(file).load() != _LEGACY_MAGIC:
        raise ValueError("neither a zip nor an old torch file")
    for _ in range(2):
        _Inert(file).load()
    return _Inert(file).load()


class _Stand:
    """Base of what stands for a class or function that is not imported, and for whatever calling it would have made."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Pickles of list subclasses call this."""

    def extend(self, items: Any) -> None:
        """Pickles of list subclasses call this."""

    def add(self, item: Any) -> None:
        """Pickles of set subclasses call this."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


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


def _dtype_of_storage(name: str) -> str:
    known = {"FloatStorage": "fp32", "DoubleStorage": "fp64", "HalfStorage": "fp16", "BFloat16Storage": "bf16"}
    return known.get(name, name.removesuffix("Storage").lower())


class _Inert(pickle.Unpickler):
    """Rebuilds plain types and nothing else; no name in the file is ever imported or called."""

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor"): _tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch", "Size"): tuple,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._KNOWN:
            return self._KNOWN[module, name]
        if module == "torch" and name.endswith("Storage"):
            return _Storage(_dtype_of_storage(name))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return type(f"{module}.{name}", (_Stand,), {})  # a class, since pickle makes instances of classes only

    def persistent_load(self, pid: Any) -> Any:
        kind = pid[1] if isinstance(pid, tuple) and len(pid) > 1 else None
        return kind if isinstance(kind, _Storage) else _Storage("unknown")


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, TensorStub]]:
    """The tensors in nested mappings and lists, with a dotted name."""
    if isinstance(value, TensorStub):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from tensors(item, f"{name}.{key}" if name else str(key))
