"""TE#415, TE#1190: activation checkpointing recomputes in FP8 too, one GEMM more a layer, and no history advances twice."""

from collections import Counter
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.fp8 import CurrentScaling, DelayedScaling, Recipe
from lightning_amp_plus.fp8.delayed import histories_of
from tests.fp8.test_training import Regressor, fit
from tests.support.training import same, weights

HOW = [None, True, False]  # without activation checkpointing, reentrant, not reentrant
DELAYED = DelayedScaling(history=8)


class Checkpointed(Regressor):
    """Keeps nothing between the input and the output of its two FP8 layers, except where ``reentrant`` is None."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()  # without that a reentrant checkpoint trains nothing
        hidden = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return nn.functional.mse_loss(self.head(hidden).float(), batch.sum(1, keepdim=True))


class Gemms(TorchDispatchMode):
    """Counts GEMMs: those in FP8 by their role (our op) or as ``float8`` (torchao's tensors), the others as ``high``."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.lightning_amp_plus.fp8_gemm.default:
            self.count[args[2]] += 1
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            kinds = {type(arg).__name__ for arg in args}
            self.count["float8" if "Float8TrainingTensor" in kinds else "high"] += 1
        return func(*args, **(kwargs or {}))


class OneStep(L.Callback):
    """What the second step multiplies, backward and optimizer included."""

    def __init__(self) -> None:
        self.gemms = Gemms()

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.gemms.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.gemms.__exit__(None, None, None)


def train(reentrant: bool | None, recipe: Recipe, backend: Any = "reference", **arguments: Any) -> Any:
    """The model after three steps, and the GEMMs of one of them."""
    step = OneStep()
    rules = [Rule("body.*", compute="fp8", recipe=recipe, backend=backend)]
    plugin = AmpPrecision(PrecisionPolicy("bf16", rules=rules))
    _, model = fit(plugin, Checkpointed(reentrant), 3, callbacks=[step], **arguments)
    return model, step.gemms.count


@pytest.mark.parametrize("recipe", [CurrentScaling(), DELAYED], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("reentrant", HOW)
def test_each_layer_multiplies_once_more_and_in_fp8(reentrant: bool | None, recipe: Recipe) -> None:
    _, count = train(reentrant, recipe)
    layers = 2
    assert count["dgrad"] == count["wgrad"] == layers
    assert count["fprop"] == (1 if reentrant is None else 2) * layers, "the recomputation is not in FP8"
    assert count["high"] == 3, "only the head's three GEMMs are not in FP8"


@pytest.mark.parametrize("reentrant", HOW)
def test_torchao_recomputes_in_fp8_too(reentrant: bool | None) -> None:
    _, count = train(reentrant, CurrentScaling(), "torchao")
    assert count == {"float8": 6 if reentrant is None else 8, "high": 3}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_histories_and_weights_are_those_of_the_run_that_keeps_its_activations(
    reentrant: bool, accumulate: int
) -> None:
    (plain, _), (model, _) = (train(how, DELAYED, accumulate_grad_batches=accumulate) for how in (None, reentrant))
    [wanted], [found] = (histories_of(net.modules()) for net in (plain, model))
    for past in found.state_dict().values():
        assert (past > 0).sum(dim=1).tolist() == [3, 3, 3], "one entry a window"
    assert same(found.state_dict(), wanted.state_dict()) and same(weights(model), weights(plain))
