"""pytorch#67590: whether a step was skipped must be something one can read."""

from typing import Any

import pytest

from lightning_amp_plus import AmpPrecision
from tests.support.faults import INF, KINDS, Fault
from tests.support.models import TinyRegressor, adamw, fused_adamw, fused_sgd_momentum, sgd_momentum
from tests.support.training import (
    WeightTrace,
    amp_fp16,
    fit,
    outcomes,
    regression_batches,
    reports_of,
    stock_bf16,
    stock_fp16,
)

PLUGINS = {
    "16-mixed": amp_fp16,
    "bf16-mixed": lambda: AmpPrecision("bf16-mixed"),
    "32-true": lambda: AmpPrecision("32-true"),
}


@pytest.mark.parametrize("fault", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw, sgd_momentum, fused_sgd_momentum])
@pytest.mark.parametrize("precision", PLUGINS)
def test_one_bad_step_is_skipped_and_said_so_and_the_next_is_applied(
    precision: str, make_optimizer: Any, fault: Fault
) -> None:
    plugin, trace = PLUGINS[precision](), WeightTrace()
    reports = reports_of(plugin)
    fit(TinyRegressor(make_optimizer, faults={1: fault}), plugin, regression_batches(3), callbacks=[trace])
    assert outcomes(reports) == ["applied", "skipped_overflow", "applied"]
    assert trace.moved() == [True, False, True]
    assert plugin.last_report is reports[-1]
    assert (plugin.applied_steps, plugin.history.skipped) == (2, 1)


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw, fused_sgd_momentum])
@pytest.mark.parametrize("fault", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("precision", PLUGINS)
def test_manual_optimization_says_the_same(precision: str, fault: Fault, make_optimizer: Any) -> None:
    plugin, trace = PLUGINS[precision](), WeightTrace()
    reports = reports_of(plugin)
    model = TinyRegressor(make_optimizer, faults={1: fault}, manual=True)
    fit(model, plugin, regression_batches(3), callbacks=[trace])
    assert outcomes(reports) == ["applied", "skipped_overflow", "applied"]
    assert trace.moved() == [True, False, True]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw, sgd_momentum, fused_sgd_momentum])
def test_a_skipped_first_step_leaves_no_trace_in_weights_or_optimizer(make_optimizer: Any, manual: bool) -> None:
    """The run that skips its first batch ends where the run without that batch ends (both at one static scale)."""
    batches = regression_batches(4)
    skipped = TinyRegressor(make_optimizer, faults={0: INF}, manual=manual)
    without = TinyRegressor(make_optimizer, manual=manual)
    fit(skipped, AmpPrecision("16-mixed", loss_scale=1024.0), batches)
    fit(without, AmpPrecision("16-mixed", loss_scale=1024.0), batches[1:])
    for left, right in zip(skipped.parameters(), without.parameters(), strict=True):
        assert left.equal(right)


@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw])
def test_the_verdict_can_be_read_in_the_step_it_belongs_to(make_optimizer: Any) -> None:
    plugin = amp_fp16()
    seen: list[str] = []

    class Reads(TinyRegressor):
        def on_train_batch_end(self, *_: Any) -> None:
            assert plugin.last_report is not None
            seen.append(plugin.last_report.outcome)

    fit(Reads(make_optimizer, faults={1: INF}), plugin, regression_batches(3))
    assert seen == ["applied", "skipped_overflow", "applied"]


def test_stock_bf16_steps_into_the_overflow() -> None:
    trace = WeightTrace()
    fit(TinyRegressor(faults={1: INF}), stock_bf16(), regression_batches(3), callbacks=[trace])
    assert not trace.weights[-1]["first.weight"].isfinite().all()


def test_stock_fused_sgd_steps_from_an_uninitialized_momentum_after_a_skipped_first_step() -> None:
    """Only the optimizer's state shows it: whatever lay in that memory is taken for the momentum."""
    skipped = TinyRegressor(fused_sgd_momentum, faults={0: INF})
    trainer = fit(skipped, stock_fp16(), regression_batches(1))
    assert len(trainer.optimizers[0].state) == 4
    ours = TinyRegressor(fused_sgd_momentum, faults={0: INF})
    trainer = fit(ours, amp_fp16(), regression_batches(1))
    buffers = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    assert len(buffers) == 4 and not any(buffer.any() for buffer in buffers)
