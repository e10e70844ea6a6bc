"""FP8 all-gather under FSDP2: which layers of a model can have it. Used by ``precision``."""

from __future__ import annotations

from collections import Counter

from torch import nn

from lightning_amp_plus.fp8.backends import torchao
from lightning_amp_plus.fp8.recipes import GEMMS, CurrentScaling
from lightning_amp_plus.local_parts import is_dtensor
from lightning_amp_plus.routing import RoutePlan


def gather_in_fp8(model: nn.Module, plan: RoutePlan) -> list[str]:
    """Prepares a model's layers to be gathered in FP8.

    Args:
        model: Not sharded yet.
        plan: Its plan.

    Returns:
        Names of the layers.

    Raises:
        ValueError: If there is no such layer, or the model is sharded already. Nothing is changed then.
    """
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    chosen: dict[str, nn.Linear] = {}
    obstacles: list[str] = []
    for route in plan.routes:
        layer = model.get_submodule(route.name)
        if route.fp8 is None or not isinstance(layer, nn.Linear) or layer in chosen.values():
            continue
        if is_dtensor(layer.weight):
            raise ValueError(
                f"gather_in_fp8(): {route.name!r} is sharded already. Call it in configure_model before fully_shard. "
                "Lightning calls configure_model for every fit, validate and test: return early once it is done."
            )
        if route.fp8.backend != "torchao":
            obstacles.append(f"{route.name}: its backend is {route.fp8.backend}")
        elif not isinstance(route.fp8.recipe, CurrentScaling) or route.fp8.gemms != GEMMS:
            obstacles.append(f"{route.name}: it needs current scaling and all three GEMMs in FP8; found {route.fp8}")
        elif holders[id(layer.weight)] > 1:
            obstacles.append(f"{route.name}: its weight is tied to another module's")
        else:
            chosen[route.name] = layer
    if not chosen:
        found = "; ".join(obstacles[:4]) or "nothing computes in FP8"
        raise ValueError(
            "gather_in_fp8(): no layer can be gathered in FP8. That takes current scaling by torchao, as in "
            f"Rule(..., compute='fp8', recipe=CurrentScaling(), backend='torchao'). Here: {found}."
        )
    for name, layer in chosen.items():
        recipe = plan[name].fp8
        assert recipe is not None
        torchao.gather_in_fp8(layer, recipe.recipe)
    return list(chosen)


def check_gathered(model: nn.Module, plan: RoutePlan) -> None:
    """Refuses a plan that takes a layer whose weight is gathered in FP8 to who cannot multiply it.

    Args:
        model: The model.
        plan: Its plan, not applied yet.

    Raises:
        ValueError: Naming the layer.
    """
    for name, module in model.named_modules():
        fp8 = plan[name].fp8 if torchao.is_gathered_in_fp8(module) else None
        if torchao.is_gathered_in_fp8(module) and (fp8 is None or fp8.backend != "torchao"):
            found = plan[name].compute if fp8 is None else f"FP8 by {fp8.backend}"
            raise ValueError(
                f"{name!r} cannot compute in {found}: gather_in_fp8() has its weight gathered in FP8, which torchao "
                "alone multiplies. Leave it in FP8 by torchao, or run without gather_in_fp8()."
            )
