"""The callbacks a run is usually watched with, in one call: :func:`precision_callbacks`."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Callback

from lightning_amp_plus.callbacks.activation import ActivationMonitor
from lightning_amp_plus.callbacks.dtype_census import DtypeCensus
from lightning_amp_plus.callbacks.fp8_coverage import Fp8CoverageMonitor
from lightning_amp_plus.callbacks.gradient import GradientMonitor
from lightning_amp_plus.callbacks.loss_scale import LossScaleMonitor
from lightning_amp_plus.callbacks.update_ratio import UpdateRatioMonitor


def precision_callbacks(level: Literal["light", "full"] = "light", every_n_steps: int | None = None) -> list[Callback]:
    """Callbacks to pass to a Trainer that runs with ``AmpPrecision``.

    Args:
        level: ``light``: what can stay on in every run, the loss scale, gradients and update ratios. ``full``: activations,
            parameters, histograms, a dtype census of the first step and, where there is FP8, its coverage too, for
            looking into a run.
        every_n_steps: Interval of all of them; by default the Trainer's ``log_every_n_steps``.

    Raises:
        ValueError: If the level is unknown.

    Example::

        trainer = L.Trainer(plugins=[AmpPrecision("16-mixed")], callbacks=precision_callbacks())
    """
    if level not in ("light", "full"):
        raise ValueError(f"precision_callbacks(level={level!r}): expected 'light' or 'full'.")
    full = level == "full"
    light: list[Callback] = [
        LossScaleMonitor(every_n_steps, histogram=full),
        GradientMonitor(every_n_steps),
        UpdateRatioMonitor(every_n_steps),
    ]
    more = [ActivationMonitor(every_n_steps), Fp8CoverageMonitor(every_n_steps, always=False), DtypeCensus()]
    return [*light, *more] if full else light
