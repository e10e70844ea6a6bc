"""Models and optimizers that a policy cannot work with, told before the first step. Used by ``precision``."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_amp_plus.formats import FP16
from lightning_amp_plus.policy import PrecisionPolicy
from lightning_amp_plus.scaling.gradients import parameters_of


def refuse_half_parameters(module: nn.Module, policy: PrecisionPolicy) -> None:
    """A trainable FP16 parameter under autocast gets FP16 gradients; unscaling those loses digits.

    Raises:
        ValueError: Naming the module and what to do.
    """
    if policy.params == "fp16" or policy.base_compute == "fp32":
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            owner = name.rpartition(".")[0] or type(module).__name__
            raise ValueError(
                f"Module {owner!r} has a trainable parameter stored in FP16 ({name!r}), but precision "
                f"{policy.lightning_precision!r} keeps trainable parameters in FP32 and computes in 16 bits by "
                "autocast. Remove the .half() call (module.float()), freeze the parameter (requires_grad_(False)), or use "
                "PrecisionPolicy(compute='fp16', params='fp16', master_weights=True)."
            )


def refuse_lbfgs(optimizer: Optimizer, precision: str) -> None:
    """Raises for LBFGS where a loss scale is in use.

    Raises:
        MisconfigurationException: As stock Lightning does.
    """
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            f"{type(optimizer).__name__} evaluates the loss many times in one step, and a loss scale (precision "
            f"{precision!r}) is updated once a step, so an overflow in mid-step could not be undone. Use 'bf16-mixed' "
            "or '32-true' with LBFGS, or AdamW with FP16."
        )


def silent_faults(optimizer: Optimizer) -> list[str]:
    """What to warn of: optimizers that fail without a word on the 16-bit parameters they were given.

    torch 2.13's fused SGD leaves such parameters on CPU where they are (16 elements and more). An ``eps`` that FP16
    rounds to zero makes Adam divide zero by zero wherever a gradient is zero.
    """
    found = []
    if (
        type(optimizer) is torch.optim.SGD
        and torch.__version__ < "2.14"
        and any(group.get("fused") for group in optimizer.param_groups)
        and any(p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16) for p in parameters_of(optimizer))
    ):
        found.append(
            "SGD(fused=True) does not move 16-bit parameters on CPU (torch 2.13). Use fused=False, or a policy with "
            "master_weights=True, whose optimizer works on FP32."
        )
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if (
            isinstance(eps, float)
            and eps <= FP16.underflow_threshold
            and any(p.dtype == torch.float16 for p in group["params"])
        ):
            found.append(
                f"{type(optimizer).__name__}(eps={eps:g}) on parameters stored in FP16: this eps is zero there, so a "
                "zero gradient becomes NaN. Use eps=1e-4, or a policy with master_weights=True, whose optimizer works on "
                "FP32."
            )
            break
    return found
