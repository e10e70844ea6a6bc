"""TE#656: ranks share amax values in the group that was named and in no wider one, and the manifest says which it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.fp8 import DelayedScaling
from lightning_amp_plus.fp8.delayed import OPERANDS, histories_of
from tests.fp8.test_training import Regressor, batches
from tests.support.sharding import outcomes_or_failure
from tests.support.training import loader, make_trainer, same

POLICY = PrecisionPolicy("bf16", rules=[Rule("body.*", compute="fp8", recipe=DelayedScaling(history=4))])


class Recorded(Regressor):
    """Keeps what this rank says of itself: of all ranks' words a checkpoint's file has those of rank 0."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.manifest = checkpoint["lightning_amp_plus"]


def on_a_rank(folder: str, grouped: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plugin = AmpPrecision(POLICY, process_group=pairs[rank // 2] if grouped else None)
    model = Recorded()
    mine = [batch * 2.0**rank for batch in batches(3)]  # each rank has larger inputs than the one before
    trainer = make_trainer(plugin, strategy=DDPStrategy(), devices=4, use_distributed_sampler=False)
    trainer.fit(model, loader(mine))
    trainer.save_checkpoint(f"{folder}/{grouped}.ckpt")
    [history] = histories_of(model.modules())
    one = torch.ones(())
    return {
        "scales": {
            name: torch.stack([history.scale(row, operand, one) for operand in OPERANDS])
            for row, name in enumerate(history.names)
        },
        "inputs": [past.item() for past in history.state_dict()["body.0"][0, :3].flip(0)],
        "own inputs": [batch.abs().max().bfloat16().item() for batch in mine],
        "groups": {name: module["amax_group"] for name, module in model.manifest["fp8"]["modules"].items()},
    }


def on_each_rank(folder: str) -> dict[str, dict[str, Any]]:
    return {"pairs": on_a_rank(folder, True), "world": on_a_rank(folder, False)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return outcomes_or_failure(on_each_rank, 4, str(folder))


def test_scales_are_equal_inside_a_group_and_differ_between_groups(ranks: list[dict[str, Any]]) -> None:
    scales = [rank["pairs"]["scales"] for rank in ranks]
    assert same(scales[0], scales[1]) and same(scales[2], scales[3])
    assert set(scales[0]) == {"body.0", "body.2"}
    # Inputs of the second pair are four times as large. DDP keeps the weights of all ranks equal.
    assert scales[0]["body.0"][0] == 4 * scales[2]["body.0"][0]
    assert scales[0]["body.0"][1] == scales[2]["body.0"][1]
    for rank, largest in zip(ranks, (1, 1, 3, 3), strict=True):
        assert rank["pairs"]["inputs"] == ranks[largest]["pairs"]["own inputs"]


def test_without_a_group_it_is_the_world(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["world"]["inputs"] == ranks[3]["world"]["own inputs"]
        assert same(rank["world"]["scales"], ranks[0]["world"]["scales"])
        assert rank["world"]["groups"] == {"body.0": None, "body.2": None}


def test_the_manifest_names_the_ranks_of_the_group(ranks: list[dict[str, Any]], folder: Path) -> None:
    for rank, group in zip(ranks, ("[0, 1]", "[0, 1]", "[2, 3]", "[2, 3]"), strict=True):
        assert rank["pairs"]["groups"] == {"body.0": f"ranks {group}", "body.2": f"ranks {group}"}
    saved = torch.load(folder / "True.ckpt", weights_only=True)["lightning_amp_plus"]["fp8"]["modules"]
    assert {module["amax_group"] for module in saved.values()} == {"ranks [0, 1]"}
