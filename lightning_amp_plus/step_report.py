"""What happened to one window: :class:`StepReport`. Written by ``step``, read by callbacks and by people.

A report is handed out before its values are known to the host. They stay on the device until somebody reads one;
reading many reports through :func:`resolve` costs one transfer for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Outcome = Literal["applied", "skipped_overflow", "skipped_no_grads", "skipped_no_backward"]
Verdictless = Literal["skipped_no_grads", "skipped_no_backward"]


@dataclass
class Values:
    """The values behind a report, each a tensor on the device until it is resolved."""

    found_inf: bool | Tensor = False
    scaled: bool = False
    forward_overflow: bool | Tensor | None = None
    losses: tuple[Tensor, ...] = ()
    scale: float | Tensor = 1.0
    next_scale: float | Tensor = 1.0
    grad_norm: float | Tensor | None = None
    late_norm: Callable[[], Tensor | None] | None = None
    found_here: Tensor | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StepReport:
    """The verdict on one window of one optimizer. Delivered once to everybody who subscribed with ``plugin.subscribe``.

    Attributes:
        step: The Trainer's ``global_step`` when the window closed (Lightning counts skipped steps too).
        window: Running number of the window, from 0, over all fits and resumes of the plugin.
        optimizer: Index of the optimizer, as in ``trainer.optimizers``.
    """

    step: int
    window: int
    optimizer: int
    values: Values = field(repr=False, compare=False)
    verdictless: Verdictless | None = field(default=None, repr=False)

    @property
    def outcome(self) -> Outcome:
        """``applied``, or why the optimizer did not step."""
        if self.verdictless is not None:
            return self.verdictless
        if isinstance(self.values.found_inf, Tensor):
            resolve([self])
        return "skipped_overflow" if self.values.found_inf else "applied"

    @property
    def applied(self) -> Tensor | bool:
        """Whether the step was applied; 0-dim where only the device knows. Waits for nothing."""
        if self.verdictless is not None:
            return False
        found = self.values.found_inf
        return found == 0 if isinstance(found, Tensor) else not found

    @property
    def scale(self) -> float:
        """What this window's losses were multiplied by (1.0 without a loss scale)."""
        if isinstance(self.values.scale, Tensor):
            resolve([self])
        return float(self.values.scale)

    @property
    def next_scale(self) -> float:
        """The loss scale after this window's update."""
        if isinstance(self.values.next_scale, Tensor):
            resolve([self])
        return float(self.values.next_scale)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the unscaled gradients before clipping.

        Measured where clipping or a subscriber needs it; otherwise when it is first read, which must be before the
        gradients change. ``None`` if it was not measured in time or there was no gradient.
        """
        values = self.values
        if values.grad_norm is None and values.late_norm is not None:
            values.grad_norm, values.late_norm = values.late_norm(), None
        resolve([self], everything=True)
        return None if values.grad_norm is None else float(values.grad_norm)

    @property
    def overflow_origin(self) -> Literal["forward", "backward"] | None:
        """``forward`` if the loss itself was not finite, ``backward`` if only gradients were, else ``None``."""
        if self.outcome != "skipped_overflow":
            return None
        resolve([self], everything=True)
        return "forward" if self.values.forward_overflow else "backward"

    @property
    def overflow_ranks(self) -> tuple[int, ...]:
        """Ranks on which the overflow was found; empty without overflow.

        Ranks are asked once a verdict is known on all of them: at once, or with a fused optimizer at the next log
        point. Until then the tuple is empty on several ranks.
        """
        if self.outcome != "skipped_overflow":
            return ()
        if self.values.ranks is None:
            return (0,) if self.values.found_here is None else ()
        return self.values.ranks

    def __str__(self) -> str:
        """One line for people; resolves the report."""
        norm = self.grad_norm
        parts = [f"step {self.step}, window {self.window}, optimizer {self.optimizer}: {self.outcome}"]
        if self.overflow_origin is not None:
            parts.append(f"overflow in the {self.overflow_origin} pass")
        if self.values.scaled:
            parts.append(f"loss scale {self.scale:g} -> {self.next_scale:g}")
        if norm is not None:
            parts.append(f"gradient norm {norm:.4g}")
        return ", ".join(parts)


def resolve(reports: Iterable[StepReport], everything: bool = False) -> None:
    """Moves the device values of ``reports`` to the host: one transfer whatever their number, or none.

    Args:
        reports: Reports to resolve.
        everything: As in :func:`unresolved`.
    """
    numbers, take = unresolved(reports, everything)
    if numbers is not None:
        take(numbers.tolist())


def unresolved(
    reports: Iterable[StepReport], everything: bool = False
) -> tuple[Tensor | None, Callable[[Sequence[float]], None]]:
    """What the device alone knows of ``reports``, for who moves it to the host together with other numbers.

    Args:
        reports: Reports to resolve.
        everything: Also the norm and the overflow's origin of reports whose verdict the host knows. For verdicts
            still on the device they come along in any case.

    Returns:
        A vector, or ``None`` if there is nothing; and what takes its numbers on the host.
    """
    waiting: list[tuple[Values, str, Tensor]] = []
    for report in reports:
        values = report.values
        unknown = isinstance(values.found_inf, Tensor)
        wanted = ["found_inf", "scale", "next_scale"]
        if unknown or everything:
            wanted.append("grad_norm")
        # Where a pass overflowed is of no interest for a window that did not.
        if unknown or (everything and values.found_inf):
            wanted.append("forward_overflow")
            if values.forward_overflow is None:
                waiting.extend((values, "losses", loss) for loss in values.losses)
                values.losses = ()
        waiting.extend((values, name, value) for name in wanted if isinstance(value := getattr(values, name), Tensor))

    def take(numbers: Sequence[float]) -> None:
        for (values, name, _), number in zip(waiting, numbers, strict=True):
            if name == "losses":
                values.forward_overflow = bool(values.forward_overflow) or not math.isfinite(number)
            else:
                setattr(values, name, bool(number) if name in ("found_inf", "forward_overflow") else number)

    if not waiting:
        return None, take
    dtype = torch.float64 if any(t.dtype == torch.float64 for _, _, t in waiting) else torch.float32
    device = waiting[0][2].device
    return torch.stack([t.detach().to(device, dtype).reshape(()) for _, _, t in waiting]), take
