"""UpdateRatioMonitor: how far each layer moved in an optimizer step, over how large it is."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus.callbacks.layers import LayerHistory
from lightning_amp_plus.callbacks.monitor import Monitor
from lightning_amp_plus.callbacks.parameter_places import Per, Places
from lightning_amp_plus.callbacks.readout import Measurement, Over
from lightning_amp_plus.metrics.applied_update import AppliedUpdate, Found, Layout
from lightning_amp_plus.metrics.update_ratio import EPSILON
from lightning_amp_plus.step_report import StepReport
from lightning_amp_plus.wide import wide_dtype

# Log points that the running median looks back on, and how many of them there must be before it says anything.
_LOOK_BACK, _LEAST_POINTS = 32, 5
_NAMED = 5  # layers that a warning names
# Squares of updates, of weights, elements rounded away, elements, parameters that were stepped, those that were pushed.
_COLUMNS: tuple[Over, ...] = ("sum",) * 6

_WHY = {
    "unused": "got no gradient at all: no output of theirs went into the loss, or it was detached",
    "masked": "got gradients that are zero throughout: a mask, a dead activation or a factor of zero lies behind them",
    "zero": "got gradients, but no element changed: the learning rate is zero, or every update was rounded away",
}


@dataclass(frozen=True)
class UpdateRatios:
    """What was seen at one log point.

    Attributes:
        step: As loggers count.
        ratios: Update ratio by name.
        rounded_away: Share of the elements whose update was rounded away, by name.
        median: Of ``ratios``, over what had a gradient; NaN if nothing had.
        jump: ``median`` over the running median of earlier log points, while there are enough of these.
        at_zero: What did not move, or by weight decay only, by name: ``frozen`` (in no optimizer, or ``requires_grad``
            is off), ``unused`` (no gradient), ``masked`` (gradients zero throughout) or ``zero`` (any other reason).
    """

    step: int
    ratios: dict[str, float]
    rounded_away: dict[str, float]
    median: float
    jump: float | None
    at_zero: dict[str, str]


class UpdateRatioMonitor(Monitor):
    """Logs how far one applied step moved each layer: ``‖Δθ‖₂ / (‖θ‖₂ + 1e-12)``, ``θ`` after the step.

    About 1e-3 is what a well chosen learning rate gives; layers far above diverge, far below they stand still. A layer
    is a module with parameters of its own; the parameters that had a gradient count. Exact for every optimizer: after
    torch's SGD, Adam and AdamW from the optimizer's own state, in any of their modes and without a copy; for any other,
    and for parameters stored in 16 bits without master weights, from a copy of the parameters in question. That copy is
    held from before the step to after it, only in steps that log, and takes as much memory as those parameters
    (``sample=1/16``: a sixteenth). With master weights it is the masters that move.

    Args:
        every_n_steps: Length of an interval in steps; by default the Trainer's ``log_every_n_steps``. Where that is 0,
            nothing is logged.
        per: ``"layer"``, ``"parameter"``, or ``"group"`` for the optimizers' parameter groups.
        sample: Look at this share of the elements only, one over a whole number: of tensors of 65536 elements or more
            always the same runs of neighbors. 1/16 takes a ninth of the time for large layers, whose ratios are then good
            to a few percent, and worse where few elements do all the moving.
        compile: Compute with a kernel made by ``torch.compile``, in half the time, for Adam and AdamW. The first log point
            waits for it to be made.
        jump: Warn, once, when the median over all layers is more than this many times the running median of the last 32
            log points.

    Raises:
        ValueError: If an argument is out of range.
        MisconfigurationException: In ``setup``, if the Trainer's precision plugin is not an ``AmpPrecision``.

    Example::

        trainer = L.Trainer(plugins=[AmpPrecision("bf16-mixed")], callbacks=[UpdateRatioMonitor(every_n_steps=50)])

    Logged keys, in the loggers, in ``trainer.callback_metrics`` and in ``trainer.logged_metrics``. NAME is the module's
    qualified name (``(model)`` for parameters of the LightningModule itself), the parameter's, or the group's ``name``,
    else ``group_0``, ``group_1``; with several optimizers ``optimizer_0/group_0``:

    =============================== ================================================================== =================
    key                             value                                                              where
    =============================== ================================================================== =================
    ``precision/update_ratio/NAME`` update ratio of the step at the log point                          not if the step
                                                                                                       was skipped, nor
                                                                                                       of frozen layers
    ``precision/update_ratio_``     median over all that had a gradient                                not if the step
    ``median``                                                                                         was skipped
    ``precision/rounded_away/NAME`` share of elements whose update was below half an ulp of the stored from the first
                                    parameter, and lost; FP32 and FP64: estimated from one element in  time on that it
                                    64; ``compile=True`` counts more                                   is above zero
    =============================== ================================================================== =================

    Layers that did not move are named, with the reason, in a warning (once for each reason) and in ``last.at_zero``; frozen
    ones are not warned about. A layer that weight decay alone moves counts as ``masked`` under AdamW; under optimizers that
    add decay to the gradient it cannot be told. Several optimizers that step in one batch are logged together, of several
    steps of one optimizer the last. ``last`` holds the numbers of the last log point, ``layer_histories()`` the logarithm
    (base 10) of the ratios over the run.
    """

    by_layer = True

    def __init__(
        self,
        every_n_steps: int | None = None,
        per: Per = "layer",
        sample: float = 1.0,
        compile: bool = False,
        jump: float = 10.0,
    ) -> None:
        if per not in ("layer", "parameter", "group"):
            raise ValueError(f"UpdateRatioMonitor(per={per!r}): expected 'layer', 'parameter' or 'group'.")
        whole = isinstance(sample, int | float) and 0 < sample <= 1 and abs(1 / sample - round(1 / sample)) < 1e-6
        if not whole:
            raise ValueError(f"UpdateRatioMonitor(sample={sample!r}): expected 1 over a whole number, as 1/16.")
        if not isinstance(jump, int | float) or not jump > 1:
            raise ValueError(f"UpdateRatioMonitor(jump={jump!r}): expected a factor above 1.")
        self.per, self.sample, self.compile, self.jump = per, sample, compile, jump
        self.last: UpdateRatios | None = None
        self._medians: deque[float] = deque(maxlen=_LOOK_BACK)
        self._warned: set[str] = set()
        self._history = LayerHistory("log10 of the update ratio")
        super().__init__(every_n_steps)

    @override
    def settings(self) -> dict[str, Any]:
        """See :class:`Monitor`."""
        return {"every_n_steps": self.every_n_steps, "per": self.per, "sample": self.sample}

    @override
    def forget_run(self) -> None:
        """See :class:`Monitor`."""
        super().forget_run()
        self._places: Places | None = None
        self._updates: list[AppliedUpdate] = []
        self._found: dict[int, list[tuple[Layout, Tensor]]] = {}
        self._at: WeakKeyDictionary[Layout, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        self._rounding: set[str] = set()
        self._device = torch.device("cpu")

    # ---------------------------------------------------------------- what is seen

    @override
    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds out which number each parameter belongs to."""
        self._bind(pl_module)
        self._device = trainer.strategy.root_device

    def _bind(self, pl_module: pl.LightningModule) -> None:
        self._places = Places(pl_module, self.optimizers, self.per)
        one_in = round(1 / self.sample)
        self._updates = [AppliedUpdate(optimizer, one_in, self.compile) for optimizer in self.optimizers]

    @override
    def before_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes note of parameters that optimizers were given meanwhile."""
        assert self._places is not None
        if [*map(id, self.optimizers)] != [id(update.optimizer) for update in self._updates]:
            self._bind(pl_module)
            self._at.clear()
        elif self._places.refresh():
            self._at.clear()

    @override
    def see_gradients(self, optimizer: Optimizer) -> None:
        """The last moment before the step: what has to be copied is copied."""
        update = self._of(optimizer)
        if update is not None:
            update.before_step()

    @override
    def see_step(self, report: StepReport, optimizer: Optimizer) -> None:
        """Measures what the step did; whether it was applied, the device may be the only one to know."""
        found_inf, update = report.values.found_inf, self._of(optimizer)
        self._found.pop(report.optimizer, None)
        if update is None:
            return
        if report.verdictless is not None or found_inf is True:
            update.forget()
            return
        # In manual optimization this runs under autocast.
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            self._found[report.optimizer] = [(part.layout, self._rows(part, found_inf)) for part in update.after_step()]

    @override
    def after_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drops copies that no step used."""
        for update in self._updates:
            update.forget()

    def _of(self, optimizer: Optimizer) -> AppliedUpdate | None:
        """``None`` for one that came in the middle of a batch. A StopIteration would end the fit."""
        return next((update for update in self._updates if update.optimizer is optimizer), None)

    def _rows(self, part: Found, found_inf: bool | Tensor) -> Tensor:
        """By parameter, all columns; zero where the step was skipped."""
        sums = part.sums
        _, known = self._placed(part.layout, sums.device)
        rows = torch.cat([sums[:, :3] * known[:, :1], known[:, 1:], sums[:, 3:]], 1)
        if isinstance(found_inf, Tensor):
            rows = torch.where(found_inf.to(rows.device) == 0, rows, 0.0)
        return rows

    def _placed(self, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each parameter its row; and one over the ranks that hold it, its elements so weighted, and 1."""
        assert self._places is not None and self.plugin is not None
        if layout not in self._at:
            shares = [1.0 / self.plugin.holders(parameter) for parameter in layout.parameters]
            known = [[share, share * size, 1.0] for share, size in zip(shares, layout.blocks.sizes, strict=True)]
            self._at[layout] = (
                self._places.index(layout.parameters, device),
                torch.tensor(known, dtype=wide_dtype(device), device=device),
            )
        return self._at[layout]

    @override
    def measure(self) -> Sequence[Measurement]:
        """Sums by row over what all optimizers did."""
        device, rows = self._device, 0 if self._places is None else len(self._places.names)
        total = torch.zeros(rows + 1, len(_COLUMNS), dtype=wide_dtype(device), device=device)
        for parts in self._found.values():
            for layout, sums in parts:
                total.index_add_(0, self._at[layout][0].to(device), sums.to(device))
        self._found.clear()
        return (Measurement(total[:-1], _COLUMNS),)

    # ---------------------------------------------------------------- what comes out

    @override
    def take(self, numbers: Sequence[Tensor], step: int) -> Mapping[str, float]:
        """See the table of the class."""
        (table,) = numbers
        stepped = (table[:, 4] > 0).tolist()
        if self._places is None or not any(stepped):  # all were skipped: there is no update to speak of
            return {}
        names = self._places.names
        found = (table[:, 0].sqrt() / (table[:, 1].sqrt() + EPSILON)).tolist()
        shares = (table[:, 2] / table[:, 3].clamp(min=1e-30)).tolist()
        pushed, moved = (table[:, 5] > 0).tolist(), (table[:, 0] != 0).tolist()
        filled = (table[:, 3] > 0).tolist()
        rows = [row for row, there in enumerate(stepped) if there and filled[row]]
        ratios = {names[row]: found[row] for row in rows}
        lost = {names[row]: shares[row] for row in rows}
        finite = [ratio for ratio in ratios.values() if math.isfinite(ratio)]
        median = statistics.median(finite) if finite else math.nan
        at_zero = {names[row]: "zero" if pushed[row] else "masked" for row in rows if not (pushed[row] and moved[row])}
        idle = [row for row, there in enumerate(stepped) if not there]
        for row, why in self._places.why_not_stepped(idle, stepped.__getitem__).items() if idle else ():
            at_zero[names[row]] = why
            if why == "unused":
                ratios[names[row]] = 0.0
        self._rounding.update(name for name, share in lost.items() if share > 0)
        self.last = UpdateRatios(step, ratios, lost, median, self._jump_of(median), at_zero)
        self._history.add(step, {name: math.log10(r) for name, r in ratios.items() if r > 0 and math.isfinite(r)})
        self._warn(self.last)
        return {
            "precision/update_ratio_median": median,
            **{f"precision/update_ratio/{name}": ratio for name, ratio in ratios.items()},
            **{f"precision/rounded_away/{name}": share for name, share in lost.items() if name in self._rounding},
        }

    @override
    def layer_histories(self) -> Sequence[LayerHistory]:
        """Logarithms (base 10) of the update ratios; NaN where a layer did not move."""
        return (self._history,)

    def _jump_of(self, median: float) -> float | None:
        """The median over the running one, which it then joins."""
        if not median > 0 or not math.isfinite(median):
            return None
        jump = median / statistics.median(self._medians) if len(self._medians) >= _LEAST_POINTS else None
        self._medians.append(median)
        return jump

    def _warn(self, seen: UpdateRatios) -> None:
        if seen.jump is not None and seen.jump > self.jump and "jump" not in self._warned:
            self._warned.add("jump")
            rank_zero_warn(
                f"The median update ratio over all layers jumped to {seen.median:.2e} at step {seen.step}, "
                f"{seen.jump:.1f} times its running median: not one layer but the step as a whole is at fault. Look at "
                "the learning rate, at gradient clipping and at this batch. Said once."
            )
        # With a learning rate of zero, as warm-up may begin, nothing moves and nothing is wrong.
        still = all(why == "zero" or why == "frozen" for why in seen.at_zero.values()) and seen.median == 0
        if still and not any(seen.rounded_away.values()):
            return
        for why, explanation in _WHY.items():
            layers = [name for name, reason in seen.at_zero.items() if reason == why]
            if not layers or why in self._warned:
                continue
            self._warned.add(why)
            what = {"layer": "layers", "parameter": "parameters"}.get(self.per, "parameter groups")
            listed = ", ".join(layers[:_NAMED]) + (f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else "")
            rank_zero_warn(
                f"{len(layers)} of {len(seen.ratios)} {what} did not learn anything in step {seen.step} ({listed}): they "
                f"{explanation}. All are in UpdateRatioMonitor.last.at_zero. Said once."
            )

    # ---------------------------------------------------------------- checkpoint and copies

    @override
    def state_dict(self) -> dict[str, Any]:
        """The medians of the last log points, so that a jump over a resume is seen."""
        return {"medians": list(self._medians)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from ``state_dict()``."""
        self._medians = deque((float(median) for median in state_dict["medians"]), maxlen=_LOOK_BACK)

    def __getstate__(self) -> dict[str, Any]:
        """Settings and what was seen travel; the run it comes from does not."""
        kept = ("every_n_steps", "per", "sample", "compile", "jump", "last", "_medians", "_warned", "_history")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget_run()
