"""Watches one training step: every operation that is dispatched, where it ran and in which dtypes. :class:`Recorder`.

It changes nothing: each operation runs as it would, and the step's numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_amp_plus.census.following import NARROW, WIDE, Casts, Exchanges
from lightning_amp_plus.census.record import OpKey, Record
from lightning_amp_plus.fp8.coverage.te_evidence import computes_by_it, evidence_of, node_of
from lightning_amp_plus.watching.ops import (
    LISTED,
    Op,
    elements_added,
    floating,
    floating_of_module,
    joined,
    op_of,
    place_of,
    plain_parts,
    short,
)
from lightning_amp_plus.watching.places import Frame, Place, Places
from lightning_amp_plus.watching.watcher import Watcher


class _Reading(Frame):
    """A call of a module, and the dtypes in which it reads what it has.

    Attributes:
        roles: ``input``, ``weight`` or ``buffer``, by memory.
        kept: Tensors that must live, so that their memory gets no other role.
        reads: For each role the dtype it was first read in, and whether by a GEMM, which counts more.
    """

    __slots__ = ("kept", "reads", "roles")

    def __init__(self, name: str, task: int, module: nn.Module, inputs: Any) -> None:
        super().__init__(name, task)
        self.roles: dict[int, str] = {}
        self.kept: list[Tensor] = []
        self.reads: dict[str, tuple[str, bool]] = {}
        for held, role in ((module._parameters, "weight"), (module._buffers, "buffer")):
            for tensor in held.values():
                if tensor is not None and tensor.ndim:
                    self.give(tensor, role)
        self.give(inputs, "input")

    def give(self, value: Any, role: str) -> None:
        """Gives tensors a role."""
        for tensor in floating_of_module(value):
            for part in plain_parts(tensor):
                self.roles[place_of(part)] = role
                self.kept.append(part)

    def read(self, role: str, dtype: str, by_gemm: bool) -> None:
        """An operation of the module itself read a tensor of that role."""
        known = self.reads.get(role)
        if known is None or (by_gemm and not known[1]):
            self.reads[role] = (dtype, by_gemm)


class Recorder(Watcher):  # type: ignore[no-untyped-call]
    """Records the parts of a step that compute; ``integration.watched_step`` has it entered during those.

    Args:
        modules: All modules of the model by their first names, the model itself as ``""``.
        compiled: Names of those in compiled code, which must not get hooks: they would end up in its graph.
    """

    def __init__(self, modules: Mapping[str, nn.Module], compiled: Iterable[str] = ()) -> None:
        super().__init__(Places(modules, _Reading, self._left))
        self.record = Record()
        self._modules = modules
        self._hidden = set(compiled)
        self._whole = {name for name, module in modules.items() if any(True for _ in module.children())}
        self._casts = Casts(self.record.events)
        self._exchanges = Exchanges()
        self._stored: dict[int, str] | None = None
        for name, module in modules.items():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.places.own(parameter, name)

    # ---------------------------------------------------------------- while it is watching

    @property
    @override
    def modules(self) -> Iterable[nn.Module]:
        """All that are not in compiled code."""
        return [module for name, module in self._modules.items() if name not in self._hidden]

    @override
    def end(self) -> None:
        """Ends it."""
        super().end()
        self.record.stepped = self.places.stepped

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
        assert isinstance(frame, _Reading)
        name = frame.name
        self._hear(frame, inputs, output)
        for role, (dtype, _) in frame.reads.items():
            if role != "buffer":
                self.record.add(name, role, dtype)
        arrived = floating_of_module(inputs)
        if "input" not in frame.reads and name in self._whole and arrived:
            self.record.add(name, "input", short(arrived[0].dtype))
        returned = floating_of_module(output)
        if returned:
            self.record.add(name, "output", short(returned[0].dtype))

    def _hear(self, frame: _Reading, inputs: Any, output: Any) -> None:
        """Notes what Transformer Engine says of a call in which no GEMM was dispatched: its own never are."""
        module = self._modules[frame.name]
        if not computes_by_it(module) or any(by_gemm for _, by_gemm in frame.reads.values()):
            return
        said = evidence_of(module, inputs, node_of(output))
        returned = floating_of_module(output)
        if said is None or not returned:
            return
        left, _, right = said.forward.partition(" x ")
        formats = left, right or left
        for role, dtype in zip(("input", "weight"), formats, strict=True):
            frame.reads[role] = (dtype, True)
        dtypes = f"{joined(formats)} -> {short(returned[0].dtype)}"
        key = OpKey(frame.name, "forward", "gemm", "transformer_engine", left, dtypes)
        self.record.rows.setdefault(key, [0, 0])[0] += len(said.matrices)

    # ---------------------------------------------------------------- one operation

    @override
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, and looks at it."""
        result = func(*args, **kwargs)
        op = op_of(func)
        if op.kind != "nothing":
            operands, results = floating((args, kwargs)), floating(result)
            if operands or results:
                self._see(op, args, operands, results)
        return result

    def _see(self, op: Op, args: Any, operands: list[Tensor], results: list[Tensor]) -> None:
        place = self.places.here()
        if place.phase == "backward":  # in the forward it is activations that ranks exchange
            if op.adds_up:
                self._exchanges.exchanged(operands, results)
            else:
                self._exchanges.follow(op, operands, results)
        frame = place.frame if isinstance(place.frame, _Reading) else None
        if op.kind == "copy":
            self._copied(op, frame, operands, results)
            return
        if frame is not None:
            self._read(op, args, frame, operands, results)
        self._casts.computed(op, frame, operands, results)
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

    def _read(self, op: Op, args: Any, frame: _Reading, operands: list[Tensor], results: list[Tensor]) -> None:
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

    def _copied(self, op: Op, frame: _Reading | None, operands: list[Tensor], results: list[Tensor]) -> None:
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
