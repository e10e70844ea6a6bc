"""Where an operation runs: in which module, and in the forward, the backward or the optimizer's part of a step.

In the forward a stack of modules says it. In the backward the number of the autograd node does: nodes are numbered as they
are made, so the module that was on top of the stack when a node got its number is the one that it belongs to. (torch's
``ModuleTracker`` goes by gradient hooks instead, and blames the wrong module where activations are recomputed.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_amp_plus.watching.aside import NO_TASK, backward_now, out_of_sight
from lightning_amp_plus.watching.modules import around, is_compiled_in_place

Phase = Literal["forward", "backward", "optimizer", "step"]


class Frame:
    """One call of a module that is going on.

    Attributes:
        name: The module's name.
        task: The backward that it runs in, where it is a recomputation.
    """

    __slots__ = ("name", "task")

    def __init__(self, name: str, task: int) -> None:
        self.name = name
        self.task = task

    @property
    def recomputes(self) -> bool:
        """Whether backward computes anew what the forward did not keep."""
        return self.task != NO_TASK


class Place(NamedTuple):
    """Where an operation runs.

    Attributes:
        module: Name of the module; of what belongs to none, that of the model, or a word in brackets.
        phase: Which part of the step.
        frame: The call of the module, in the forward.
        accumulates: Whether autograd is adding to a parameter's ``grad``.
        node: In the backward, what :meth:`Places.next_node` said when the node was made that runs now.
        recomputes: Whether backward computes anew, outside of any module's call, what the forward did not keep.
    """

    module: str
    phase: Phase
    frame: Frame | None = None
    accumulates: bool = False
    node: tuple[int, int] | None = None
    recomputes: bool = False


class Places:
    """Keeps the stack of modules and the numbers of autograd nodes, from hooks on modules and around optimizer steps.

    Args:
        modules: Modules to watch, each by one name.
        enter: Makes the frame of a call that begins, of the module's name, the backward that it runs in, the module and
            the call's inputs.
        leave: Called when a call of a module ends, with its frame, its inputs and its output.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        enter: Callable[[str, int, nn.Module, Any], Frame],
        leave: Callable[[Frame, Any, Any], None],
    ) -> None:
        self.stack: list[Frame] = []
        self.in_training_step = False
        self.stepping = 0
        self.stepped = False
        self._names = {id(module): name for name, module in modules.items()}
        self._make_frame = enter
        self._leave = leave
        self._owners: dict[int, str] = {}
        # Node numbers and the module that was running from each on; those of recomputations by the backward they ran in.
        self._marks: dict[int, tuple[list[int], list[str]]] = {NO_TASK: ([], [])}
        self._outer_task: int | None = None
        self._last: tuple[int, int, Place] | None = None  # of the node that the operation before this one ran in

    def __reduce__(self) -> Any:
        # Copies and pickles of a module made while it is watched hold its hooks; theirs are to watch nothing.
        return _nowhere, ()

    def own(self, parameter: Tensor, name: str) -> None:
        """Says whose a parameter is; of a tied one the first says it."""
        self._owners.setdefault(id(parameter), name)

    # ---------------------------------------------------------------- hooks

    def watch(
        self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> list[Callable[[], None]]:
        """Puts hooks on modules and optimizers; what it returns takes them off."""
        undo: list[Callable[[], None]] = []
        for module in modules:
            if is_compiled_in_place(module):
                undo.append(around(module, self._enter, self._exit))
                continue
            # By the class: a scripted module refuses hooks from outside, and calls those that it has.
            undo.append(nn.Module.register_forward_pre_hook(module, self._enter, with_kwargs=True).remove)
            # Recomputation stops early by an exception; without `always_call` its modules would stay on the stack.
            undo.append(nn.Module.register_forward_hook(module, self._exit, with_kwargs=True, always_call=True).remove)
        for optimizer in optimizers:
            undo.append(optimizer.register_step_pre_hook(self._before_step).remove)
            undo.append(optimizer.register_step_post_hook(self._after_step).remove)
        return undo

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names.get(id(module))
        if name is None or out_of_sight():
            return
        frame = self._make_frame(name, backward_now(), module, (args, kwargs))
        self.stack.append(frame)
        self._mark(frame.task)

    def _exit(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is None or out_of_sight():
            return
        if not any(frame.name == name for frame in self.stack):
            return
        while (frame := self.stack.pop()).name != name:  # left by an exception that somebody caught
            pass
        self._mark(frame.task)
        self._leave(frame, (args, kwargs), output)

    def _mark(self, task: int) -> None:
        self._last = None
        numbers, names = self._marks.setdefault(task, ([], []))
        top = self.stack[-1] if self.stack else None
        numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        names.append(top.name if top is not None and top.task == task else "")

    def _before_step(self, *_: Any) -> None:
        self.stepping += 1

    def _after_step(self, *_: Any) -> None:
        self.stepping -= 1
        self.stepped = True

    def new_backward(self) -> None:
        """A backward begins that is not one inside another."""
        if backward_now() == NO_TASK:
            self._outer_task = self._last = None

    # ---------------------------------------------------------------- the question

    def here(self) -> Place:
        """Where the operation that is asked about runs."""
        task = backward_now()
        if self.stack and self.stack[-1].task == task:
            return Place(self.stack[-1].name, "forward", self.stack[-1])
        if task != NO_TASK:
            if self._outer_task is None:
                self._outer_task = task
            return self._in_backward(task)
        if self.stepping:
            return Place("(optimizer)", "optimizer")
        return Place("", "forward") if self.in_training_step else Place("(step)", "step")

    def next_node(self) -> tuple[int, int]:
        """The backward that runs now, and the number that the next autograd node will get in it."""
        return backward_now(), torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def _in_backward(self, task: int) -> Place:
        node: Any = torch._C._current_autograd_node()
        if node is None:  # when all nodes are done: what waited for gradients, such as DDP's reducer
            return Place("", "backward")
        variable = getattr(node, "variable", None)
        if variable is not None:
            return Place(self._owners.get(id(variable), ""), "backward", accumulates=True)
        if _recomputing(node):
            return self._recomputed(task, node._sequence_nr())
        number = node._sequence_nr()
        if self._last is not None and self._last[:2] == (task, number):
            return self._last[2]
        place = self._of_node(task, number)
        self._last = task, number, place
        return place

    def _recomputed(self, task: int, number: int) -> Place:
        """The place of what a node computes anew; the nodes that this makes are its module's too."""
        place = self._of_node(task, number)._replace(recomputes=True)
        numbers, names = self._marks.setdefault(task, ([], []))
        made = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if numbers and numbers[-1] == made and names[-1] == place.module:
            return place
        numbers += [made - 1, made]
        names += [place.module] * 2
        return place

    def _of_node(self, task: int, number: int) -> Place:
        if task != self._outer_task:
            # A backward inside a backward, of what was recomputed there. On a GPU that ran in a thread of autograd's own,
            # which numbers its nodes anew, so these come first.
            for made_in, (numbers, names) in list(self._marks.items())[:0:-1]:
                if numbers[0] <= number < numbers[-1]:
                    return Place(_at(numbers, names, number), "backward", node=(made_in, number))
        return Place(_at(*self._marks[NO_TASK], number), "backward", node=(NO_TASK, number))


def _nowhere() -> Places:
    return Places({}, lambda name, task, *_: Frame(name, task), lambda *_: None)


def _recomputing(node: Any) -> bool:
    """Whether what runs in a node is a forward: of a function that checkpoints, or to unpack what was not kept.

    With ``create_graph=True`` backward itself runs in grad mode too.
    """
    if not torch.is_grad_enabled():
        return False
    own_backward = isinstance(node, torch.autograd.function.BackwardCFunction)
    return own_backward or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _at(numbers: list[int], names: list[str], number: int) -> str:
    position = bisect_right(numbers, number) - 1
    return names[position] if position >= 0 else ""
