"""`inspect`, `diff` and `check` on real checkpoints: what they print, in a pipe and in a terminal, and how they end."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from rich.console import Console

import lightning_amp_plus.cli as cli
import lightning_amp_plus.commands.inspect as commands_inspect
from lightning_amp_plus import AmpPrecision, IncompatiblePrecisionError, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks.checkpoint import PrecisionCheckpoint
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, Manifest
from lightning_amp_plus.checkpoint.sidecar import sidecar_of
from lightning_amp_plus.cli import main
from lightning_amp_plus.commands.routes import folded
from tests.support.manifests import checkpoint, document
from tests.support.models import TinyRegressor, adamw, sgd
from tests.support.training import PLAIN_TYPES_ONLY, amp_fp16, fit, loader, make_trainer, regression_batches, stock_fp16

BOXES = set("━─│┃┏┡└╇")
MODEL = "model: tests.support.models.TinyRegressor\n"
STORED = {"micro_batches": 1, "size": 2, "gradients": "stored"}
FP16 = """
trainer:
  accelerator: cpu
  accumulate_grad_batches: 2
  gradient_clip_val: 1.0
  plugins:
    class_path: lightning_amp_plus.AmpPrecision
    init_args: {policy: 16-mixed, loss_scale: {init: 1024}}
"""


class Deep(L.LightningModule):
    """More modules than anybody wants to read, one of which is moved while training."""

    def __init__(self, depth: int = 250) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(depth)
        )
        self.head = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for block in self.blocks:
            x = x + 0.01 * block(x)
        return torch.nn.functional.mse_loss(self.head(x).float(), y.float())

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


@dataclass(frozen=True)
class Saved:
    """Checkpoints of real runs; those that are changed by a test are copied first."""

    fp16: str
    bf16: str
    moved: str
    stock: str
    stock_fp32: str
    weights: str
    bare_weights: str


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")

    def save(trainer: L.Trainer, name: str, **options: Any) -> str:
        trainer.save_checkpoint(folder / f"{name}.ckpt", **options)
        return str(folder / f"{name}.ckpt")

    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "callbacks": [PrecisionCheckpoint()]}
    ours = fit(TinyRegressor(adamw), amp_fp16(), regression_batches(12), **options)
    fp16, weights_only = save(ours, "fp16"), save(ours, "weights", weights_only=True)
    bare = fit(TinyRegressor(), amp_fp16(), regression_batches(2))
    plugin = AmpPrecision(PrecisionPolicy(compute="bf16", rules=[Rule("head", compute="fp32", reason="logits")]))
    return Saved(
        fp16=fp16,
        bf16=save(fit(TinyRegressor(adamw), AmpPrecision("bf16-mixed"), regression_batches(4)), "bf16"),
        moved=save(fit(Deep(), plugin, regression_batches(3), callbacks=[Mover(plugin)]), "moved"),
        stock=save(fit(TinyRegressor(), stock_fp16(), regression_batches(4)), "stock"),
        stock_fp32=save(fit(TinyRegressor(), None, regression_batches(4)), "stock_fp32"),
        weights=weights_only,
        bare_weights=save(bare, "bare_weights", weights_only=True),
    )


class Mover(L.Callback):
    def __init__(self, plugin: AmpPrecision) -> None:
        self.plugin = plugin

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == 2:
            self.plugin.set_route("blocks.3.1", "fp32", "it overflows")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lightning-amp-plus {argv[0]}: ")
    assert err.count("\n") == 1
    return err


def config(text: str) -> str:
    Path("run.yaml").write_text(text)
    return "run.yaml"


def checked(capsys: pytest.CaptureFixture[str], path: str, text: str, *options: str, code: int) -> dict[str, Any]:
    return json.loads(printed(capsys, "check", path, "--config", config(text), "--json", *options, code=code))


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    return {finding["field"]: finding["verdict"] for finding in document["findings"]}


def cells(text: str, label: str) -> str:
    """What stands beside a label in a table of two columns."""
    [found] = [line for line in text.splitlines() if line.startswith(f"{label}  ")]
    return found.removeprefix(label).strip()


# ---------------------------------------------------------------- inspect


def test_inspect_says_what_the_run_was_like(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    out = printed(capsys, "inspect", saved.fp16)
    assert out.startswith(f"Precision of {saved.fp16} (source: checkpoint)\n")
    assert cells(out, "precision") == "16-mixed"
    assert f"torch {torch.__version__}" in cells(out, "versions")
    assert cells(out, "hardware").startswith("device cpu")
    assert "1024 (6x)" in out  # the scale after each window
    assert cells(out, "windows skipped") == "0 (0.00%)"
    assert cells(out, "parameters") == "fp32 4"
    assert cells(out, "optimizer") == "AdamW; state: fp32 8"
    assert (cells(out, "epoch"), cells(out, "global step"), cells(out, "open window")) == ("1", "6", "none")
    assert cells(out, "random states") == "ranks: 1; generators: numpy, python, torch"
    assert (cells(out, "strategy"), cells(out, "micro-batches in a window")) == ("SingleDeviceStrategy", "2")
    assert cells(out, "clipping") == "1 by norm"
    assert "Not recorded" not in out


def test_inspect_in_a_pipe_draws_no_boxes(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    assert not BOXES & set(printed(capsys, "inspect", saved.fp16) + printed(capsys, "inspect", saved.moved))


@pytest.mark.parametrize("width", [60, 200])
def test_inspect_in_a_terminal_draws_tables_that_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, saved: Saved, width: int
) -> None:
    in_a_terminal(monkeypatch, width)
    out = printed(capsys, "inspect", saved.moved)
    assert set(out) & BOXES
    assert max(map(len, out.splitlines())) <= width
    assert out.count("no room for") == (width == 60)  # under the one table that has columns to spare
    assert "it overflows" in out


def in_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(
        cli, "Console", lambda **options: Console(force_terminal=True, color_system=None, width=width, **options)
    )


def test_inspect_folds_modules_that_are_alike(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    out = printed(capsys, "inspect", saved.moved)
    assert len(out.splitlines()) < 80
    assert "blocks.*.* (249 Linear)" in out and "blocks.*.* (250 LayerNorm)" in out
    assert "1003 modules; --modules" in out
    every = printed(capsys, "inspect", saved.moved, "--modules")
    assert len(every.splitlines()) > 1003
    assert cells(every, "blocks.249.1").startswith("bf16")


def test_inspect_lists_moves(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    [moved] = [line for line in printed(capsys, "inspect", saved.moved).splitlines() if line.endswith("it overflows")][
        :1
    ]
    assert moved.split()[:3] == ["blocks.3.1", "fp32", "2"]


def test_names_are_folded_by_number_and_class() -> None:
    names = [("", "Net"), *((f"h.{i}.fc", "Linear") for i in range(3)), ("h.3.fc", "Other"), ("layer2x", "Linear")]
    assert folded(names) == "(model), h.*.fc (3 Linear), h.3.fc, layer2x"
    assert folded((f"{letter}x", "") for letter in "abcdefgh") == "ax, bx, cx, dx, ex, fx and 2 more"


@pytest.mark.parametrize("name", ["fp16", "bf16", "moved", "stock", "stock_fp32", "weights", "bare_weights"])
def test_inspect_json_is_the_manifest(capsys: pytest.CaptureFixture[str], saved: Saved, name: str) -> None:
    path = getattr(saved, name)
    document = json.loads(printed(capsys, "inspect", path, "--json"))
    assert document["path"] == path
    assert document["source"] == ("sidecar" if name == "weights" else "checkpoint")
    assert document["weights_only"] is ("weights" in name)
    manifest = Manifest.from_dict(document["manifest"], "the printed JSON")
    if name in ("fp16", "bf16", "moved"):
        stored = torch.load(path, weights_only=True)[CHECKPOINT_KEY]
        assert manifest == Manifest.from_dict(stored, "the checkpoint")


def test_inspect_reads_a_folder(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    sharded(saved.fp16, "sharded")
    out = printed(capsys, "inspect", "sharded")
    assert "(source: checkpoint)" in out and cells(out, "precision") == "16-mixed"


def sharded(path: str, folder: str) -> str:
    """A checkpoint as FSDP saves it: a folder with a small file for all but the tensors."""
    contents = torch.load(path, weights_only=True)
    Path(folder).mkdir()
    torch.save(
        {key: contents[key] for key in contents.keys() - {"state_dict", "optimizer_states"}}, f"{folder}/meta.pt"
    )
    return folder


@pytest.mark.parametrize("suffix", ["", ".precision.json"])
def test_inspect_reads_a_sidecar_whose_checkpoint_is_elsewhere(
    capsys: pytest.CaptureFixture[str], saved: Saved, suffix: str
) -> None:
    shutil.copy(sidecar_of(saved.fp16), "run.ckpt.precision.json")
    out = printed(capsys, "inspect", f"run.ckpt{suffix}")
    assert "(source: sidecar)" in out and "itself is not there" in out
    assert cells(out, "precision") == "16-mixed"


def test_inspect_names_a_stale_sidecar(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    shutil.copy(saved.bf16, "run.ckpt")
    shutil.copy(sidecar_of(saved.fp16), "run.ckpt.precision.json")
    out = printed(capsys, "inspect", "run.ckpt")
    assert "stale" in out and cells(out, "precision") == "bf16-mixed"


def test_inspect_says_what_a_stock_checkpoint_does_not(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    out = printed(capsys, "inspect", saved.stock)
    assert "Written without AmpPrecision" in out
    assert cells(out, "precision") == "16-mixed"
    assert cells(out, "scale") == "1024"
    [unsaid] = [line for line in out.splitlines() if line.startswith("Not recorded: ")]
    assert all(
        word in unsaid for word in ("versions", "hardware", "history of windows", "clipping", "routes of modules")
    )
    assert cells(printed(capsys, "inspect", saved.stock_fp32), "precision") == "cannot be told"


def test_inspect_says_why_weights_alone_have_no_precision_state(
    capsys: pytest.CaptureFixture[str], saved: Saved
) -> None:
    out = printed(capsys, "inspect", saved.bare_weights)
    assert "save_weights_only=True" in out and "PrecisionCheckpoint() writes a sidecar" in out
    with_sidecar = printed(capsys, "inspect", saved.weights)
    assert "(source: sidecar)" in with_sidecar and "a fit cannot continue it" in with_sidecar
    assert cells(with_sidecar, "scale").startswith("1024")


def test_inspect_shows_a_damaged_loss_scale_and_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    scaler = {**document("16-mixed")["scaler"], "scale": float("nan")}
    torch.save({CHECKPOINT_KEY: {**document("16-mixed"), "scaler": scaler}}, "nan.ckpt")
    assert "not usable: scale=nan" in cells(printed(capsys, "inspect", "nan.ckpt"), "state")
    json.loads(printed(capsys, "inspect", "nan.ckpt", "--json"))
    torch.save({CHECKPOINT_KEY: document("fp8-mixed")}, "fp8.ckpt")
    assert "first, second  recipe delayed, history_length 16" in printed(capsys, "inspect", "fp8.ckpt")
    for begun_at, said in ((None, "not yet"), (40, "after 40 applied steps")):
        torch.save({CHECKPOINT_KEY: document("fp8-mixed", fp8_start__begun_at=begun_at)}, "fp8.ckpt")
        assert re.search(f"fp8 begun +{said}", printed(capsys, "inspect", "fp8.ckpt"))


def test_inspect_prints_foreign_names_on_one_line_and_without_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = document("16-mixed")
    plain["routes"]["a[/b]\x1b[31m\nc"] = {**plain["routes"]["first"], "reason": "[bold]\nno"}
    torch.save({CHECKPOINT_KEY: plain}, "[b].ckpt")
    in_a_pipe = printed(capsys, "inspect", "[b].ckpt")
    in_a_terminal(monkeypatch, 250)
    for out in (in_a_pipe, printed(capsys, "inspect", "[b].ckpt"), printed(capsys, "diff", "[b].ckpt", "[b].ckpt")):
        assert "[b].ckpt" in out and "\x1b[31m" not in out
    assert "a[/b]?[31m c" in in_a_pipe and "[bold] no" in in_a_pipe


def test_inspect_a_long_history_by_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    plain = document("16-mixed")
    plain["history"]["scales"] = [[float(2 ** (i % 2)), 3.0] for i in range(4096)]
    torch.save({CHECKPOINT_KEY: plain}, "long.ckpt")
    out = printed(capsys, "inspect", "long.ckpt")
    assert "4088 changes earlier, then 1 (3x), 2 (3x)" in out


# ---------------------------------------------------------------- what cannot be read


def truncated(saved: Saved) -> str:
    Path("cut.ckpt").write_bytes(Path(saved.fp16).read_bytes()[:3000])
    return "cut.ckpt"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("gone.ckpt", ("not found", "gone.ckpt")),
        ("nowhere://run.ckpt", ("nowhere://run.ckpt cannot be opened: ",)),
        (".", ("holds no meta.pt",)),
    ],
)
def test_one_line_says_what_cannot_be_read(
    capsys: pytest.CaptureFixture[str], path: str, words: tuple[str, ...]
) -> None:
    for argv in (("inspect", path), ("diff", path, path), ("check", path, "--config", config(FP16 + MODEL))):
        message = refused(capsys, *argv)
        assert all(word in message for word in words), message


def test_one_line_says_that_a_file_is_cut_off_or_something_else(
    capsys: pytest.CaptureFixture[str], saved: Saved
) -> None:
    assert "cut off" in refused(capsys, "inspect", truncated(saved))
    Path("text.ckpt").write_text("not a checkpoint\n" * 100)
    assert "cannot be read as a checkpoint" in refused(capsys, "inspect", "text.ckpt")
    Path("empty.ckpt").touch()
    assert "cannot be read as a checkpoint" in refused(capsys, "inspect", "empty.ckpt")
    torch.save([1, 2], "list.ckpt")
    assert "holds list" in refused(capsys, "inspect", "list.ckpt")
    torch.save({CHECKPOINT_KEY: {**document(), "windows": "many", "more": 1}}, "edited.ckpt")
    message = refused(capsys, "inspect", "edited.ckpt")
    assert "windows holds 'many'" in message and "more is not a field" in message
    torch.save({CHECKPOINT_KEY: {**document(), "schema_version": 99}}, "newer.ckpt")
    assert "written by a newer" in refused(capsys, "inspect", "newer.ckpt")


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), ImportError("Install s3fs"), TypeError("x")]
)
def test_whatever_a_file_system_raises_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def raising(path: str) -> Any:
        raise error

    monkeypatch.setattr(commands_inspect, "saved_precision", raising)
    assert f"run.ckpt cannot be read: {error}" in refused(capsys, "inspect", "run.ckpt")


def test_nothing_that_a_file_names_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, ("sprung",)

    torch.save({"state_dict": {}, "optimizer_states": [], "trap": Trap()}, "trap.ckpt")
    printed(capsys, "inspect", "trap.ckpt")
    assert not Path("sprung").exists()


# ---------------------------------------------------------------- diff


def test_diff_of_a_checkpoint_and_itself_is_nothing(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    for path in (saved.fp16, saved.moved, saved.weights, saved.stock):
        assert "Nothing differs." in printed(capsys, "diff", path, path)
    assert json.loads(printed(capsys, "diff", saved.fp16, saved.fp16, "--json"))["findings"] == []


def test_diff_prints_what_differs_and_why_it_is_refused(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    out = printed(capsys, "diff", saved.fp16, saved.bf16, code=1)
    assert out.startswith(f"A: {saved.fp16}\nB: {saved.bf16}\n")
    [row] = [line for line in out.splitlines() if line.startswith("precision  ")]
    assert row.split() == ["precision", "16-mixed", "bf16-mixed", "refuse"]
    assert "precision: The run would go on without the loss scale it found" in out
    assert out.endswith("allow=['precision']\n")
    assert "partial_window" not in out and not BOXES & set(out)
    every = printed(capsys, "diff", saved.fp16, saved.bf16, "--all", code=1)
    assert "partial_window" in every and "random_state" in every


def test_diff_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, saved: Saved) -> None:
    in_a_terminal(monkeypatch, 100)
    out = printed(capsys, "diff", saved.fp16, saved.bf16, code=1)
    assert set(out) & BOXES and "why, and what to do" in out
    assert all(len(line) <= 100 for line in out.splitlines() if set(line) & BOXES)


def test_diff_json(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    found = json.loads(printed(capsys, "diff", saved.fp16, saved.bf16, "--json", code=1))
    assert (found["checkpoint"], found["run"]) == (saved.fp16, saved.bf16)
    assert found["compatible"] is False and found["allow"] == ["precision"]
    assert verdicts(found) == {
        "precision": "refuse",
        "loss_scale": "convert",
        "accumulation": "note",
        "clipping": "note",
    }


def test_diff_that_converts_is_exit_code_zero(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({CHECKPOINT_KEY: document()}, "two.ckpt")
    torch.save({CHECKPOINT_KEY: document(strategy__world_size=4)}, "four.ckpt")
    out = printed(capsys, "diff", "two.ckpt", "four.ckpt")
    assert "world_size" in out and "Nothing is refused." in out


def test_diff_takes_stock_lightning_on_the_left_and_where_its_precision_can_be_told(
    capsys: pytest.CaptureFixture[str], saved: Saved
) -> None:
    printed(capsys, "diff", saved.stock, saved.fp16)
    printed(capsys, "diff", saved.bf16, saved.stock, code=1)
    printed(capsys, "diff", saved.stock_fp32, saved.bf16)
    assert "does not tell the precision" in refused(capsys, "diff", saved.bf16, saved.stock_fp32)


def test_diff_says_of_which_checkpoint_a_note_is(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    assert "B: The checkpoint was saved with save_weights_only=True" in printed(
        capsys, "diff", saved.fp16, saved.weights
    )
    assert (
        "A: " + saved.bare_weights + " was saved with save_weights_only=True and holds no precision state"
        in printed(capsys, "diff", saved.bare_weights, saved.bf16)
    )


# ---------------------------------------------------------------- check


def test_check_continues_the_same_run(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    assert verdicts(checked(capsys, saved.fp16, FP16 + MODEL, code=0)) == {}
    out = printed(capsys, "check", saved.fp16, "--config", config(FP16 + MODEL))
    assert out == f"saved: {saved.fp16}\nthis run: run.yaml\n\nNothing differs.\n"
    every = verdicts(checked(capsys, saved.fp16, FP16 + MODEL, "--all", code=0))
    assert set(every.values()) == {"ok"}
    assert {"precision", "routes", "scaler", "accumulation", "clipping", "world_size", "strategy"} <= every.keys()


def test_check_prints_what_to_allow_and_a_fit_then_goes_on(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    bf16 = FP16.replace("16-mixed, loss_scale: {init: 1024}", "bf16-mixed") + MODEL
    out = printed(capsys, "check", saved.fp16, "--config", config(bf16), code=1)
    assert "Refused: precision." in out and not BOXES & set(out)
    allow = out.splitlines()[-1]
    assert allow == "allow=['precision']"
    allowing = bf16.replace("policy: bf16-mixed", f"policy: bf16-mixed, {allow.replace('=', ': ')}")
    assert verdicts(checked(capsys, saved.fp16, allowing, code=0))["precision"] == "convert"

    fields = json.loads(printed(capsys, "check", saved.fp16, "--config", config(bf16), "--json", code=1))["allow"]
    for names, goes_on in (((), False), (fields, True)):
        trainer = make_trainer(AmpPrecision("bf16-mixed", allow=names), max_epochs=2, callbacks=[PrecisionCheckpoint()])
        options: dict[str, Any] = {"ckpt_path": saved.fp16, **PLAIN_TYPES_ONLY}
        if goes_on:
            trainer.fit(TinyRegressor(adamw), loader(regression_batches(12)), **options)
        else:
            with pytest.raises(IncompatiblePrecisionError, match="precision"):
                trainer.fit(TinyRegressor(adamw), loader(regression_batches(12)), **options)


def test_check_keeps_what_the_run_allows_already(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    Path("cut").mkdir()
    torch.save(checkpoint(scaler=None, master_weights_kept=True), "cut/meta.pt")
    allowing = FP16.replace("policy:", "allow: [scaler], policy:")
    found = checked(capsys, "cut", allowing + MODEL, code=1)
    assert found["allow"] == ["master_weights", "scaler"]


def test_check_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, saved: Saved) -> None:
    in_a_terminal(monkeypatch, 100)
    out = printed(capsys, "check", saved.bf16, "--config", config(FP16 + MODEL), code=1)
    assert set(out) & BOXES and out.endswith("allow=['precision']\n")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("accumulate_grad_batches: 2", "accumulate_grad_batches: 4", {"accumulation": "note"}),
        ("gradient_clip_val: 1.0", "gradient_clip_val: null", {"clipping": "note"}),
        ("gradient_clip_val: 1.0", "gradient_clip_val: 1, gradient_clip_algorithm: value", {"clipping": "note"}),
        ("accelerator: cpu", "accelerator: cpu, devices: 1, num_nodes: 1, strategy: auto", {}),
        (
            "accelerator: cpu",
            "accelerator: cpu, devices: 2, num_nodes: 3",
            {"world_size": "convert", "strategy": "note", "random_state": "note"},
        ),
        (
            "accelerator: cpu",
            "accelerator: cpu, strategy: {class_path: lightning.pytorch.strategies.DDPStrategy}",
            {"strategy": "note"},
        ),
        ("accelerator: cpu", "accelerator: cpu, strategy: ddp_find_unused_parameters_true", {"strategy": "note"}),
        ("{init: 1024}", "{init: 1024, growth_interval: 10}", {"loss_scale_rule": "note"}),
        ("{init: 1024}", "512.0", {"loss_scale": "convert"}),
        ("{init: 1024}", "{class_path: lightning_amp_plus.LossScale, init_args: {init: 4}}", {}),
        ("{init: 1024}", "{class_path: torch.amp.GradScaler, init_args: {device: cpu, init_scale: 8.0}}", {}),
        ("{init: 1024}", "{init: 1024, max: 512, init: 512}", {"scaler": "convert", "loss_scale_rule": "note"}),
        ("{init: 1024}", "auto, partial_window: mean", {"partial_window": "note"}),
        ("policy: 16-mixed", "policy: {compute: fp16, params: fp16}", {"precision": "refuse"}),
    ],
)
def test_check_reads_what_the_config_says(
    capsys: pytest.CaptureFixture[str], saved: Saved, old: str, new: str, expected: dict[str, str]
) -> None:
    text = f"trainer: {{{', '.join(line.strip() for line in FP16.strip().splitlines()[1:4])}, PLUGINS}}\n{MODEL}"
    plugin = "class_path: lightning_amp_plus.AmpPrecision, init_args: {policy: 16-mixed, loss_scale: {init: 1024}}"
    text = text.replace("PLUGINS", f"plugins: {{{plugin}}}").replace(old, new)
    found = verdicts(checked(capsys, saved.fp16, text, code=1 if "refuse" in expected.values() else 0))
    assert {field: found.get(field) for field in expected} == expected
    assert expected or not found


def test_check_makes_the_moves_of_the_checkpoint_first(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    policy = "{compute: bf16, rules: [{match: head, compute: fp32, reason: logits}]}"
    text = f"trainer: {{accelerator: cpu, precision: {policy}}}\nmodel: {{class_path: {__name__}.Deep}}\n"
    found = verdicts(checked(capsys, saved.moved, text, "--all", code=0))
    assert found["routes"] == "ok" and found["moves"] == "ok"
    without_blocks = text.replace(f"{__name__}.Deep", "tests.support.models.TinyRegressor").replace("head", "first")
    other = checked(capsys, saved.moved, without_blocks, code=1)
    assert "moved modules to another format, and this model does not have them" in other["obstacle"]
    assert other["allow"] == []


def test_check_says_what_the_config_leaves_open(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    found = checked(capsys, saved.fp16, FP16.replace("accelerator: cpu", "devices: auto") + MODEL, "--all", code=0)
    assert "leaves the number of ranks or the strategy open" in found["notes"][0]
    assert not {"world_size", "strategy", "clipping", "mesh"} & verdicts(found).keys()


def test_check_does_not_call_a_stored_window_dropped_where_ranks_are_open(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(checkpoint(window=STORED) | {"optimizer_states": []}, "window.ckpt")
    open_ranks = FP16.replace("accelerator: cpu", "devices: auto") + MODEL
    assert "window" not in verdicts(checked(capsys, "window.ckpt", open_ranks, code=0))
    assert verdicts(checked(capsys, "window.ckpt", FP16 + MODEL, code=0))["window"] == "convert"


@pytest.mark.parametrize(
    ("changes", "part", "said"),
    [
        ({"master_weights_kept": True}, "master_weights", "master_weights: the manifest says that they are kept"),
        ({"window": STORED}, "gradients", "gradients: the manifest says that those of the open window are stored"),
        ({}, "random_state", "random states: expected those of 2 ranks"),
        ({"random": None}, "random_state", "random states are there, but the manifest does not mention it"),
        ({"random__generators": ["torch"]}, "random_state", "random states of rank 0: expected the generators"),
    ],
    ids=["no masters", "no gradients", "no random state", "random state unsaid", "a generator unsaid"],
)
def test_check_says_that_tensors_are_not_what_the_manifest_says(
    capsys: pytest.CaptureFixture[str], changes: dict[str, Any], part: str, said: str
) -> None:
    """Edited by hand, or damaged: no allow helps, in a check as in a fit."""
    whole = checkpoint(**({} if "random" in str(changes) else changes))
    edited = {**whole[CHECKPOINT_KEY], **document(**changes)}
    if "random" not in str(changes):
        edited.pop(part)
    torch.save({CHECKPOINT_KEY: edited}, "edited.ckpt")
    found = checked(capsys, "edited.ckpt", FP16 + MODEL, code=1)
    assert found["obstacle"].startswith("edited.ckpt is damaged, or was edited: ") and said in found["obstacle"]
    assert found["allow"] == [] and found["compatible"] is False
    with pytest.raises(IncompatiblePrecisionError) as caught:
        make_trainer(amp_fp16()).fit(TinyRegressor(adamw), loader(regression_batches(2)), ckpt_path="edited.ckpt")
    assert said in str(caught.value)


def test_check_without_a_precision_says_that_nothing_would_be_asked(
    capsys: pytest.CaptureFixture[str], saved: Saved
) -> None:
    found = checked(capsys, saved.fp16, "trainer: {accelerator: cpu}\n" + MODEL, code=1)
    assert any("names no precision" in note for note in found["notes"])


@pytest.mark.parametrize("name", ["weights", "bare_weights"])
def test_check_refuses_weights_alone_whatever_is_allowed(
    capsys: pytest.CaptureFixture[str], saved: Saved, name: str
) -> None:
    found = checked(capsys, getattr(saved, name), FP16 + MODEL, code=1)
    path = getattr(saved, name)
    assert "save_weights_only=True" in found["obstacle"] and found["allow"] == []
    said = f"Refused: {path} holds weights only (it was saved with save_weights_only=True, or not by a Trainer)"
    assert said in printed(capsys, "check", path, "--config", config(FP16 + MODEL), code=1)


def test_check_reads_folder_sidecar_and_stock(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    assert checked(capsys, sharded(saved.fp16, "sharded"), FP16 + MODEL, code=0)["compatible"]
    shutil.copy(sidecar_of(saved.fp16), "run.ckpt.precision.json")
    found = checked(capsys, "run.ckpt", FP16 + MODEL, code=0)
    assert "itself is not there" in found["notes"][0]
    assert checked(capsys, saved.stock, FP16 + MODEL, code=0)["compatible"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("policy: 16-mixed", "policy: 17-mixed", ("the policy of trainer.plugins", "17-mixed")),
        ("{init: 1024}", "{init: -1}", ("trainer.plugins: LossScale(init=-1)",)),
        ("{init: 1024}", "{start: 1}", ("trainer.plugins", "start")),
        (
            "{init: 1024}",
            "{class_path: gone.Scale}",
            ("the loss scale of trainer.plugins: cannot import 'gone.Scale'",),
        ),
        ("{init: 1024}", "auto, allow: [precison]", ("Did you mean 'precision'?",)),
        ("{init: 1024}", "auto, frobnicate: 1", ("trainer.plugins", "frobnicate")),
        ("accumulate_grad_batches: 2", "accumulate_grad_batches: 0", ("trainer.accumulate_grad_batches", "found 0")),
        ("gradient_clip_val: 1.0", "gradient_clip_val: a lot", ("trainer.gradient_clip_val", "'a lot'")),
        ("accelerator: cpu", "strategy: deepspeed_stage_2", ("trainer.strategy: AmpPrecision does not work",)),
        ("16-mixed", "{compute: fp16, rules: [{match: gone, compute: fp32}]}", ("there is no plan", "'gone'")),
    ],
)
def test_check_says_in_one_line_what_is_wrong_with_the_config(
    capsys: pytest.CaptureFixture[str], saved: Saved, old: str, new: str, words: tuple[str, ...]
) -> None:
    message = refused(capsys, "check", saved.fp16, "--config", config(FP16.replace(old, new) + MODEL))
    assert all(word in message for word in words), message


def test_check_takes_the_models_class_from_the_command_line(capsys: pytest.CaptureFixture[str], saved: Saved) -> None:
    argv = ("check", saved.fp16, "--config", config(FP16))
    assert "--model MODULE:CLASS" in refused(capsys, *argv)
    printed(capsys, *argv, "--model", "tests.support.models:TinyRegressor")


@pytest.mark.parametrize("argv", [["inspect"], ["diff", "a"], ["check", "a"], ["check", "--config", "run.yaml"]])
def test_wrong_usage_is_exit_code_two(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 2
    assert "usage: lightning-amp-plus" in capsys.readouterr().err
