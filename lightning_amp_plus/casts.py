"""Casts for the time of one call: of inputs, and of parameters in their modules' dictionaries. `routed` uses them."""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
BITS_16 = (torch.bfloat16, torch.float16)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: ``fp32 bf16 fp16 fp64``, torch's own for any other."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Casts FP32, BF16 and FP16 tensors in nested tuples, lists and dicts.

    A collection with nothing to cast comes back as the same object, since the callee may keep or fill it.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in (torch.float32, *BITS_16) else value
    if isinstance(value, (tuple, list)):
        items = [cast_floating(item, dtype) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        cast = {key: cast_floating(item, dtype) for key, item in value.items()}
        if all(cast[key] is item for key, item in value.items()):
            return value
        copied = copy.copy(value)
        copied.update(cast)
        return copied
    return value


class Swap(NamedTuple):
    """One entry of a module's dictionaries that holds a cast, or derives from one, for the time of a call."""

    place: dict[str, Any]
    name: str
    original: Any
    cast: Tensor | None


def swap_in_fp32(modules: Iterable[nn.Module], swaps: list[Swap]) -> None:
    """Puts FP32 casts in the place of the modules' 16-bit parameters.

    Never retypes: gradients flow through the cast into the stored Parameter, and one cast serves all ends of a tie.

    Args:
        modules: The modules.
        swaps: Filled as it goes, so that `put_back` is right also after a failure half way.
    """
    casts: dict[int, Tensor] = {}
    for module in modules:
        parameters = module._parameters
        for name, parameter in list(parameters.items()):
            if parameter is None or parameter.dtype not in BITS_16:
                continue
            if id(parameter) not in casts:
                casts[id(parameter)] = parameter.to(torch.float32)
            swaps.append(Swap(parameters, name, parameter, casts[id(parameter)]))
            parameters[name] = casts[id(parameter)]  # type: ignore[assignment]
        if isinstance(module, nn.RNNBase):
            # Its forward notices new weights and renews these lists; left there, casts would keep the graph alive.
            swaps.extend(
                Swap(vars(module), name, vars(module)[name], None) for name in ("_flat_weights", "_flat_weight_refs")
            )


def put_back(swaps: list[Swap]) -> None:
    """Undoes `swap_in_fp32`, except where the call has put a new parameter of its own."""
    for place, name, original, cast in swaps:
        if cast is None or place.get(name) is cast:
            place[name] = original


def refuse_writes(module: nn.Module, swaps: list[Swap]) -> None:
    """Raises RuntimeError if a call wrote to a cast in place, which the stored parameter would never learn of."""
    for _, name, _, cast in swaps:
        if cast is not None and not cast.is_inference() and cast._version:
            raise RuntimeError(
                f"{type(module).__name__} computes in FP32 from parameters stored in 16 bits, and a call wrote to "
                f"the FP32 cast of {name!r} in place: the write would be lost. Write to parameters outside the "
                "module's own methods, or store them in FP32."
            )
