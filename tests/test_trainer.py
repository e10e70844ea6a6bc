"""Trainer(precision=...): what it takes, what it refuses, and what a LightningCLI makes of a YAML file."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision

from lightning_amp_plus import AmpPrecision, LossScale, PrecisionPolicy, Rule, Trainer
from lightning_amp_plus.callbacks import Fp8CoverageMonitor
from lightning_amp_plus.fp8 import DelayedScaling, RowwiseScaling


def make(**arguments: Any) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **arguments)


def plugin_of(trainer: pl.Trainer) -> AmpPrecision:
    plugin = trainer.precision_plugin
    assert type(plugin) is AmpPrecision
    return plugin


def test_a_plugin_is_used_as_it_is() -> None:
    plugin = AmpPrecision("16-mixed")
    trainer = make(precision=plugin)
    assert trainer.precision_plugin is plugin
    assert trainer.precision == "16-mixed"


def test_a_policy_becomes_a_plugin() -> None:
    policy = PrecisionPolicy("bf16", rules=[Rule("layer", compute="fp32")])
    trainer = make(precision=policy)
    assert plugin_of(trainer).policy == policy
    assert trainer.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("precision", "meaning"),
    [
        ("16-mixed", "16-mixed"),
        ("bf16-mixed", "bf16-mixed"),
        ("16-true", "16-true"),
        ("bf16-true", "bf16-true"),
        ("32-true", "32-true"),
        ("16", "16-mixed"),
        ("bf16", "bf16-mixed"),
        (16, "16-mixed"),
        (32, "32-true"),
    ],
)
def test_strings_a_policy_knows_become_a_plugin(precision: Any, meaning: str) -> None:
    trainer = make(precision=precision)
    assert plugin_of(trainer).policy == PrecisionPolicy.from_string(meaning)
    assert trainer.precision == meaning


def test_fp16_on_a_cpu_stays_fp16() -> None:
    assert plugin_of(make(precision="16-mixed")).scaler is not None


def test_other_precisions_are_passed_on_to_lightning() -> None:
    assert type(make(precision="64-true").precision_plugin) is DoublePrecision


@pytest.mark.parametrize("arguments", [{}, {"precision": None}])
def test_without_a_precision_lightning_decides(arguments: dict[str, Any]) -> None:
    assert type(make(**arguments).precision_plugin) is Precision


def test_unknown_strings_are_refused_by_lightning() -> None:
    with pytest.raises(ValueError, match="bf17"):
        make(precision="bf17")


@pytest.mark.parametrize("form", [lambda plugin: plugin, lambda plugin: [plugin]], ids=["single", "list"])
def test_plugins_work_as_in_lightning(form: Any) -> None:
    plugin = AmpPrecision("bf16-mixed")
    assert make(plugins=form(plugin)).precision_plugin is plugin


def test_other_plugins_are_kept_beside_the_precision() -> None:
    sync: LayerSync = TorchSyncBatchNorm()
    trainer = make(precision=AmpPrecision("bf16-mixed"), plugins=[sync])
    plugin_of(trainer)
    assert trainer._accelerator_connector._layer_sync is sync


def test_the_callers_list_of_plugins_is_left_alone() -> None:
    plugins: list[Any] = []
    make(precision="bf16-mixed", plugins=plugins)
    assert plugins == []


@pytest.mark.parametrize("second", [AmpPrecision("bf16-mixed"), MixedPrecision("bf16-mixed", "cpu")])
@pytest.mark.parametrize("first", ["16-mixed", PrecisionPolicy("fp16"), AmpPrecision("16-mixed")])
def test_a_second_precision_is_refused_naming_both(first: Any, second: Any) -> None:
    with pytest.raises(ValueError, match=rf"given twice.*plugins=.*{type(second).__name__}.*Keep one"):
        make(precision=first, plugins=[second])


@pytest.mark.parametrize("strategy", ["deepspeed", "deepspeed_stage_2", "deepspeed_stage_3_offload"])
@pytest.mark.parametrize("arguments", [{"precision": "16-mixed"}, {"plugins": [AmpPrecision("bf16-mixed")]}])
def test_deepspeed_is_refused_with_the_reason(strategy: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{strategy}.*never calls the plugin.*strategy='ddp'"):
        make(strategy=strategy, **arguments)


@pytest.mark.parametrize("strategy", ["xla", "xla_fsdp", "single_xla"])
def test_xla_is_refused_with_the_reason(strategy: str) -> None:
    with pytest.raises(ValueError, match=rf"{strategy}.*XLAPrecision only"):
        make(strategy=strategy, precision="bf16-mixed")


# ---------------------------------------------------------------- LightningCLI


def from_yaml(folder: Path, trainer: str, trainer_class: type[pl.Trainer] = Trainer) -> pl.Trainer:
    config = folder / "run.yaml"
    indented = "\n".join(f"  {line}" for line in trainer.strip("\n").splitlines())
    quiet = "  accelerator: cpu\n  logger: false\n  enable_checkpointing: false\n  enable_progress_bar: false\n"
    config.write_text(f"trainer:\n{quiet}{indented}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", "--config", str(config)])
        cli = LightningCLI(
            BoringModel,
            trainer_class=trainer_class,
            run=False,
            save_config_callback=None,
            seed_everything_default=False,
        )
    return cli.trainer


@pytest.mark.parametrize("written", ["bf16-mixed", "16-mixed", "16", "fp8-mixed"])
def test_cli_takes_a_plain_string(tmp_path: Path, written: str) -> None:
    trainer = from_yaml(tmp_path, f"precision: {written}")
    assert plugin_of(trainer).policy == PrecisionPolicy.from_string(written)


def test_cli_passes_other_strings_on(tmp_path: Path) -> None:
    assert type(from_yaml(tmp_path, "precision: 64-true").precision_plugin) is DoublePrecision


def test_cli_takes_a_policy_as_a_mapping(tmp_path: Path) -> None:
    trainer = from_yaml(
        tmp_path,
        """
precision:
  compute: bf16
  reduce: bf16
  rules:
    - match: layer
      compute: fp32
""",
    )
    assert plugin_of(trainer).policy == PrecisionPolicy("bf16", reduce="bf16", rules=[Rule("layer", compute="fp32")])


def test_cli_takes_recipes_to_try_by_name_by_class_and_in_their_plain_form(tmp_path: Path) -> None:
    trainer = from_yaml(
        tmp_path,
        """
precision: bf16-mixed
callbacks:
  - class_path: lightning_amp_plus.callbacks.Fp8CoverageMonitor
    init_args:
      what_if:
        - rowwise
        - class_path: lightning_amp_plus.fp8.DelayedScaling
          init_args: {history: 16}
        - {name: delayed, history: 4}
""",
    )
    [monitor] = [callback for callback in trainer.callbacks if isinstance(callback, Fp8CoverageMonitor)]
    assert monitor.what_if == (RowwiseScaling(), DelayedScaling(history=16), DelayedScaling(history=4))


PLUGIN = """
class_path: lightning_amp_plus.AmpPrecision
init_args:
  policy:
    compute: fp16
    rules:
      - match: layer
        compute: fp32
        reason: logits
  loss_scale:
    init: 1024
    growth_interval: 7
  max_consecutive_skips: 3
"""


@pytest.mark.parametrize(
    ("key", "trainer_class"),
    [("precision", Trainer), ("plugins", Trainer), ("plugin list", Trainer), ("plugin list", pl.Trainer)],
)
def test_cli_takes_a_plugin_with_nested_policy_and_loss_scale(
    tmp_path: Path, key: str, trainer_class: type[pl.Trainer]
) -> None:
    lines = PLUGIN.strip().splitlines()
    if key == "plugin list":
        text = "plugins:\n" + "\n".join(("  - " if i == 0 else "    ") + line for i, line in enumerate(lines))
    else:
        text = f"{key}:\n" + "\n".join(f"  {line}" for line in lines)
    plugin = plugin_of(from_yaml(tmp_path, text, trainer_class))
    assert plugin.policy == PrecisionPolicy("fp16", rules=[Rule("layer", compute="fp32", reason="logits")])
    assert plugin.scaler is not None
    assert plugin.scaler.config == LossScale(init=1024, growth_interval=7)


def test_cli_takes_a_plugin_with_a_string_and_a_static_scale(tmp_path: Path) -> None:
    text = """
precision:
  class_path: lightning_amp_plus.AmpPrecision
  init_args: {policy: 16-mixed, loss_scale: 512.0}
"""
    plugin = plugin_of(from_yaml(tmp_path, text))
    assert plugin.policy == PrecisionPolicy.from_string("16-mixed")
    assert plugin.scaler is not None
    assert (plugin.scaler.dynamic, plugin.scaler.get_scale()) == (False, 512.0)


def test_cli_refuses_a_second_precision(tmp_path: Path) -> None:
    text = """
precision: bf16-mixed
plugins:
  - class_path: lightning_amp_plus.AmpPrecision
    init_args: {policy: 16-mixed}
"""
    with pytest.raises(ValueError, match="given twice"):
        from_yaml(tmp_path, text)


@pytest.mark.parametrize(
    "recipe",
    [
        "delayed",
        "{name: delayed, history: 1024}",
        "{class_path: lightning_amp_plus.fp8.DelayedScaling, init_args: {history: 1024}}",
    ],
)
def test_cli_takes_an_fp8_recipe_by_name_as_a_mapping_and_as_a_class(tmp_path: Path, recipe: str) -> None:
    trainer = from_yaml(
        tmp_path,
        f"""
precision:
  compute: bf16
  rules:
    - match: layer
      compute: fp8
      recipe: {recipe}
""",
    )
    assert plugin_of(trainer).policy.rules[0].recipe == DelayedScaling()
