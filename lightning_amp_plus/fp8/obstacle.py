"""Why a module does not compute in FP8, as a value. Made by ``selection`` and the backends; plans keep and print it."""

from __future__ import annotations

from typing import Literal, NamedTuple

ObstacleKind = Literal["rule", "shape", "op", "hardware", "backend"]


class Obstacle(NamedTuple):
    """What keeps a module out of FP8; as a string it is what plans and errors say.

    Attributes:
        kind: ``op``: it is no Linear that FP8 could take over. ``shape``: its sizes do not fit, or FP8 gains nothing at
            them. ``rule``: it is better left in high precision, unless a rule names it. ``hardware`` and ``backend``: what
            would multiply cannot run here; or is not installed, or lacks the recipe.
        text: The obstacle in words.
    """

    kind: ObstacleKind
    text: str

    def __str__(self) -> str:
        return self.text if self.kind in ("op", "rule") else f"{self.kind}: {self.text}"
