"""FP8 coverage over two ranks that do not do alike: work is added up before it is divided, sharded or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks.fp8_coverage import Fp8CoverageMonitor
from tests.support.models import sgd
from tests.support.sharding import CpuFSDPStrategy, fit_on_rank, outcomes_of, outcomes_or_failure, whole_weights
from tests.support.training import same

# Tokens of each rank: through the layer in FP8 and through the other.
TOKENS = ((32, 4), (16, 24))
WIDTH, IN_FP8, OTHER = 16, 32, 48


class Two(L.LightningModule):
    """A layer in FP8 and one that is not, each with inputs of its own."""

    def __init__(self, layout: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.first, self.fp8, self.other = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, IN_FP8),
                nn.Linear(WIDTH, OTHER),
            )
        self.layout, self.laid_out = layout, False

    def configure_model(self) -> None:
        if self.layout is not None and not self.laid_out:
            self.laid_out = True
            self.layout(self)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        left, right = (self.first(part) for part in batch)
        return self.fp8(left).float().square().mean() + self.other(right).float().square().mean()

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


def expected(ranks: tuple[int, ...]) -> dict[str, float]:
    """The shares of these ranks together: ``first`` has two GEMMs a call, the others three."""
    flops = {name: 0 for name in ("first", "fp8", "other")}
    for rank in ranks:
        in_fp8, other = TOKENS[rank]
        flops["first"] += 2 * 2 * (in_fp8 + other) * WIDTH * WIDTH
        flops["fp8"] += 3 * 2 * in_fp8 * WIDTH * IN_FP8
        flops["other"] += 3 * 2 * other * WIDTH * OTHER
    total = sum(flops.values())
    return {
        "fp8/coverage_flops": flops["fp8"] / total,
        "fp8/coverage_flops_without_attention": flops["fp8"] / total,
        "fp8/fallback/rule": (flops["first"] + flops["other"]) / total,
        "fp8/coverage_gemms": 3 / 10,
        "fp8/coverage_gemms_without_attention": 3 / 10,
    }


def shard_layers(model: Any) -> None:
    mesh = model.device_mesh["data_parallel"]
    policy = model.trainer.precision_plugin.fsdp2_policy
    for name in ("first", "fp8", "other", ""):
        unit = model.get_submodule(name)
        fully_shard(unit, mesh=mesh, mp_policy=policy(unit, name))


def fsdp2() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def fsdp1() -> CpuFSDPStrategy:
    return CpuFSDPStrategy(auto_wrap_policy={nn.Linear}, use_orig_params=True)


class Spare(Two):
    """Its ranks have modules of other names."""

    def __init__(self, layout: Any = None) -> None:
        super().__init__(layout)
        setattr(self, f"rank_{dist.get_rank()}", nn.Identity())


def run(
    strategy: Any,
    layout: Any = None,
    backend: str | None = None,
    watch: bool = True,
    model: Any = Two,
    every: int = 2,
    **arguments: Any,
) -> dict[str, Any]:
    made = model(layout)
    monitor = Fp8CoverageMonitor(every)
    policy = PrecisionPolicy("bf16", rules=[Rule("fp8", compute="fp8", backend=backend)])
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes = TOKENS[dist.get_rank()]
    batches = [tuple(torch.randn(size, WIDTH, generator=generator) for size in sizes) for _ in range(2)]
    callbacks: list[L.Callback] = [monitor] if watch else []
    trainer = fit_on_rank(made, AmpPrecision(policy), strategy(), batches, callbacks=callbacks, **arguments)
    last = monitor.last
    return {
        "weights": whole_weights(made),
        "logged": {key: value.item() for key, value in trainer.callback_metrics.items() if key.startswith("fp8/")},
        "rows": None
        if last is None
        else [(r.module, r.role, r.shown_format, r.reason, r.count, r.flops) for r in last.rows],
        "own": None if last is None else last.shares().flops,
        "history": {h: r for m in monitor.layer_histories()[:1] for h, r in zip(m.names, m.rows(), strict=True)},
        "stack": torch._C._len_torch_dispatch_stack(),
        "left": {"training_step", "backward", "optimizer_step"} & set(vars(trainer.strategy)),
    }


def everything() -> dict[str, Any]:
    return outcomes_of(
        {
            "ddp": partial(run, DDPStrategy),
            "ddp, bare": partial(run, DDPStrategy, watch=False),
            "ddp, accumulated": partial(run, DDPStrategy, every=1, accumulate_grad_batches=2),
            "fsdp2": partial(run, fsdp2, shard_layers),
            "fsdp2, bare": partial(run, fsdp2, shard_layers, watch=False),
            "fsdp2, torchao": partial(run, fsdp2, shard_layers, "torchao"),
            "fsdp1": partial(run, fsdp1),
            "fsdp1, bare": partial(run, fsdp1, watch=False),
            "other names": partial(run, DDPStrategy, model=Spare),
        }
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return outcomes_or_failure(everything, 2)


RUNS = ("ddp", "ddp, accumulated", "fsdp2", "fsdp2, torchao", "fsdp1")


@pytest.mark.parametrize("name", RUNS)
def test_the_shares_are_those_of_both_ranks_together(ranks, name):
    together = expected((0, 1))
    if name == "fsdp2, torchao":
        pytest.importorskip("torchao")
    # What each rank did by itself is neither, nor is their mean.
    assert len({expected((rank,))["fp8/coverage_flops"] for rank in (0, 1)} | {together["fp8/coverage_flops"]}) == 3
    for rank in ranks:
        assert "error" not in rank[name], rank[name]["error"]
        assert rank[name]["logged"] == ranks[0][name]["logged"] and "fp8/sqnr/fp8/grad_output" in rank[name]["logged"]
        for key, value in together.items():
            assert rank[name]["logged"][key] == pytest.approx(value), key
        native = together["fp8/coverage_flops"] if name == "fsdp2, torchao" else 0.0
        assert rank[name]["logged"]["fp8/native_flops"] == pytest.approx(native)
        assert rank[name]["history"] == {"first": [0.0], "fp8": [1.0], "other": [0.0]}
        assert rank[name]["stack"] == 0 and rank[name]["left"] == set()


@pytest.mark.parametrize("name", RUNS)
def test_rows_are_the_ranks_own(ranks, name):
    if name == "fsdp2, torchao":
        pytest.importorskip("torchao")
    windows = 2 if name == "ddp, accumulated" else 1
    for rank, (in_fp8, other) in enumerate(TOKENS):
        assert ranks[rank][name]["own"] == expected((rank,))["fp8/coverage_flops"]
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for module, role, _, _, count, flops in ranks[rank][name]["rows"]:
            assert role not in found.setdefault(module, {})
            found[module][role] = count, flops
        first, both = 2 * (in_fp8 + other) * WIDTH * WIDTH, ("fprop", "dgrad", "wgrad")
        assert found == {
            "first": dict.fromkeys(("fprop", "wgrad"), (2 * windows, windows * first)),
            "fp8": dict.fromkeys(both, (windows, windows * 2 * in_fp8 * WIDTH * IN_FP8)),
            "other": dict.fromkeys(both, (windows, windows * 2 * other * WIDTH * OTHER)),
        }


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1"])
def test_the_look_changes_no_number(ranks, name):
    for rank in ranks:
        assert same(rank[name]["weights"], rank[f"{name}, bare"]["weights"])


def test_ranks_with_modules_of_other_names_are_refused(ranks):
    for rank in ranks:
        assert "ranks 0 and 1 have modules of different names" in rank["other names"]["error"]
