"""GradientMonitor: norm, zeros, underflow and range of the gradients, by layer, and the loss scales that would fit them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus.callbacks.gradient_layers import (
    OUTSIDE,
    LayerSums,
    OptimizerGradients,
    ids_held,
    layer_of_each,
    names_on_all_ranks,
)
from lightning_amp_plus.callbacks.gradient_reading import GradientReading, no_scale, underflow
from lightning_amp_plus.callbacks.layers import LayerHistory
from lightning_amp_plus.callbacks.monitor import Monitor
from lightning_amp_plus.callbacks.readout import Measurement, Over
from lightning_amp_plus.formats import FP16, ScaleWindow
from lightning_amp_plus.metrics.exponents import (
    best_power_of_two,
    cut_off,
    fitting_scales,
    shares_below,
    smallest_kept,
)
from lightning_amp_plus.metrics.gradient_health import COLUMNS, GradientSums
from lightning_amp_plus.routing import RoutePlan
from lightning_amp_plus.scaling.gradients import parameters_of
from lightning_amp_plus.wide import wide_dtype

_CLIP_WINDOWS = 100
_SUM: Over = "sum"
_SUMS = (_SUM,) * COLUMNS
# The range that a LossScale has by default; a larger scale would be of no use, since FP16 has no room for it.
_EXPONENTS = range(-14, 25)
# By how many binades the smallest FP16 step may lie below 2^-24 / S: gradients are still divided by ranks and items.
_DIVIDED = 24


class GradientMonitor(Monitor):
    """Logs how large gradients are, how many are zero, and how many FP16 loses; warns of silent underflow.

    Looks at the gradients that an optimizer is about to consume: unscaled, before clipping, of all ranks. A layer is a
    module with parameters of its own. Works with every precision; in BF16 and FP32 it tells beforehand which loss scale
    FP16 would need. Norms, largest magnitudes, zeros and clipped elements are exact. What depends on exponents, underflow
    and the window of scales, is taken from all elements of small tensors and a sample of tensors of more than 2048, another
    one at each log point: see :func:`lightning_amp_plus.metrics.gradient_health`.

    Args:
        every_n_steps: Length of an interval in steps; by default the Trainer's ``log_every_n_steps``.
        outliers: Share of the non-zero elements, the smallest ones, that a loss scale may let become zero. Of the
            largest ones none is left out, since one overflow costs a step.
        underflow_threshold: Warn, once, when FP16 has turned more than this share of a layer's elements into zero; 1
            turns the warning off.

    Raises:
        ValueError: If an argument is out of range.
        MisconfigurationException: In ``setup``, if the Trainer's precision plugin is not an ``AmpPrecision``.

    Example::

        monitor = GradientMonitor(every_n_steps=10)
        L.Trainer(plugins=[AmpPrecision("16-mixed")], callbacks=[monitor]).fit(model)
        print(monitor.last.window)

    Logged keys; NAME is the qualified name of a layer, as in the plan:

    ====================================== ========================================================= ====================
    key                                    value                                                     where
    ====================================== ========================================================= ====================
    ``precision/grad_norm``                global L2 norm of the unscaled gradients before clipping  always
    ``precision/grad_norm/NAME``           the same of a layer                                       layers with a
                                                                                                     gradient
    ``precision/zero_grad_fraction/NAME``  share of the layer's gradient elements that are zero      layers with a
                                                                                                     gradient
    ``precision/fp16_underflow_fraction``  share of the non-zero elements that FP16 rounds to zero   always
                                           at the present loss scale, ``|g| S <= 2**-25``; without
                                           a loss scale ``S = 1``
    ``precision/nonfinite_gradients``      number of inf and NaN elements; above 0 if there is any,  always
                                           estimated in tensors of more than 2048 elements
    ``precision/clip_share``               share of the last 100 windows looked at whose norm was    with
                                           above ``gradient_clip_val``; with clipping by value the   ``gradient_clip_val``
                                           share of the elements above it
    ``precision/scale_window_low``         the loss scales that fit lie above this                   if there are any
    ``precision/scale_window_high``        and not above this                                        if there are any
    ====================================== ========================================================= ====================

    The window of fitting scales is that of what is seen: ``S g_min > 2**-25`` and ``S g_max <= 65504``, where ``g_max``
    is exact and ``g_min`` the lower edge of the binade of the smallest element that is no outlier. What FP16 turned into
    zero before cannot be seen; then the lower end is too low, and the warning of underflow says so.

    Underflow is told from other zeros by the exponents: see :func:`lightning_amp_plus.metrics.exponents.cut_off`. It is
    suspected only of layers that compute in FP16, if their histogram breaks off at FP16's smallest step at the present
    scale; where parameters and gradients themselves are FP16 (``16-true``), at ``2**-24`` whatever the scale. Layers whose
    gradient is all zero are named only beside others that break off. Not seen is what an activation's
    gradient lost on the way, where sums over a batch hide it, nor what a layer lost that computes in FP32 or BF16.

    With several optimizers, layers show what each one saw last in the batch, and the global norm is that of the last one.
    ``last`` holds a :class:`~lightning_amp_plus.callbacks.gradient_reading.GradientReading` of the last log point,
    ``layer_histories()`` the logarithm (base 10) of the norms and the shares of zeros over the run.
    """

    logs_grad_norm = True

    def __init__(
        self, every_n_steps: int | None = None, outliers: float = 1e-3, underflow_threshold: float = 0.05
    ) -> None:
        for name, share, limit in (
            ("outliers", outliers, "below 1"),
            ("underflow_threshold", underflow_threshold, "1"),
        ):
            number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not number or not 0 <= share <= 1 or (name == "outliers" and share == 1):
                raise ValueError(f"GradientMonitor({name}={share!r}): expected a share between 0 and {limit}.")
        self.outliers = outliers
        self.underflow_threshold = underflow_threshold
        self.last: GradientReading | None = None
        self._warned: set[str] = set()
        self._histories = _histories()
        super().__init__(every_n_steps)

    @override
    def settings(self) -> dict[str, Any]:
        """See :class:`Monitor`."""
        return {"every_n_steps": self.every_n_steps, "outliers": self.outliers}

    @override
    def forget_run(self) -> None:
        """See :class:`Monitor`."""
        super().forget_run()
        self._module: pl.LightningModule | None = None
        self._names: list[str] = []
        self._parameters: tuple[int, ...] = ()
        self._readers: dict[int, OptimizerGradients] = {}
        self._shared: set[int] = set()
        self._seen: dict[int, LayerSums | None] = {}
        self._scale: float | Tensor = 1.0
        self._device = torch.device("cpu")
        self._fp16: tuple[RoutePlan | None, set[str]] | None = None
        self._clip: tuple[float, bool] | None = None
        self._clips: deque[bool] = deque(maxlen=_CLIP_WINDOWS)
        self._norm_keys: list[str] = []
        self._zero_keys: list[str] = []

    # ---------------------------------------------------------------- what is looked at

    @override
    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learns which layers there are, whichever rank holds them."""
        assert self.plugin is not None
        self._module = pl_module
        # Frozen ones too: what is unfrozen in mid-training finds its row on every rank without another exchange.
        layers = list(dict.fromkeys(layer_of_each(pl_module).values()))
        self._names = [*names_on_all_ranks(layers, self.plugin.consensus), OUTSIDE]
        self._learn_parameters()
        self._histories = _histories()
        self._norm_keys = [f"precision/grad_norm/{name}" for name in self._names]
        self._zero_keys = [f"precision/zero_grad_fraction/{name}" for name in self._names]
        self._device = trainer.strategy.root_device
        if trainer.gradient_clip_val:
            by_value = str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) == "value"
            self._clip = (float(trainer.gradient_clip_val), by_value)

    def _learn_parameters(self) -> None:
        """Which parameters the optimizers hold, and in which layers these are."""
        assert self.plugin is not None and self._module is not None
        self._parameters = ids_held(self.optimizers)
        layer_of = layer_of_each(self._module)
        optimized: dict[int, int] = {}
        for number, optimizer in enumerate(self.optimizers):
            for parameter in parameters_of(optimizer):
                if optimized.setdefault(id(parameter), number) != number:
                    self._shared.add(id(parameter))
        self._readers = {
            id(optimizer): OptimizerGradients(optimizer, layer_of, self._names, self.plugin.holders)
            for optimizer in self.optimizers
        }
        self._seen = {key: sums for key, sums in self._seen.items() if key in self._readers}

    @override
    def see_gradients(self, optimizer: Optimizer) -> None:
        """Looks at them; what is found stays on the device."""
        assert self.plugin is not None
        if self._parameters != ids_held(self.optimizers):  # as after BaseFinetuning has unfrozen some
            self._learn_parameters()
        reader = self._readers.get(id(optimizer))
        if reader is None:
            return
        scaler = self.plugin.scaler
        if scaler is not None:
            known = scaler.host_scale()
            self._scale = scaler.scale_on(self._device) if known is None else known
        self._seen.pop(id(optimizer), None)  # so that the last one comes last
        reported: set[int] = set()
        if self._shared and self._seen:
            reported = {id(p) for key in self._seen for p in self._readers[key].parameters} & self._shared
        clip_value = self._clip[0] if self._clip is not None and self._clip[1] else None
        self._seen[id(optimizer)] = reader.read(self._scale, clip_value, reported)

    @override
    def measure(self) -> Sequence[Measurement]:
        """Sums by layer, the largest magnitudes, and what is of the whole window; of one size on every rank."""
        wide = wide_dtype(self._device)
        seen = [sums for sums in self._seen.values() if sums is not None]
        last = next(reversed(self._seen.values()), None)
        self._seen.clear()
        if seen:
            sums, largest = seen[0].layers.sums, seen[0].layers.largest
            for other in seen[1:]:
                sums = sums + other.layers.sums.to(sums.device)
                largest = torch.maximum(largest, other.layers.largest.to(largest.device))
        else:
            sums = torch.zeros(len(self._names), COLUMNS, dtype=wide, device=self._device)
            largest = sums[:, 0]
        head = torch.zeros(1, 2, dtype=wide, device=self._device)
        head[0, 1] = self._scale
        if last is not None:
            head[0, 0] = last.square_sum.to(self._device)
        return (
            Measurement(sums.to(self._device), _SUMS),
            Measurement(largest.to(self._device).unsqueeze(1), ("max",)),
            Measurement(head, ("sum", "max")),
        )

    # ---------------------------------------------------------------- what comes out

    @override
    def take(self, numbers: Sequence[Tensor], step: int) -> Mapping[str, float]:
        """See the table of the class."""
        sums, largest, head = numbers
        layers = GradientSums(
            torch.cat([sums, sums.sum(0, keepdim=True)]), torch.cat([largest, largest.amax(0, keepdim=True)])[:, 0]
        )
        count, histogram = layers.count, layers.histogram
        nonzero = layers.nonzero.clamp(min=1)
        square, scale = head[0].unbind()
        exponent = -math.log2(max(float(scale), 1e-38))
        columns = (
            count,
            layers.norm,
            layers.largest,
            layers.zeros / count.clamp(min=1),
            layers.underflowed / nonzero,
            shares_below(histogram, FP16.min_exponent + exponent),
            layers.nans,
            layers.nonfinite - layers.nans,
            layers.clipped / count.clamp(min=1),
            layers.nonzero,
            *(cut_off(histogram, layers.zeros) if self._in_fp16() else (torch.zeros_like(count),) * 2),
        )
        counts, norms, peaks, zeros, below, flushed, nans, infs, clipped, alive, lowest, lost = torch.stack(
            columns
        ).tolist()
        if not counts[-1]:
            return {}
        kept = [row for row, number in enumerate(counts[:-1]) if number]
        first = len(kept)
        every = kept[-1] == first - 1  # all that there are at the beginning; the last row is seldom used

        def of(values: Sequence[Any]) -> Sequence[Any]:
            return values[:first] if every else [values[row] for row in kept]

        names = of(self._names)
        step_of_fp16 = FP16.min_exponent - FP16.fraction_bits
        finest = step_of_fp16 + exponent
        highest = max(finest, step_of_fp16) if self._unscaled_in_fp16() else finest
        broken = [
            row
            for row in kept
            if lost[row] and self._names[row] in self._in_fp16() and finest - _DIVIDED <= lowest[row] <= highest
        ]
        # A sample may miss the only one; the largest magnitude is taken over all elements.
        for row in kept if not math.isfinite(peaks[-1]) else ():
            if not math.isfinite(peaks[row]) and not nans[row] and not infs[row]:
                spoiled = nans if math.isnan(peaks[row]) else infs
                spoiled[row] += 1.0
                spoiled[-1] += 1.0
        window, unfit = self._scales(histogram, layers, peaks[-1], [row for row in kept if alive[row]])
        self.last = reading = GradientReading(
            step=step,
            scale=float(scale),
            norm=math.sqrt(square) if square >= 0 else math.nan,
            norms=dict(zip(names, of(norms), strict=True)),
            largest=dict(zip(names, of(peaks), strict=True)),
            zeros=dict(zip(names, of(zeros), strict=True)),
            underflow=dict(zip(names, of(below), strict=True)),
            flushed=dict(zip(names, of(flushed), strict=True)),
            lost={self._names[row]: lost[row] for row in broken},
            nans={self._names[row]: nans[row] for row in kept if nans[row]} if nans[-1] else {},
            infs={self._names[row]: infs[row] for row in kept if infs[row]} if infs[-1] else {},
            window=window,
            unfit=unfit,
            histogram=histogram[-1],
            histograms=histogram[:first] if every else histogram[kept],
        )
        self._keep(reading)
        self._warn(reading)
        values = dict(zip(of(self._norm_keys), of(norms), strict=True))
        values.update(zip(of(self._zero_keys), of(zeros), strict=True))
        values["precision/fp16_underflow_fraction"] = below[-1]
        values["precision/nonfinite_gradients"] = nans[-1] + infs[-1]
        values["precision/grad_norm"] = reading.norm
        values.update(self._clip_share(reading.norm, clipped[-1]))
        if window is not None and window.exists:
            values["precision/scale_window_low"] = window.low
            values["precision/scale_window_high"] = window.high
        return values

    def _scales(
        self, histogram: Tensor, layers: GradientSums, peak: float, living: list[int]
    ) -> tuple[ScaleWindow | None, tuple[str, ...]]:
        """The window of all layers together, and the layers outside of the scale that fits most."""
        window = fitting_scales(histogram[-1], peak, self.outliers)
        if window is None:
            return None, ()
        rows = torch.tensor(living)
        largest = layers.largest[rows]
        _, fits = best_power_of_two(
            torch.minimum(smallest_kept(histogram[rows], self.outliers), largest), largest, _EXPONENTS
        )
        return window, tuple(self._names[row] for row, fit in zip(living, fits.tolist(), strict=True) if not fit)

    def _clip_share(self, norm: float, elements: float) -> dict[str, float]:
        if self._clip is None:
            return {}
        threshold, by_value = self._clip
        if by_value:
            return {"precision/clip_share": elements}
        if math.isfinite(norm):  # else the window was skipped
            self._clips.append(norm > threshold)
        return {"precision/clip_share": sum(self._clips) / len(self._clips)} if self._clips else {}

    def _keep(self, reading: GradientReading) -> None:
        norms, zeros = self._histories
        norms.add(
            reading.step,
            {name: math.log10(n) if 0 < n < math.inf else math.nan for name, n in reading.norms.items()},
        )
        zeros.add(reading.step, reading.zeros)

    @override
    def layer_histories(self) -> Sequence[LayerHistory]:
        """The norm and the share of zeros of each layer over the run."""
        return self._histories

    # ---------------------------------------------------------------- warnings

    def _warn(self, reading: GradientReading) -> None:
        if "underflow" not in self._warned:
            lost = {name: share for name, share in reading.lost.items() if share > self.underflow_threshold}
            if lost:
                self._warned.add("underflow")
                rank_zero_warn(underflow(reading, lost, self._unscaled_in_fp16()))
        if "scale" not in self._warned and reading.unfit and self._in_fp16():
            unfit = [name for name in reading.unfit if name in self._in_fp16()]
            if unfit:
                self._warned.add("scale")
                rank_zero_warn(no_scale(reading, unfit, self.outliers))

    def _in_fp16(self) -> set[str]:
        """The layers whose gradients are made, kept or exchanged in FP16; worked out anew where routes have changed."""
        assert self.plugin is not None
        policy, plan = self.plugin.policy, self.plugin.plan
        if self._fp16 is None or self._fp16[0] is not plan:
            if plan is None or "fp16" in (policy.params, policy.reduce):
                names = set(self._names)
            else:
                computes = {route.name: route.compute for route in plan.routes}
                # A parameter of the LightningModule itself is named for itself and no module.
                names = {name for name in self._names if computes.get(name, policy.base_compute) == "fp16"}
            self._fp16 = (plan, names)
        return self._fp16[1]

    def _unscaled_in_fp16(self) -> bool:
        """Whether gradients are divided by the loss scale in FP16 itself, where they underflow whatever the scale."""
        assert self.plugin is not None
        return self.plugin.policy.params == "fp16" and not self.plugin.policy.master_weights

    # ---------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """Settings travel; the run they were used in does not."""
        kept = ("every_n_steps", "outliers", "underflow_threshold", "last", "_warned")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._histories = _histories()
        self.forget_run()


def _histories() -> tuple[LayerHistory, LayerHistory]:
    return LayerHistory("log10 of the gradient norm"), LayerHistory("share of zero gradients")
