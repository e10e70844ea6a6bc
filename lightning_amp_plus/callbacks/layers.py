"""Numbers of layers over log points, bounded in memory: :class:`LayerHistory`. Heat maps are made from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

_MOST_STEPS = 512  # columns of a picture that can still be told apart


@dataclass
class LayerHistory:
    """One number for each layer at each log point.

    When it is full, every second log point is dropped, and of those to come as many.

    Attributes:
        title: What the numbers are.
        names: Layers in the order of the model; known from the first log point on, others are added behind.
        steps: The log points, as loggers count.
        columns: For each log point the numbers of ``names``; NaN where a layer had none.
        ceiling: In a picture larger numbers have one color, so that the others can be told apart.
        floor: The number that the lowest color stands for; by default the smallest.
        group: What loggers keep the picture under, with the keys of that name.
    """

    title: str
    names: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    columns: list[list[float]] = field(default_factory=list)
    ceiling: float | None = None
    floor: float | None = None
    group: str = "precision"
    _every: int = 1
    _offered: int = 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of one log point."""
        self._offered += 1
        if (self._offered - 1) % self._every:
            return
        known = set(self.names)
        self.names += [name for name in values if name not in known]
        self.steps.append(step)
        self.columns.append([values.get(name, math.nan) for name in self.names])
        if len(self.steps) > _MOST_STEPS:
            self.steps, self.columns = self.steps[::2], self.columns[::2]
            self._every *= 2

    def rows(self) -> list[list[float]]:
        """The numbers by layer, one for each of ``steps``."""
        return [
            [column[row] if row < len(column) else math.nan for column in self.columns]
            for row in range(len(self.names))
        ]
