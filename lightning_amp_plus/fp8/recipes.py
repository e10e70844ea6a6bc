"""FP8 recipes as frozen data: how the scales of a GEMM's three operands are chosen, and what that needs.

A recipe is part of a policy, of the plan and of the manifest, so it is plain data with a JSON round trip; what computes
with it is a backend. Two things differ between recipes: the *granularity*, which elements share a scale, and the *clock*,
whether the scale comes from the tensor at hand or from those of earlier windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from lightning_amp_plus.formats import E4M3, E5M2, Format

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
"""A Linear's three products: its output, the gradient of its input, the gradient of its weight."""
Operand = Literal["input", "weight", "grad_output"]
Granularity = Literal["tensor", "row", "block_1x128", "block_128x128", "mx_32"]


@dataclass(frozen=True)
class Recipe:
    """What all recipes have in common; use one of its subclasses.

    Attributes:
        name: Its name in a policy's plain form.
        gradient: Format of the gradient operand; input and weight are E4M3 in every recipe.
        capability: Compute capability that a GPU needs for it.
        multiple: What both sizes of a weight must be a multiple of on tensor cores.
    """

    name: ClassVar[str] = ""
    gradient: ClassVar[Format] = E5M2
    capability: ClassVar[tuple[int, int]] = (8, 9)
    multiple: ClassVar[int] = 16

    def format_of(self, operand: Operand) -> Format:
        """Format that an operand is quantized to."""
        return self.gradient if operand == "grad_output" else E4M3

    def granularity_of(self, operand: Operand) -> Granularity:
        """Which elements of an operand share a scale."""
        return "tensor"

    @property
    def one_scale_a_tensor(self) -> bool:
        """Whether all elements of an operand share one scale, whichever dimension a GEMM contracts."""
        return self.granularity_of("input") == self.granularity_of("weight") == "tensor"

    @property
    def power_of_two_scales(self) -> bool:
        """Whether scales are rounded down to powers of two, so that scaling changes no fraction bit."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """The recipe in plain types."""
        return {"name": self.name, **asdict(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """The recipe that ``to_dict`` described.

        Raises:
            ValueError: If the name is unknown or a key is not one of that recipe's, naming it.
        """
        if "name" not in values:
            raise ValueError(
                f"A recipe needs the key 'name', one of {sorted(RECIPES)}; found the keys {sorted(values)}."
            )
        cls = _class_of(values["name"])
        known = [field.name for field in fields(cls)]
        unknown = sorted(key for key in values if key != "name" and key not in known)
        if unknown:
            raise ValueError(f"{cls.__name__} has no settings {unknown}. Known are {known or 'none'}.")
        return cls(**{key: value for key, value in values.items() if key != "name"})

    @staticmethod
    def of(value: Any) -> Recipe:
        """The recipe that a policy's ``recipe=`` means: one itself, its name, its plain form, or a config's object.

        Raises:
            ValueError: If it means none.
        """
        if isinstance(value, Recipe):
            return value
        if isinstance(value, Mapping) and "class_path" in value:  # as a LightningCLI config writes an object
            wanted = str(value["class_path"]).rpartition(".")[2]
            named = [name for name, cls in RECIPES.items() if cls.__name__ == wanted]
            return Recipe.from_dict({"name": named[0] if named else wanted, **(value.get("init_args") or {})})
        if isinstance(value, Mapping):
            return Recipe.from_dict(value)
        return _class_of(value)()


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale a tensor, taken from the largest magnitudes (amax) of earlier windows.

    Costs no pass over the tensor before quantizing it; what grows faster than its history saturates. (Micikevicius et
    al., "FP8 Formats for Deep Learning", 2022, section 3.3.)

    Args:
        history: Number of windows looked back on.
        amax: ``max`` of the history, or its ``most_recent`` entry.
        margin: Powers of two left above the amax.
        reduce_amax: Whether ranks share amax values.

    Raises:
        ValueError: If a value is out of range.
    """

    name: ClassVar[str] = "delayed"

    history: int = 1024
    amax: Literal["max", "most_recent"] = "max"
    margin: int = 0
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        _whole(self, "history", 1, 2**20)
        _whole(self, "margin", -32, 32)
        _one_of(self, "amax", ("max", "most_recent"))
        _flag(self, "reduce_amax")


@dataclass(frozen=True)
class CurrentScaling(Recipe):
    """One scale a tensor, taken from the tensor itself: a pass more, and nothing saturates.

    Args:
        power_of_two: Round scales down to powers of two.
    """

    name: ClassVar[str] = "current"

    power_of_two: bool = False

    def __post_init__(self) -> None:
        _flag(self, "power_of_two")

    @property
    def power_of_two_scales(self) -> bool:
        """See ``power_of_two``."""
        return self.power_of_two


@dataclass(frozen=True)
class RowwiseScaling(Recipe):
    """One scale a row of each operand, along the dimension that a GEMM contracts: an outlier costs its own row only.

    Gradients are E4M3: with a scale of its own for each row they need the digits more than the range (SQNR on normal
    data 31.6 dB, against 25.6 dB in E5M2).

    Args:
        weight_grad: ``fp8``, or ``high`` to compute the weight's gradient in BF16.
        power_of_two: Round scales down to powers of two.

    Raises:
        ValueError: If a value is unknown.
    """

    name: ClassVar[str] = "rowwise"
    gradient: ClassVar[Format] = E4M3
    capability: ClassVar[tuple[int, int]] = (9, 0)

    weight_grad: Literal["fp8", "high"] = "fp8"
    power_of_two: bool = True

    def __post_init__(self) -> None:
        _one_of(self, "weight_grad", ("fp8", "high"))
        _flag(self, "power_of_two")

    def granularity_of(self, operand: Operand) -> Granularity:
        """A row, whichever operand."""
        return "row"

    @property
    def power_of_two_scales(self) -> bool:
        """See ``power_of_two``."""
        return self.power_of_two


@dataclass(frozen=True)
class BlockScaling(Recipe):
    """One scale for 1x128 elements of inputs and gradients, and for 128x128 of weights (DeepSeek-V3, 2024, section 3.3).

    Scales are powers of two: they vary along the contracted dimension, and only so are they exact inside it.
    """

    name: ClassVar[str] = "block"
    gradient: ClassVar[Format] = E4M3
    capability: ClassVar[tuple[int, int]] = (9, 0)

    def granularity_of(self, operand: Operand) -> Granularity:
        """Tiles of the weight, strips of the other two."""
        return "block_128x128" if operand == "weight" else "block_1x128"

    @property
    def power_of_two_scales(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class MXScaling(Recipe):
    """One power-of-two scale (E8M0) for 32 elements along the contracted dimension.

    (OCP Microscaling Formats specification 1.0, section 5.2.)
    """

    name: ClassVar[str] = "mx"
    gradient: ClassVar[Format] = E4M3
    capability: ClassVar[tuple[int, int]] = (10, 0)
    multiple: ClassVar[int] = 32

    def granularity_of(self, operand: Operand) -> Granularity:
        """Strips of 32, whichever operand."""
        return "mx_32"

    @property
    def power_of_two_scales(self) -> bool:
        """E8M0 holds nothing else."""
        return True


RECIPES: dict[str, type[Recipe]] = {
    cls.name: cls for cls in (DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling, MXScaling)
}
"""Every recipe by name."""


def _class_of(name: Any) -> type[Recipe]:
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(
            f"recipe={name!r}: expected one of {', '.join(sorted(RECIPES))}, or a recipe of lightning_amp_plus.fp8 such "
            "as CurrentScaling()."
        )
    return RECIPES[name]


def _whole(recipe: Recipe, field: str, least: int, most: int) -> None:
    value = getattr(recipe, field)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(
            f"{type(recipe).__name__}({field}={value!r}): expected a whole number of at least {least}, at most {most}."
        )


def _one_of(recipe: Recipe, field: str, known: tuple[str, ...]) -> None:
    value = getattr(recipe, field)
    if value not in known:
        raise ValueError(f"{type(recipe).__name__}({field}={value!r}): expected one of {', '.join(map(repr, known))}.")


def _flag(recipe: Recipe, field: str) -> None:
    value = getattr(recipe, field)
    if not isinstance(value, bool):
        raise ValueError(f"{type(recipe).__name__}({field}={value!r}): expected True or False.")
