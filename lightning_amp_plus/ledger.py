"""Which gradients belong to which window, and in which scale they are: :class:`Ledger`. The step sequence's memory.

An optimizer's window runs from the first backward after its last step to its next step. With several optimizers windows
overlap, and one optimizer's gradients may wait, scaled, while another one steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.scaling.gradients import dense_gradients, parameters_of, parameters_with_gradients

_KEPT_LOSSES = 1024  # per window; in a longer one the oldest are not looked at for the overflow's origin
_WATCHED = 16
_CONSUMED = "_lightning_amp_plus_consumed"


@dataclass
class OpenWindow:
    """What is known so far about the window of one optimizer.

    Attributes:
        found_inf: 0-dim FP32 tensor, above 0 if a gradient was found to be non-finite; ``None`` before any check.
        found_here: The same of this rank alone, where ranks agree on ``found_inf``.
        unscaled: Whether the gradients have been divided by the scale.
        terms: What all ranks agreed on, ``[overflows, forward overflows, items, ranks that count items, norm
            squared]``; ``None`` in a single process.
        parameters: The optimizer's parameters with gradients, as unscaled.
        norm: Global norm of the unscaled gradients before clipping, where it was measured.
        norm_at: Number of the backward after which ``norm`` was measured; a later backward makes it stale.
        known_norm: ``norm`` on the host, where it came along with the verdict.
        clipped: Whether the gradients were clipped since, so that ``norm`` is no longer theirs.
        overflowed: The verdict, once the host has read it.
    """

    found_inf: Tensor | None = None
    found_here: Tensor | None = None
    unscaled: bool = False
    parameters: list[Tensor] = field(default_factory=list)
    terms: Tensor | None = None
    norm: Tensor | None = None
    norm_at: int = -1
    known_norm: float | None = None
    clipped: bool = False
    overflowed: bool | None = None


class Ledger:
    """Backwards, losses and consumption of the windows that are open.

    Args:
        optimizers: All optimizers of the run.
        manual: Whether the run is in manual optimization, the only case where windows can overlap or be consumed twice.
    """

    def __init__(self, optimizers: Sequence[Optimizer] = (), manual: bool = False) -> None:
        self.optimizers = list(optimizers)
        self.manual = manual
        self.discard()

    def watch_backwards(self) -> Callable[[], None]:
        """Notices backwards past the plugin where they reach one of a few parameters, spread over each optimizer's.

        A hook on every parameter would cost a microsecond for each in every backward.

        Returns:
            The function that ends it.
        """
        handles = []
        for optimizer in self.optimizers:
            trained = [p for p in parameters_of(optimizer) if p.requires_grad]
            spread = (
                [trained[round(i * (len(trained) - 1) / (_WATCHED - 1))] for i in range(_WATCHED)] if trained else []
            )
            watched: dict[int, Any] = {id(p): p for p in spread}
            for parameter in watched.values():
                handles.append(parameter.register_post_accumulate_grad_hook(self._note_foreign))

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def _note_foreign(self, parameter: Tensor) -> None:
        if not self.in_backward and parameter.grad is not None:
            self._foreign[id(parameter)] = parameter.grad

    def has_foreign_gradient(self, optimizer: Optimizer) -> bool:
        """Whether a backward past the plugin has written to a gradient that is still there."""
        return bool(self._foreign) and any(
            p.grad is not None and self._foreign.get(id(p)) is p.grad for p in parameters_of(optimizer)
        )

    def discard(self, interrupted: bool = False) -> None:
        """Forgets every open window: an exception ended it, or its gradients were zeroed unconsumed.

        Args:
            interrupted: Whether it was an exception; known until the next backward.
        """
        self.interrupted = interrupted
        self.backwards = 0
        self.in_backward = False
        self._foreign: dict[int, Tensor] = {}
        self._stepped_at: dict[int, int] = {}
        self._losses: deque[tuple[int, Tensor]] = deque(maxlen=_KEPT_LOSSES)
        self._open: dict[int, OpenWindow] = {}

    def record_loss(self, loss: Tensor) -> None:
        """Keeps the detached loss of the last backward, whose overflow may be asked for."""
        # Of a loss with several elements, backward from which needs a gradient, the largest tells as much as all.
        self._losses.append((self.backwards, loss if loss.numel() == 1 else loss.abs().amax()))

    def window_of(self, optimizer: Optimizer) -> OpenWindow:
        """The optimizer's open window."""
        return self._open.setdefault(id(optimizer), OpenWindow())

    def reopen(self, optimizer: Optimizer) -> None:
        """The window is computed anew inside a step (LBFGS): what was found out about its gradients no longer holds."""
        self._open.pop(id(optimizer), None)

    def close(self, optimizer: Optimizer) -> None:
        """The optimizer's window is over, whatever became of it."""
        self._open.pop(id(optimizer), None)
        if self._foreign:
            mine = {id(p) for p in parameters_of(optimizer)}
            self._foreign = {key: gradient for key, gradient in self._foreign.items() if key not in mine}
        self._stepped_at[id(optimizer)] = self.backwards
        if len(self.optimizers) < 2:
            self._losses.clear()

    def has_backward(self, optimizer: Optimizer) -> bool:
        """Whether any backward went through the plugin since the optimizer's last step."""
        return self.backwards > self._stepped_at.get(id(optimizer), 0)

    def micro_batches(self) -> int:
        """Backwards in the longest of the open windows."""
        since = [self._stepped_at.get(id(optimizer), 0) for optimizer in self.optimizers] or [0]
        return self.backwards - min(since)

    def resume_window(self, micro_batches: int) -> None:
        """Goes on in a window whose gradients were restored from a checkpoint."""
        self.backwards = micro_batches

    def unscaled_early(self) -> list[Optimizer]:
        """Optimizers whose open window was unscaled (by ``scaler.unscale_``) and may still go on."""
        return [o for o in self.optimizers if id(o) in self._open and self._open[id(o)].unscaled]

    def losses_of(self, optimizer: Optimizer) -> tuple[Tensor, ...]:
        """The losses of the optimizer's open window, detached, in the scale they were called backward on."""
        since = self._stepped_at.get(id(optimizer), 0)
        return tuple(loss for number, loss in self._losses if number > since)

    def forward_overflow(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        """0-dim FP32 tensor on ``device``: 1 if a loss of the open window is not finite, else 0."""
        losses = self.losses_of(optimizer)
        if not losses:
            return torch.zeros((), device=device)
        dtype = torch.float64 if any(loss.dtype == torch.float64 for loss in losses) else torch.float32
        flat = torch.stack([loss.to(device, dtype).reshape(()) for loss in losses])
        return 1.0 - torch.isfinite(flat).all().float()

    def is_fresh(self, parameter: Tensor) -> bool:
        """Whether the gradient was written to since it was last consumed.

        The tensor's version is remembered, not its id: ids are reused as soon as a gradient is freed.
        """
        gradient = parameter.grad
        return gradient is not None and getattr(gradient, _CONSUMED, None) != gradient._version

    def mark_consumed(self, parameters: Iterable[Tensor]) -> None:
        """Notes that the gradients, as they are now, have been through a step and are unscaled."""
        for parameter in parameters if self.manual else ():
            if parameter.grad is not None:
                setattr(parameter.grad, _CONSUMED, parameter.grad._version)

    def scaled_gradients(self) -> Iterator[list[Tensor]]:
        """Gradients of open windows, by optimizer, that carry the present scale."""
        for optimizer in self.optimizers:
            if self.has_backward(optimizer) and not self.window_of(optimizer).unscaled:
                parameters = parameters_with_gradients(optimizer)
                held = dense_gradients(p for p in parameters if not self.manual or self.is_fresh(p))
                if held:
                    yield held

    def held_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Gradients of *other* optimizers that still carry the present scale while ``optimizer`` steps."""
        if not self.manual or len(self.optimizers) < 2:
            return []
        mine = {id(p) for p in parameters_of(optimizer)}
        held = {
            id(p): p
            for other in self.optimizers
            if other is not optimizer and not (id(other) in self._open and self._open[id(other)].unscaled)
            for p in parameters_with_gradients(other)
            if id(p) not in mine and self.is_fresh(p)
        }
        return dense_gradients(held.values())
