"""Adds up the GEMMs of a window: :class:`Tally`. Filled by ``gemm_watcher`` and ``transformer_engine``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_amp_plus.fp8.coverage.report import TIMES, GemmRow
from lightning_amp_plus.naming import ROOT
from lightning_amp_plus.plan_table import plural


class RowKey(NamedTuple):
    """What tells rows apart: the fields of a :class:`GemmRow` but for its numbers."""

    module: str
    role: str
    kind: str
    op: str
    format: str
    engine: str
    reason: str
    region: bool


@dataclass
class Tally:
    """What the micro-batches of a window have come to.

    Attributes:
        work: Number of GEMMs and FLOPs of each row.
        nanoseconds: Time in operators by module and kind: ``gemm``, ``cast``, ``bias``, ``other``.
        unknown: Operators whose work has no formula.
        notes: What could not be seen or is not believed, and of which modules, in order.
    """

    work: dict[RowKey, list[int]] = field(default_factory=dict)
    nanoseconds: dict[tuple[str, str], int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    notes: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, key: RowKey, flops: int | None) -> None:
        """One GEMM more; ``flops`` is ``None`` where its work has no formula."""
        if flops is None:
            self.unknown.add(key.op)
        known = self.work.setdefault(key, [0, 0])
        known[0] += 1
        known[1] += flops or 0

    def note(self, text: str, module: str) -> None:
        """Something to know of a module."""
        self.notes.setdefault(text, {})[module] = None

    def remarks(self) -> tuple[str, ...]:
        """The notes, a sentence each with the modules in front."""
        told = []
        for text, modules in self.notes.items():
            first, *others = modules
            more = f" and {plural(len(others), 'more module')}" if others else ""
            told.append(f"{first or ROOT}{more}: {text}")
        return tuple(told)

    def rows(self) -> tuple[GemmRow, ...]:
        """All GEMMs, in the order in which each was met first."""
        return tuple(GemmRow(**key._asdict(), count=count, flops=flops) for key, (count, flops) in self.work.items())

    def spent(self, leaves: Iterable[str]) -> dict[str, int]:
        """Nanoseconds in GEMMs, in casts and quantization, and in the rest, in the order of :data:`report.TIMES`.

        Args:
            leaves: Modules without modules inside. Where one of them multiplied in FP8, all that it did besides is
                quantization, but for its bias.
        """
        quantizing = {key.module for key in self.work if not key.reason} & set(leaves)
        spent = dict.fromkeys(TIMES, 0)
        for (module, kind), time in self.nanoseconds.items():
            if kind == "other" and module in quantizing:
                kind = "cast"
            spent[kind if kind in spent else "rest"] += time
        return spent
