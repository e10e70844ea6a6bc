"""What is wanted of a module, and what it gets: :class:`Wish` and :class:`Decision`. From ``matching`` to ``routing``."""

from typing import Literal, NamedTuple

from lightning_amp_plus.fp8.obstacle import ObstacleKind
from lightning_amp_plus.fp8.selection import Fp8Route
from lightning_amp_plus.policy import Rule


class Decision(NamedTuple):
    """One module's format, the `match` of the deciding rule (or ``""``), why, whether it is torchmetrics' own, and FP8.

    ``left_out``: of a module that was to be in FP8 and is not, the kind of its obstacle. Metrics are never to be.
    """

    compute: str
    rule: str
    reason: str
    metric: bool
    fp8: Fp8Route | None = None
    left_out: ObstacleKind | Literal[""] = ""


class Wish(NamedTuple):
    """What is wanted of a module before it is known what it can do; passed on to the modules inside it.

    Attributes:
        compute: The format, FP8 included.
        rule: The deciding rule, if any.
        reason: Why.
        own: Whether the rule names this very module, rather than meeting it by a glob or its class.
    """

    compute: str
    rule: Rule | None
    reason: str
    own: bool
