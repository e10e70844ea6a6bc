"""FP8 coverage: which GEMMs of a training step really ran in which format, and why the others did not. :class:`Coverage`.

Plain data, pure. ``gemm_watcher`` and ``tally`` make it from what was dispatched; ``Fp8CoverageMonitor`` and the command
line show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning_amp_plus.fp8.obstacle import ObstacleKind
from lightning_amp_plus.metrics.fp8_coverage import fp8_coverage
from lightning_amp_plus.naming import ROOT, pattern_of
from lightning_amp_plus.plan_table import as_text, cell, fitting_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Reason = Literal[ObstacleKind, "warmup", "eval", "demoted"]
REASONS: Mapping[str, str] = {
    "rule": "a rule, the policy or a route's gemms= leaves it in another format",
    "shape": "its sizes do not suit FP8, or would make it slower",
    "op": "not a Linear layer's own product: FP8 has no other",
    "hardware": "the device cannot multiply FP8",
    "backend": "what multiplies FP8 is missing, lacks the recipe, or did not do it",
    "warmup": "FP8 has not begun",
    "eval": "the layer is in evaluation mode",
    "demoted": "it was to run in FP8: moved by set_route(), or switched off inside the model",
}
"""Why a GEMM did not run in FP8."""

ROLES = ("fprop", "dgrad", "wgrad", "recompute", "backward")
"""Of a row: the output, the input's gradient, the weight's, an output computed anew in backward, and a gradient that
cannot be told apart, in compiled code. ``optimizer`` besides, which counts in no share."""


_OURS = "lightning_amp_plus."  # in front of the names of this package's operators
_WIDEST = 44  # letters of an operator's name; those of attention are long

TIMES = ("gemm", "cast", "rest")
"""What time is spent in: GEMMs (attention included), casts and quantization, and the rest."""


@dataclass(frozen=True)
class GemmRow:
    """GEMMs of one kind in one place.

    Attributes:
        module: Qualified name of the module; of the model itself, for what ``training_step`` computes, ``""``.
        role: One of :data:`ROLES`, or ``optimizer``.
        kind: ``gemm``, ``conv`` or ``attention``: fused attention, and stacked products of two activations, which is what
            attention is when it is written out.
        op: The operator, as torch's dispatcher calls it, or ``transformer_engine``.
        format: What its operands were: ``bf16``, ``e4m3``, ``e5m2 x e4m3`` where they differ.
        engine: ``native``, or ``emulated`` where FP8 numbers were multiplied in a wider format.
        reason: Why it did not run in FP8, one of :data:`REASONS`; empty if it did.
        region: Whether ``module`` is a compiled region, of whose inside no more is known.
        count: How many.
        flops: Their work in floating-point operations, all together.
    """

    module: str
    role: str
    kind: str
    op: str
    format: str
    engine: str
    reason: str
    region: bool
    count: int
    flops: int

    @property
    def in_fp8(self) -> bool:
        """Whether all operands were FP8 numbers, whatever multiplied them."""
        return not self.reason

    @property
    def shown_format(self) -> str:
        """The format, and whether it was emulated."""
        return f"{self.format} (emulated)" if self.engine == "emulated" else self.format


@dataclass(frozen=True)
class Shares:
    """Shares of the work of a step, each from 0 to 1; NaN where there was none.

    Attributes:
        flops: In FP8, by FLOPs.
        gemms: In FP8, by count.
        native_flops: Multiplied as FP8 by the device, by FLOPs. What is emulated counts above and not here.
        native_gemms: The same by count.
    """

    flops: float
    gemms: float
    native_flops: float
    native_gemms: float


@dataclass(frozen=True)
class Coverage:
    """What the GEMMs of one training step ran in. Print it, or store it with :meth:`to_dict`.

    Attributes:
        step: The Trainer's ``global_step`` when the step began.
        rows: The GEMMs.
        time: Shares of the time of all operations by :data:`TIMES`; of a GPU the device's time, of a CPU the operators'.
            Empty if it is not known.
        notes: What else to know, a sentence each.
    """

    step: int
    rows: tuple[GemmRow, ...] = ()
    time: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def shares(self, attention: bool = True) -> Shares:
        """The shares of the whole step.

        Args:
            attention: Whether attention counts as work that might be in FP8.
        """
        return shares_of(sums(self.counted(attention)))

    def counted(self, attention: bool = True) -> list[GemmRow]:
        """The rows that count: those of the model, not of the optimizer."""
        return [row for row in self.rows if row.role != "optimizer" and (attention or row.kind != "attention")]

    def by_module(self) -> dict[str, Shares]:
        """The shares of each module that holds a GEMM, attention included."""
        return {name: shares_of(sums(rows)) for name, rows in _grouped(self.counted(), lambda row: row.module).items()}

    def fallbacks(self) -> dict[str, float]:
        """For each of :data:`REASONS` that occurs its share of all FLOPs."""
        total = sum(row.flops for row in self.counted())
        found = _grouped((row for row in self.counted() if row.reason), lambda row: row.reason)
        return {
            reason: sum(row.flops for row in found[reason]) / total if total else 0.0
            for reason in REASONS
            if reason in found
        }

    def summary(self) -> str:
        """One line for a log."""
        rows, all_ = self.counted(), self.shares()
        if not rows:
            return "no GEMM ran"
        plain = f" ({percent(self.shares(attention=False).flops)} without attention)"
        if not any(row.kind == "attention" for row in rows):
            plain = ""
        if math.isnan(all_.flops):
            number = sum(row.count for row in rows)
            return f"no FLOPs, as of batches without elements, in {number} GEMMs, {percent(all_.gemms)} of them in FP8"
        native = "" if all_.native_flops == all_.flops else f", {percent(all_.native_flops)} natively"
        why = ", ".join(f"{reason} {percent(share)}" for reason, share in self.fallbacks().items())
        return (
            f"{percent(all_.flops)} of the FLOPs in FP8{native}{plain}, "
            f"{percent(all_.gemms)} of {sum(row.count for row in rows)} GEMMs" + (f"; not in FP8: {why}" if why else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """The coverage in plain types, its shares included; ``None`` where there was no work, since JSON has no NaN."""
        return {
            "step": self.step,
            "coverage": _plain(self.shares()),
            "coverage_without_attention": _plain(self.shares(attention=False)),
            "rows": [asdict(row) for row in self.rows],
            "time": dict(self.time),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Coverage:
        """The coverage that ``to_dict`` described."""
        rows = tuple(GemmRow(**row) for row in values["rows"])
        return cls(int(values["step"]), rows, dict(values["time"]), tuple(values["notes"]))

    def __str__(self) -> str:
        return as_text(self._table(), self._below(), widest=_WIDEST)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = f"FP8 coverage, step {self.step}"
        yield fitting_table(title, self._table(), self._below(), console, options, ("op", "GEMMs", "FLOPs", "role"))

    def _table(self) -> list[tuple[str, ...]]:
        """A row for what is alike in place (blocks that differ in a number are one), kind, format and reason."""
        total = sum(row.flops for row in self.counted()) or 1
        alike: dict[tuple[str, ...], list[GemmRow]] = {}
        for row in self.rows:
            what = (pattern_of(row.module), "(compiled)" if row.region else "", row.kind, row.shown_format, row.reason)
            alike.setdefault((*what, "optimizer" if row.role == "optimizer" else ""), []).append(row)
        lines: list[tuple[str, ...]] = [("module", "role", "op", "format", "GEMMs", "FLOPs", "share", "not FP8")]
        order = list(dict.fromkeys(pattern for pattern, *_ in alike))  # what backward adds to a module stands beside it
        for key in sorted(alike, key=lambda key: order.index(key[0])):
            pattern, compiled, _, shown, reason, optimizer = key
            rows = alike[key]
            modules = len({row.module for row in rows})
            where = cell(pattern if modules > 1 else rows[0].module) or ROOT
            roles = [role for role in (*ROLES, optimizer) if any(row.role == role for row in rows)]
            flops = sum(row.flops for row in rows)
            lines.append(
                (
                    " ".join([where, *([compiled] if compiled else []), *([f"({modules})"] if modules > 1 else [])]),
                    " ".join(roles),
                    " ".join(dict.fromkeys(row.op.removeprefix("aten.").removeprefix(_OURS) for row in rows)),
                    shown,
                    str(sum(row.count for row in rows)),
                    short(flops),
                    "-" if optimizer else percent(flops / total),
                    reason,
                )
            )
        return lines

    def _below(self) -> list[str]:
        found = [f"Step {self.step}: {self.summary()}."]
        if self.time:
            titles = ("GEMMs", "casts and quantization", "the rest")
            parts = (f"{title} {percent(self.time[key])}" for key, title in zip(TIMES, titles, strict=True))
            found.append(f"Time: {', '.join(parts)}.")
        found += [f"{reason}: {REASONS[reason]}." for reason in self.fallbacks()]
        return [*found, *map(cell, self.notes)]


class Work(NamedTuple):
    """FLOPs and numbers of GEMMs: in FP8, natively in FP8, and all. Over ranks they are added up."""

    fp8_flops: float
    fp8_gemms: float
    native_flops: float
    native_gemms: float
    flops: float
    gemms: float


def sums(rows: Iterable[GemmRow]) -> Work:
    """The work of some rows."""
    listed = list(rows)
    in_fp8 = [row for row in listed if row.in_fp8]
    native = [row for row in in_fp8 if row.engine == "native"]
    return Work(*(number for some in (in_fp8, native, listed) for number in _flops_and_gemms(some)))


def _flops_and_gemms(rows: list[GemmRow]) -> tuple[int, int]:
    return sum(row.flops for row in rows), sum(row.count for row in rows)


def shares_of(work: Iterable[float]) -> Shares:
    """Shares from the numbers of a :class:`Work`, which may be those over ranks."""
    done = Work._make(work)
    return Shares(
        flops=fp8_coverage(done.fp8_flops, done.flops),
        gemms=fp8_coverage(done.fp8_gemms, done.gemms),
        native_flops=fp8_coverage(done.native_flops, done.flops),
        native_gemms=fp8_coverage(done.native_gemms, done.gemms),
    )


def time_shares(spent: Iterable[float]) -> dict[str, float]:
    """Shares of time from the times of :data:`TIMES`, which may be sums over ranks; empty where no time was spent."""
    times = list(spent)
    total = sum(times)
    return {kind: time / total for kind, time in zip(TIMES, times, strict=True)} if total else {}


def _plain(shares: Shares) -> dict[str, float | None]:
    return {name: None if math.isnan(share) else share for name, share in asdict(shares).items()}


def _grouped(rows: Iterable[GemmRow], key: Callable[[GemmRow], str]) -> dict[str, list[GemmRow]]:
    found: dict[str, list[GemmRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def percent(share: float) -> str:
    """A share for people; ``0 %`` and ``100 %`` only where it is that."""
    if math.isnan(share):
        return "-"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.3g} %"


def short(number: float) -> str:
    """A large number for people: ``1.34 G``."""
    for power, letter in ((21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 0.9995 * 10**power:  # what three digits round up to it
            return f"{number / 10**power:.3g} {letter}"
    return f"{number:.0f}"
