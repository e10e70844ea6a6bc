"""How torch's SGD, Adam and AdamW move a parameter, in terms of what they leave behind.

Their state holds all that the last update was made of. With ``θ`` the parameter after the step, ``m`` and ``v`` the
moments, ``λ`` the decay and ``η`` the learning rate, the update is ``Δθ = -s·(q + r·θ)``:

============================== ==================================== ============== =========================
optimizer                      ``q``                                ``r``          ``s``
============================== ==================================== ============== =========================
Adam                           ``m / (√v + ε·c₂)``                  0              ``η·c₂/c₁``
AdamW                          ``m / (√v + ε·c₂)``                  ``λ·c₁/c₂``    ``η·c₂/c₁ / (1 - η·λ)``
SGD                            gradient                             ``λ``          ``η / (1 - η·λ)``
SGD with momentum              momentum buffer                      0              ``η``
SGD with Nesterov's            gradient + momentum · buffer         ``λ``          ``η / (1 - η·λ)``
============================== ==================================== ============== =========================

``c₁ = 1 - β₁ᵗ`` and ``c₂ = √(1 - β₂ᵗ)``; the decay of AdamW and SGD works on the parameter before the step, which is
``θ - Δθ`` (D. Kingma, J. Ba, "Adam", 2015, algorithm 1; I. Loshchilov, F. Hutter, "Decoupled weight decay
regularization", 2019, algorithm 2). ``maximize`` changes the sign of the gradient, and so that of ``r``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from lightning_amp_plus.wide import wide_dtype

KNOWN = (SGD, Adam, AdamW)
# Below this, what is left of a parameter after decay is too small to tell from it what it was.
_LEAST_LEFT = 1e-2
_SETTINGS = ("lr", "weight_decay", "eps", "momentum", "decoupled_weight_decay")


def formula(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """Which kernel computes the update of a parameter group from the optimizer's state, if one does."""
    if type(optimizer) not in KNOWN or isinstance(group["weight_decay"], Tensor):
        return None
    momentum = group.get("momentum", 0)
    kind = "adam" if "betas" in group else "nesterov" if group["nesterov"] and momentum else "momentum"
    if kind == "momentum" and not momentum:
        kind = "gradient"
    decays_first = kind != "momentum" and (kind != "adam" or group.get("decoupled_weight_decay"))
    rate = group["lr"]
    if decays_first and not isinstance(rate, Tensor) and abs(1 - rate * group["weight_decay"]) < _LEAST_LEFT:
        return None
    return kind


def nesterov_is_in_the_gradients(group: Mapping[str, Any], parameters: list[Tensor]) -> bool:
    """Whether SGD has added the momentum to ``.grad`` itself, as torch does where it steps with ``_foreach`` kernels."""
    if group["weight_decay"] or group["maximize"] or group["fused"]:
        return False
    if group["foreach"] is None:
        return _default_to_fused_or_foreach(parameters, differentiable=False, use_fused=False)[1]
    return bool(group["foreach"])


class GroupSettings:
    """The settings of an optimizer's parameter groups, as a tensor.

    Args:
        optimizer: Whose.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._last: tuple[Any, Tensor] | None = None

    def table(self, device: torch.device) -> Tensor:
        """The settings of the groups, a row for each: what is in tensors stays on the device."""
        groups = self._optimizer.param_groups
        values = [[group.get(name, 0.0) for name in _SETTINGS] for group in groups]
        for row, group in zip(values, groups, strict=True):
            betas = group["betas"] if type(self._optimizer) in KNOWN and "betas" in group else (0.0, 0.0)
            row += [*betas, -1.0 if group.get("maximize") else 1.0]
        plain = [[_plain(value) for value in row] for row in values]
        if self._last is None or self._last[0] != (device, plain):
            # Not torch.tensor(..., device=device), after which the host would wait for all that the device has to do.
            self._last = ((device, plain), torch.tensor(plain, dtype=wide_dtype(device)).to(device, non_blocking=True))
        table = self._last[1]
        tensors = [(i, j, v) for i, row in enumerate(values) for j, v in enumerate(row) if _is_scalar(v)]
        if tensors:
            table = table.clone()
            for i, j, value in tensors:
                table[i, j] = value.detach().reshape(()).to(device, table.dtype)
        return table


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _plain(value: Any) -> float:
    """A setting, if it is a number: Adafactor's eps are two, and elsewhere a rate of None is found by the step."""
    if isinstance(value, int | float):
        return float(value)
    return 0.0 if _is_scalar(value) else math.nan


def coefficients_of(kind: str, settings: Tensor, steps: list[Tensor]) -> list[Tensor]:
    """What the kernel of a kind takes of each parameter; the last two are ``r`` and ``s``.

    Args:
        kind: What :func:`formula` said.
        settings: Of each parameter's group, a row of :meth:`GroupSettings.table`.
        steps: Of each parameter, the optimizer's own count; for ``adam`` only.
    """
    rate, decay, eps, momentum, decoupled, beta1, beta2, sign = settings.unbind(1)
    if kind == "adam":
        if len({step.device for step in steps}) > 1:  # groups that step on the device and groups that do not
            steps = [step.to(settings.device, non_blocking=True) for step in steps]
        step = torch.stack(steps).reshape(-1).to(settings.device, settings.dtype, non_blocking=True)
        first, second = 1 - beta1**step, (1 - beta2**step).sqrt()
        decay = decay * decoupled
        return [eps * second, decay * first / second, rate * second / first / (1 - rate * decay)]
    if kind == "momentum":
        return [torch.zeros_like(rate), rate]
    r, s = decay * sign, rate / (1 - rate * decay)
    return [r, s] if kind == "gradient" else [momentum * sign, r, s]
