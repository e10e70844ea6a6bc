"""ao#4300: with an operand's rows spread over two ranks, its scale is that of one rank that has them all."""

from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_amp_plus import AmpPrecision, PrecisionPolicy, Rule
from lightning_amp_plus.fp8 import DelayedScaling
from lightning_amp_plus.fp8.delayed import OPERANDS, histories_of
from tests.support.ranks import run_on_ranks
from tests.support.training import loader, make_trainer, same

STEPS = 4


class Still(L.LightningModule):
    """Two FP8 layers that never move, so that both runs have the same operands; its loss is a sum over rows.

    (A mean over the rows of a rank would make each rank's gradients larger, and rightly so.)
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.body(batch).float() * batch.sum(1, keepdim=True)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def scales(parts: int, reduce_amax: bool = True) -> dict[str, Tensor]:
    """The scales after a few steps over this rank's rows of each batch, by layer; in the order of ``OPERANDS``."""
    rank = dist.get_rank() if parts > 1 else 0
    batches = torch.randn(STEPS, 32, 16, generator=torch.Generator().manual_seed(1))
    batches[-1, 3] *= 8  # the largest of all lies in the first half only
    mine = [batch.chunk(parts)[rank] for batch in batches]
    recipe = DelayedScaling(history=STEPS, reduce_amax=reduce_amax)
    plugin = AmpPrecision(PrecisionPolicy("bf16", rules=[Rule("body.*", compute="fp8", recipe=recipe)]))
    model = Still()
    strategy: Any = DDPStrategy() if parts > 1 else "auto"
    make_trainer(plugin, strategy=strategy, devices=parts, use_distributed_sampler=False).fit(model, loader(mine))
    [history] = histories_of(model.modules())
    one = torch.ones(())
    return {
        name: torch.stack([history.scale(row, operand, one) for operand in OPERANDS])
        for row, name in enumerate(history.names)
    }


def both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return scales(2), scales(2, reduce_amax=False)


def test_two_ranks_have_the_scales_of_one() -> None:
    whole, ranks = scales(1), run_on_ranks(both, 2)
    assert set(whole) == {"body.0", "body.2"}
    for shared, _ in ranks:
        assert same(shared, whole)
    # Without sharing, the rank that does not have the largest rows scales by what it has.
    alone = [alone for _, alone in ranks]
    assert alone[0]["body.0"][0] == whole["body.0"][0] < alone[1]["body.0"][0]
