"""One verdict, one scale and one set of weights on two ranks, wherever the overflow began: DDP, FSDP1 and FSDP2."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_amp_plus import AmpPrecision, LossScale
from tests.support.faults import INF, INF_LOSS, NAN, Fault
from tests.support.models import adamw, fused_adamw, sgd
from tests.support.sharding import (
    CpuFSDPStrategy,
    GradientFault,
    RankedRegressor,
    WholeWeights,
    fit_on_rank,
    halves,
    outcomes_of,
    outcomes_or_failure,
    shard_units,
    stock_fsdp1,
)
from tests.support.training import SCALE, regression_batches, reports_of, same, stock_fp16

LAYOUTS = ["ddp", "fsdp1", "fsdp2"]
BATCHES = 4  # micro-batches of a run; the fault is in the second or, with accumulation, in the third

# name: (rank that fails, in the loss or in a gradient already exchanged, optimizer, micro-batches to a window)
CASES: dict[str, tuple[int, Fault | float, Any, int]] = {
    "inf before the exchange": (0, INF, sgd, 1),
    "inf before the exchange, fused": (0, INF, fused_adamw, 1),
    "nan before the exchange": (1, NAN, adamw, 1),
    "inf loss": (1, INF_LOSS, sgd, 1),
    "inf loss, fused": (1, INF_LOSS, fused_adamw, 1),
    "inf after the exchange": (0, float("inf"), sgd, 1),
    "inf after the exchange, fused": (0, float("inf"), fused_adamw, 1),
    "nan after the exchange": (1, float("nan"), adamw, 1),
    "nan after the exchange, fused": (1, float("nan"), fused_adamw, 1),
    "inf in an inner micro-batch": (0, INF, adamw, 2),
    "inf in an inner micro-batch, fused": (1, INF, fused_adamw, 2),
    "inf in an inner micro-batch's gradient": (0, float("inf"), sgd, 2),
}
STOCK = ["inf after the exchange", "inf after the exchange, fused"]


def strategy_of(layout: str) -> Any:
    if layout == "ddp":
        return DDPStrategy()
    return (
        CpuFSDPStrategy() if layout == "fsdp1" else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    )


def stock_of(layout: str) -> Any:
    return stock_fsdp1(SCALE) if layout == "fsdp1" else stock_fp16()


def run(layout: str, plugin: Any, case: tuple[int, Fault | float, Any, int]) -> dict[str, Any]:
    """One short training on this rank; what the parent needs to judge it."""
    bad_rank, fault, make_optimizer, accumulate = case
    mine = dist.get_rank() == bad_rank
    at = 1 if accumulate == 1 else 2
    trace = WholeWeights()
    callbacks: list[L.Callback] = [trace]
    if not isinstance(fault, Fault):
        callbacks.append(GradientFault({at} if mine else set(), fault))
    average = EMAWeightAveraging(decay=0.5) if layout == "ddp" else None
    if average is not None:
        callbacks.append(average)
    model = RankedRegressor(
        make_optimizer,
        {at: fault} if mine and isinstance(fault, Fault) else None,
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        shard_units if layout == "fsdp2" else None,
    )
    reports = reports_of(plugin) if isinstance(plugin, AmpPrecision) else []
    trainer = fit_on_rank(
        model,
        plugin,
        strategy_of(layout),
        halves(regression_batches(BATCHES), 2)[dist.get_rank()],
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=BATCHES // accumulate,
    )
    found: dict[str, Any] = {
        "outcomes": [report.outcome for report in reports],
        "scales": [(report.scale, report.next_scale) for report in reports],
        "origins": [report.overflow_origin for report in reports],
        "ranks": [report.overflow_ranks for report in reports],
        "scaler": plugin.scaler.state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "moved": [not same(a, b) for a, b in zip(trace.weights, trace.weights[1:], strict=False)],
        "weights": trace.weights[-1],
    }
    if average is not None:
        found["average"] = {k: v.clone() for k, v in average._average_model.module.state_dict().items()}
    return found


def every_case(layout: str) -> dict[str, Any]:
    def ours() -> AmpPrecision:
        return AmpPrecision("16-mixed", loss_scale=LossScale(init=SCALE, growth_interval=3))

    jobs = {name: (lambda case=case: run(layout, ours(), case)) for name, case in CASES.items()}
    stock = {f"stock: {name}": (lambda name=name: run(layout, stock_of(layout), CASES[name])) for name in STOCK}
    return outcomes_of({**jobs, **stock})


@pytest.fixture(scope="module")
def results() -> Any:
    """For each layout, what each rank found in every case; ranks are started once a layout."""
    known: dict[str, list[dict[str, Any]]] = {}

    def of(layout: str, name: str) -> list[Any]:
        if layout not in known:
            known[layout] = outcomes_or_failure(every_case, 2, layout)
        ranks = [rank[name] for rank in known[layout]]
        assert [rank.get("error") for rank in ranks] == [None, None]
        return ranks

    return of


def found_on(layout: str, name: str) -> tuple[int, ...]:
    """The ranks whose own gradients hold the fault when they look."""
    bad_rank, fault, _, accumulate = CASES[name]
    exchanged_later = accumulate > 1 and layout != "fsdp2"  # DDP and FSDP1 exchange once a window
    if not isinstance(fault, Fault) and not exchanged_later:
        return (bad_rank,)
    # FSDP1 cuts all parameters end to end in two: the layers below the fault lie on rank 0 entirely.
    return (0,) if layout == "fsdp1" and fault is not INF_LOSS else (0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_an_overflow_on_one_rank_is_skipped_on_both(results: Any, layout: str, name: str) -> None:
    accumulate = CASES[name][3]
    windows = BATCHES // accumulate
    skipped = 1
    wanted = ["skipped_overflow" if window == skipped else "applied" for window in range(windows)]
    scale = SCALE / 2
    for rank in results(layout, name):
        assert rank["outcomes"] == wanted
        assert rank["scales"][skipped] == (SCALE, scale)
        assert rank["scaler"]["scale"] == scale
        assert rank["scaler"]["_growth_tracker"] == windows - 2
        assert rank["scheduler"] == windows - 1
        moved = [batch for batch, did in enumerate(rank["moved"]) if did]
        assert moved == [w * accumulate + accumulate - 1 for w in range(windows) if w != skipped]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_both_ranks_end_with_equal_weights_and_averages(results: Any, layout: str, name: str) -> None:
    first, second = results(layout, name)
    assert same(first["weights"], second["weights"])
    assert all(torch.isfinite(weight).all() for weight in first["weights"].values())
    if layout == "ddp":
        assert same(first["average"], second["average"])
        assert all(torch.isfinite(value).all() for value in first["average"].values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_the_report_names_the_ranks_and_the_pass_in_which_it_overflowed(results: Any, layout: str, name: str) -> None:
    origin = "forward" if CASES[name][1] is INF_LOSS else "backward"
    for rank in results(layout, name):
        assert [r for r in rank["ranks"] if r] == [found_on(layout, name)]
        assert [o for o in rank["origins"] if o] == [origin]


# ---------------------------------------------------------------- what stock Lightning does


@pytest.mark.parametrize("name", STOCK)
def test_stock_ddp_splits_when_gradients_already_exchanged_overflow_on_one_rank(results: Any, name: str) -> None:
    first, second = results("ddp", f"stock: {name}")
    assert (first["moved"], second["moved"]) == ([True, False, True, True], [True] * 4)
    assert (first["scaler"]["scale"], second["scaler"]["scale"]) == (SCALE / 2, SCALE)
    assert not same(first["weights"], second["weights"])


def test_stock_fsdp1_splits_with_a_fused_optimizer(results: Any) -> None:
    first, second = results("fsdp1", f"stock: {STOCK[1]}")
    assert (first["scaler"]["scale"], second["scaler"]["scale"]) == (SCALE / 2, SCALE)
    assert first["moved"][1]  # half of the model did


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stock_advances_the_scheduler_on_the_skipped_step(results: Any, layout: str) -> None:
    for rank in results(layout, f"stock: {STOCK[0]}"):
        assert rank["scheduler"] == BATCHES
