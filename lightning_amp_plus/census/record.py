"""What was seen of a step, as plain data: :class:`Record`. Made by ``recording``, judged by ``comparing``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class OpKey(NamedTuple):
    """Operations that count as one: the same operator in the same place and dtypes.

    Attributes:
        module: Where it ran; see :class:`Place`.
        phase: ``forward backward optimizer step``.
        kind: One of ``ops.LISTED``.
        op: The operator.
        lead: Dtype of its first floating operand.
        dtypes: Of operands and results, ``bf16+fp32 -> fp32``.
    """

    module: str
    phase: str
    kind: str
    op: str
    lead: str
    dtypes: str


class Event(NamedTuple):
    """Something about casts that a route may or may not explain.

    Attributes:
        kind: ``upcast used``: a 16-bit tensor was cast to FP32 and computed with in the same module. ``promotion``: a
            16-bit tensor met an FP32 parameter or buffer of the module. ``downcast``: FP32 was cast to 16 bits.
            ``chain``: what a cast gave was cast again, with nothing computed in between.
        module: Where.
        op: The operator.
        dtypes: From and to.
        other: For a chain, where the first cast was.
    """

    kind: str
    module: str
    op: str
    dtypes: str
    other: str = ""


@dataclass
class Record:
    """What was seen of a step.

    Attributes:
        columns: For each module, dtypes by column (``parameter input weight output gradient optimizer reduction``).
        rows: For each kind of operation how often it ran, and the most elements that one of its results adds up.
        events: What was seen of casts.
        stepped: Whether an optimizer ran.
    """

    columns: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    rows: dict[OpKey, list[int]] = field(default_factory=dict)
    events: dict[Event, None] = field(default_factory=dict)
    stepped: bool = False

    def add(self, module: str, column: str, dtype: str) -> None:
        """Notes a dtype of a module."""
        self.columns.setdefault(module, {}).setdefault(column, set()).add(dtype)
