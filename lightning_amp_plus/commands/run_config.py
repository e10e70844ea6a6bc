"""A run described in YAML: reads the config of a LightningCLI and builds the model and the precision that it names.

Used by the commands ``explain`` and ``check``. Nothing is trained and no Trainer is made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_amp_plus.policy import PrecisionPolicy

if TYPE_CHECKING:
    from lightning_amp_plus.precision import AmpPrecision

# Sections of a config that LightningCLI saved from a run with subcommands.
_SUBCOMMANDS = ("fit", "validate", "test", "predict")


class UsageError(Exception):
    """What was asked for cannot be done; the message is for the user."""


@dataclass(frozen=True)
class RunConfig:
    """The sections of a LightningCLI config that bear on precision.

    Attributes:
        trainer: Arguments of the Trainer.
        model: The section ``model``, in whatever form.
        data: The section ``data``.
    """

    trainer: Mapping[str, Any]
    model: Any
    data: Any = None

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        """Reads a config file. Modules that it names are also looked for in the current directory from now on.

        Raises:
            UsageError: If it cannot be read, or is no config of a LightningCLI.
        """
        if find_spec("jsonargparse") is None:
            raise UsageError(
                "reading a LightningCLI config needs jsonargparse, which is not installed. "
                "Run: pip install lightning_amp_plus[cli]"
            )
        if os.getcwd() not in sys.path:  # an installed command does not have it, unlike `python train.py`
            sys.path.insert(0, os.getcwd())
        config = _sections(path)
        return cls(config.get("trainer") or {}, config.get("model"), config.get("data"))

    def names_precision(self) -> bool:
        """Whether the config says anything of the precision."""
        return bool(self._found())

    def policy(self) -> PrecisionPolicy:
        """The policy under ``trainer.plugins`` or ``trainer.precision``; without either 32-true, as in Lightning.

        Raises:
            UsageError: If it is given twice, is none that this package knows, or is wrong.
        """
        return self._precision()[0]

    def plugin(self, instead: PrecisionPolicy | None = None) -> AmpPrecision:
        """The plugin that the config describes: that of its policy, with the other arguments given there.

        Args:
            instead: A policy to take in the place of the config's.

        Raises:
            UsageError: As :meth:`policy`, and where the plugin refuses its arguments or cannot work with the strategy.
        """
        from lightning_amp_plus.integration.strategies import refuse_strategy
        from lightning_amp_plus.precision import AmpPrecision

        policy, where, cls, arguments = self._precision()
        with reporting(where):
            if "loss_scale" in arguments:
                arguments["loss_scale"] = _loss_scale(arguments["loss_scale"], where)
            plugin = (cls or AmpPrecision)(instead or policy, **arguments)
        with reporting("trainer.strategy"):
            refuse_strategy(_path(self._argument("strategy", "auto")))
        return plugin

    def build_model(self, given: str | None) -> Any:
        """The model of the config, with its layers made.

        Args:
            given: Its class as ``module:Class``, where the config does not name it.

        Raises:
            UsageError: If no class is named, or the model cannot be built.
        """
        model = _built(self.model, given, "model", "--model")
        with reporting(f"the model {type(model).__name__} cannot be built"):
            model.configure_model()
        return model

    def build_data(self, given: str | None) -> Any:
        """The data module of the config; ``None`` where it names none.

        Args:
            given: Its class as ``module:Class``, where the config does not name it.

        Raises:
            UsageError: If it cannot be built, or there are arguments and no class.
        """
        return None if given is None and not self.data else _built(self.data, given, "data", "--data")

    def device_type(self) -> str:
        """Type of the device that a Trainer with this accelerator computes on."""
        import torch

        accelerator = self._argument("accelerator", "auto")
        if accelerator == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return {"gpu": "cuda", "cuda": "cuda", "mps": "mps"}.get(str(accelerator), "cpu")

    def accumulate_grad_batches(self) -> int:
        """Micro-batches in a window."""
        value = self._argument("accumulate_grad_batches", 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(
                f"trainer.accumulate_grad_batches: expected a whole number of at least 1; found {value!r}."
            )
        return value

    def clipping(self) -> tuple[float, str] | None:
        """Threshold and algorithm of gradient clipping; ``None`` without."""
        value = self._argument("gradient_clip_val", 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"trainer.gradient_clip_val: expected a number; found {value!r}.")
        return (float(value), str(self._argument("gradient_clip_algorithm", "norm"))) if value else None

    def ranks(self) -> int | None:
        """Number of ranks; ``None`` where it is left to the machine that the run starts on."""
        devices, nodes = self._argument("devices", "auto"), self._argument("num_nodes", 1)
        if devices == "auto" and self._argument("accelerator", "auto") == "cpu":
            devices = 1  # Lightning's choice on a CPU, however many cores there are
        if isinstance(devices, list):
            devices = len(devices)
        known = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (devices, nodes))
        return devices * nodes if known else None

    def strategy_name(self, ranks: int) -> str | None:
        """Name of the strategy's class on so many ranks; ``None`` where the config does not tell it."""
        from lightning.pytorch.strategies import StrategyRegistry

        strategy = self._argument("strategy", "auto")
        if strategy == "auto":
            return "SingleDeviceStrategy" if ranks == 1 else "DDPStrategy"
        if isinstance(strategy, str) and strategy in StrategyRegistry:
            return str(StrategyRegistry[strategy]["strategy"].__name__)
        return _path(strategy).rpartition(".")[2] if _names_class(strategy) else None

    def _argument(self, name: str, default: Any) -> Any:
        value = self.trainer.get(name)
        return default if value is None else value

    def _found(self) -> dict[str, Any]:
        """What stands for the precision, by where it was found."""
        from lightning.pytorch.plugins.precision import Precision

        plugins, precision = self._argument("plugins", []), self.trainer.get("precision")
        found = {} if precision is None else {"trainer.precision": precision}
        for plugin in plugins if isinstance(plugins, list) else [plugins]:
            if _names_class(plugin) and issubclass(_class(plugin, "trainer.plugins"), Precision):
                found["trainer.plugins"] = plugin
        return found

    def _precision(self) -> tuple[PrecisionPolicy, str, type[AmpPrecision] | None, dict[str, Any]]:
        """The policy; where it was found; the plugin's class, where one is named, and its other arguments.

        Read by hand: the policy's and the plugin's own errors say more than those of a parser that tries every type
        a Trainer takes.
        """
        from lightning_amp_plus.precision import AmpPrecision

        found = self._found()
        if len(found) > 1:
            raise UsageError("the precision is given twice: keep one of trainer.precision and trainer.plugins.")
        if not found:
            return PrecisionPolicy.from_string("32-true"), "trainer.precision", None, {}
        [(where, value)] = found.items()
        if not _names_class(value) or issubclass(cls := _class(value, where), PrecisionPolicy):
            return _policy(value, where), where, None, {}
        if not issubclass(cls, AmpPrecision):
            raise UsageError(f"{where} is {cls.__name__}, which has no plan; expected AmpPrecision.")
        arguments = dict(_init_args(value))
        return _policy(arguments.pop("policy", None), f"the policy of {where}"), where, cls, arguments


def _built(section: Any, given: str | None, what: str, option: str) -> Any:
    """The object that a section of the config describes.

    Args:
        section: It.
        given: The class as ``module:Class``, where the section does not name it.
        what: What the section is called.
        option: The option that names the class.
    """
    from jsonargparse import ArgumentParser

    named = _names_class(section)
    if given is not None:
        cls = _import(given, ":", option)
    elif named:
        cls = _class(section, f"the {what}")
    else:
        raise UsageError(
            f"the config does not name the {what}'s class"
            + (", only its arguments" if section else "")
            + f". Say which it is: {option} MODULE:CLASS."
        )
    with reporting(f"the {what} {cls.__name__} cannot be built"):
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls, what, fail_untyped=False, sub_configs=True)
        arguments = parser.parse_object({what: _init_args(section) if named else section or {}})
        # Named so from jsonargparse 4.49 on, where the old name warns.
        return getattr(getattr(parser, "instantiate", parser.instantiate_classes)(arguments), what)


@contextmanager
def reporting(what: str) -> Generator[None, None, None]:
    """Turns an exception, of user code too, into a :class:`UsageError` that begins with ``what``."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _sections(path: Path) -> Mapping[str, Any]:
    """The part of a config file that holds ``trainer`` and ``model``."""
    from jsonargparse import get_loader

    with reporting("the config cannot be read"):
        text = path.read_text(encoding="utf-8")
    with reporting(f"{path} is neither YAML nor JSON"):
        # jsonargparse's own loader, so that 1e-3 is a number here too.
        config = get_loader("yaml")(text)
    if not isinstance(config, Mapping):
        raise UsageError(f"{path} is not a LightningCLI config: expected a mapping with 'trainer' and 'model'.")
    if "trainer" not in config and "model" not in config:
        for command in _SUBCOMMANDS:
            if isinstance(config.get(command), Mapping):
                return _with_trainer(path, config[command])
        raise UsageError(
            f"{path} is not a LightningCLI config: it has neither 'trainer' nor 'model', also under none of "
            f"{', '.join(_SUBCOMMANDS)}; found {', '.join(map(str, config)) or 'nothing'}."
        )
    return _with_trainer(path, config)


def _with_trainer(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config.get("trainer") or {}, Mapping):
        raise UsageError(f"{path}: 'trainer' must be a mapping of Trainer arguments; found {config['trainer']!r}.")
    return config


def _policy(value: Any, where: str) -> PrecisionPolicy:
    with reporting(where):
        value = _plain(value)
        return PrecisionPolicy.from_dict(value) if isinstance(value, Mapping) else PrecisionPolicy.from_string(value)


def _loss_scale(value: Any, where: str) -> Any:
    """What ``AmpPrecision`` takes for a loss scale: a mapping is a ``LossScale``, or names another class."""
    from lightning_amp_plus.scaling.loss_scale import LossScale

    if _names_class(value):
        return _class(value, f"the loss scale of {where}")(**_init_args(value))
    return LossScale(**value) if isinstance(value, Mapping) else value


def _names_class(value: Any) -> bool:
    """Whether a value of the config stands for an object: a mapping with ``class_path``, or the path alone."""
    return "class_path" in value if isinstance(value, Mapping) else isinstance(value, str) and "." in value


def _path(value: Any) -> str:
    return str(value["class_path"]) if isinstance(value, Mapping) and "class_path" in value else str(value)


def _class(value: Any, where: str) -> type:
    return _import(_path(value), ".", where)


def _init_args(value: Any) -> Mapping[str, Any]:
    return {} if isinstance(value, str) else value.get("init_args") or {}


def _plain(value: Any) -> Any:
    """A value with ``class_path`` and ``init_args`` taken off: a policy's classes are known, but not a recipe's."""
    if isinstance(value, Mapping):
        items = _init_args(value) if "class_path" in value else value
        return {key: item if key == "recipe" else _plain(item) for key, item in items.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _import(path: str, separator: str, where: str) -> type:
    module, _, name = path.rpartition(separator)
    if not module or not name:
        raise UsageError(f"{where}: expected {f'module{separator}Class'!r}; found {path!r}.")
    with reporting(f"{where}: cannot import {path!r}"):
        found = getattr(import_module(module), name)
    if not isinstance(found, type):
        raise UsageError(f"{where}: expected a class; {path!r} is {found!r}.")
    return found
