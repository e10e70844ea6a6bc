"""Tensors in nested values: :func:`named_tensors`. For what modules take and return, and for what checkpoints hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def named_tensors(value: Any, name: str, within: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings, lists, tuples and dataclasses, each with its dotted name, in their order.

    Args:
        value: A tensor, or anything that holds tensors; what is none of these kinds holds none.
        name: What the value itself is called.
        within: Ids of what holds the value, for containers that hold themselves: they are looked into once.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    if id(value) in within:
        return
    inside = (*within, id(value))
    if isinstance(value, Mapping):  # before dataclasses: transformers' outputs are both
        for key, item in value.items():
            yield from named_tensors(item, f"{name}.{key}", inside)
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from named_tensors(item, f"{name}.{position}", inside)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from named_tensors(getattr(value, field.name, None), f"{name}.{field.name}", inside)
