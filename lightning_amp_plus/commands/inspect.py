"""``lightning-amp-plus inspect``: what a checkpoint says of the precision it was trained in, as tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_amp_plus.census import Census
from lightning_amp_plus.checkpoint.manifest import CHECKPOINT_KEY, CensusEntry, Manifest
from lightning_amp_plus.checkpoint.rules import scaler_fault
from lightning_amp_plus.checkpoint.saved import SavedPrecision, saved_precision
from lightning_amp_plus.commands.routes import UNKNOWN, Rows, folded, moves_tables, route_tables
from lightning_amp_plus.commands.run_config import UsageError, one_line
from lightning_amp_plus.errors import IncompatiblePrecisionError
from lightning_amp_plus.metrics.skip_rate import skip_rate
from lightning_amp_plus.plan_table import as_text, cell, fitting_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_WIDEST = 88
_LAST_SCALES = 8


def read_saved(path: str) -> SavedPrecision:
    """What a checkpoint says of its precision.

    Raises:
        UsageError: If it is not there or cannot be read, whatever it is.
    """
    try:
        return saved_precision(path)
    except (FileNotFoundError, IncompatiblePrecisionError) as error:
        raise UsageError(one_line(error)) from error
    except Exception as error:  # of a file system, of a protocol nobody knows, or of a file that nobody thought of
        raise UsageError(f"{path} cannot be read: {one_line(error)}") from error


def inspect(path: str, every_module: bool = False) -> Inspection:
    """What there is to show of a checkpoint.

    Args:
        path: A file, a folder, any address that fsspec knows, or the sidecar.
        every_module: Show each module's route in a row of its own.

    Raises:
        UsageError: As :func:`read_saved`.
    """
    return Inspection(read_saved(path), every_module)


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint says, to be printed.

    Attributes:
        saved: What was read.
        every_module: Whether each module has a row of its own.
    """

    saved: SavedPrecision
    every_module: bool = False

    def to_json(self) -> str:
        """The manifest, and where it comes from, as JSON."""
        saved = self.saved
        document = {
            "path": saved.path,
            "source": saved.source,
            "weights_only": saved.weights_only,
            "notes": list(saved.notes),
            "manifest": saved.manifest.to_dict(),
        }
        return json.dumps(document, indent=1, default=str)

    def __str__(self) -> str:
        tables = [as_text(rows, widest=_WIDEST) for rows in self._tables()]
        return "\n\n".join(["\n".join(self._opening()), *tables, *self._closing()])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield from map(Text, self._opening())
        for rows in self._tables():
            yield fitting_table("", rows, (), console, options)
        yield from map(Text, self._closing())

    def _opening(self) -> list[str]:
        saved = self.saved
        lines = [f"Precision of {cell(saved.path)} (source: {saved.source})", *map(cell, saved.notes)]
        if saved.weights_only and saved.source == "checkpoint":
            lines.append(
                "It holds no training state, as with save_weights_only=True, where Lightning asks no plugin: "
                "there is no precision state in it, and a fit cannot continue it. PrecisionCheckpoint() writes a sidecar."
            )
        elif saved.weights_only:
            lines.append("Saved with save_weights_only=True: a fit cannot continue it.")
        elif not _ours(saved.manifest):
            lines.append("Written without AmpPrecision: what is shown is what can be told from it.")
        return lines

    def _tables(self) -> list[Rows]:
        manifest = self.saved.manifest
        said = [[row for row in rows if row[1] != UNKNOWN] for rows in _groups(manifest)]
        tables: list[Rows] = [[*rows] for rows in said if len(rows) > 1]
        return [*tables, *moves_tables(manifest), *route_tables(manifest, self.every_module)]

    def _closing(self) -> list[str]:
        manifest = self.saved.manifest
        unsaid = [label for rows in _groups(manifest) for label, value in rows if value == UNKNOWN]
        unsaid += [] if manifest.routes else ["routes of modules"]
        lines = [f"Not recorded: {', '.join(unsaid)}."] if unsaid else []
        if manifest.routes and not self.every_module:
            lines.append(f"{len(manifest.routes)} modules; --modules gives each a line of its own.")
        return lines


def _ours(manifest: Manifest) -> bool:
    return manifest.writer == CHECKPOINT_KEY


def _groups(manifest: Manifest) -> list[list[tuple[str, str]]]:
    """The tables of two columns: what, and what was recorded of it, or that it was not."""
    groups = {
        "run": _run(manifest),
        "loss scale": _loss_scale(manifest),
        "history": _history(manifest),
        "tensors": _tensors(manifest),
        "position": _position(manifest),
        "ranks and windows": _ranks(manifest),
        "fp8": _fp8(manifest),
    }
    return [[(title, "recorded"), *rows] for title, rows in groups.items()]


def _run(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "precision", cell(manifest.precision or "cannot be told")
    yield "written by", cell(manifest.writer)
    yield "save id", _or_unknown(manifest.save_id)
    yield "policy", _policy(manifest.policy)
    yield "fingerprint", _or_unknown(manifest.fingerprint)
    yield "planned for", _or_unknown(manifest.device_type)
    yield "versions", _fields(manifest.versions)
    yield "hardware", _fields(manifest.hardware)
    yield "settings", _fields(manifest.settings)
    yield "compiled", UNKNOWN if manifest.flags is None else cell(manifest.flags.compiled)
    yield (
        "activation checkpointing",
        UNKNOWN if manifest.flags is None else cell(manifest.flags.activation_checkpointing),
    )


def _policy(policy: Mapping[str, Any] | None) -> str:
    if policy is None:
        return UNKNOWN
    said = {key: value for key, value in policy.items() if key != "rules" and value not in (None, False, 0)}
    rules = policy.get("rules") or []
    return cell(said) + "".join(f"; rule {_rule(rule)}" for rule in (rules if isinstance(rules, list) else [rules]))


def _rule(rule: Any) -> str:
    return cell({k: v for k, v in rule.items() if v not in (None, "")} if isinstance(rule, Mapping) else rule)


def _loss_scale(manifest: Manifest) -> Iterator[tuple[str, str]]:
    config, state = manifest.loss_scale, manifest.scaler
    if config is None and state is None:
        yield "loss scale", "none in use" if _ours(manifest) else UNKNOWN
        return
    if config is None:
        yield "rule of the loss scale", UNKNOWN
    else:
        yield "kind", config.kind
        yield "first scale", cell(config.init)
    if config is not None and config.kind == "dynamic":
        yield "growth", f"times {cell(config.growth_factor)} after {config.growth_interval} applied windows in a row"
        times = f"{config.hysteresis} overflows" if config.hysteresis > 1 else "an overflow"
        yield "backoff", f"times {cell(config.backoff_factor)} after {times}"
        yield "limits", f"{cell(config.min)} to {cell(config.max)}"
        yield "a loss that overflows", "lowers it" if config.backoff_on_forward_overflow else "does not lower it"
    fault = "missing" if state is None else scaler_fault(state)
    if state is None or fault is not None:
        yield "state", f"not usable: {cell(fault)}"
        return
    yield "scale", cell(state["scale"])
    yield "applied windows in a row", cell(state["_growth_tracker"])
    if "_hysteresis" in state:
        yield "overflows before a backoff", cell(state["_hysteresis"])


def _history(manifest: Manifest) -> Iterator[tuple[str, str]]:
    history = manifest.history
    if not _ours(manifest):
        yield "history of windows", UNKNOWN
        return
    total = history.applied + history.skipped
    yield "windows applied", cell(history.applied)
    yield "windows skipped", f"{history.skipped} ({skip_rate(history.skipped, total):.2%})"
    yield "skipped in a row at last", cell(history.consecutive_skips)
    yield "growths, backoffs", f"{history.growths}, {history.backoffs}"
    yield "scales over windows", _scales(history.scales)


def _scales(runs: Sequence[Sequence[float]]) -> str:
    earlier = len(runs) - _LAST_SCALES
    # A damaged checkpoint may hold a run of another length.
    shown = (f"{cell(run[0])} ({run[1]:.0f}x)" if len(run) == 2 else cell(run) for run in runs[-_LAST_SCALES:])
    return (f"{earlier} changes earlier, then " if earlier > 0 else "") + (", ".join(shown) or "none")


def _tensors(manifest: Manifest) -> Iterator[tuple[str, str]]:
    dtypes, optimizers = manifest.dtypes, manifest.optimizers
    for name in ("parameters", "gradients", "optimizer_state"):
        yield name.replace("_", " "), UNKNOWN if dtypes is None else cell(getattr(dtypes, name))
    if optimizers is None:
        yield "optimizers", UNKNOWN
    for optimizer in optimizers or ():
        fused = ", fused" if optimizer.fused else ""
        yield "optimizer", f"{cell(optimizer.name)}{fused}; state: {cell(optimizer.state_dtypes)}"
    kept = manifest.master_weights_kept
    yield "master weights", UNKNOWN if kept is None else "kept" if kept else "none"
    if manifest.census is not None:
        yield "dtype census", _census(manifest.census)
    else:
        yield "dtype census", "none was taken" if _ours(manifest) else UNKNOWN


def _census(entry: CensusEntry) -> str:
    census = Census.from_dict(entry.model_dump())
    kinds = Counter(flag.kind for flag in census.flags)
    said = f" ({cell(dict(kinds))})" if kinds else ""
    return f"at step {census.step}: {census.summary()}{said}; fingerprint {cell(entry.fingerprint[:12])}"


def _position(manifest: Manifest) -> Iterator[tuple[str, str]]:
    progress, data, window = manifest.progress, manifest.data, manifest.window
    yield "epoch", UNKNOWN if progress is None else cell(progress.epoch)
    yield "global step", UNKNOWN if progress is None else cell(progress.global_step)
    yield "windows closed", cell(manifest.windows) if _ours(manifest) else UNKNOWN
    if window is None:
        yield "open window", UNKNOWN
    elif window.micro_batches == 0:
        yield "open window", "none"
    else:
        size = "" if window.size is None else f" of {window.size}"
        yield "open window", f"{window.micro_batches}{size} micro-batches done, gradients {window.gradients}"
    if data is None:
        yield "data", UNKNOWN
    else:
        loader = "can continue there" if data.stateful else "starts the epoch again"
        yield "data", f"middle of an epoch; the loader {loader}" if data.mid_epoch else "end of an epoch"
    random = manifest.random
    said = UNKNOWN if random is None else f"ranks: {random.ranks}; generators: {cell(random.generators)}"
    yield "random states", said


def _ranks(manifest: Manifest) -> Iterator[tuple[str, str]]:
    strategy, accumulation, clipping = manifest.strategy, manifest.accumulation, manifest.clipping
    yield "strategy", UNKNOWN if strategy is None else cell(strategy.name)
    yield "ranks", UNKNOWN if strategy is None else cell(strategy.world_size)
    if strategy is not None and strategy.mesh is not None:
        yield "mesh", cell(strategy.mesh)
    yield "micro-batches in a window", UNKNOWN if accumulation is None else cell(accumulation.batches)
    if accumulation is not None:
        yield "partial window", f"weighted as in {cell(accumulation.partial_window)!r}"
        yield "FSDP2 gradients", f"reduced each {'micro-batch' if accumulation.sync_each_microbatch else 'window'}"
    if clipping is not None:
        yield "clipping", f"{cell(clipping.value)} by {cell(clipping.algorithm)}"
    else:  # no Trainer without clipping leaves the strategy out
        yield "clipping", UNKNOWN if strategy is None else "none"


def _fp8(manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.fp8 is None:
        if (manifest.precision or "").startswith("fp8"):
            yield "fp8", UNKNOWN
        return
    start = manifest.fp8_start
    if start is None:
        yield "fp8 begun", UNKNOWN
    else:
        yield "fp8 begun", "not yet" if start.begun_at is None else f"after {start.begun_at} applied steps"
    yield "amax clock", manifest.fp8.amax_clock
    alike: dict[str, list[tuple[str, str]]] = {}
    for name, module in manifest.fp8.modules.items():
        alike.setdefault(_fields(module), []).append((name, ""))
    for said, names in alike.items():
        yield folded(names), said


def _or_unknown(value: Any) -> str:
    return UNKNOWN if value is None else cell(value)


def _fields(section: Any) -> str:
    """A section's fields in a row; those that do not apply are left out."""
    if section is None:
        return UNKNOWN
    return cell({key: value for key, value in section.model_dump().items() if value is not None})
