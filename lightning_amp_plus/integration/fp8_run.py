"""FP8 over a run: whether it is on, and what a window does to amax histories and kept weights. Used by ``precision``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_amp_plus.fp8.backends.transformer_engine import Engine, delayed_engines, region
from lightning_amp_plus.fp8.delayed import AmaxHistory, histories_of
from lightning_amp_plus.fp8.switch import switch_fp8
from lightning_amp_plus.fp8.weights import WindowWeights
from lightning_amp_plus.integration.fp8_start import Start
from lightning_amp_plus.journal import Journal
from lightning_amp_plus.policy import PrecisionPolicy
from lightning_amp_plus.routed import route_of
from lightning_amp_plus.step_report import StepReport


class Fp8Run:
    """Keeps FP8 off until it is to begin, and advances amax histories once a window.

    Args:
        policy: Says when FP8 begins.
        journal: Knows the applied steps and how ranks agree.
    """

    def __init__(self, policy: PrecisionPolicy, journal: Journal) -> None:
        self._journal = journal
        self._module: Module | None = None
        self.start = Start(policy, journal, self._switch)
        self.histories: list[AmaxHistory] = []
        self._engines: dict[str, Engine] = {}
        self.weights = WindowWeights()

    @property
    def keeps_histories(self) -> bool:
        """Whether there are amax histories, whoever advances them."""
        return bool(self.histories or self._engines)

    def step_region(self, group: Any) -> AbstractContextManager[None]:
        """Surrounds the training step of a micro-batch, for a backend that advances its histories at its end.

        Args:
            group: Ranks that share amax values; ``None`` means all.
        """
        return region(self._engines.values(), group)

    def take_plan(self, module: Module) -> None:
        """A plan was applied to ``module``: finds its histories, and switches FP8 off again if it is too early."""
        self._module = module
        self.histories = histories_of(module.modules())
        self._engines = delayed_engines(module.named_modules())
        self.weights.attach(
            part
            for part in module.modules()
            if (route := route_of(part)) is not None and route.fp8 is not None and route.fp8.backend == "reference"
        )
        self._switch(self.start.begun)

    def _switch(self, on: bool) -> None:
        if self._module is not None:
            switch_fp8(self._module, on)

    def on_report(self, report: StepReport) -> None:
        """A window closed; called on every rank."""
        self.start.on_report(report)
        reduce_max = self._journal.consensus.maximum if self._journal.consensus.world_size > 1 else None
        for history in self.histories:
            history.end_window(report.applied, reduce_max)

    def begin_fit(self) -> None:
        """Every fit begins with an empty window."""
        self.start.discard_window()
        self.discard_window()

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

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """``fp8_histories``: amax histories by module name. ``fp8_scales``: where they do not follow from those."""
        histories = {name: past for history in self.histories for name, past in history.state_dict().items()}
        own = {name: known for name, engine in self._engines.items() if (known := engine.histories()) is not None}
        histories |= {name: past for name, (past, _) in own.items()}
        scales = {name: scales for name, (_, scales) in own.items()}
        return {"fp8_histories": histories, **({"fp8_scales": scales} if self._engines else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the histories of the modules that are still in FP8, by name."""
        histories, scales = state.get("fp8_histories") or {}, state.get("fp8_scales") or {}
        for history in self.histories:
            history.load_state_dict(histories)
        for name, engine in self._engines.items():
            if name in histories:
                engine.take_histories(histories[name], scales.get(name))
            else:  # it had not run yet when that was saved, as before a search for a learning rate
                engine.forget()
        self.weights.release()  # they were scaled by other histories
