"""DDP on two ranks: equal to one process on the whole batch, one small collective a window, no rank left waiting."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from lightning_amp_plus import AmpPrecision, LossScale
from tests.support.faults import INF
from tests.support.models import sgd
from tests.support.ranks import run_on_ranks
from tests.support.sharding import RankedRegressor, counted_collectives, fit_on_rank, halves, outcomes_of
from tests.support.training import SCALE, amp_fp16, fit, regression_batches, reports_of, same, stock_fp16, weights

# name: (arguments of DDPStrategy, micro-batches to a window, bound on the relative error of the whole update)
VARIANTS: dict[str, tuple[dict[str, Any], int, float]] = {
    "plain": ({}, 1, 2e-3),
    "no_sync": ({}, 4, 2e-3),
    "find_unused_parameters": ({"find_unused_parameters": True}, 1, 2e-3),
    "find_unused_parameters, no_sync": ({"find_unused_parameters": True}, 2, 2e-3),
    "static_graph": ({"static_graph": True}, 1, 2e-3),
    "gradient_as_bucket_view": ({"gradient_as_bucket_view": True}, 1, 2e-3),
    "gradient_as_bucket_view, no_sync": ({"gradient_as_bucket_view": True}, 2, 2e-3),
    "bf16 comm hook": ({"ddp_comm_hook": bf16_compress_hook}, 1, 1e-2),
    "bf16 comm hook, no_sync": ({"ddp_comm_hook": bf16_compress_hook}, 2, 1e-2),
}


class HalfUsed(RankedRegressor):
    """Has a layer that this rank uses in the first two micro-batches only, or never."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 1)
        nn.init.constant_(self.extra.weight, 0.125)
        nn.init.zeros_(self.extra.bias)
        self.uses = uses

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + self.extra(batch[0]).float().square().mean() if self.uses and self.seen <= 2 else loss


class Tokens(RankedRegressor):
    """Sums its loss over the rows of a batch and says how many there were."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        total = nn.functional.mse_loss(self.net(x).float(), y, reduction="sum")
        return {"loss": total, "num_items": self.count_of(len(x))}

    def count_of(self, rows: int) -> Any:
        return rows


class TensorTokens(Tokens):
    def count_of(self, rows: int) -> Any:
        return torch.tensor(rows)


class Manual(RankedRegressor):
    """Optimizes by hand what ``script`` says, without exchanging gradients; errors are kept, not raised."""

    def __init__(self, script: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.script = script
        self.errors: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        try:
            self.script(self, self.loss(batch))
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def configure_optimizers(self) -> Any:
        return [sgd(self.net.first.parameters()), sgd(self.net.third.parameters())]


def backward_here(model: Manual, loss: Tensor) -> None:
    with model.trainer.strategy.model.no_sync():
        model.manual_backward(loss)


def backward_on_rank_zero(model: Manual, loss: Tensor) -> None:
    if dist.get_rank() == 0:
        backward_here(model, loss)
    for optimizer in model.optimizers():
        optimizer.step()
        optimizer.zero_grad()


def gradients_of_half_the_model_on_rank_one(model: Manual, loss: Tensor) -> None:
    backward_here(model, loss)
    if dist.get_rank() == 1:
        model.net.first.zero_grad()
    for optimizer in model.optimizers():
        optimizer.step()
    for optimizer in model.optimizers():
        optimizer.zero_grad()


def raw_backward_on_rank_one(model: Manual, loss: Tensor) -> None:
    if dist.get_rank() == 1:
        loss.backward()
    else:
        backward_here(model, loss)
    model.optimizers()[0].step()


def manual(script: Any, plugin: Any, count: int = 3, faults: Any = None) -> dict[str, Any]:
    model = Manual(script)
    model.faults = dict(faults or {})
    start = weights(model)
    reports = reports_of(plugin) if isinstance(plugin, AmpPrecision) else []
    batches = halves(regression_batches(count), 2)[dist.get_rank()]
    with counted_collectives() as counts:
        fit_on_rank(model, plugin, DDPStrategy(), batches)
    return {
        "errors": model.errors,
        "outcomes": [report.outcome for report in reports],
        "next_scales": [report.next_scale for report in reports],
        "overflow_ranks": [report.overflow_ranks for report in reports],
        "scaler": plugin.scaler.state_dict(),
        "untouched": same(start, weights(model)),
        "counts": dict(counts),
    }


def update_of(model: L.LightningModule) -> Tensor:
    start = type(model)(False) if isinstance(model, HalfUsed) else type(model)()
    before = weights(start)
    return torch.cat([(value - before[name]).flatten() for name, value in weights(model).items()])


def variant(name: str) -> dict[str, Any]:
    """The whole update of a run on two ranks and of one on the whole batch, and the scales of both."""
    arguments, accumulate, _ = VARIANTS[name]
    unused = "unused" in name
    rank = dist.get_rank()

    def plugin() -> AmpPrecision:
        return AmpPrecision("16-mixed", loss_scale=LossScale(init=SCALE, growth_interval=2))

    batches = regression_batches(8)
    here = HalfUsed(rank == 0) if unused else RankedRegressor()
    parallel = plugin()
    reports = reports_of(parallel)
    fit_on_rank(here, parallel, DDPStrategy(**arguments), halves(batches, 2)[rank], accumulate_grad_batches=accumulate)
    alone = HalfUsed(True) if unused else RankedRegressor()
    if unused:  # only rank 0's rows go through the extra layer: half the whole batch, so half the mean
        alone.loss = lambda batch: half_loss(alone, batch)  # type: ignore[method-assign]
    whole = plugin()
    fit(alone, whole, batches, accumulate_grad_batches=accumulate)
    return {
        "update": update_of(here),
        "reference": update_of(alone),
        "scales": [report.next_scale for report in reports],
        "reference scales": list(whole.history.scales),
        "extra moved": unused and bool((here.extra.bias.detach() != 0).all()),
    }


def half_loss(model: HalfUsed, batch: Any) -> Tensor:
    loss = RankedRegressor.loss(model, batch)
    rows = batch[0][: len(batch[0]) // 2]
    return loss + 0.5 * model.extra(rows).float().square().mean() if model.seen <= 2 else loss


# Rows of each micro-batch on each rank; two micro-batches to a window.
ROWS = ([5, 1, 3, 4], [2, 7, 1, 1])


def items(model: RankedRegressor, plugin: Any, rows: Any = ROWS) -> dict[str, Any]:
    x, y = (torch.cat([batch[i] for batch in regression_batches(20)]) for i in (0, 1))
    at, mine = 0, []
    windows: list[list[Tensor]] = [[], []]
    for step in range(4):
        for rank in range(2):
            count = rows[rank][step]
            part = slice(at, at + count)
            at += count
            windows[step // 2].append(torch.arange(part.start, part.stop))
            if rank == dist.get_rank():
                mine.append((x[part], y[part]))
    fit_on_rank(model, plugin, DDPStrategy(), mine, accumulate_grad_batches=2)
    reference = RankedRegressor()
    optimizer = sgd(reference.parameters())
    for window in windows:
        chosen = torch.cat(window)
        optimizer.zero_grad()
        nn.functional.mse_loss(reference.net(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return {"update": update_of(model), "reference": update_of(reference)}


class Tamper(L.Callback):
    """Changes rank 1's scale by hand after the first batch; saves after the second, if asked to."""

    def __init__(self, folder: str | None = None, value: float = 2.0) -> None:
        self.folder, self.value = folder, value
        self.error = ""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 1:
            trainer.precision_plugin.scaler.update(self.value)
        if trainer.global_step == 2 and self.folder is not None:
            try:
                trainer.save_checkpoint(Path(self.folder, f"{self.value}.ckpt"))
            except RuntimeError as error:
                self.error = str(error)


def tampered(value: float, every: int | None, folder: str | None = None) -> Any:
    callback = Tamper(folder, value)
    plugin = amp_fp16(check_ranks_every=every)
    batches = halves(regression_batches(6), 2)[dist.get_rank()]
    fit_on_rank(RankedRegressor(), plugin, DDPStrategy(), batches, callbacks=[callback])
    return {"save": callback.error, "windows": plugin.applied_steps}


def counts_of(plugin: Any, accumulate: int) -> dict[str, int]:
    batches = halves(regression_batches(8), 2)[dist.get_rank()]
    with counted_collectives() as counts:
        fit_on_rank(RankedRegressor(), plugin, DDPStrategy(), batches, accumulate_grad_batches=accumulate)
    return dict(counts)


def other_group() -> Any:
    groups = [dist.new_group([0]), dist.new_group([1])]
    plugin = amp_fp16(process_group=groups[1 - dist.get_rank()])
    fit_on_rank(RankedRegressor(), plugin, DDPStrategy(), halves(regression_batches(2), 2)[dist.get_rank()])


def everything(folder: str) -> dict[str, Any]:
    jobs: dict[str, Any] = {
        **{name: partial(variant, name) for name in VARIANTS},
        "no backward": lambda: manual(backward_on_rank_zero, amp_fp16()),
        "no backward, overflow": lambda: manual(backward_on_rank_zero, amp_fp16(), faults={1: INF}),
        "no backward, stock": lambda: manual(backward_on_rank_zero, stock_fp16()),
        "half a model": lambda: manual(gradients_of_half_the_model_on_rank_one, amp_fp16()),
        "items, fp32": lambda: items(Tokens(), AmpPrecision("32-true")),
        "items, fp32 unchecked": lambda: items(Tokens(), AmpPrecision("32-true", check_finite=False)),
        "items, fp16": lambda: items(Tokens(), amp_fp16()),
        "items, tensor": lambda: items(TensorTokens(), AmpPrecision("32-true")),
        "items, stock": lambda: items(Tokens(), MixedPrecision("bf16-mixed", "cpu")),
        "items, on one rank only": lambda: items([Tokens, RankedRegressor][dist.get_rank()](), AmpPrecision("32-true")),
        "tampered": lambda: tampered(2.0, 2),
        "tampered, unwatched": lambda: tampered(2.0, None, folder),
        "untouched": lambda: tampered(SCALE, 2, folder),
        "counts, 1": lambda: counts_of(amp_fp16(), 1),
        "counts, 4": lambda: counts_of(amp_fp16(), 4),
        "counts, stock 1": lambda: counts_of(stock_fp16(), 1),
        "counts, stock 4": lambda: counts_of(stock_fp16(), 4),
        "other group": other_group,
    }
    return outcomes_of(jobs)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(everything, 2, folder)


def both(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    assert [rank.get("error") for rank in found] == [None, None]
    return found


def relative(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


# ---------------------------------------------------------------- equal to one process


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_train_like_one_process_on_the_whole_batch(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = both(ranks, name)
    assert torch.equal(first["update"], second["update"])
    assert float(first["reference"].norm()) > 0.1
    assert relative(first["update"], first["reference"]) < VARIANTS[name][2]


@pytest.mark.parametrize("name", VARIANTS)
def test_scales_grow_on_both_ranks_as_in_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = both(ranks, name)
    assert first["scales"] == second["scales"] == first["reference scales"]
    assert first["scales"][-1] > SCALE


def test_a_layer_that_one_rank_only_uses_is_trained_on_both(ranks: list[dict[str, Any]]) -> None:
    assert [rank["extra moved"] for rank in both(ranks, "find_unused_parameters")] == [True, True]


# ---------------------------------------------------------------- nobody waits


def test_a_rank_without_backward_takes_part_and_nobody_waits(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "no backward")
    assert first["outcomes"] == ["applied"] * 6
    assert second["outcomes"] == ["skipped_no_backward"] * 6
    assert (first["untouched"], second["untouched"]) == (False, True)
    assert first["scaler"] == second["scaler"]
    assert first["errors"] == second["errors"] == []


def test_a_rank_without_backward_learns_of_the_others_overflow(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "no backward, overflow")
    # The fault lies above the first layer, which is the first optimizer's; the second one's gradients are finite.
    assert first["outcomes"] == ["applied", "applied", "skipped_overflow", "applied", "applied", "applied"]
    assert first["next_scales"] == second["next_scales"] == [SCALE] * 2 + [SCALE / 2] * 4
    assert first["overflow_ranks"][2] == (0,)
    assert first["scaler"] == second["scaler"]


def test_stock_raises_on_the_rank_without_backward(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "no backward, stock")
    assert first["errors"] == []
    assert len(second["errors"]) == 3


def test_an_optimizer_without_gradients_on_one_rank_is_said_so_there(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "half a model")
    assert first["outcomes"] == ["applied"] * 6
    assert second["outcomes"] == ["skipped_no_grads", "applied"] * 3
    assert first["scaler"] == second["scaler"]


def raw_backward() -> dict[str, Any]:
    return manual(raw_backward_on_rank_one, amp_fp16(), 1)


def test_a_raw_backward_on_one_rank_is_an_error_there_and_a_skip_elsewhere() -> None:
    first, second = run_on_ranks(raw_backward, 2, timeout=40.0)
    (error,) = second["errors"]
    for words in ("RuntimeError", "manual_backward", "not made from a scaled loss"):
        assert words in error
    assert first["errors"] == []
    assert first["outcomes"] == ["skipped_overflow"]
    assert (first["untouched"], second["untouched"]) == (True, True)


def test_a_group_without_this_rank_is_refused(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        for words in ("ValueError", "process_group", f"rank {number} is not part of the group"):
            assert words in rank["other group"]["error"]


# ---------------------------------------------------------------- sums over items


@pytest.mark.parametrize(
    ("name", "bound"),
    [("fp32", 1e-6), ("fp32 unchecked", 1e-6), ("fp16", 2e-3), ("tensor", 1e-6)],
)
def test_summed_losses_over_unequal_ranks_give_the_mean_over_all_items(
    ranks: list[dict[str, Any]], name: str, bound: float
) -> None:
    first, second = both(ranks, f"items, {name}")
    assert torch.equal(first["update"], second["update"])
    assert relative(first["update"], first["reference"]) < bound


def a_rank_without_items() -> dict[str, Any]:
    return items(Tokens(), AmpPrecision("32-true"), ([3, 2, 4, 1], [1, 2, 0, 0]))


def test_a_rank_whose_window_held_no_items_takes_part_with_none() -> None:
    first, second = run_on_ranks(a_rank_without_items, 2, timeout=40.0)
    assert torch.equal(first["update"], second["update"])
    assert relative(first["update"], first["reference"]) < 1e-6


def test_items_counted_on_one_rank_only_are_an_error_on_both(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "num_items" in rank["items, on one rank only"].get("error", "no error")


def test_stock_knows_no_items(ranks: list[dict[str, Any]]) -> None:
    first, _ = both(ranks, "items, stock")
    assert relative(first["update"], first["reference"]) > 0.5


# ---------------------------------------------------------------- ranks that have split


def test_ranks_compared_every_two_windows_stop_with_both_values(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for words in ("RuntimeError", "after window 1", "loss scale is 1024 on rank 0 and 2 on rank 1"):
            assert words in rank["tampered"]["error"]


def test_a_checkpoint_of_ranks_that_disagree_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "tampered, unwatched"):
        for words in ("save of a checkpoint", "refused", "1024 on rank 0 and 2 on rank 1"):
            assert words in rank["save"]


def test_ranks_that_agree_are_left_alone(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "untouched"):
        assert rank == {"save": "", "windows": 6}


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_verdict_costs_one_all_reduce_a_window_over_stock_and_nothing_else(
    ranks: list[dict[str, Any]], accumulate: int
) -> None:
    for ours, stock in zip(
        both(ranks, f"counts, {accumulate}"), both(ranks, f"counts, stock {accumulate}"), strict=True
    ):
        extra = Counter(ours)
        extra.subtract(stock)
        assert stock["allreduce_"] >= 8 // accumulate
        assert {name: count for name, count in extra.items() if count} == {"allreduce_": 8 // accumulate}


def test_two_optimizers_cost_one_all_reduce_each_step(ranks: list[dict[str, Any]]) -> None:
    for ours, stock in zip(both(ranks, "no backward"), both(ranks, "no backward, stock"), strict=True):
        assert ours["counts"]["allreduce_"] - stock["counts"].get("allreduce_", 0) == 6
