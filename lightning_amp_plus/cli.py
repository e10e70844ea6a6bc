"""The command ``lightning-amp-plus``: looks at the precision of a run, and of its checkpoints, from outside.

``explain`` prints the plan of a LightningCLI config, ``inspect`` what a checkpoint says of its precision, ``diff`` what
differs between two of them, and ``check`` whether a run could continue one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, ConsoleOptions, RenderResult

from lightning_amp_plus.commands.compare import Comparison, check, diff
from lightning_amp_plus.commands.inspect import inspect
from lightning_amp_plus.commands.observe import observe
from lightning_amp_plus.commands.run_config import RunConfig, UsageError, reporting
from lightning_amp_plus.routing import plan

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_CHECKPOINT = "a checkpoint: a file, a folder, an address that fsspec knows, or its .precision.json"


class Shown(Protocol):
    """What a command hands back: ``str()`` is for a pipe, Rich's protocol for a terminal, JSON for programs."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For a terminal."""

    def to_json(self) -> str:
        """For programs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments without the command's name; by default those of the process.

    Returns:
        Exit code: 0; 1 where a checkpoint would be refused; 2 for wrong usage and for what cannot be read or built.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message
        return int(stop.code or 0)
    try:
        shown, code = arguments.run(arguments)
    except UsageError as error:
        print(f"lightning-amp-plus {arguments.command}: {error}", file=sys.stderr)
        return 2
    try:
        _print(shown, arguments.json)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(code)


def _print(shown: Shown, as_json: bool) -> None:
    """Prints in a terminal what fits its width, else plain text."""
    console = Console()
    if as_json:
        print(shown.to_json())
    elif console.is_terminal:
        console.print(shown)
    else:
        print(shown)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-amp-plus", description="Mixed precision of Lightning runs and their checkpoints, explained."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_explain(commands)
    _add_inspect(commands)
    _add_diff(commands)
    _add_check(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_explain(commands: _Commands) -> None:
    command = commands.add_parser(
        "explain",
        help="print what every module of a LightningCLI config's model computes in",
        description=(
            "Builds the model of a LightningCLI config and prints the plan, without training: what every module "
            "computes in, and why. With --observe one step is trained, and what its GEMMs ran in is printed too. Python "
            "modules are also looked for in the current directory."
        ),
    )
    _add_config(command)
    command.add_argument(
        "--observe",
        action="store_true",
        help="train one step on one device and show what its GEMMs really ran in; nothing is saved",
    )
    command.add_argument(
        "--data",
        metavar="MODULE:CLASS",
        help="the data module's class, where --observe needs it and the config names none",
    )
    command.set_defaults(run=_explain)


def _add_inspect(commands: _Commands) -> None:
    command = commands.add_parser(
        "inspect",
        help="print what a checkpoint says of its precision",
        description=(
            "Prints what a checkpoint records of the precision it was trained in. Reads no tensors, and imports nothing "
            "that the file names."
        ),
    )
    command.add_argument("checkpoint", metavar="CKPT", help=_CHECKPOINT)
    command.add_argument("--modules", action="store_true", help="a line for every module, not one for those alike")
    command.set_defaults(run=lambda a: (inspect(a.checkpoint, a.modules), 0))


def _add_diff(commands: _Commands) -> None:
    command = commands.add_parser(
        "diff",
        help="print in which precision two checkpoints differ",
        description=(
            "Compares the precision of two checkpoints by the rules of a resume: could a run like that of B continue A? "
            "Exit code 1 if something would be refused."
        ),
    )
    command.add_argument("a", metavar="A", help=_CHECKPOINT)
    command.add_argument("b", metavar="B", help="another one")
    _add_all(command)
    command.set_defaults(run=lambda a: _with_code(diff(a.a, a.b, a.all)))


def _add_check(commands: _Commands) -> None:
    command = commands.add_parser(
        "check",
        help="say whether a fit with a LightningCLI config would continue a checkpoint",
        description=(
            "Builds model and precision of a LightningCLI config and says, without training, whether a fit would continue "
            "the checkpoint. A precision string is taken as lightning_amp_plus.Trainer takes it. Whether the weights are "
            "finite is seen only when the run starts. Exit code 1 if the checkpoint would be refused."
        ),
    )
    command.add_argument("checkpoint", metavar="CKPT", help=_CHECKPOINT)
    _add_config(command)
    _add_all(command)
    command.set_defaults(run=lambda a: _with_code(check(a.checkpoint, a.config, a.model, a.all)))


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config", required=True, type=Path, help="a config file, or the config.yaml that a run saved"
    )
    command.add_argument("--model", metavar="MODULE:CLASS", help="the model's class, where the config does not name it")


def _add_all(command: argparse.ArgumentParser) -> None:
    command.add_argument("--all", action="store_true", help="also show what is the same")


def _explain(arguments: argparse.Namespace) -> tuple[Shown, int]:
    config = RunConfig.read(arguments.config)
    if arguments.observe:
        return observe(config, arguments.model, arguments.data), 0
    if arguments.data is not None:
        raise UsageError("--data is for --observe: without it nothing is trained. Add --observe, or leave --data out.")
    policy = config.policy()
    model = config.build_model(arguments.model)
    with reporting("there is no plan"):
        return plan(model, policy, hardware=config.device_type()), 0


def _with_code(comparison: Comparison) -> tuple[Shown, int]:
    return comparison, comparison.exit_code
