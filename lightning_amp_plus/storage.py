"""Conversion of a model's stored parameters and buffers to the formats of its plan; `routing.apply` calls it."""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_amp_plus.casts import DTYPES
from lightning_amp_plus.routed import is_metric

if TYPE_CHECKING:
    from lightning_amp_plus.routing import RoutePlan

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)


def convert_storage(model: nn.Module, plan: "RoutePlan") -> None:
    """Stores floating parameters in the policy's `params` and floating buffers in its `buffers`, in place.

    Parameters stay the same objects: tied, hooked and frozen as before. Left alone are FP64, complex, integer and
    boolean tensors, everything of torchmetrics, and buffers that a rule names or whose module computes in FP32.
    Parameters are not widened: under ``params="fp32"`` one found in 16 bits stays, and the plan shows it.

    Args:
        model: The model that the plan was made for.
        plan: Its plan.
    """
    policy = plan.policy
    params = DTYPES[policy.params] if policy.is_true else None
    wanted = policy.buffers or (policy.params if policy.is_true else None)
    buffers = None if wanted is None else DTYPES[wanted]
    if params is None and buffers is None:
        return
    metrics = {id(part) for module in model.modules() if is_metric(module) for part in module.modules()}
    to_convert: dict[int, torch.Tensor] = {}
    untouched: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        route = plan[name]
        if params is not None and id(module) not in metrics:
            for parameter in module._parameters.values():
                if parameter is not None:
                    _retype(parameter, params)
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            qualified = f"{route.name}.{key}" if route.name else key
            if id(module) in metrics or route.compute == "fp32" or qualified in plan.kept_buffers:
                untouched.add(id(buffer))
            else:
                to_convert[id(buffer)] = buffer
    if buffers is not None:
        for identity in to_convert.keys() - untouched:
            _retype(to_convert[identity], buffers)


def _retype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype not in _CONVERTED or tensor.dtype is dtype:
        return
    if is_traceable_wrapper_subclass(tensor):
        # Other data would change a DTensor's own dtype but not that of its local tensor, which is what FSDP2 gathers.
        converted = tensor.detach().to(dtype)
        if isinstance(tensor, nn.Parameter):
            converted = nn.Parameter(converted, tensor.requires_grad)
        grad = tensor.grad
        tensor.grad = None
        torch.utils.swap_tensors(tensor, converted)
        tensor.grad = None if grad is None else grad.to(dtype)
        return
    tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(dtype)
