"""FP8 over a run: when it begins, and what a window does to amax histories and kept weights. Used by ``precision``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_amp_plus.fp8.delayed import AmaxHistory, histories_of
from lightning_amp_plus.fp8.switch import switch_fp8
from lightning_amp_plus.fp8.weights import WindowWeights
from lightning_amp_plus.journal import Journal
from lightning_amp_plus.policy import PrecisionPolicy
from lightning_amp_plus.routed import route_of
from lightning_amp_plus.step_report import StepReport


class Fp8Run:
    """Keeps FP8 off until its steps have come, and advances amax histories once a window.

    Args:
        policy: Whose ``fp8_after_steps`` counts.
        journal: Knows the applied steps and how ranks agree.
    """

    def __init__(self, policy: PrecisionPolicy, journal: Journal) -> None:
        self._after = policy.fp8_after_steps
        self._journal = journal
        self._module: Module | None = None
        self._waits = False
        self.histories: list[AmaxHistory] = []
        self.weights = WindowWeights()

    def take_plan(self, module: Module) -> None:
        """A plan was applied to ``module``: finds its histories, and switches FP8 off again if it is too early."""
        self._module = module
        self.histories = histories_of(module.modules())
        self.weights.attach(m for m in module.modules() if (route := route_of(m)) is not None and route.fp8 is not None)
        self.count()

    def count(self) -> None:
        """Begins FP8 if enough steps have been applied, and ends it if not."""
        if self._after and self._module is not None:
            started = self._journal.history.applied >= self._after
            switch_fp8(self._module, started)
            self._waits = not started

    def on_report(self, report: StepReport) -> None:
        """A window closed; called on every rank."""
        journal = self._journal
        # Asked where every rank knows the verdict: each window, or at log points where only the device knows it.
        if self._waits and (journal.windows % journal.settle_every == 0 or not journal.has_waiting):
            journal.settle()
            self.count()
        found = report.values.found_inf
        applied: Tensor | bool = found == 0 if isinstance(found, Tensor) else not found and report.verdictless is None
        reduce_max = journal.consensus.maximum if journal.consensus.world_size > 1 else None
        for history in self.histories:
            history.end_window(applied, reduce_max)

    def discard_window(self) -> None:
        """An exception ended the open window."""
        self.weights.end()
        for history in self.histories:
            history.discard()

    def ends_window(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of a window's last forward and backward, after which the optimizer changes weights."""

        def last() -> Any:
            result = closure()
            self.weights.end()
            return result

        return last

    def noted(self) -> dict[str, Tensor]:
        """Amax values of the open window by module name, the largest over ranks; every rank has to call it."""
        found: dict[str, Tensor] = {}
        for history in self.histories:
            noted = history.noted()
            if self._journal.consensus.world_size > 1 and history.recipe.reduce_amax:
                self._journal.consensus.maximum(noted)
            found |= dict(zip(history.names, noted.cpu(), strict=True))
        return {name: row.clone() for name, row in found.items()}

    def note_again(self, noted: Mapping[str, Tensor]) -> None:
        """Goes on in the window that :meth:`noted` was asked in."""
        for history in self.histories:
            history.note_again(noted)

    def state_dict(self) -> dict[str, Tensor]:
        """Amax histories by module name."""
        return {name: past for history in self.histories for name, past in history.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the histories of the modules that are still in FP8, by name."""
        for history in self.histories:
            history.load_state_dict(state)
        self.weights.release()  # they were scaled by other histories
