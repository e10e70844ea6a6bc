"""The command ``lightning-amp-plus``: looks at the precision of a run from outside.

``explain`` prints the plan of a LightningCLI config.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_amp_plus.policy import PrecisionPolicy
from lightning_amp_plus.routing import RoutePlan, plan

# Sections of a config that LightningCLI saved from a run with subcommands.
_SUBCOMMANDS = ("fit", "validate", "test", "predict")


class UsageError(Exception):
    """What was asked for cannot be done; the message is for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments without the command's name; by default those of the process.

    Returns:
        Exit code: 0, or 2 for wrong usage and for a config or model that cannot be read or built.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message
        return int(stop.code or 0)
    try:
        arguments.run(arguments)
    except UsageError as error:
        print(f"lightning-amp-plus {arguments.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lightning-amp-plus", description="Mixed precision of Lightning runs, explained.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain",
        help="print what every module of a LightningCLI config's model computes in",
        description=(
            "Builds the model of a LightningCLI config and prints the plan, without training: what every module "
            "computes in, and why. Python modules are also looked for in the current directory."
        ),
    )
    explain.add_argument(
        "--config", required=True, type=Path, help="a config file, or the config.yaml that a run saved"
    )
    explain.add_argument("--model", metavar="MODULE:CLASS", help="the model's class, where the config does not name it")
    explain.add_argument("--json", action="store_true", help="print the plan as JSON")
    explain.set_defaults(run=_explain)
    return parser


def print_plan(routes: RoutePlan) -> None:
    """Prints a plan: in a terminal as a table that fits its width, else as plain text."""
    console = Console()
    if console.is_terminal:
        console.print(routes)
    else:
        print(routes)


# ---------------------------------------------------------------- explain


def _explain(arguments: argparse.Namespace) -> None:
    if find_spec("jsonargparse") is None:
        raise UsageError(
            "reading a LightningCLI config needs jsonargparse, which is not installed. "
            "Run: pip install lightning_amp_plus[cli]"
        )
    if os.getcwd() not in sys.path:  # an installed command does not have it, unlike `python train.py`
        sys.path.insert(0, os.getcwd())
    config = _read(arguments.config)
    policy = _policy(config.get("trainer") or {})
    model = _model(config.get("model"), arguments.model)
    accelerator = (config.get("trainer") or {}).get("accelerator") or "auto"
    with _reporting("there is no plan"):
        routes = plan(model, policy, hardware=_device(accelerator))
    if arguments.json:
        print(routes.to_json())
    else:
        print_plan(routes)


def _read(path: Path) -> Mapping[str, Any]:
    """The part of a config file that holds ``trainer`` and ``model``."""
    from jsonargparse import get_loader

    with _reporting("the config cannot be read"):
        text = path.read_text(encoding="utf-8")
    with _reporting(f"{path} is neither YAML nor JSON"):
        # jsonargparse's own loader, so that 1e-3 is a number here too.
        config = get_loader("yaml")(text)
    if not isinstance(config, Mapping):
        raise UsageError(f"{path} is not a LightningCLI config: expected a mapping with 'trainer' and 'model'.")
    if "trainer" not in config and "model" not in config:
        for command in _SUBCOMMANDS:
            if isinstance(config.get(command), Mapping):
                return _with_sections(path, config[command])
        raise UsageError(
            f"{path} is not a LightningCLI config: it has neither 'trainer' nor 'model', also under none of "
            f"{', '.join(_SUBCOMMANDS)}; found {', '.join(map(str, config)) or 'nothing'}."
        )
    return _with_sections(path, config)


def _with_sections(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config.get("trainer") or {}, Mapping):
        raise UsageError(f"{path}: 'trainer' must be a mapping of Trainer arguments; found {config['trainer']!r}.")
    return config


def _policy(trainer: Mapping[str, Any]) -> PrecisionPolicy:
    """The policy under ``trainer.plugins`` or ``trainer.precision``; without either 32-true, as in Lightning.

    Read by hand: all that is wanted of a plugin is its policy, whose own errors say more than those of a parser
    that tries every type a Trainer takes.
    """
    from lightning.pytorch.plugins.precision import Precision

    from lightning_amp_plus.precision import AmpPrecision

    plugins = trainer.get("plugins") or []
    found = {"trainer.precision": trainer["precision"]} if trainer.get("precision") is not None else {}
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if _names_class(plugin) and issubclass(_class(plugin, "trainer.plugins"), Precision):
            found["trainer.plugins"] = plugin
    if len(found) > 1:
        raise UsageError("the precision is given twice: keep one of trainer.precision and trainer.plugins.")
    if not found:
        return PrecisionPolicy.from_string("32-true")
    [(where, value)] = found.items()
    if _names_class(value) and not issubclass(cls := _class(value, where), PrecisionPolicy):
        if not issubclass(cls, AmpPrecision):
            raise UsageError(f"{where} is {cls.__name__}, which has no plan; expected AmpPrecision.")
        value, where = _init_args(value).get("policy"), f"the policy of {where}"
    with _reporting(where):
        value = _plain(value)
        return PrecisionPolicy.from_dict(value) if isinstance(value, Mapping) else PrecisionPolicy.from_string(value)


def _model(section: Any, given: str | None) -> Any:
    """The model, made from its section of the config and, where that does not name it, the class that was given."""
    from jsonargparse import ArgumentParser

    named = _names_class(section)
    if given is not None:
        cls = _import(given, ":", "--model")
    elif named:
        cls = _class(section, "the model")
    else:
        raise UsageError(
            "the config does not name the model's class"
            + (", only its arguments" if section else "")
            + ". Say which it is: --model MODULE:CLASS."
        )
    with _reporting(f"the model {cls.__name__} cannot be built"):
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls, "model", fail_untyped=False, sub_configs=True)
        arguments = parser.parse_object({"model": _init_args(section) if named else section or {}})
        # Named so from jsonargparse 4.49 on, where the old name warns.
        model = getattr(parser, "instantiate", parser.instantiate_classes)(arguments).model
        model.configure_model()
    return model


def _names_class(value: Any) -> bool:
    """Whether a value of the config stands for an object: a mapping with ``class_path``, or the path alone."""
    return "class_path" in value if isinstance(value, Mapping) else isinstance(value, str) and "." in value


def _class(value: Any, where: str) -> type:
    return _import(value if isinstance(value, str) else str(value["class_path"]), ".", where)


def _init_args(value: Any) -> Mapping[str, Any]:
    return {} if isinstance(value, str) else value.get("init_args") or {}


def _plain(value: Any) -> Any:
    """A value with ``class_path`` and ``init_args`` taken off: the classes in a policy are known."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in (_init_args(value) if "class_path" in value else value).items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _import(path: str, separator: str, where: str) -> type:
    module, _, name = path.rpartition(separator)
    if not module or not name:
        raise UsageError(f"{where}: expected {f'module{separator}Class'!r}; found {path!r}.")
    with _reporting(f"{where}: cannot import {path!r}"):
        found = getattr(import_module(module), name)
    if not isinstance(found, type):
        raise UsageError(f"{where}: expected a class; {path!r} is {found!r}.")
    return found


def _device(accelerator: Any) -> str:
    """Type of the device that a Trainer with this accelerator computes on."""
    import torch

    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return {"gpu": "cuda", "cuda": "cuda", "mps": "mps"}.get(str(accelerator), "cpu")


@contextmanager
def _reporting(what: str) -> Generator[None, None, None]:
    """Turns an exception, of user code too, into a :class:`UsageError` that begins with ``what``."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__
