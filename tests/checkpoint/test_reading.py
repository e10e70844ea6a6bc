"""Reading a checkpoint without its tensors: what comes back, how many bytes it takes, and that nothing in it runs."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import io
import json
import os
import pathlib
import pickle
import re
import struct
import sys
import uuid
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from lightning_amp_plus.casts import dtype_name
from lightning_amp_plus.checkpoint.compatibility import compare
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY
from lightning_amp_plus.checkpoint.reading import TensorStub, read, tensors
from lightning_amp_plus.checkpoint.saved import saved_precision
from lightning_amp_plus.checkpoint.sidecar import sidecar_of, write_sidecar
from lightning_amp_plus.errors import IncompatiblePrecisionError
from tests.support.manifests import document, manifest

FORMATS = {"zip": True, "the format before 1.6": False}


@pytest.fixture(params=FORMATS)
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], Path]:
    """Saves an object in one of torch's formats and returns where."""

    def saved(value: Any) -> Path:
        path = tmp_path / "a.ckpt"
        torch.save(value, path, _use_new_zipfile_serialization=FORMATS[request.param])
        return path

    return saved


def contents(path: Any) -> Any:
    found = read(path).contents
    assert found is not None
    return found


def with_pickle(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """A checkpoint of torch whose record ``data.pkl`` is ``data``."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, record in records.items():
            archive.writestr(name, data if name.endswith("data.pkl") else record)
    return path


# ---------------------------------------------------------------- how much is read


class Counted(io.FileIO):
    """A file that counts what is read from it."""

    read_bytes = 0

    def read(self, size: int | None = -1, /) -> Any:
        data = super().read(-1 if size is None else size)
        Counted.read_bytes += len(data or b"")
        return data

    def readall(self) -> Any:
        data = super().readall()
        Counted.read_bytes += len(data)
        return data

    def readinto(self, buffer: Any, /) -> Any:
        length = super().readinto(buffer)
        Counted.read_bytes += length or 0
        return length


class CountingFileSystem(LocalFileSystem):
    """Local files under ``counting://``; reading them is counted."""

    protocol = ("counting",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("counting://"))

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        return Counted(path, mode)


fsspec.register_implementation("counting", CountingFileSystem, clobber=True)


def bytes_read(path: Path) -> int:
    Counted.read_bytes = 0
    assert saved_precision(f"counting://{path}").manifest.precision == "16-mixed"
    return Counted.read_bytes


def checkpoint_of(elements: int) -> dict[str, Any]:
    return {
        "state_dict": {"first.weight": torch.zeros(elements)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(elements)}}}],
        "global_step": 3,
        CHECKPOINT_KEY: document(),
    }


def test_the_size_of_the_tensors_does_not_matter(save: Callable[[Any], Path]) -> None:
    small = bytes_read(save(checkpoint_of(10)))
    path = save(checkpoint_of(4_000_000))
    size, large = path.stat().st_size, bytes_read(path)
    path.unlink()
    assert size >= 32_000_000
    assert large <= small + 1000
    assert large < 50_000


def test_a_folder_is_read_by_its_small_file_alone(tmp_path: Path) -> None:
    torch.save({"global_step": 3, CHECKPOINT_KEY: document()}, tmp_path / "meta.pt")
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1_000_000))
    assert 0 < bytes_read(tmp_path) < 50_000


def test_a_sidecar_of_a_weights_only_checkpoint_costs_no_tensors_either(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"first.weight": torch.zeros(1_000_000)}, "global_step": 12}, path)
    write_sidecar(path, manifest(weights_only=True).to_json())
    assert 0 < bytes_read(path) < 50_000


# ---------------------------------------------------------------- tensors

NOT_STORED = ("bits", "q", "uq", "float4")  # and integers of 1 to 7 bits: of these no tensor can be made and saved
DTYPES = {
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
    and not str(value).removeprefix("torch.").startswith(NOT_STORED)
    and str(value).removeprefix("torch.u").removeprefix("torch.") not in {f"int{bits}" for bits in range(1, 8)}
}


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_a_tensor_is_its_dtype_and_shape(dtype: torch.dtype, save: Callable[[Any], Path]) -> None:
    path = save({"t": torch.empty(2, 3, dtype=dtype)})
    assert contents(path) == {"t": TensorStub(dtype_name(dtype), (2, 3))}


TENSORS: dict[str, tuple[Callable[[], Any], TensorStub]] = {
    "a Parameter": (lambda: nn.Parameter(torch.zeros(2, 3)), TensorStub("fp32", (2, 3))),
    "a frozen Parameter": (
        lambda: nn.Parameter(torch.zeros(2, dtype=torch.float16), requires_grad=False),
        TensorStub("fp16", (2,)),
    ),
    "a Parameter with an attribute": (
        lambda: _with_attribute(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))),
        TensorStub("bf16", (2,)),
    ),
    "a Buffer": (lambda: nn.Buffer(torch.zeros(4, dtype=torch.float16)), TensorStub("fp16", (4,))),
    "one without dimensions": (lambda: torch.tensor(3.0), TensorStub("fp32", ())),
    "an empty one": (lambda: torch.zeros(0, 5), TensorStub("fp32", (0, 5))),
    "a transposed one": (lambda: torch.zeros(2, 3).t(), TensorStub("fp32", (3, 2))),
    "a slice": (lambda: torch.zeros(10, 10)[2:4, ::3], TensorStub("fp32", (2, 4))),
    "an expanded one": (lambda: torch.zeros(1).expand(5, 7), TensorStub("fp32", (5, 7))),
    "one with an attribute": (lambda: _with_attribute(torch.zeros(2, requires_grad=True)), TensorStub("fp32", (2,))),
    "one in float8": (lambda: torch.zeros(2, 3).to(torch.float8_e4m3fn), TensorStub("float8_e4m3fn", (2, 3))),
    "one in float8 e5m2": (lambda: torch.zeros(2).to(torch.float8_e5m2), TensorStub("float8_e5m2", (2,))),
}


def _with_attribute(tensor: Any) -> Any:
    tensor.model_parallel = True
    return tensor


@pytest.mark.parametrize("kind", TENSORS)
def test_dtype_and_shape_are_those_of(kind: str, save: Callable[[Any], Path]) -> None:
    make, stub = TENSORS[kind]
    found = contents(save({"state_dict": {"w": make(), "other": torch.zeros(1, dtype=torch.float64)}}))
    assert found["state_dict"]["other"] == TensorStub("fp64", (1,))
    assert found["state_dict"]["w"] == stub


def test_tied_tensors_are_both_there(save: Callable[[Any], Path]) -> None:
    weight = torch.zeros(6, dtype=torch.bfloat16)
    found = contents(save({"a": weight, "b": weight, "view": weight[2:].view(2, 2)}))
    assert found == {"a": TensorStub("bf16", (6,)), "b": TensorStub("bf16", (6,)), "view": TensorStub("bf16", (2, 2))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), id="quantized"),
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.eye(3).to_sparse_csr(), id="compressed"),
        pytest.param(lambda: torch.zeros(3, device="meta"), id="meta"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), id="nested"),
        pytest.param(lambda: torch.zeros(3, dtype=torch.float64).untyped_storage(), id="a storage"),
        pytest.param(lambda: torch.Generator(), id="a generator"),
    ],
)
def test_uncommon_tensors_do_not_stop_the_reader(make: Callable[[], Any], tmp_path: Path) -> None:
    try:
        torch.save({"before": torch.zeros(1), "odd": make(), "after": torch.zeros(2)}, tmp_path / "a.ckpt")
    except (TypeError, RuntimeError, pickle.PicklingError) as error:
        pytest.skip(f"torch cannot save it: {error}")
    found = contents(tmp_path / "a.ckpt")
    assert (found["before"], found["after"]) == (TensorStub("fp32", (1,)), TensorStub("fp32", (2,)))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_folder_whose_small_file_holds_dtensors_is_read(tmp_path: Path, alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    sharded = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    torch.save({"callbacks": {"ema": {"w": sharded}}, CHECKPOINT_KEY: document()}, tmp_path / "meta.pt")
    assert saved_precision(tmp_path).manifest == manifest()


def test_nested_tensors_are_named_with_dots() -> None:
    stub = TensorStub("fp32", ())
    nested = {"a": {"b": stub}, "c": [stub, (stub, 5)], "d": "text", 3: stub}
    assert [name for name, *_ in tensors(nested)] == ["a.b", "c.0", "c.1.0", "3"]


# ---------------------------------------------------------------- other objects


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Settings:
    name: str = "x"
    values: list[int] = dataclasses.field(default_factory=lambda: [1, 2])


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str = "x"


class Config(dict):  # type: ignore[type-arg]
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.frozen = True


class Items(list):  # type: ignore[type-arg]
    pass


class Numbers(set):  # type: ignore[type-arg]
    pass


class Slots:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


class Outer:
    """Classes in classes are pickled as an attribute of the outer one."""

    class Mode(enum.Enum):
        FAST = 1

    @dataclasses.dataclass
    class Options:
        depth: int = 3

    def method(self) -> None:
        pass


Point = collections.namedtuple("Point", "x y")

OBJECTS: dict[str, Any] = {
    "numpy scalars": [numpy.float64(2.5), numpy.int32(3), numpy.bool_(True)],
    "numpy arrays": numpy.zeros((2, 3)),
    "a numpy generator": numpy.random.default_rng(0),
    "a dataclass": Settings(),
    "a frozen dataclass with slots": Frozen(),
    "enums": [Colour.RED, Level.LOW],
    "a path": Path("/a/b"),
    "a pure path": pathlib.PurePosixPath("a"),
    "a Namespace": argparse.Namespace(lr=0.1),
    "an OrderedDict": OrderedDict(a=1),
    "a defaultdict": collections.defaultdict(list, {"a": [1]}),
    "a Counter": collections.Counter("aab"),
    "a deque": collections.deque([1, 2], maxlen=5),
    "sets": [{1, 2}, frozenset({3})],
    "a mapping of its own class": Config(a=1),
    "a list of its own class": Items([1, 2]),
    "a set of its own class": Numbers({1}),
    "a namedtuple": Point(1, 2),
    "slots": Slots(),
    "bytes and ranges": [b"\x00\xff", bytearray(b"x"), range(3), slice(1, 2), 3 + 4j, ..., 10**40],
    "a class and a function": [Settings, os.path.join, len],
    "an enum in a class": Outer.Mode.FAST,
    "a dataclass in a class": Outer.Options(),
    "a class in a class": Outer.Options,
    "a method": Outer().method,
    "a partial": functools.partial(Outer.method, 3),
    "a method of a module of torch": nn.Linear(1, 1).forward,
    "a module of torch": nn.Linear(2, 2),
    "an optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
    "a device and a dtype": [torch.device("cpu"), torch.float16, torch.Size([1, 2])],
    "a version": torch.__version__,
    "a uuid": uuid.UUID(int=3),
    "a circle": (lambda circle: circle.append(circle) or circle)([]),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_hyper_parameters_may_be(kind: str, save: Callable[[Any], Path]) -> None:
    path = save(
        {
            "hyper_parameters": {"value": OBJECTS[kind]},
            "state_dict": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)},
            CHECKPOINT_KEY: document(),
        }
    )
    assert saved_precision(path).manifest == manifest()
    assert contents(path)["state_dict"] == {"w": TensorStub("bf16", (2, 3))}


def test_plain_values_come_back_as_they_are(save: Callable[[Any], Path]) -> None:
    plain = {"a": [1, 2.5, None, True, "text"], "b": {"c": (1, 2)}, "d": OrderedDict(x=1), "e": 10**30}
    found = contents(save(plain))
    assert found == plain
    assert type(found["d"]) is OrderedDict


# ---------------------------------------------------------------- nothing runs


class Evil:
    """An object whose unpickling calls something."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


class Setter:
    """Makes a folder when it is unpickled."""

    def __setstate__(self, state: Any) -> None:
        os.mkdir(state)


def _calls(mark: Path) -> dict[str, tuple[Any, ...]]:
    return {
        "a function of os": (os.mkdir, (str(mark),)),
        "a shell": (os.system, (f"touch {mark}",)),
        "eval": (eval, (f"__import__('os').mkdir({str(mark)!r})",)),
        "exec": (exec, (f"import os; os.mkdir({str(mark)!r})",)),
        "open": (open, (str(mark), "w")),
        "a method of a path": (Path.mkdir, (mark,)),
        "a function of torch": (torch.save, ({}, str(mark))),
        "a state": (Setter, (), str(mark)),
        "items": (collections.UserList, (), None, iter([Evil(os.mkdir, (str(mark),))])),
        "setters": (collections.UserDict, (), None, None, iter([("a", Evil(os.mkdir, (str(mark),)))])),
    }


@pytest.mark.parametrize("kind", _calls(Path()))
def test_a_call_hidden_in_the_file_is_not_made(kind: str, save: Callable[[Any], Path], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = save({"hyper_parameters": {"x": Evil(*_calls(mark)[kind])}, CHECKPOINT_KEY: document()})
    assert saved_precision(path).manifest == manifest()
    assert not mark.exists()
    torch.load(path, weights_only=False)  # here it would have been
    assert mark.exists()


def test_a_module_named_in_the_file_is_not_imported(save: Callable[[Any], Path], tmp_path: Path) -> None:
    (tmp_path / "never_imported.py").write_text("class Thing:\n    pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import never_imported  # type: ignore[import-not-found]

        path = save({"hyper_parameters": never_imported.Thing(), CHECKPOINT_KEY: document()})
    finally:
        sys.modules.pop("never_imported", None)
    assert saved_precision(path).manifest == manifest()
    sys.path.remove(str(tmp_path))
    assert "never_imported" not in sys.modules


def test_torch_is_not_asked_for_names_that_it_would_import_or_call_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def lazy(name: str) -> Any:
        asked.append(name)
        raise AttributeError(name)

    monkeypatch.setattr(torch, "__getattr__", lazy)  # imports torch.onnx, torch._inductor and others when asked
    path = with_pickle(tmp_path / "a.ckpt", b"\x80\x02}X\x01\x00\x00\x00actorch\nsomething_lazy\ns.")
    assert set(contents(path)) == {"a"}
    assert asked == []


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b".", id="a stop"),
        pytest.param(b"\x80\x09N.", id="an unknown protocol"),
        pytest.param(b"\x80\x02\x82\x01.", id="an extension"),
        pytest.param(b"cos\nsystem\n", id="no end"),
        pytest.param(b"(ios\nsystem\n.", id="an instance"),
        pytest.param(b"\x80\x04\x8c\x02os\x8c\x06system\x93)R.", id="a call"),
        pytest.param(b"\x80\x02X\xff\xff\xff\xffx.", id="a text that is too long"),
        pytest.param(b"\x80\x05\x96" + b"\xff" * 7 + b"\x0f.", id="bytes that are too long"),
        pytest.param(b"\x80\x04\x95" + b"\xff" * 7 + b"\x0fN.", id="a frame that is too long"),
        pytest.param(b"\x80\x02]q\x00h\x00h\x01.", id="a memo that is not there"),
        pytest.param(b"\x80\x02K\x05.", id="a number"),
        pytest.param(b"\x80\x02]" + b"]" * 5 + b"aaaaa.", id="a list"),
        pytest.param(b"\x80\x02}(K\x01K\x02" + b"}" * 3 + b"u.", id="an unhashable key"),
        pytest.param(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01tR.", id="a tensor of nothing"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\nK\x05\x85R.", id="a mapping of a number"),
        pytest.param(b"\x80\x02ctorch\nFloatStorage\n)R.", id="a storage that is called"),
        pytest.param(b"\x80\x02K\x05Q.", id="a tensor's address that is none"),
        pytest.param(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", id="100000 lists in each other"),
    ],
)
def test_a_pickle_that_makes_no_sense_is_a_named_error(data: bytes, tmp_path: Path) -> None:
    path = with_pickle(tmp_path / "a.ckpt", data)
    with pytest.raises(IncompatiblePrecisionError, match=r"a\.ckpt"):
        saved_precision(path)


@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_mappings_in_mappings_do_not_overflow_the_stack(depth: int, tmp_path: Path) -> None:
    data = b"\x80\x02}" + b"X\x01\x00\x00\x00a}" * depth + b"s" * depth + b"."
    for key in (b"", b"X\x0a\x00\x00\x00state_dict"):
        inner = b"\x80\x02}" + key + data[2:-1] + (b"s" if key else b"") + b"."
        path = with_pickle(tmp_path / "a.ckpt", inner)
        try:
            found = saved_precision(path)
        except IncompatiblePrecisionError:
            continue
        assert found.manifest.precision is None


def test_a_record_that_is_longer_than_its_file_is_not_unpacked(tmp_path: Path) -> None:
    text = b"X" + struct.pack("<I", 10_000_000) + bytes(10_000_000)
    path = with_pickle(tmp_path / "a.ckpt", b"\x80\x02}" + text + b"Ns.", zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 20_000
    with pytest.raises(IncompatiblePrecisionError, match=r"its data\.pkl claims 10,000,011 bytes in a file of 1"):
        saved_precision(path)


def test_a_flipped_bit_in_the_small_record_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({CHECKPOINT_KEY: document("16-mixed")}, path)
    data = path.read_bytes()
    assert data.count(b"16-mixed") == 1
    path.write_bytes(data.replace(b"16-mixed", b"16-mixee"))  # the record's checksum is as it was
    with pytest.raises(IncompatiblePrecisionError, match="damaged"):
        saved_precision(path)


# ---------------------------------------------------------------- files that are none


@pytest.mark.parametrize("value", [[1, 2], 5, "text", torch.zeros(2), None, (1,)], ids=repr)
def test_a_file_that_holds_no_mapping_is_named(value: Any, save: Callable[[Any], Path]) -> None:
    with pytest.raises(IncompatiblePrecisionError, match="holds a mapping"):
        saved_precision(save(value))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"P",
        b"PK",
        b"PK\x03\x04",
        b"PK\x03\x04" + bytes(1000),
        b"text\n",
        bytes(1000),
        b"\x80\x02}.",
        b"\x89PNG\r\n",
    ],
    ids=repr,
)
def test_a_file_of_another_kind_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(data[:2000])
    with pytest.raises(IncompatiblePrecisionError, match=r"a\.ckpt cannot be read as a checkpoint"):
        saved_precision(tmp_path / "a.ckpt")


def test_a_zip_of_another_kind_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(IncompatiblePrecisionError, match=r"a\.zip cannot be read"):
        saved_precision(tmp_path / "a.zip")


@pytest.mark.parametrize("value", [5, "text", [], True, torch.zeros(1), Settings()], ids=str)
def test_what_lies_under_our_key_but_is_no_manifest_is_named(value: Any, save: Callable[[Any], Path]) -> None:
    path = save({CHECKPOINT_KEY: value, "state_dict": {}})
    with pytest.raises(IncompatiblePrecisionError, match=r"a\.ckpt"):
        saved_precision(path)


NOT_PLAIN = pytest.mark.parametrize("value", [Settings(), torch.zeros(1), {1}], ids=lambda v: type(v).__name__)


@NOT_PLAIN
def test_what_is_not_plain_in_the_policy_is_named(value: Any, tmp_path: Path) -> None:
    torch.save({CHECKPOINT_KEY: document(policy__odd=value)}, tmp_path / "a.ckpt")
    with pytest.raises(IncompatiblePrecisionError, match=r"damaged.*\n  policy holds \w+, which is no plain type"):
        saved_precision(tmp_path / "a.ckpt")


@NOT_PLAIN
@pytest.mark.parametrize("key", ["scale", "odd"])
def test_what_is_not_plain_in_the_state_of_the_scale_is_judged_with_it(value: Any, key: str, tmp_path: Path) -> None:
    torch.save({CHECKPOINT_KEY: document(**{f"scaler__{key}": value})}, tmp_path / "a.ckpt")
    found = saved_precision(tmp_path / "a.ckpt").manifest
    assert found.scaler is not None and re.fullmatch(r"<\w+>", found.scaler[key])
    [judged] = [finding for finding in compare(found, manifest()) if finding.field == "scaler"]
    wanted = ("refuse", f"scale={found.scaler[key]!r}") if key == "scale" else ("ok", "scale 1024")
    assert (judged.verdict, judged.saved) == wanted
    json.loads(found.to_json())


# ---------------------------------------------------------------- addresses


def at_every_address(path: Path) -> dict[str, Any]:
    return {
        "a path": path,
        "text": str(path),
        "a relative path": os.path.relpath(path),
        "file://": f"file://{path}",
        "a trailing slash": f"{path}/",
        "its sidecar": f"{path}.precision.json",
    }


@pytest.mark.parametrize("form", at_every_address(Path("/a")))
def test_a_file_is_found_by(form: str, tmp_path: Path) -> None:
    path = tmp_path / "a b.ckpt"
    torch.save({CHECKPOINT_KEY: document(), "state_dict": {}}, path)
    write_sidecar(path, manifest().to_json())
    found = saved_precision(at_every_address(path)[form])
    assert (found.manifest, found.source, found.notes) == (manifest(), "checkpoint", ())


@pytest.mark.parametrize("form", at_every_address(Path("/a")))
def test_a_folder_is_found_by(form: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.mkdir()
    torch.save({CHECKPOINT_KEY: document(), "global_step": 12}, path / "meta.pt")
    write_sidecar(path, manifest().to_json())
    found = saved_precision(at_every_address(path)[form])
    assert (found.manifest, found.source, found.notes) == (manifest(), "checkpoint", ())


def test_an_address_in_memory_is_read() -> None:
    address = f"memory://{uuid.uuid4().hex}/a.ckpt"
    with fsspec.open(address, "wb") as file:
        torch.save({CHECKPOINT_KEY: document(), "state_dict": {"w": torch.zeros(5)}}, file)
    write_sidecar(address, manifest().to_json())
    assert sidecar_of(address) == f"{address}.precision.json"
    for form in (address, f"{address}.precision.json"):
        found = saved_precision(form)
        assert (found.manifest, found.source, found.notes) == (manifest(), "checkpoint", ())


def test_a_folder_in_memory_is_read() -> None:
    address = f"memory://{uuid.uuid4().hex}/folder"
    with fsspec.open(f"{address}/meta.pt", "wb") as file:
        torch.save({CHECKPOINT_KEY: document()}, file)
    for form in (address, f"{address}/"):
        assert saved_precision(form).manifest == manifest()


def test_a_remote_checkpoint_that_is_gone_is_told_by_its_sidecar() -> None:
    address = f"memory://{uuid.uuid4().hex}/a.ckpt"
    write_sidecar(address, manifest().to_json())
    found = saved_precision(address)
    assert (found.manifest, found.source) == (manifest(), "sidecar")
    assert "itself is not there" in found.notes[0]


@pytest.mark.parametrize(
    "place", ["/nowhere/a.ckpt", "memory://nowhere/a.ckpt", "file:///nowhere/a.ckpt", ""], ids=repr
)
def test_nothing_at_all_is_not_found(place: str, tmp_path: Path) -> None:
    with pytest.raises((FileNotFoundError, IncompatiblePrecisionError)):
        saved_precision(place)


@pytest.mark.parametrize("place", ["nosuchprotocol://bucket/a.ckpt", "a.ckpt::b"])
def test_an_address_that_nobody_understands_is_a_named_error(place: str) -> None:
    with pytest.raises((FileNotFoundError, IncompatiblePrecisionError), match=r"a\.ckpt"):
        saved_precision(place)


@pytest.mark.parametrize("inside", [[], ["__0_0.distcp"]], ids=["empty", "an interrupted save"])
def test_a_folder_without_its_small_file_is_named(inside: list[str], tmp_path: Path) -> None:
    for name in inside:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(IncompatiblePrecisionError, match=r"holds no meta\.pt.*interrupted"):
        saved_precision(tmp_path)


def test_a_folder_without_its_small_file_is_told_by_its_sidecar(tmp_path: Path) -> None:
    folder = tmp_path / "a.ckpt"
    folder.mkdir()
    write_sidecar(folder, manifest().to_json())
    found = saved_precision(folder)
    assert (found.manifest, found.source) == (manifest(), "sidecar")
    assert "no meta.pt" in found.notes[0]


def test_the_small_file_of_a_folder_may_be_damaged(tmp_path: Path) -> None:
    torch.save({CHECKPOINT_KEY: document()}, tmp_path / "meta.pt")
    whole = (tmp_path / "meta.pt").read_bytes()
    (tmp_path / "meta.pt").write_bytes(whole[:-200])
    with pytest.raises(IncompatiblePrecisionError, match="cut off"):
        saved_precision(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ("[1]", "holds no manifest"),
        ("5", "holds no manifest"),
        ("\udcff", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
    ids=["half", "empty", "a list", "a number", "no text", "too deep"],
)
def test_a_damaged_sidecar_is_said_and_the_checkpoint_is_used(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({CHECKPOINT_KEY: document()}, path)
    Path(sidecar_of(path)).write_bytes(text.encode(errors="surrogateescape"))
    found = saved_precision(path)
    assert (found.manifest, found.source) == (manifest(), "checkpoint")
    assert said in found.notes[0] and "sidecar" in found.notes[0]


def test_a_damaged_sidecar_without_a_checkpoint_is_said_in_the_error(tmp_path: Path) -> None:
    Path(sidecar_of(tmp_path / "a.ckpt")).write_text("{")
    with pytest.raises(FileNotFoundError, match="sidecar"):
        saved_precision(tmp_path / "a.ckpt")


@pytest.mark.parametrize("field", ["schema_version", "precision"])
def test_a_sidecar_alone_is_read_as_strictly(field: str, tmp_path: Path) -> None:
    plain = {**document(), field: 99}
    Path(sidecar_of(tmp_path / "a.ckpt")).write_text(json.dumps(plain))
    with pytest.raises(IncompatiblePrecisionError, match=field):
        saved_precision(tmp_path / "a.ckpt")
