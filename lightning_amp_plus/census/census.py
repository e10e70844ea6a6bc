"""What one training step really ran in: :class:`Census`, to be printed, stored and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_amp_plus.plan_table import as_text, fitting_table, plural

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# In the order of the table. `compute` is what the plan gave the module.
COLUMNS = ("parameter", "input", "weight", "output", "accumulator", "gradient", "optimizer", "reduction")


@dataclass(frozen=True)
class OpRow:
    """Operations of one kind in one place.

    Attributes:
        module: Name of the module that they ran in, the model's (``""``) for what ``training_step`` computes by itself,
            ``(optimizer)``, or ``(step)`` for what surrounds an optimizer's step.
        phase: ``forward backward optimizer step``. Recomputed activations count as forward.
        kind: ``gemm attention softmax norm reduction loss communication`` or ``in place`` (``out=`` included).
        op: The operator, as torch's dispatcher calls it.
        dtypes: Of its floating operands and results, ``bf16+fp32 -> fp32``.
        count: How often it ran.
    """

    module: str
    phase: str
    kind: str
    op: str
    dtypes: str
    count: int


@dataclass(frozen=True)
class Flag:
    """Something that is not as the plan promises, or that costs digits.

    Attributes:
        kind: ``off plan``: a module's column differs from its route. ``off route``: a GEMM or an attention ran in another
            dtype than its module's route. ``fp32 island``: FP32 computation in a 16-bit module. ``cast against route``: a
            module in FP32 casts down. ``double cast``: a tensor was cast twice with nothing in between. ``16-bit
            reduction``: many elements were added up to a 16-bit number.
        module: Where.
        op: The operator, or the column.
        found: What was found.
        remedy: What to do.
    """

    kind: str
    module: str
    op: str
    found: str
    remedy: str


@dataclass(frozen=True)
class Census:
    """The dtypes of one training step. Print it, or store it with :meth:`to_dict`.

    Attributes:
        step: The Trainer's ``global_step`` when the step began.
        modules: For each module its ``type``, the ``compute`` format of its route and what was found in each of
            :data:`COLUMNS`: short names (``bf16``), several joined by ``+``, ``-`` for what does not apply or was not
            seen. An accumulator is never seen: it says ``measured`` (by the plan's probe, on this device) or ``assumed``.
        ops: Operations that no module's columns tell of, such as a softmax that a function computes.
        flags: What deserves a look.
        notes: What else to know, a sentence each.
        versions: Versions of what computed.
        hardware: The device.
        planned: For each module what its route promises of the columns; only in the process that took the census.
    """

    step: int
    modules: Mapping[str, Mapping[str, str]]
    ops: tuple[OpRow, ...] = ()
    flags: tuple[Flag, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, Any] | None = None
    hardware: Mapping[str, Any] | None = None
    planned: Mapping[str, Mapping[str, str]] = field(default_factory=dict, compare=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the dtypes of modules and operations; neither counts nor versions go into it."""
        ops = sorted({(row.module, row.phase, row.kind, row.op, row.dtypes) for row in self.ops})
        plain = {"modules": {name: dict(row) for name, row in self.modules.items()}, "ops": ops}
        return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def as_planned(self) -> int:
        """Number of modules in which nothing differs from the plan."""
        off = {flag.module for flag in self.flags if flag.kind in ("off plan", "off route")}
        return len(self.modules) - len(off & set(self.modules))

    def summary(self) -> str:
        """One line for a log."""
        return f"{self.as_planned} of {len(self.modules)} modules as planned, {plural(len(self.flags), 'flag')}"

    def to_dict(self) -> dict[str, Any]:
        """The census in plain types, without ``planned``, which is the plan's."""
        return {
            "step": self.step,
            "fingerprint": self.fingerprint,
            "modules": {name: dict(row) for name, row in self.modules.items()},
            "ops": [asdict(row) for row in self.ops],
            "flags": [asdict(flag) for flag in self.flags],
            "notes": list(self.notes),
            "versions": None if self.versions is None else dict(self.versions),
            "hardware": None if self.hardware is None else dict(self.hardware),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Census:
        """The census that ``to_dict`` described."""
        return cls(
            step=values["step"],
            modules=values["modules"],
            ops=tuple(OpRow(**row) for row in values["ops"]),
            flags=tuple(Flag(**flag) for flag in values["flags"]),
            notes=tuple(values["notes"]),
            versions=values["versions"],
            hardware=values["hardware"],
        )

    def __str__(self) -> str:
        from lightning_amp_plus.census import table

        parts = [as_text(rows, widest=table.WIDEST) for rows in table.tables(self)]
        return "\n\n".join([*parts, "\n".join(table.closing(self))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        from lightning_amp_plus.census import table

        for rows in table.tables(self):
            yield fitting_table("", rows, (), console, options)
        yield from map(Text, table.closing(self))
