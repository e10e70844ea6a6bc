"""Lightning#9599: the clipping threshold is meant for true gradients, not for those multiplied by the loss scale."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision
from tests.support.models import ExactLinear
from tests.support.training import amp_fp16, fit, stock_fp16

TRUE_NORM_2 = [torch.ones(4)]


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


class Manual(ExactLinear):
    def __init__(self, make_optimizer: Any = None, algorithm: str = "norm", threshold: float = 1.0) -> None:
        super().__init__(make_optimizer=make_optimizer)
        self.automatic_optimization = False
        self.algorithm, self.threshold = algorithm, threshold

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, self.threshold, self.algorithm)
        optimizer.step()


def run(plugin: Any, manual: bool, make_optimizer: Any, algorithm: str, threshold: float) -> ExactLinear:
    if manual:
        model: ExactLinear = Manual(make_optimizer, algorithm, threshold)
        fit(model, plugin, TRUE_NORM_2)
    else:
        model = ExactLinear(make_optimizer=make_optimizer)
        fit(model, plugin, TRUE_NORM_2, gradient_clip_val=threshold, gradient_clip_algorithm=algorithm)
    return model


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_norm_2_clipped_at_1_has_norm_1_at_the_step(precision: str, manual: bool, make_optimizer: Any) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model = run(plugin, manual, make_optimizer, "norm", 1.0)
    assert float(model.at_step[0].norm()) == pytest.approx(1.0, rel=1e-5)
    assert float(model.moved().norm()) == pytest.approx(1.0, rel=1e-5)
    assert plugin.last_report is not None and plugin.last_report.grad_norm == pytest.approx(2.0)


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_value_clipping_bounds_the_true_elements(precision: str, manual: bool, make_optimizer: Any) -> None:
    plugin = amp_fp16() if precision == "16-mixed" else AmpPrecision(precision)
    model = run(plugin, manual, make_optimizer, "value", 0.25)
    assert torch.equal(model.at_step[0], torch.full((4,), 0.25))
    assert torch.equal(model.moved(), torch.full((4,), 0.25))


@pytest.mark.parametrize("make_optimizer", [None, fused])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(("algorithm", "threshold"), [("norm", 2.5), ("value", 1.5)])
def test_gradients_below_the_threshold_pass_unchanged(
    algorithm: str, threshold: float, manual: bool, make_optimizer: Any
) -> None:
    model = run(amp_fp16(), manual, make_optimizer, algorithm, threshold)
    assert torch.equal(model.moved(), torch.ones(4))


@pytest.mark.parametrize("make_optimizer", [None, fused])
def test_an_accumulated_gradient_is_clipped_as_a_whole(make_optimizer: Any) -> None:
    model = ExactLinear(make_optimizer=make_optimizer)
    fit(model, amp_fp16(), [torch.ones(4)] * 4, accumulate_grad_batches=4, gradient_clip_val=1.0)
    assert float(model.moved().norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("make_optimizer", [None, fused])
def test_a_module_that_clips_in_its_own_hook_meets_true_gradients(make_optimizer: Any) -> None:
    class OwnClipping(ExactLinear):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    model = OwnClipping(make_optimizer=make_optimizer)
    fit(model, amp_fp16(), TRUE_NORM_2)
    assert float(model.moved().norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("wrapped", [False, True], ids=["torch optimizer", "Lightning's wrapper"])
@pytest.mark.parametrize("make_optimizer", [None, fused])
def test_unscaling_by_hand_before_own_clipping_is_done_once(make_optimizer: Any, wrapped: bool) -> None:
    """The idiom from torch's documentation: ``scaler.unscale_``, clip, step."""

    class ByHand(ExactLinear):
        def __init__(self) -> None:
            super().__init__(make_optimizer=make_optimizer)
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            self.trainer.precision_plugin.scaler.unscale_(optimizer if wrapped else optimizer.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    model = ByHand()
    fit(model, amp_fp16(), TRUE_NORM_2 * 2)
    assert model.moved().tolist() == pytest.approx([1.0] * 4, rel=1e-5)


def test_stock_manual_clipping_leaves_a_thousandth_of_the_gradient() -> None:
    model = run(stock_fp16(), True, None, "norm", 1.0)
    assert float(model.moved().norm()) == pytest.approx(1 / 1024, rel=1e-3)


def test_stock_refuses_to_clip_with_a_fused_optimizer() -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        run(stock_fp16(), False, fused, "norm", 1.0)
