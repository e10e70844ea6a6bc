"""Skip rate: the share of windows whose optimizer step was skipped for an overflow."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


@overload
def skip_rate(skipped: int, windows: int) -> float: ...
@overload
def skip_rate(skipped: Tensor, windows: Tensor) -> Tensor: ...
def skip_rate(skipped: int | Tensor, windows: int | Tensor) -> float | Tensor:
    """Share of windows that were skipped.

    Args:
        skipped: Number of skipped windows, or a tensor of numbers of any shape.
        windows: Number of all windows, skipped ones included; of the same kind and shape.

    Returns:
        ``skipped / windows``, as a float for numbers and in FP32 for tensors; 0 where there was no window.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import skip_rate
        >>> skip_rate(1, 4)
        0.25
        >>> skip_rate(torch.tensor([0, 3]), torch.tensor([0, 4]))
        tensor([0.0000, 0.7500])
    """
    if isinstance(skipped, Tensor) or isinstance(windows, Tensor):
        return torch.as_tensor(skipped).float() / torch.as_tensor(windows).clamp(min=1)
    return skipped / max(1, windows)


class SkipRate(Metric):
    """The skip rate over all updates and all ranks.

    On ranks that take every verdict together the numbers are the same on each, and so is their ratio after summing.

    Raises:
        ValueError: In ``update``, if numbers on the host are negative or more windows were skipped than there were.
            Tensors are not looked at, which would wait for the device.

    Example:
        >>> from lightning_amp_plus.metrics import SkipRate
        >>> metric = SkipRate()
        >>> metric.update(skipped=1, windows=100)
        >>> metric.update(skipped=4, windows=100)
        >>> metric.compute()
        tensor(0.0250)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    skipped: Tensor
    windows: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("skipped", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("windows", torch.tensor(0), dist_reduce_fx="sum")

    @override
    def update(self, skipped: int | Tensor, windows: int | Tensor) -> None:
        """Adds ``skipped`` of ``windows``; of tensors, the sums of their elements."""
        if isinstance(skipped, int) and isinstance(windows, int) and not 0 <= skipped <= windows:
            raise ValueError(
                f"SkipRate.update(skipped={skipped}, windows={windows}): expected 0 <= skipped <= windows."
            )
        self.skipped += _total(skipped)
        self.windows += _total(windows)

    @override
    def compute(self) -> Tensor:
        """The skip rate, an FP32 scalar; 0 before the first window."""
        return skip_rate(self.skipped, self.windows)


def _total(count: int | Tensor) -> int | Tensor:
    return count.sum().long() if isinstance(count, Tensor) else count
