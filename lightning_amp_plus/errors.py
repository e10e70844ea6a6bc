"""The exceptions a user may want to catch; raised by the step sequence, exported from the package."""

from __future__ import annotations

from typing import Any


class IncompatiblePrecisionError(ValueError):
    """Raised when a checkpoint cannot be continued in the precision of this run; says what differs and what to do.

    Attributes:
        findings: What was compared (``checkpoint.compatibility.Finding``), where that is the reason.
    """

    def __init__(self, message: str, findings: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class SkipLimitError(RuntimeError):
    """Raised when too many windows in a row were skipped because their gradients were not finite.

    The message holds the number of skips, where the overflow began, the first parameter hit and what to try.
    """


class ScaleCollapseError(SkipLimitError):
    """The :class:`SkipLimitError` of a run with a loss scale: lowering it did not bring finite gradients back."""
