"""Activation checkpointing that is right for every FP8 backend. For users' models; nothing in the package calls it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_amp_plus.fp8.backends.transformer_engine import engine_of, their_checkpoint


def activation_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function`` now and again in backward, in place of keeping what is between its inputs and outputs.

    It is ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, and Transformer Engine's where a module in
    ``function`` computes by Transformer Engine: its amax histories must advance once and both computations use the same
    scales, which torch's does not know of. The other backends are right under torch's, reentrant or not. Transformer
    Engine's reentrant one advances the histories of gradients once a layer, so it is not offered.

    Args:
        function: A module, or a bound method of one.
        args: Passed on.
        kwargs: Passed on.

    Returns:
        What ``function`` returns.
    """
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and any(engine_of(module) is not None for module in owner.modules()):
        # As a function: in a module Transformer Engine would look for layers of its own, find none and leave it to torch.
        return their_checkpoint()(partial(function), *args, use_reentrant=False, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, **kwargs)
