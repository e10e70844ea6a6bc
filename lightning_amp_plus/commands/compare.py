"""``lightning-amp-plus diff`` and ``check``: the rules of a resume, asked without one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_amp_plus.checkpoint.compatibility import Finding, compare, refusals, waive, with_moves
from lightning_amp_plus.checkpoint.findings_table import SIDES, plain_table, reasons, rich_table, to_allow
from lightning_amp_plus.checkpoint.manifest import Accumulation, Clipping, Manifest, StrategyEntry
from lightning_amp_plus.checkpoint.saved import SavedPrecision
from lightning_amp_plus.commands.inspect import read_saved
from lightning_amp_plus.commands.run_config import RunConfig, UsageError, one_line, reporting
from lightning_amp_plus.errors import IncompatiblePrecisionError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from lightning_amp_plus.precision import AmpPrecision

# What a resume does with what the checkpoint holds, whichever run it is.
_OF_A_RESUME = frozenset({"window", "data", "random_state"})


@dataclass(frozen=True)
class Comparison:
    """Whether one run may continue another's checkpoint, to be printed.

    Attributes:
        checkpoint: The checkpoint.
        run: What describes the run: a config, or another checkpoint.
        findings: What was compared, after ``allow`` was taken into account.
        sides: What the two are called in the table.
        notes: What else to say, a sentence each.
        allowed: Fields that the run allows already.
        obstacle: Why a fit cannot continue the checkpoint whatever the run allows.
        beside: Fields that say something of the checkpoint alone, and so are no difference.
        everything: Whether the table shows those and what is the same, too.
    """

    checkpoint: str
    run: str
    findings: tuple[Finding, ...]
    sides: tuple[str, str]
    notes: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    obstacle: str | None = None
    beside: frozenset[str] = frozenset()
    everything: bool = False

    @property
    def exit_code(self) -> int:
        """0 where nothing is refused, else 1."""
        return 1 if self.obstacle is not None or refusals(self.findings) else 0

    def to_json(self) -> str:
        """Verdict and findings as JSON."""
        document = {
            "checkpoint": self.checkpoint,
            "run": self.run,
            "compatible": self.exit_code == 0,
            "obstacle": self.obstacle,
            "allow": self._to_allow(),
            "notes": list(self.notes),
            "findings": [finding.to_dict() for finding in self._shown()],
        }
        return json.dumps(document, indent=1)

    def __str__(self) -> str:
        shown = self._shown()
        table = [plain_table(shown, self.sides), reasons(shown)] if shown else []
        return "\n\n".join(part for part in ("\n".join(self._opening()), *table, self._conclusion()) if part)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield from map(Text, self._opening())
        shown = self._shown()
        if shown:
            yield rich_table("", shown, self.sides)
        yield Text(self._conclusion())

    def _shown(self) -> list[Finding]:
        return [finding for finding in self.findings if self.everything or self._differs(finding)]

    def _differs(self, finding: Finding) -> bool:
        return finding.verdict != "ok" and finding.field not in self.beside

    def _to_allow(self) -> list[str]:
        return [] if self.obstacle is not None else to_allow(self.findings, self.allowed)

    def _opening(self) -> list[str]:
        return [f"{self.sides[0]}: {self.checkpoint}", f"{self.sides[1]}: {self.run}", *self.notes]

    def _conclusion(self) -> str:
        if self.obstacle is not None:
            return f"Refused: {self.obstacle}"
        if self.exit_code:
            return (
                f"Refused: {', '.join(f.field for f in refusals(self.findings))}. To continue the checkpoint all the same, "
                f"knowing this, pass to AmpPrecision:\nallow={self._to_allow()!r}"
            )
        return "Nothing is refused." if any(map(self._differs, self.findings)) else "Nothing differs."


def diff(a: str, b: str, everything: bool = False) -> Comparison:
    """Compares two checkpoints as if a run like that of ``b`` were to continue ``a``.

    Args:
        a: A checkpoint, as for :func:`read_saved`.
        b: Another one.
        everything: Show what is the same, too.

    Raises:
        UsageError: If one of them cannot be read, or ``b`` does not tell its precision.
    """
    saved, current = read_saved(a), read_saved(b)
    if current.manifest.precision is None:
        raise UsageError(
            f"{current.path} does not tell the precision of its run (written by {current.manifest.writer}), so there is "
            "nothing to compare with. Only the first of the two checkpoints may be such a one."
        )
    notes = [f"{side}: {note}" for side, found in (("A", saved), ("B", current)) for note in _notes(found)]
    findings = tuple(compare(saved.manifest, with_moves(current.manifest, saved.manifest.moves)))
    return Comparison(
        saved.path, current.path, findings, ("A", "B"), tuple(notes), beside=_OF_A_RESUME, everything=everything
    )


def check(path: str, config_path: Path, model_class: str | None = None, everything: bool = False) -> Comparison:
    """Says whether a fit with a LightningCLI config would continue a checkpoint.

    Args:
        path: The checkpoint, as for :func:`read_saved`.
        config_path: The config.
        model_class: The model's class as ``module:Class``, where the config does not name it.
        everything: Show what is the same, too.

    Raises:
        UsageError: If the checkpoint or the config cannot be read, or model or precision cannot be built.
    """
    saved, config = read_saved(path), RunConfig.read(config_path)
    plugin, model = config.plugin(), config.build_model(model_class)
    with reporting("there is no plan"):
        current = _described(config, plugin, model)
    findings, obstacle = _judged(saved, current, plugin, model)
    notes = (*_notes(saved), *_left_open(config, current))
    return Comparison(
        saved.path, str(config_path), tuple(findings), SIDES, notes, plugin.allow, obstacle, everything=everything
    )


def _notes(saved: SavedPrecision) -> list[str]:
    if saved.weights_only and saved.source == "checkpoint":
        return [*saved.notes, f"{saved.path} was saved with save_weights_only=True and holds no precision state."]
    return list(saved.notes)


def _described(config: RunConfig, plugin: AmpPrecision, model: Any) -> Manifest:
    """The manifest that a run with this config would start from, as far as the config tells it."""
    clipping, ranks = config.clipping(), config.ranks()
    strategy = None if ranks is None else config.strategy_name(ranks)
    sections = {
        "accumulation": Accumulation(
            batches=config.accumulate_grad_batches(),
            partial_window=plugin.partial_window,
            sync_each_microbatch=plugin.sync_each_microbatch,
        ),
        "clipping": None if clipping is None else Clipping(value=clipping[0], algorithm=clipping[1]),
        "strategy": None if ranks is None or strategy is None else StrategyEntry(name=strategy, world_size=ranks),
    }
    return plugin.manifest(model=model).model_copy(update=sections)


def _judged(
    saved: SavedPrecision, current: Manifest, plugin: AmpPrecision, model: Any
) -> tuple[list[Finding], str | None]:
    """The findings, and what makes a fit impossible besides them."""
    why = saved.why_no_fit()
    if saved.weights_only and saved.source == "checkpoint":
        return [], why
    manifest, moves = plugin.filled(saved.manifest, model), saved.manifest.moves
    if moves:  # a resume makes them again before it compares
        try:
            current = current.model_copy(update={"routes": plugin.manifest(model=model, moves=moves).routes})
        except IncompatiblePrecisionError as error:
            return [], one_line(error)
    findings = waive(compare(manifest, current), plugin.allow)
    told = [finding for finding in findings if finding.field not in _untold(saved.manifest, current)]
    return told, why


def _untold(saved: Manifest, current: Manifest) -> set[str]:
    """Fields on which a config says nothing, so that their absence is no difference."""
    open_window = saved.window is not None and saved.window.gradients == "stored"
    return {"mesh", "window"} if open_window and current.strategy is None else {"mesh"}


def _left_open(config: RunConfig, current: Manifest) -> list[str]:
    notes = []
    if not config.names_precision():
        notes.append(
            "The config names no precision, so this is Lightning's own 32-true. A run without AmpPrecision continues any "
            "checkpoint without a word."
        )
    if current.strategy is None:
        notes.append(
            "The config leaves the number of ranks or the strategy open, so ranks, strategy and clipping were not compared."
        )
    return notes
