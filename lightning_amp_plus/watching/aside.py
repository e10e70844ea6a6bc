"""Looking at what runs without being part of it: when a hook has to keep quiet, and ops that nobody else notices.

Used wherever hooks watch a model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _python_dispatch

# Bare functions, asked at every call of every watched module. A compiler that traces makes hooks part of its graph.
compiling = torch.compiler.is_dynamo_compiling
# Number of the backward pass that is running, or NO_TASK: in one, a forward is a recomputation.
backward_now = torch._C._current_graph_task_id
NO_TASK = -1
# Inside of torch.func's transformations tensors stand for others; None outside.
transforming = torch._C._functorch.peek_interpreter_stack


def out_of_sight() -> bool:
    """Whether a compiler traces the user's function, or ``torch.func`` transforms it: such tensors have no memory."""
    return compiling() or transforming() is not None


def aside() -> AbstractContextManager[Any]:
    """Hides our ops from dispatch modes.

    Selective activation checkpointing would take their results for the model's own, and who counts ops would count ours.
    """
    if torch._C._len_torch_dispatch_stack():
        return _python_dispatch._disable_current_modes()
    return nullcontext()
