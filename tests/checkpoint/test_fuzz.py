"""Random edits of manifests and random damage to files: a named error or a finding, never a crash, never silence."""

from __future__ import annotations

import copy
import json
import math
import resource
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lightning_amp_plus.checkpoint.compatibility import compare
from lightning_amp_plus.checkpoint.findings_table import conversions_text, notes_text, refusal_text
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, TENSOR_PARTS, Manifest
from lightning_amp_plus.checkpoint.migrations import upgrade
from lightning_amp_plus.checkpoint.rules import scaler_fault
from lightning_amp_plus.checkpoint.saved import SavedPrecision, saved_precision
from lightning_amp_plus.checkpoint.sidecar import sidecar_of
from lightning_amp_plus.errors import IncompatiblePrecisionError
from tests.support.manifests import document

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
QUICKLY = timedelta(seconds=5)  # a whole second is far more than it takes; the machine may be busy
_ONCE = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large)


def fuzz(examples: int) -> Any:
    return settings(
        max_examples=examples, derandomize=True, database=None, deadline=QUICKLY, suppress_health_check=list(_ONCE)
    )


def written(name: str) -> dict[str, Any]:
    inside = torch.load(DATA / f"{name}.pt", weights_only=True)[CHECKPOINT_KEY]
    return {key: value for key, value in inside.items() if key not in TENSOR_PARTS}


OLD = [written("ours-1-16-mixed"), written("ours-1-bf16-true-masters"), written("ours-1-moved")]
DOCUMENTS = [
    written("ours-2-16-mixed"),
    *(document(precision) for precision in ("32-true", "16-mixed", "bf16-mixed", "fp8-mixed", "16-true", "bf16-true")),
    document("16-mixed", loss_scale__kind="static"),
    document(
        "bf16-mixed",
        moves=[{"match": "second", "compute": "fp32", "reason": "", "step": 4}],
        window={"micro_batches": 1, "size": 4, "gradients": "lost"},
        data={"mid_epoch": True, "stateful": False},
    ),
]
CURRENT = [Manifest.from_dict(plain, "this run") for plain in DOCUMENTS]

# Words and numbers of the document itself come often, so that edits are accepted often enough.
_WORDS = ["fp32", "fp16", "bf16", "fp8", "fp64", "-", "bf16+fp32", "dynamic", "static", "16-mixed", "bf16-mixed",
          "32-true", "lost", "stored", "none", "window", "delayed", "current", "", "schema_version", "scale"]  # fmt: skip
_NUMBERS = [0, -1, 1, 2, 10**400, -(10**400), 0.5, 1e-300, 1e39, math.nan, math.inf, -math.inf]
leaves = st.one_of(
    st.none(), st.booleans(), st.sampled_from(_NUMBERS), st.integers(), st.floats(), st.sampled_from(_WORDS), st.text()
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from(_WORDS), st.text()), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of the document with each of its keys."""
    keys = list(plain) if isinstance(plain, dict) else range(len(plain))
    for key in keys:
        yield plain, key
        if isinstance(plain[key], (dict, list)) and plain[key]:
            yield from places(plain[key])


@st.composite
def edited(draw: Any, documents: list[dict[str, Any]]) -> Any:
    """A document with one to three entries dropped, replaced, swapped or added, whatever they are."""
    plain = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(plain))
        if not found:
            break
        container, key = found[draw(st.integers(0, len(found) - 1))]
        how = draw(st.sampled_from(["replace", "replace", "drop", "insert", "swap"]))
        if how == "drop":
            del container[key]
        elif how == "insert" and isinstance(container, dict):
            container[draw(st.one_of(st.sampled_from(_WORDS), st.text(), st.integers()))] = draw(values)
        elif how == "insert":
            container.insert(key, draw(values))
        elif how == "swap":
            other, place = found[draw(st.integers(0, len(found) - 1))]
            container[key] = copy.deepcopy(other[place])
        else:
            container[key] = draw(values)
    return plain


def taken(plain: Any) -> Manifest | None:
    """The manifest, or ``None`` if it is refused, which must be by the named error."""
    try:
        return Manifest.from_dict(upgrade(plain), "it")
    except IncompatiblePrecisionError as error:
        assert "it" in str(error)
        return None


def kind_of_scale(manifest: Manifest) -> str:
    if manifest.loss_scale is not None:
        return manifest.loss_scale.kind
    return "none" if manifest.scaler is None else "dynamic"


def format_of(policy: dict[str, Any], key: str) -> Any:
    """Of communication, or of buffers, which follow the parameters where nothing else is said."""
    return policy.get(key) if key == "reduce" else policy.get(key) or policy.get("params")


def unlike(saved: Manifest, current: Manifest, column: str) -> bool:
    before, now = saved.routes or {}, current.routes or {}
    return any(
        column in before[name] and column in now[name] and before[name][column] != now[name][column]
        for name in before.keys() & now.keys()
    )


def never_silent(saved: Manifest, current: Manifest) -> None:
    """What differs in substance has a finding, and one that cannot be gone on with has a refusal."""
    findings = compare(saved, current)
    by_field = {finding.field: finding.verdict for finding in findings}
    assert len(by_field) == len(findings)
    assert set(by_field.values()) <= {"ok", "note", "convert", "refuse"}
    seen = {field for field, verdict in by_field.items() if verdict != "ok"}
    if saved.precision != current.precision:
        assert "precision" in seen
        if saved.precision is not None:
            assert by_field["precision"] == "refuse"
    elif unlike(saved, current, "compute"):
        assert "routes" in seen
    if unlike(saved, current, "params"):
        assert "parameters" in seen
    if unlike(saved, current, "optimizer"):
        stateless = saved.dtypes is not None and not saved.dtypes.optimizer_state
        assert by_field.get("optimizer_state") == (None if stateless else "refuse")
    for key in ("reduce", "buffers"):
        if saved.policy is not None and current.policy is not None:
            same = format_of(saved.policy, key) == format_of(current.policy, key)
            lost = set(saved.kept_buffers or ()) - set(current.kept_buffers or ())
            if key == "buffers" and lost and current.kept_buffers is not None:
                same = same and format_of(current.policy, key) == "fp32"
            assert (by_field[key] == "ok") == same
    if kind_of_scale(saved) != kind_of_scale(current):
        assert seen & {"loss_scale", "precision"}
    elif saved.loss_scale is not None and saved.loss_scale != current.loss_scale and current.loss_scale is not None:
        first = saved.loss_scale.model_dump()
        rule = {k for k, v in first.items() if k not in ("kind", "init") and getattr(current.loss_scale, k) != v}
        if rule and saved.loss_scale.kind == "dynamic":
            assert "loss_scale_rule" in seen
        if saved.loss_scale.kind == "static" and current.loss_scale.init != saved.loss_scale.init:
            assert "loss_scale" in seen
    if "none" not in (kind_of_scale(saved), kind_of_scale(current)):
        broken = saved.scaler is None or scaler_fault(saved.scaler) is not None
        assert (by_field["scaler"] == "refuse") == broken
    if None not in (saved.master_weights_kept, current.master_weights_kept):
        assert (by_field["master_weights"] == "refuse") == (saved.master_weights_kept != current.master_weights_kept)
    for text in (refusal_text("a.ckpt", findings), conversions_text("a.ckpt", findings), notes_text("a", findings)):
        assert text


def agrees_with_itself(manifest: Manifest) -> None:
    expected = set()
    if kind_of_scale(manifest) != "none":
        expected.add("scaler")  # it may be broken, or outside its own limits
    if manifest.window is not None and manifest.window.micro_batches:
        expected.add("window")
    if manifest.precision is None:
        expected.add("precision")  # of a run it is always known
    policy = manifest.policy or {}
    expected |= {key for key in ("reduce", "buffers") if format_of(policy, key) != format_of(policy, key)}  # NaN
    stopping = {f.field for f in compare(manifest, manifest) if f.verdict in ("refuse", "convert")}
    assert stopping <= expected


@given(plain=edited(DOCUMENTS), current=st.sampled_from(CURRENT))
@example(plain={**DOCUMENTS[0], "schema_version": [1]}, current=CURRENT[0])
@example(plain={**DOCUMENTS[0], "schema_version": {"a": 1}}, current=CURRENT[0])
@example(plain={**DOCUMENTS[0], "scaler": {"scale": 10**400, "_growth_tracker": 0}}, current=CURRENT[0])
@example(plain={**DOCUMENTS[0], "scaler": {"scale": 1.0, "_growth_tracker": -(10**400)}}, current=CURRENT[0])
@example(plain={**DOCUMENTS[0], "loss_scale": {**document()["loss_scale"], "init": math.nan}}, current=CURRENT[0])
@example(
    plain={**DOCUMENTS[0], "loss_scale": {**document()["loss_scale"], "init": math.nan, "kind": "static"}},
    current=CURRENT[0],
)
@fuzz(400)
def test_an_edited_manifest_is_refused_by_name_or_compared_in_full(plain: Any, current: Manifest) -> None:
    manifest = taken(plain)
    if manifest is None:
        return
    assert taken(manifest.to_dict()) == manifest or "nan" in json.dumps(manifest.to_dict()).lower()
    never_silent(manifest, current)
    never_silent(current, manifest)
    agrees_with_itself(manifest)


@given(plain=edited(OLD), current=st.sampled_from(CURRENT))
@example(plain={**OLD[0], "moves": 5}, current=CURRENT[0])
@example(plain={**OLD[0], "moves": None}, current=CURRENT[0])
@fuzz(200)
def test_an_edited_manifest_of_version_1_is_refused_by_name_or_compared_in_full(plain: Any, current: Manifest) -> None:
    manifest = taken(plain)
    if manifest is not None:
        never_silent(manifest, current)


@given(saved=st.sampled_from(CURRENT), current=st.sampled_from(CURRENT))
@fuzz(100)
def test_any_two_runs_are_compared_in_full(saved: Manifest, current: Manifest) -> None:
    never_silent(saved, current)
    agrees_with_itself(saved)


@given(one=edited(DOCUMENTS), other=edited(DOCUMENTS))
@fuzz(300)
def test_any_two_edited_manifests_are_compared_in_full(one: Any, other: Any) -> None:
    saved, current = taken(one), taken(other)
    if saved is not None and current is not None:
        never_silent(saved, current)


@given(plain=values)
@fuzz(150)
def test_anything_at_all_is_no_manifest(plain: Any) -> None:
    assert taken(plain) is None


def test_edits_are_accepted_often_enough_to_mean_something() -> None:
    accepted = []

    @given(plain=edited(DOCUMENTS))
    @fuzz(200)
    def count(plain: Any) -> None:
        try:
            accepted.append(taken(plain) is not None)
        except Exception:  # not the subject here
            accepted.append(False)

    count()
    assert 20 < sum(accepted) < len(accepted) - 20


# ---------------------------------------------------------------- files

_watching = False
_happened: list[str] = []
_FORBIDDEN = ("import", "exec", "compile", "os.", "subprocess.", "socket.", "shutil.", "pickle.find_class", "ctypes.")
_HARMLESS = ("os.listdir", "os.scandir")


def _audit(event: str, arguments: Any) -> None:
    if _watching and event.startswith(_FORBIDDEN) and event not in _HARMLESS:
        _happened.append(f"{event} {arguments[0]!r}")


@pytest.fixture(scope="module")
def audited() -> None:
    """From here on this process notes what is imported or called; a hook cannot be taken out again."""
    sys.addaudithook(_audit)


@contextmanager
def harmless(limit: int = 2**30) -> Iterator[None]:
    """Nothing is imported or run inside, and no more than ``limit`` further bytes can be had."""
    global _watching
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 2**33
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limit, before[1]))
    _happened.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert _happened == []


def look(path: Path) -> SavedPrecision | None:
    """What is read, or ``None`` if it is refused, which must be by the named error."""
    try:
        with harmless():
            return saved_precision(path)
    except IncompatiblePrecisionError as error:
        assert str(path) in str(error)
        return None


@pytest.fixture
def target(tmp_path: Path, audited: None) -> Path:
    saved_precision(DATA / "ours-2-16-mixed.pt")  # what is imported late is imported now
    with pytest.raises(IncompatiblePrecisionError):
        saved_precision(DATA / "make.py")
    return tmp_path / "a.ckpt"


def legacy(name: str, folder: Path) -> bytes:
    path = folder / "legacy.pt"
    torch.save(torch.load(DATA / f"{name}.pt", weights_only=True), path, _use_new_zipfile_serialization=False)
    return path.read_bytes()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("files")
    names = ("ours-2-16-mixed", "ours-1-16-mixed", "stock-16-mixed", "hand-transformer-engine")
    return [(DATA / f"{name}.pt").read_bytes() for name in names] + [legacy(name, folder) for name in names[:2]]


def test_the_watch_sees_an_import_and_a_call(target: Path) -> None:
    with pytest.raises(AssertionError, match=r"os\.mkdir"), harmless():
        target.mkdir()
    with pytest.raises(AssertionError, match="compile"), harmless():
        eval("1 + 1")


@given(data=st.binary(max_size=300))
@fuzz(150)
def test_random_bytes_are_refused_by_name(target: Path, data: bytes) -> None:
    target.write_bytes(data)
    assert look(target) is None


@given(
    start=st.sampled_from([b"PK\x03\x04", b"\x80\x02", b"\x80\x04\x95", b"\x80\x02\x8a\x0a"]),
    data=st.binary(max_size=200),
)
@fuzz(150)
def test_random_bytes_that_begin_well_are_refused_by_name(target: Path, start: bytes, data: bytes) -> None:
    target.write_bytes(start + data)
    assert look(target) is None


@given(which=st.integers(0, 5), share=st.floats(0, 1, exclude_max=True))
@fuzz(150)
def test_a_file_cut_off_anywhere_is_refused_or_read(target: Path, files: list[bytes], which: int, share: float) -> None:
    whole = files[which]
    target.write_bytes(whole)
    before = look(target)
    target.write_bytes(whole[: int(share * len(whole))])
    found = look(target)
    # An old file ends with the numbers, which are not looked at; all that is read comes before them.
    assert found is None or (which >= 4 and found == before)


@given(
    which=st.integers(0, 5),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4),
)
@fuzz(300)
def test_flipped_bits_are_refused_or_read(
    target: Path, files: list[bytes], which: int, flips: list[tuple[float, int]]
) -> None:
    damaged = bytearray(files[which])
    for share, bit in flips:
        damaged[int(share * len(damaged))] ^= 1 << bit
    target.write_bytes(damaged)
    found = look(target)
    if found is not None:
        never_silent(found.manifest, CURRENT[0])


_OPCODES = [
    b"(", b".", b"0", b"1", b"2", b"F1.5\n", b"I1\n", b"J\x01\x00\x00\x00", b"K\x01", b"L1L\n", b"M\x01\x00", b"N",
    b"Q", b"R", b"S'a'\n", b"T\x01\x00\x00\x00a", b"U\x01a", b"V\\u0041\n", b"X\x01\x00\x00\x00a", b"a", b"b",
    b"cos\nsystem\n", b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n",
    b"c__builtin__\ngetattr\n", b"d", b"e", b"g0\n", b"h\x00", b"ios\nsystem\n", b"j\x00\x00\x00\x00", b"l", b"o",
    b"p0\n", b"q\x00", b"r\x00\x00\x00\x00", b"s", b"t", b"u", b"}", b"]", b")", b"\x81", b"\x85", b"\x86", b"\x87",
    b"\x88", b"\x89", b"\x8a\x01\x05", b"\x8b\x01\x00\x00\x00\x05", b"B\x01\x00\x00\x00a", b"C\x01a", b"\x8c\x01a",
    b"\x8c\x02os\x8c\x06system\x93", b"\x8f", b"\x90", b"\x91", b"\x92", b"\x94", b"\x96\x01\x00\x00\x00\x00\x00\x00\x00a",
    b"\x97", b"\x98", b"\x82\x01", b"P1\n", b"X\x0a\x00\x00\x00state_dict", b"X\x12\x00\x00\x00lightning_amp_plus",
]  # fmt: skip


@given(code=st.lists(st.sampled_from(_OPCODES), max_size=25), how=st.sampled_from(["zip", "old"]))
@fuzz(350)
def test_a_random_program_for_the_unpickler_is_refused_or_read(target: Path, code: list[bytes], how: str) -> None:
    program = b"\x80\x04}" + b"".join(code) + b"."
    if how == "zip":
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("a/data.pkl", program)
            archive.writestr("a/version", "3\n")
    else:
        magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
        target.write_bytes(magic + b"\x80\x02M\xe9\x03." + b"\x80\x02}." + program)
    found = look(target)
    if found is not None:
        never_silent(found.manifest, CURRENT[0])


@given(cut=st.floats(0, 1), flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=3))
@fuzz(150)
def test_a_damaged_sidecar_never_changes_what_the_checkpoint_says(
    target: Path, cut: float, flips: list[tuple[float, int]]
) -> None:
    plain = document()
    if not target.exists():
        torch.save({CHECKPOINT_KEY: plain}, target)
    data = bytearray(json.dumps(plain).encode())
    for share, bit in flips:
        data[int(share * len(data))] ^= 1 << bit
    Path(sidecar_of(target)).write_bytes(data[: math.ceil(cut * len(data))])
    found = look(target)
    if found is not None:
        assert (found.source, found.manifest.to_dict()) == ("checkpoint", plain)
        if bytes(data[: math.ceil(cut * len(data))]) != json.dumps(plain).encode():
            assert found.notes


@given(plain=edited(DOCUMENTS))
@fuzz(150)
def test_an_edited_sidecar_alone_is_refused_by_name_or_read(target: Path, plain: Any) -> None:
    Path(sidecar_of(target)).write_text(json.dumps(plain))
    found = look(target)
    if found is not None:
        assert found.source == "sidecar"
        never_silent(found.manifest, CURRENT[0])
