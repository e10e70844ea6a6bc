"""FP8 all-gather under FSDP2, by torchao: what travels, what a checkpoint holds, and where it is refused."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.callbacks import DtypeCensus
from lightning_amp_plus.integration import fp8_gather
from tests.distributed.test_fp8_over_ranks import TORCHAO, Regressor
from tests.support.sharding import outcomes_of, outcomes_or_failure
from tests.support.training import ResumableLoader, make_trainer

WARM_UP = PrecisionPolicy("bf16", rules=TORCHAO.rules, fp8_after_steps=2)


class Gathers(TorchDispatchMode):
    """Bytes that all-gathers send, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func) or "all_gather" in str(func):
            sent = [value for value in torch.utils._pytree.tree_leaves(args) if isinstance(value, Tensor)][-1]
            name = str(sent.dtype).removeprefix("torch.")
            self.bytes[name] = self.bytes.get(name, 0) + sent.nbytes
        return func(*args, **(kwargs or {}))


class Watched(Regressor):
    def __init__(self, gather: bool) -> None:
        super().__init__(sharded=True, gather=gather)
        self.bytes: dict[str, int] = {}
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with Gathers() as seen:
            loss = super().training_step(batch, batch_idx)
        self.bytes, self.losses = seen.bytes, [*self.losses, float(loss.detach())]
        return loss

    def configure_optimizers(self) -> Any:
        # With a state: Lightning cannot read the whole checkpoint of an optimizer that has none.
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch).float(), batch.sum(1, keepdim=True)))


def mine(count: int = 6) -> list[Tensor]:
    batches = torch.randn(count, 32, 16, generator=torch.Generator().manual_seed(1))
    return [batch.chunk(2)[dist.get_rank()] for batch in batches]


def trained(gather: bool, precision: Any = TORCHAO, **arguments: Any) -> tuple[L.Trainer, Watched]:
    model = Watched(gather)
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=arguments.pop("distributed", False))
    trainer = make_trainer(AmpPrecision(precision), strategy=strategy, devices=2, **arguments)
    trainer.fit(model, ResumableLoader(mine()), ResumableLoader(mine(2)))
    return trainer, model


def traffic(gather: bool) -> Any:
    _, model = trained(gather)
    return {"bytes": model.bytes, "losses": model.losses}


def warm_up() -> Any:
    trainer, model = trained(True, WARM_UP)
    return {"losses": model.losses, "val": float(trainer.callback_metrics["val"])}


def census() -> Any:
    callback = DtypeCensus()
    trained(True, callbacks=[callback])
    assert callback.last is not None
    return {"rows": {n: dict(r) for n, r in callback.last.modules.items()}, "text": str(callback.last),
            "flags": [flag.kind for flag in callback.last.flags]}  # fmt: skip


def checkpoint(distributed: bool) -> Any:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "a.ckpt")
    whole = trained(True, max_epochs=2)[1]
    trainer, first = trained(True, distributed=distributed)
    trainer.save_checkpoint(path)
    model = Watched(True)
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=distributed)
    trainer = make_trainer(AmpPrecision(TORCHAO), strategy=strategy, devices=2, max_epochs=2)
    trainer.fit(model, ResumableLoader(mine()), ckpt_path=path)
    types = set()
    if not distributed:
        state = torch.load(path, weights_only=True)["state_dict"]
        types = {type(value).__name__ for value in state.values()}
        Regressor().load_state_dict(state)
    local = {type(value.to_local()).__name__ for value in model.state_dict().values()}
    return {"resumed": first.losses + model.losses, "whole": whole.losses, "types": types, "local": local}


def jobs() -> Any:
    return outcomes_of(
        {
            "plain": partial(traffic, False),
            "gathered": partial(traffic, True),
            "warm-up": warm_up,
            "census": census,
            "full": partial(checkpoint, False),
            "distributed": partial(checkpoint, True),
        }
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return outcomes_or_failure(jobs, 2)


def test_weights_travel_in_fp8_and_the_run_is_the_same_but_for_rounding(ranks: list[dict[str, Any]]) -> None:
    plain, gathered = ranks[0]["plain"], ranks[0]["gathered"]
    assert sum(gathered["bytes"].values()) < 0.6 * sum(plain["bytes"].values()), (plain["bytes"], gathered["bytes"])
    assert gathered["losses"] == pytest.approx(plain["losses"], rel=0.05) and gathered["losses"] != plain["losses"]


def test_outside_of_fp8_the_gathered_weights_are_multiplied_in_bf16(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["warm-up"]
    assert found["losses"] == pytest.approx(ranks[0]["gathered"]["losses"], rel=0.1)
    assert found["losses"][0] != ranks[0]["gathered"]["losses"][0] and found["val"] > 0


def test_the_census_sees_gemms_in_fp8_of_gathered_weights(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["census"]
    assert "error" not in found, found["error"]
    rows = [row for row in found["rows"].values() if row["compute"] == "fp8"]
    assert rows and all((row["input"], row["weight"]) == ("e4m3", "e4m3") for row in rows), found["text"]
    assert {row["parameter"] for row in rows} == {row["reduction"] for row in rows} == {"fp32"}
    assert not found["flags"], found["text"]


@pytest.mark.parametrize("kind", ["full", "distributed"])
def test_a_checkpoint_holds_plain_tensors_and_resumes_bit_for_bit(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        assert rank[kind]["resumed"] == rank[kind]["whole"]
        assert rank[kind]["local"] == {"Tensor"} and rank[kind]["types"] <= {"Tensor"}


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("fp8-mixed", ["backend is reference"]),
        ("bf16-mixed", ["nothing computes in FP8"]),
        (PrecisionPolicy("bf16", rules=[Rule("net.0", compute="fp8", recipe="rowwise", backend="torchao")]), ["net.0"]),
    ],
)
def test_a_model_without_such_a_layer_is_refused(precision: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"no layer can be gathered in FP8") as caught:
        AmpPrecision(precision).gather_in_fp8(Regressor())
    assert all(word in str(caught.value) for word in ("backend='torchao'", *words))


def test_a_tied_weight_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    policy = PrecisionPolicy("bf16", rules=[Rule("type:Linear", compute="fp8", recipe="current", backend="torchao")])
    assert AmpPrecision(policy).gather_in_fp8(model) == ["2"]
    assert model[1].weight is model[0].weight


def test_a_gathered_layer_does_not_leave_fp8() -> None:
    model, plugin = Regressor(), AmpPrecision(TORCHAO)
    gathered = plugin.gather_in_fp8(model)
    plugin.convert_module(model)
    assert plugin.plan is not None
    before = plugin.plan
    for compute in ("bf16", "fp32"):
        with pytest.raises(ValueError, match=rf"{gathered[0]!r} cannot compute in {compute}: gather_in_fp8"):
            plugin.set_route(gathered[0], compute)  # type: ignore[arg-type]
    assert plugin.plan is before
    reference = PrecisionPolicy("bf16", rules=[Rule("net.*", compute="fp8", backend="reference")])
    with pytest.raises(ValueError, match="cannot compute in FP8 by reference"):
        AmpPrecision(reference).convert_module(model)


def test_a_model_that_is_sharded_already_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_gather, "is_dtensor", lambda _: True)
    with pytest.raises(ValueError, match=r"'net\.0' is sharded already.*return early once it is done"):
        AmpPrecision(TORCHAO).gather_in_fp8(Regressor())
