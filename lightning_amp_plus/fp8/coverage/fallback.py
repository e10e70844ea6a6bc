"""Why a GEMM did not run in FP8: :class:`Fallbacks` answers from routes and from the state that layers are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_amp_plus.fp8.coverage.gemms import Product, sizes_of
from lightning_amp_plus.fp8.coverage.report import Reason
from lightning_amp_plus.fp8.recipes import GEMMS
from lightning_amp_plus.fp8.selection import Fp8Route
from lightning_amp_plus.routed import fp8_has_begun


@dataclass(frozen=True)
class Layer:
    """What a module's route says of FP8.

    Attributes:
        module: The module.
        route: How it computes in FP8, if it does.
        why_not: Why it does not, otherwise.
    """

    module: nn.Module
    route: Fp8Route | None
    why_not: Reason

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Sizes of a Linear's weight, in ascending order."""
        module = self.module
        return sizes_of((module.out_features, module.in_features)) if isinstance(module, nn.Linear) else None


class Fallbacks:
    """Reasons for the GEMMs of a model.

    Args:
        layers: Its modules by name.
        regions: For each compiled region the names of the modules inside it, itself included.
    """

    def __init__(self, layers: Mapping[str, Layer], regions: Mapping[str, list[str]]) -> None:
        self._layers = layers
        self._regions = regions

    def why(self, product: Product, module: str, role: str) -> Reason:
        """Why a product did not run in FP8.

        Args:
            product: What was multiplied.
            module: Name of the module that it ran in.
            role: What it is for.
        """
        if product.kind != "gemm" or role == "optimizer":
            return "op"
        if module in self._regions:
            return self._in_region(product, module, role)
        layer = self._layers.get(module)
        return "op" if layer is None else _now(layer, product, role)

    def _in_region(self, product: Product, region: str, role: str) -> Reason:
        """Compiled code shows sizes only: of the layers that have them, the reason that most give counts."""
        sides = {sizes_of(tensor.shape) for tensor in (product.left, product.right) if tensor is not None}
        if product.result is not None:
            sides.add(sizes_of(product.result))
        meant: Counter[Reason] = Counter()
        for name in self._regions[region]:
            layer = self._layers.get(name)
            if layer is not None and layer.sizes in sides:
                meant[_now(layer, product, role)] += 1
        return meant.most_common(1)[0][0] if meant else "op"


def _now(layer: Layer, product: Product, role: str) -> Reason:
    route, module = layer.route, layer.module
    if route is None:
        return layer.why_not
    if not fp8_has_begun(module):
        return "warmup"
    if not module.training and not route.in_evaluation:
        return "eval"
    if role in GEMMS and role not in route.gemms:
        return "rule"
    if role == "recompute" and "fprop" not in route.gemms:
        return "rule"
    if role == "backward" and not {"dgrad", "wgrad"} <= set(route.gemms):
        return "rule"
    if product.flops == 0:
        return "shape"  # a batch without elements
    return "demoted"
