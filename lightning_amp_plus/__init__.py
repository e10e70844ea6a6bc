"""Mixed precision as a first-class part of a Lightning Trainer: decided, executed, observed and recorded.

Names are imported when they are first used, so that ``import lightning_amp_plus`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_amp_plus._version import __version__

if TYPE_CHECKING:
    from lightning_amp_plus.errors import IncompatiblePrecisionError, ScaleCollapseError, SkipLimitError
    from lightning_amp_plus.policy import PrecisionPolicy, Rule
    from lightning_amp_plus.precision import AmpPrecision
    from lightning_amp_plus.routing import plan
    from lightning_amp_plus.scaling.loss_scale import LossScale
    from lightning_amp_plus.step_report import StepReport
    from lightning_amp_plus.trainer import Trainer

_ROOMS = {
    "AmpPrecision": "precision",
    "IncompatiblePrecisionError": "errors",
    "LossScale": "scaling.loss_scale",
    "PrecisionPolicy": "policy",
    "Rule": "policy",
    "ScaleCollapseError": "errors",
    "SkipLimitError": "errors",
    "StepReport": "step_report",
    "Trainer": "trainer",
    "plan": "routing",
}

__all__ = [
    "AmpPrecision",
    "IncompatiblePrecisionError",
    "LossScale",
    "PrecisionPolicy",
    "Rule",
    "ScaleCollapseError",
    "SkipLimitError",
    "StepReport",
    "Trainer",
    "__version__",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        value = getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
