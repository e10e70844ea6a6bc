"""FP8 coverage: the share of a model's GEMM work that ran in FP8, by FLOPs and by count."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_amp_plus.wide import wide_dtype


@overload
def fp8_coverage(in_fp8: float, work: float) -> float: ...
@overload
def fp8_coverage(in_fp8: Tensor, work: Tensor) -> Tensor: ...
def fp8_coverage(in_fp8: float | Tensor, work: float | Tensor) -> float | Tensor:
    """Share of work that ran in FP8.

    Args:
        in_fp8: FLOPs, or number of GEMMs, in FP8; or a tensor of them of any shape.
        work: All of them; of the same kind and shape.

    Returns:
        ``in_fp8 / work``, as a float for numbers, for tensors in FP64 where the device has it; NaN where there was no work.

    Example:
        >>> from lightning_amp_plus.metrics import fp8_coverage
        >>> fp8_coverage(3, 4)
        0.75
    """
    if isinstance(in_fp8, Tensor) or isinstance(work, Tensor):
        some, all_ = torch.as_tensor(in_fp8), torch.as_tensor(work)
        return some.to(wide_dtype(some.device)) / all_.to(wide_dtype(all_.device))  # 0 / 0 is NaN
    return in_fp8 / work if work else float("nan")


class Fp8Coverage(Metric):
    """FP8 coverage over all updates and all ranks: work is added up before it is divided.

    A mean of ranks' shares would be wrong wherever ranks do not compute alike, as stages and unequal batches do.

    Args:
        by: ``flops`` or ``gemms``: what is added up of each GEMM, its work or just 1.
        kwargs: Of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: If ``by`` is neither; in ``update``, if the tensors differ in shape.

    Example:
        >>> import torch
        >>> from lightning_amp_plus.metrics import Fp8Coverage
        >>> flops, in_fp8 = torch.tensor([900, 60, 40]), torch.tensor([True, False, False])
        >>> metric = Fp8Coverage("flops")
        >>> metric.update(flops, in_fp8)
        >>> metric.compute()
        tensor(0.9000, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    in_fp8: Tensor
    work: Tensor

    def __init__(self, by: Literal["flops", "gemms"] = "flops", **kwargs: Any) -> None:
        if by not in ("flops", "gemms"):
            raise ValueError(f"Fp8Coverage(by={by!r}): expected 'flops' or 'gemms'.")
        super().__init__(**kwargs)
        self.by = by
        # Whole numbers: a step of a large model is some 1e18 FLOPs, which FP32 cannot add up.
        self.add_state("in_fp8", torch.tensor(0, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("work", torch.tensor(0, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, flops: Tensor, in_fp8: Tensor) -> None:
        """Adds GEMMs.

        Args:
            flops: ``[gemms]``, whole numbers: the work of each.
            in_fp8: ``[gemms]``, bool: whether it ran in FP8.
        """
        if flops.shape != in_fp8.shape:
            raise ValueError(
                f"Fp8Coverage.update: flops has the shape {tuple(flops.shape)} and in_fp8 {tuple(in_fp8.shape)}; expected "
                "one number of each for every GEMM."
            )
        work = flops.to(torch.int64) if self.by == "flops" else torch.ones_like(flops, dtype=torch.int64)
        self.work += work.sum()
        self.in_fp8 += (work * in_fp8).sum()

    @override
    def compute(self) -> Tensor:
        """The coverage, a scalar, in FP64 where the device has it; NaN before the first GEMM."""
        return fp8_coverage(self.in_fp8, self.work)
