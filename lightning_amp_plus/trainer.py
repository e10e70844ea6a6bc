"""Lightning's Trainer whose ``precision=`` also takes a plugin or a policy."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.pytorch.plugins import _PLUGIN_INPUT

from lightning_amp_plus.integration.guard import ResumeGuard
from lightning_amp_plus.integration.strategies import refuse_second_precision, refuse_strategy
from lightning_amp_plus.policy import PrecisionPolicy
from lightning_amp_plus.precision import AmpPrecision


class Trainer(pl.Trainer):
    """``lightning.Trainer`` with one argument changed; also the ``trainer_class`` of a LightningCLI.

    Args:
        precision: An :class:`AmpPrecision`, a :class:`PrecisionPolicy`, one of the strings a policy knows
            (``16-mixed``, ``bf16-mixed``, ``16-true``, ``bf16-true``, ``32-true`` and their short forms, ``fp8-mixed``), or
            anything else that Lightning takes, which is passed on.
        plugins: As in Lightning.
        **kwargs: As in Lightning.

    Raises:
        ValueError: If the precision is given twice, or the strategy cannot work with :class:`AmpPrecision`.
    """

    def __init__(
        self,
        *,
        precision: AmpPrecision | PrecisionPolicy | _PRECISION_INPUT | Literal["fp8-mixed"] | None = None,
        plugins: _PLUGIN_INPUT | list[_PLUGIN_INPUT] | None = None,
        **kwargs: Any,
    ) -> None:
        plugin = _as_plugin(precision)
        given = [] if plugins is None else list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        if plugin is not None:
            refuse_second_precision(precision, given)
            given.append(plugin)
            precision = None
        if any(isinstance(other, AmpPrecision) for other in given):
            refuse_strategy(kwargs.get("strategy", "auto"))
        super().__init__(precision=precision, plugins=given or None, **kwargs)  # type: ignore[arg-type]
        callbacks: list[pl.Callback] = self.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, ResumeGuard) for callback in callbacks):
            callbacks.insert(0, ResumeGuard())  # the package is not installed, so no entry point added it


def _as_plugin(precision: Any) -> AmpPrecision | None:
    """The plugin that ``precision`` means, or ``None`` where it is Lightning's business."""
    if isinstance(precision, AmpPrecision):
        return precision
    if isinstance(precision, PrecisionPolicy):
        return AmpPrecision(precision)
    if isinstance(precision, (str, int)) and PrecisionPolicy.knows(precision):
        return AmpPrecision(str(precision))
    return None
