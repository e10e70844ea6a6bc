"""The verdict on a window: agreed on by all ranks, read by the host only where it must be. Used by ``step``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.ledger import Ledger, OpenWindow
from lightning_amp_plus.scaling.consensus import Consensus
from lightning_amp_plus.scaling.grad_norm import GradNorm, ShardedGradNorm
from lightning_amp_plus.scaling.gradients import dense_gradients, multiply, parameters_of
from lightning_amp_plus.wide import wide_dtype
from lightning_amp_plus.window import Window


class Verdicts:
    """Takes the verdicts of one run.

    Args:
        ledger: The run's open windows.
        consensus: How ranks agree.
        grad_norm: How the global norm is taken.
    """

    def __init__(self, ledger: Ledger, consensus: Consensus, grad_norm: GradNorm) -> None:
        self.ledger = ledger
        self.consensus = consensus
        self.grad_norm = grad_norm
        self._counts_items: bool | None = None  # known to all ranks alike from the first window on

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        return self.consensus.world_size == 1

    def device_of(self, optimizer: Optimizer) -> torch.device:
        """Where the optimizer's windows are computed; the same kind of device on every rank, gradients or none."""
        losses = self.ledger.losses_of(optimizer)
        if losses:
            return losses[-1].device
        return next((p.device for p in parameters_of(optimizer)), torch.device("cpu"))

    def agree(self, optimizer: Optimizer, state: OpenWindow, window: Window) -> None:
        """One collective for all that steers the window: the overflow, where it began, the items, the sharded norm.

        Raises:
            ValueError: On every rank, at the first window of a run, if only some ranks count items.
        """
        if self.alone:
            return
        device = self.device_of(optimizer) if state.found_inf is None else state.found_inf.device
        state.found_here = torch.zeros((), device=device) if state.found_inf is None else state.found_inf
        items = window.num_items
        terms = [
            state.found_here,
            self.ledger.forward_overflow(optimizer, device),
            scalar(0.0 if items is None else items, device),
            scalar(0.0 if items is None else 1.0, device),
        ]
        if isinstance(self.grad_norm, ShardedGradNorm):
            terms.append(self.grad_norm.square_sum(state.parameters, device))
        wide = wide_dtype(device)
        state.terms = self.consensus.agree(torch.stack([term.to(wide) for term in terms]))
        state.found_inf = state.terms[0].clamp(max=1.0).float()
        if self._counts_items is None:
            self._settle_items(float(state.terms[3]))
        weight: float | Tensor = 1.0
        if self._counts_items:
            weight = self._weigh(state.parameters, state.terms[2])
        if self.grad_norm.sharded:
            state.norm, state.norm_at = state.terms[4].sqrt() * weight, self.ledger.backwards

    def agree_on_items(self, optimizer: Optimizer, window: Window, parameters: list[Tensor]) -> None:
        """The same for a window that nobody checks: a collective only where losses are weighted by items."""
        if self.alone or self._counts_items is False:
            return
        items = window.num_items
        device, counted = self.device_of(optimizer), (0.0, 0.0) if items is None else (items, 1.0)
        total = self.consensus.agree(torch.stack([scalar(number, device) for number in counted]))
        if self._counts_items is None:
            self._settle_items(float(total[1]))
        if self._counts_items:
            self._weigh(parameters, total[0])

    def _settle_items(self, counting: float) -> None:
        """Whether this run counts items; one transfer, once."""
        if 0 < counting < self.consensus.world_size:
            raise ValueError(
                f"training_step returned num_items on {counting:g} of {self.consensus.world_size} ranks. Summed and "
                "averaged losses cannot be mixed: return it on every rank or on none."
            )
        self._counts_items = counting > 0

    def _weigh(self, parameters: list[Tensor], items: Tensor) -> Tensor:
        # The strategy averages over ranks, so the sum over all ranks is world_size times what is in the buffers. A sum
        # over no item at all has no gradient either.
        weight = self.consensus.world_size / torch.where(items > 0, items, 1.0)
        multiply(dense_gradients(parameters), weight)
        return weight

    def read(self, state: OpenWindow) -> bool:
        """Whether the window overflowed. The step's one transfer; brings the norm along where one was measured."""
        if state.overflowed is None:
            norm = state.norm if state.norm_at == self.ledger.backwards else None
            if state.found_inf is None:
                state.overflowed = False
            elif norm is None:
                state.overflowed = bool(state.found_inf.item())
            else:
                found = state.found_inf
                overflowed, known = torch.stack([found, norm.to(found.device, found.dtype)]).tolist()
                state.overflowed, state.known_norm = bool(overflowed), known
                if not state.overflowed and known == float("inf"):
                    # Finite gradients whose squares are not (1e25): the sum fits FP64.
                    state.norm = self.grad_norm.total(state.parameters, torch.float64)
                    state.known_norm = None
        return state.overflowed


def add_verdict(state: OpenWindow, found_inf: Tensor) -> None:
    """Adds the outcome of a check to what is known about a window: one overflow is enough."""
    before = state.found_inf
    state.found_inf = found_inf if before is None else torch.maximum(before, found_inf.to(before.device))


def scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """``value`` as a 0-dim FP32 tensor on ``device``."""
    return value.to(device, torch.float32) if isinstance(value, Tensor) else torch.full((), value, device=device)
