"""Which modules can compute in FP8, which are better left in high precision, and with what recipe and backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_amp_plus.fp8.obstacle import Obstacle
from lightning_amp_plus.fp8.recipes import GEMMS, CurrentScaling, Gemm, MXScaling, Recipe, RowwiseScaling

_HEADS = ("head", "lm_head", "classifier", "score")
_ROUTERS = ("router", "gate")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

NOT_LINEAR = Obstacle("op", "only Linear layers compute in FP8")  # most modules of a model; errors name others first


@dataclass(frozen=True)
class Fp8Route:
    """How one module computes in FP8.

    Attributes:
        recipe: How its scales are chosen.
        gemms: Which of its GEMMs run in FP8; the others in BF16.
        backend: What multiplies.
        in_evaluation: Whether it stays in FP8 in evaluation mode.
    """

    recipe: Recipe
    gemms: tuple[Gemm, ...] = GEMMS
    backend: str = "reference"
    in_evaluation: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.recipe, RowwiseScaling) and self.recipe.weight_grad == "high":
            object.__setattr__(self, "gemms", tuple(gemm for gemm in self.gemms if gemm != "wgrad"))
        if not self.gemms:
            raise ValueError(
                "RowwiseScaling(weight_grad='high') with gemms=['wgrad'] leaves no GEMM in FP8. Name another GEMM, or "
                "leave one of the two out."
            )

    def to_dict(self) -> dict[str, Any]:
        """The route in plain types."""
        return {
            "recipe": self.recipe.to_dict(),
            "gemms": list(self.gemms),
            "backend": self.backend,
            "in_evaluation": self.in_evaluation,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fp8Route:
        """The route that ``to_dict`` described."""
        recipe, gemms = Recipe.from_dict(values["recipe"]), tuple(values["gemms"])
        return cls(recipe, gemms, str(values["backend"]), bool(values["in_evaluation"]))

    def __str__(self) -> str:
        some = "" if self.gemms == GEMMS else f", {'+'.join(self.gemms)}"
        return f"{self.recipe.name}, {self.backend}{some}"


def default_recipe(device_type: str) -> Recipe:
    """The recipe where none is named: MX on Blackwell, current scaling everywhere else."""
    on_gpu = device_type == "cuda" and torch.cuda.is_available()
    return MXScaling() if on_gpu and torch.cuda.get_device_capability() >= MXScaling.capability else CurrentScaling()


def is_of_package(part: nn.Module | torch.Tensor, *packages: str) -> bool:
    """Whether the class of a module or a tensor, or one that it is derived from, comes from a package.

    Asked without importing that.
    """
    return any(cls.__module__.partition(".")[0] in packages for cls in type(part).__mro__)


def obstacle(module: nn.Module, recipe: Recipe) -> Obstacle | None:
    """Why a module cannot compute in FP8, or ``None`` if it can."""
    if is_of_package(module, "transformer_engine"):
        return Obstacle(
            "op", "it is Transformer Engine's own: whether it computes in FP8 is up to te.autocast around it"
        )
    if not isinstance(module, nn.Linear):
        return NOT_LINEAR
    cls = getattr(module, "_amp_base", type(module))
    if cls.forward is not nn.Linear.forward:
        return Obstacle("op", f"{cls.__name__} has a forward of its own")
    weight = _stored_weight(module)
    if weight.dtype not in _FLOATS:
        return Obstacle("op", f"its weight is stored in {str(weight.dtype).removeprefix('torch.')}")
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return Obstacle("shape", "it has no size yet; run a batch through the model first")
    unfit = [
        f"{name}={size}"
        for name, size in (("in_features", module.in_features), ("out_features", module.out_features))
        if size % recipe.multiple or not size
    ]
    if unfit:
        are = "is" if len(unfit) == 1 else "are"
        return Obstacle("shape", f"{' and '.join(unfit)} {are} no multiple of {recipe.multiple}")
    return None


def _stored_weight(module: nn.Linear) -> torch.Tensor:
    """The weight, or of a parametrized one what it is made of: making it may have effects (power iterations)."""
    parametrizations = module._modules.get("parametrizations")
    if isinstance(parametrizations, nn.ModuleDict) and "weight" in parametrizations:
        return next(parametrizations["weight"].parameters())
    return module.weight


def too_small(module: nn.Module, recipe: Recipe) -> Obstacle | None:
    """Why FP8 tensor cores would make a layer slower than BF16, or ``None``.

    The cast costs more than the GEMM gains below a size. The sizes are those that torchao publishes for an H100; there are
    none for block and MX scaling.

    Args:
        module: A Linear.
        recipe: How its scales are chosen.
    """
    outer, inner = (module.out_features, module.in_features) if isinstance(module, nn.Linear) else (0, 0)
    by_tensor = outer <= 1024 and inner <= 4096
    by_row = outer <= 2048 or inner <= 1024 or (outer <= 4096 and inner <= 2048)
    small = by_tensor if recipe.one_scale_a_tensor else by_row if isinstance(recipe, RowwiseScaling) else False
    if small:
        slower = f"{inner} to {outer} is too small to be faster with {recipe.name} scaling than in BF16"
        return Obstacle("shape", slower)
    return None


def better_high(
    names: Iterable[str], module: nn.Module, embeddings: set[int], match: str, own: bool
) -> Obstacle | None:
    """Why a module stays in high precision unless a rule names it, or ``None``.

    Args:
        names: Its qualified names. A head or a router may also be a module around it, of several layers.
        module: The module.
        embeddings: Ids of the parameters that embeddings look up in.
        match: The rule that wants it in FP8; a head or a router that is spelled out there is meant.
        own: Whether that rule names this very module.
    """
    weight = module._parameters.get("weight")
    if weight is not None and id(weight) in embeddings and not own:
        return Obstacle("rule", "its weight is an embedding's too, and makes the logits")
    cautious = {part for name in names for part in name.split(".")} - set(match.split("."))
    if cautious & set(_HEADS):
        return Obstacle("rule", "a head makes the logits, whose differences are small")
    if cautious & set(_ROUTERS):
        return Obstacle("rule", "a router's small differences decide where tokens go")
    return None
