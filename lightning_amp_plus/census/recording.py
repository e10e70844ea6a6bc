"""Watches one training step: every operation that is dispatched, where it ran and in which dtypes. :class:`Recorder`.

It changes nothing: each operation runs as it would, and the step's numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_amp_plus.census.following import NARROW, WIDE, Casts, Exchanges
from lightning_amp_plus.census.ops import (
    LISTED,
    Op,
    elements_added,
    floating,
    floating_of_module,
    is_wrapper,
    joined,
    op_of,
    place_of,
    plain_parts,
    short,
)
from lightning_amp_plus.census.places import Frame, Place, Places
from lightning_amp_plus.census.record import OpKey, Record
from lightning_amp_plus.fp8.backends.transformer_engine import engine_of
from lightning_amp_plus.integration.instance_hooks import InstanceHooks


class Recorder(TorchDispatchMode):
    """Records while it is entered; :meth:`around` has it entered during the parts of a step that compute.

    Args:
        modules: All modules of the model by their first names, the model itself as ``""``.
        compiled: Names of those in compiled code, which must not get hooks: they would end up in its graph.
    """

    # torch refuses to run FlexAttention under a mode that does not say so.
    supports_higher_order_operators = True

    def __init__(self, modules: Mapping[str, nn.Module], compiled: Iterable[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self._modules = modules
        self._hidden = set(compiled)
        self._places = Places(modules, self._left)
        self._whole = {name for name, module in modules.items() if any(True for _ in module.children())}
        self._casts = Casts(self.record.events)
        self._exchanges = Exchanges()
        self._stored: dict[int, str] | None = None
        self._depth = 0
        for name, module in modules.items():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._places.own(parameter, name)

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Yes: around any other mode compiled code would be run uncompiled, and stay so."""
        return True

    # ---------------------------------------------------------------- while it is watching

    def around(self, strategy: Any, optimizers: list[torch.optim.Optimizer]) -> Callable[[], None]:
        """Watches what a strategy computes. Returns the function that ends it."""
        hooks = InstanceHooks()
        watched = {name: module for name, module in self._modules.items() if name not in self._hidden}
        handles = self._places.watch(watched, optimizers)
        for verb in ("training_step", "backward", "optimizer_step"):
            hooks.wrap(strategy, verb, partial(self._watching, verb))

        def end() -> None:
            hooks.undo()
            for handle in handles:
                handle.remove()
            self.record.stepped = self._places.stepped
            self._places.stack.clear()

        return end

    def _watching(self, verb: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._entered(verb):
                return run(*args, **kwargs)

        return watched

    @contextmanager
    def _entered(self, verb: str) -> Iterator[None]:
        # The closure of an optimizer runs the other two inside of its step, which must not see every operation twice.
        self._depth += 1
        around = self._places.in_training_step, self._places.stepping
        self._places.in_training_step = verb == "training_step"
        if verb != "optimizer_step":
            self._places.stepping = 0  # without a finite check the optimizer's own step runs the closure
        if verb == "backward":
            self._places.new_backward()
        try:
            if self._depth > 1:
                yield
            else:
                with self:
                    yield
        finally:
            self._depth -= 1
            self._places.in_training_step, self._places.stepping = around

    def see_gradients(self) -> None:
        """Notes the dtypes of gradients as backward left them, and those in which ranks have exchanged them."""
        for name, module in self._modules.items():
            if "gradient" in self.record.columns.get(name, ()):
                continue
            for parameter in module._parameters.values():
                for part in () if parameter is None or parameter.grad is None else plain_parts(parameter.grad):
                    self.record.add(name, "gradient", short(part.dtype))
                    if (known := self._exchanges.of(part)) is not None:
                        self.record.add(name, "reduction", known)

    def see_rest(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Notes what can be read off parameters and optimizer states once the step is over."""
        if len(self._exchanges.dtypes) == 1 and not any("reduction" in found for found in self.record.columns.values()):
            # A communication hook of DDP's finishes in a thread of its own, where nothing can be followed.
            for found in self.record.columns.values():
                if "gradient" in found:
                    found["reduction"] = set(self._exchanges.dtypes)
        states: dict[int, Any] = {id(p): state for opt in optimizers for p, state in opt.state.items()}
        for name, module in self._modules.items():
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                self.record.add(name, "parameter", short(parameter.dtype))
                state = states.get(id(parameter))
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and value.ndim and value.dtype.is_floating_point:
                        self.record.add(name, "optimizer", short(value.dtype))

    # ---------------------------------------------------------------- one call of a module

    def _left(self, frame: Frame, inputs: Any, output: Any) -> None:
        name = frame.name
        engine = engine_of(self._modules[name])
        if engine is not None and (formats := engine.ran_in()) is not None:
            for role, dtype in zip(("input", "weight"), formats, strict=True):
                frame.reads[role] = (dtype, True)
            key = OpKey(name, "forward", "gemm", "transformer_engine", formats[0], f"{joined(formats)} -> bf16")
            self.record.rows.setdefault(key, [0, 0])[0] += 1
        for role, (dtype, _) in frame.reads.items():
            if role != "buffer":
                self.record.add(name, role, dtype)
        arrived = floating_of_module(inputs)
        if "input" not in frame.reads and name in self._whole and arrived:
            self.record.add(name, "input", short(arrived[0].dtype))
        returned = floating_of_module(output)
        if returned:
            self.record.add(name, "output", short(returned[0].dtype))

    # ---------------------------------------------------------------- one operation

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, and looks at it. Tensor classes that take it apart do so first, and their parts come here."""
        if any(issubclass(cls, FakeTensor) for cls in types):  # nothing is computed: a DTensor asks for shapes so
            return func(*args, **(kwargs or {}))
        if any(is_wrapper(cls) for cls in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        op = op_of(func)
        if op.kind != "nothing":
            operands, results = floating((args, kwargs)), floating(result)
            if operands or results:
                self._see(op, args, operands, results)
        return result

    def _see(self, op: Op, args: Any, operands: list[Tensor], results: list[Tensor]) -> None:
        place = self._places.here()
        if place.phase == "backward":  # in the forward it is activations that ranks exchange
            if op.adds_up:
                self._exchanges.exchanged(operands, results)
            else:
                self._exchanges.follow(op, operands, results)
        if op.kind == "copy":
            self._copied(op, place.frame, operands, results)
            return
        if place.frame is not None:
            self._read(op, args, place.frame, operands, results)
        self._casts.computed(op, place.frame, operands, results)
        if op.kind == "communication" or (op.kind in LISTED and not place.accumulates):
            self._list(op, place, args, operands, results)

    def _list(self, op: Op, place: Place, args: Any, operands: list[Tensor], results: list[Tensor]) -> None:
        module, name = place.module, op.name
        dtypes = f"{joined(short(t.dtype) for t in operands)} -> {joined(short(t.dtype) for t in results)}"
        lead = short(operands[0].dtype) if operands else "-"
        if op.base == "fp8_gemm":
            left, _, right = str(args[3]).partition(" x ")
            dtypes, lead = f"{left} x {right} -> {short(results[0].dtype)}", left
            name = f"{name} ({args[2]}, {args[4]})"
        elif "scaled" in op.base and op.kind == "gemm":
            dtypes = f"{lead} x {short(operands[1].dtype)} -> {short(results[0].dtype)}"
        elif op.kind == "gemm" and not module:
            module = self._owner_of(operands)
        row = self.record.rows.setdefault(OpKey(module, place.phase, op.kind, name, lead, dtypes), [0, 0])
        row[0] += 1
        if place.phase == "forward":
            row[1] = max(row[1], elements_added(op, operands, results, args))

    def _owner_of(self, operands: list[Tensor]) -> str:
        """In compiled code no module can be seen; its weight tells where a GEMM belongs, if it is read as it is stored."""
        if not self._hidden:
            return ""
        if self._stored is None:
            self._stored = {
                place_of(part): name
                for name in sorted(self._hidden)
                for parameter in self._modules[name]._parameters.values()
                if parameter is not None and parameter.ndim > 1
                for part in plain_parts(parameter)
            }
        for tensor in operands:
            owner = self._stored.get(place_of(tensor))
            if owner is not None:
                self.record.add(owner, "weight", short(tensor.dtype))
                return owner
        return ""

    def _read(self, op: Op, args: Any, frame: Frame, operands: list[Tensor], results: list[Tensor]) -> None:
        if op.base == "fp8_gemm":
            if args[2] == "fprop":
                for role, dtype in zip(("input", "weight"), str(args[3]).split(" x "), strict=True):
                    frame.read(role, dtype, by_gemm=True)
            return
        if "scaled" in op.base and op.kind == "gemm":
            for role, tensor in zip(("input", "weight"), operands, strict=False):
                frame.read(role, short(tensor.dtype), by_gemm=True)
            return
        own_in_fp32 = narrow = False
        for tensor in operands:
            known = frame.roles.get(place_of(tensor))
            if known is not None:
                frame.read(known, short(tensor.dtype), op.kind in ("gemm", "attention"))
                own_in_fp32 |= known != "input" and tensor.dtype == torch.float32
            narrow |= tensor.dtype in NARROW and tensor.ndim > 0
        if own_in_fp32 and narrow and op.kind in ("other", "in place") and results and results[0].dtype in WIDE:
            self._casts.promoted(op, frame, operands)

    def _copied(self, op: Op, frame: Frame | None, operands: list[Tensor], results: list[Tensor]) -> None:
        if not operands or not results:
            return
        source, target = operands[-1], results[0]
        if op.base == "copy":
            self._casts.written(results)
        elif frame is not None:
            role = frame.roles.get(place_of(source))
            if role is not None and place_of(target) not in frame.roles:
                frame.give(target, role)
            if op.base == "_to_copy" and source.dtype != target.dtype and source.ndim:
                self._casts.cast(op, frame, source, target)
