"""Shows every operation that a training step dispatches, and changes none: :class:`Watcher`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_amp_plus.watching.ops import is_wrapper
from lightning_amp_plus.watching.places import Places


class Watcher(TorchDispatchMode):
    """Base of what looks at the operations of a step. It is entered during the parts of a step that compute.

    Args:
        places: Says where an operation runs.
    """

    # torch refuses to run FlexAttention under a mode that does not say so.
    supports_higher_order_operators = True

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places
        self._depth = 0
        self._undo: list[Callable[[], None]] = []

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Yes: around any other mode compiled code would be run uncompiled, and stay so."""
        return True

    @abstractmethod
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation on plain tensors and returns its result as it is; here a subclass looks at it."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Has the operation run. Tensor classes that take it apart do so first, and their parts come here."""
        if types:
            if any(issubclass(cls, FakeTensor) for cls in types):  # nothing is computed: a DTensor asks for shapes so
                return func(*args, **(kwargs or {}))
            if any(is_wrapper(cls) for cls in types):
                return NotImplemented
        return self.run(func, args, kwargs or {})

    @property
    @abstractmethod
    def modules(self) -> Iterable[nn.Module]:
        """Those to put hooks on; none of compiled code, where they would end up in the graph."""

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Puts hooks on modules and on all optimizers of the run."""
        self._undo = self.places.watch(self.modules, optimizers)

    def end(self) -> None:
        """Takes them off; again without effect."""
        while self._undo:
            self._undo.pop()()
        self.places.stack.clear()

    @contextmanager
    def entered(self, verb: str) -> Iterator[None]:
        """Looks at what runs inside.

        Args:
            verb: Which part of a step that is: ``training_step``, ``backward`` or ``optimizer_step``.
        """
        # The closure of an optimizer runs the other two inside of its step, which must not see every operation twice.
        self._depth += 1
        places = self.places
        around = places.in_training_step, places.stepping
        places.in_training_step = verb == "training_step"
        if verb != "optimizer_step":
            places.stepping = 0  # without a finite check the optimizer's own step runs the closure
        if verb == "backward":
            places.new_backward()
        try:
            if self._depth > 1:
                yield
            else:
                with self:
                    yield
        finally:
            self._depth -= 1
            places.in_training_step, places.stepping = around
