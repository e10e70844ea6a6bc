"""The state of the loss scale: :class:`LossScaler`. Moved by the step sequence, read by everybody."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus.optimizers import real_optimizer
from lightning_amp_plus.scaling.loss_scale import LossScale, advance, to_fp32, usable


class LossScaler(torch.amp.GradScaler):
    """State of the loss scale. A ``torch.amp.GradScaler``, since other code looks for one at ``plugin.scaler``.

    The scale lives on the device as a 0-dim FP32 tensor, which is replaced, never written to, when it changes: whoever
    keeps a reference (a report) keeps the value of its window. Where the host knows every verdict, it follows the scale
    in Python and the device tensor is rebuilt only when the scale changes.

    Args:
        config: Configuration of the dynamic rule. For a static scale only ``init`` is used.
        device: Device type the losses live on.
        dynamic: ``False`` for a scale that never changes; overflowing windows are skipped all the same.
    """

    def __init__(self, config: LossScale, device: str, dynamic: bool = True) -> None:
        super().__init__(
            device=device,
            init_scale=to_fp32(config.init),
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
        )
        self.config = config
        self.dynamic = dynamic
        self._init_hysteresis = config.hysteresis
        self._hysteresis: Tensor | None = None
        self._inverse: Tensor | None = None
        self._host: tuple[float, float, float] | None = (to_fp32(config.init), 0.0, float(config.hysteresis))
        self.unscaler: Callable[[Optimizer], None] | None = None
        self.on_set: Callable[[float], None] | None = None

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # From the host's copy: it may have taken verdicts (of other ranks) before the first loss was scaled here.
        scale, tracker, hysteresis = self._fetch()
        self._scale = torch.full((), scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), tracker, dtype=torch.float32, device=dev)
        self._hysteresis = torch.full((), hysteresis, dtype=torch.float32, device=dev)

    def scale_on(self, device: torch.device) -> Tensor:
        """The present scale as a 0-dim FP32 tensor on ``device``."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale.to(device, non_blocking=True)

    def inverse_on(self, device: torch.device) -> Tensor:
        """``1 / S`` on ``device``; computed once for each value of the scale."""
        if self._inverse is None:
            self._inverse = self.scale_on(device).reciprocal()
        return self._inverse.to(device, non_blocking=True)

    def host_scale(self) -> float | None:
        """The present scale if the host knows it without a transfer, else ``None``."""
        return self._host[0] if self._host is not None else None

    def take_verdict(
        self, overflowed: bool | Tensor, lowers: bool | Tensor, device: torch.device, *, may_grow: bool, overdue: bool
    ) -> tuple[float | Tensor, float | Tensor]:
        """Moves the scale by the verdict on one window.

        Args:
            overflowed: The verdict, as a bool where the host knows it, else a 0-dim FP32 tensor of 0 or 1.
            lowers: Whether that overflow counts against the scale; of the same kind as ``overflowed``.
            device: Where the scale is needed.
            may_grow: See :func:`~lightning_amp_plus.scaling.loss_scale.advance`.
            overdue: As above.

        Returns:
            The scale of that window and the next one, as floats if the verdict is a bool (one transfer if the host had
            lost track of the scale), else as tensors, without a transfer. The same object twice if nothing can have
            changed.
        """
        if isinstance(overflowed, Tensor) and isinstance(lowers, Tensor):
            before = self.scale_on(device)
            if not self.dynamic:
                return before, before
            tracker, hysteresis = self._device_counters(before)
            after, self._growth_tracker, self._hysteresis = advance(
                self.config, before, tracker, hysteresis, overflowed, lowers, may_grow=may_grow, overdue=overdue
            )
            self._replace_scale(after)
            self._host = None
            return before, after
        old = self._fetch()
        if not self.dynamic:
            return old[0], old[0]
        new = advance(self.config, *old, float(overflowed), float(lowers), may_grow=may_grow, overdue=overdue)
        self._host = new
        self._growth_tracker = self._hysteresis = None  # rebuilt from the host's copy when the device needs them
        if new[0] == old[0]:
            return old[0], old[0]
        if self._scale is not None:
            self._replace_scale(torch.full_like(self._scale, new[0]))
        return old[0], new[0]

    def _device_counters(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        if self._growth_tracker is None or self._hysteresis is None:
            assert self._host is not None
            self._growth_tracker = torch.full_like(scale, self._host[1])
            self._hysteresis = torch.full_like(scale, self._host[2])
        return self._growth_tracker, self._hysteresis

    def _replace_scale(self, scale: Tensor) -> None:
        self._scale = scale
        self._inverse = None

    def _fetch(self) -> tuple[float, float, float]:
        if self._host is None:
            assert self._scale is not None and self._growth_tracker is not None and self._hysteresis is not None
            scale, tracker, hysteresis = torch.stack([self._scale, self._growth_tracker, self._hysteresis]).tolist()
            self._host = (scale, tracker, hysteresis)
        return self._host

    def digest(self) -> tuple[float, float, float]:
        """Scale, growth tracker and hysteresis; one transfer if only the device knows them."""
        return self._fetch()

    @override
    def get_scale(self) -> float:
        """The present scale. One transfer if only the device knows it."""
        return self._fetch()[0]

    @override
    def _get_growth_tracker(self) -> int:
        return int(self._fetch()[1])

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Sets the scale by hand (``new_scale``). The step sequence itself updates it once a window.

        Raises:
            RuntimeError: If called without ``new_scale``: a second update in a window would double its effect.
            ValueError: If ``new_scale`` is not a finite number above 0.
        """
        if new_scale is None:
            raise RuntimeError(
                "scaler.update() was called by hand, but AmpPrecision updates the loss scale itself, once a window, in "
                "optimizer.step(). Remove the call; pass update(new_scale) to set the scale."
            )
        value = float(new_scale)
        if not usable(value):
            raise ValueError(f"scaler.update(new_scale={value:g}): expected a finite number above 0.")
        before, tracker, hysteresis = self._fetch()
        self._restore(to_fp32(value), tracker, hysteresis)
        if self.on_set is not None:
            self.on_set(to_fp32(value) / before)

    @override
    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the growth factor from the next window on."""
        self.config = replace(self.config, growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    @override
    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the backoff factor from the next window on."""
        self.config = replace(self.config, backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    @override
    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the growth interval from the next window on."""
        self.config = replace(self.config, growth_interval=new_interval)
        super().set_growth_interval(new_interval)

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales the optimizer's gradients now, for code that reads or clips them in mid-window.

        At most once a window, as ever. Should the window go on with a further backward, the gradients are scaled
        again first.
        """
        if self.unscaler is None:
            raise RuntimeError("scaler.unscale_(optimizer): this scaler belongs to no plugin that could run the step.")
        self.unscaler(real_optimizer(optimizer))

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Refused: stepping past the plugin would skip the verdict that all ranks share.

        Raises:
            RuntimeError: Always, naming the call to use.
        """
        raise RuntimeError(
            "scaler.step(optimizer) was called by hand, but AmpPrecision steps optimizers itself. "
            "In manual optimization call optimizer.step() on what self.optimizers() returns."
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state as plain types: torch's five keys and ``_hysteresis``."""
        scale, tracker, hysteresis = self._fetch()
        return {
            "scale": scale,
            "growth_factor": self.config.growth_factor,
            "backoff_factor": self.config.backoff_factor,
            "growth_interval": self.config.growth_interval,
            "_growth_tracker": int(tracker),
            "_hysteresis": int(hysteresis),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from ``state_dict()``, or from that of a ``torch.amp.GradScaler`` (which has no hysteresis).

        The configuration of this scaler stays; only the state is taken over, into this configuration's limits. A static
        scale stays what it is.

        Raises:
            ValueError: If the state is empty, partial, or holds a scale that no training can go on with. Nothing is
                changed then.
        """
        missing = [key for key in ("scale", "_growth_tracker") if key not in state_dict]
        if missing:
            raise ValueError(f"The saved scaler state lacks {missing}; found {sorted(state_dict) or 'an empty state'}.")
        scale = _number(state_dict, "scale", "a finite number above 0")
        tracker = _number(state_dict, "_growth_tracker")
        hysteresis = _number({"_hysteresis": self.config.hysteresis, **state_dict}, "_hysteresis")
        if not usable(scale):
            raise ValueError(f"The saved scaler state holds scale={scale}; expected a finite number above 0.")
        if tracker < 0:
            raise ValueError(
                f"The saved scaler state holds _growth_tracker={state_dict['_growth_tracker']}; expected 0 or more."
            )
        if self.dynamic:
            self._restore(to_fp32(max(self.config.min, min(self.config.max, scale))), tracker, hysteresis)

    def reset(self) -> None:
        """Starts anew, from the configuration."""
        self._restore(to_fp32(self.config.init), 0.0, float(self.config.hysteresis))

    def describe(self) -> dict[str, Any]:
        """Kind and configuration as plain types, for the manifest."""
        return {"kind": "dynamic" if self.dynamic else "static", **self.config.describe()}

    def _restore(self, scale: float, tracker: float, hysteresis: float) -> None:
        self._host = (scale, tracker, hysteresis)
        self._init_scale, self._init_growth_tracker, self._init_hysteresis = scale, int(tracker), int(hysteresis)
        if self._scale is not None:
            self._replace_scale(torch.full_like(self._scale, scale))
            self._growth_tracker = self._hysteresis = None

    def __getstate__(self) -> dict[str, Any]:
        # torch refuses to pickle a scaler in mid-window; ours keeps no window, so its state is always whole. Device
        # tensors are rebuilt from the host's copy.
        scale, tracker, hysteresis = self._fetch()
        rebuilt = {
            "_scale": None,
            "_growth_tracker": None,
            "_hysteresis": None,
            "_inverse": None,
            "unscaler": None,
            "on_set": None,
        }
        initial = {"_init_scale": scale, "_init_growth_tracker": int(tracker), "_init_hysteresis": int(hysteresis)}
        return {**self.__dict__, **rebuilt, **initial}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _number(state: dict[str, Any], key: str, expected: str = "a finite number") -> float:
    value = state[key]
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)) or not math.isfinite(float(value)):
        raise ValueError(f"The saved scaler state holds {key}={value!r}; expected {expected}.")
    return float(value)


def make_scaler(loss_scale: Any, *, fp16: bool, warn: Callable[[str], None]) -> LossScaler | None:
    """The scaler that ``AmpPrecision(loss_scale=...)`` asks for, or ``None``.

    Args:
        loss_scale: As ``AmpPrecision`` takes it.
        fp16: Whether the policy computes in FP16.
        warn: Called with a message for the user.

    Raises:
        ValueError: If the value means nothing.
        TypeError: For a GradScaler of a class whose own rule could not be kept.
    """
    if loss_scale == "auto":
        return LossScaler(LossScale(), "cpu") if fp16 else None
    if loss_scale is None:
        if fp16:
            warn(
                "loss_scale=None with FP16: gradients below 6e-8 become zero without a word. Leave loss_scale at 'auto', "
                "or use bf16-mixed, which needs no scale."
            )
        return None
    if isinstance(loss_scale, LossScale):
        return LossScaler(loss_scale, "cpu")
    if isinstance(loss_scale, torch.amp.GradScaler):
        return _from_grad_scaler(loss_scale)
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, (int, float)):
        raise ValueError(
            f"loss_scale={loss_scale!r}: expected 'auto', None, a LossScale, a torch.amp.GradScaler, or a number for a "
            "static scale."
        )
    value = float(loss_scale)
    if not math.isfinite(value) or not 2.0**-126 <= value <= 2.0**126:
        raise ValueError(
            f"loss_scale={loss_scale!r}: a static scale must be a finite number above 0, from 2**-126 to 2**126."
        )
    return LossScaler(LossScale(init=value, min=min(value, 2.0**-14), max=max(value, 2.0**24)), "cpu", dynamic=False)


def _from_grad_scaler(scaler: torch.amp.GradScaler) -> LossScaler | None:
    """Our scaler with the present scale and the factors of one of torch's."""
    if isinstance(scaler, LossScaler):
        return scaler
    if type(scaler).__module__.partition(".")[0] != "torch":
        raise TypeError(
            f"loss_scale={type(scaler).__module__}.{type(scaler).__qualname__}(...): the step sequence updates the scale "
            "by its own rule, so what this class overrides would never run. Pass a LossScale with the factors you want, "
            "or a torch.amp.GradScaler."
        )
    if not scaler.is_enabled():
        return None
    state = scaler.state_dict()
    ours = LossScaler(
        LossScale(
            init=float(state["scale"]),
            growth_factor=state["growth_factor"],
            backoff_factor=state["backoff_factor"],
            growth_interval=state["growth_interval"],
            min=min(2.0**-14, float(state["scale"])),
            max=max(2.0**24, float(state["scale"])),
        ),
        "cpu",
    )
    ours.load_state_dict(state)
    return ours
