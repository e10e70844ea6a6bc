"""read: one collective and one transfer for all monitors, whatever is summed, maximized or each rank's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_amp_plus.callbacks.readout import Measurement, read
from lightning_amp_plus.scaling.consensus import Consensus


class TwoRanks(Consensus):
    """As if another rank had twice the numbers."""

    world_size = 2

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @override
    def gather(self, values: Tensor) -> Tensor:
        self.sizes.append(values.numel())
        return torch.stack([values, 2 * values])


def test_each_column_is_reduced_in_its_own_way_in_one_exchange() -> None:
    ranks = TwoRanks()
    mixed = Measurement(torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]), ("sum", "max", "min", "own"))
    alone = Measurement(torch.tensor([[9.0], [10.0]]), ("own",))
    sums = Measurement(torch.ones(3, 1, dtype=torch.float32), ("sum",))
    empty = Measurement(torch.zeros(0, 2), ("sum", "max"))
    found = read([alone, mixed, empty, sums], ranks)
    assert ranks.sizes == [8 + 3]  # what is each rank's own alone stays out
    assert found[0].tolist() == [[9.0], [10.0]] and found[2].shape == (0, 2)
    assert found[1].tolist() == [[3.0, 4.0, 3.0, 4.0], [15.0, 12.0, 7.0, 8.0]] and found[3].tolist() == [[3.0]] * 3


def test_ranks_exchange_nothing_where_all_is_their_own() -> None:
    ranks = TwoRanks()
    assert read([Measurement(torch.ones(2, 1), ("own",))], ranks)[0].tolist() == [[1.0], [1.0]] and not ranks.sizes
    assert read([], ranks) == []


def test_there_is_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers: list[int] = []
    original = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: (transfers.append(self.numel()), original(self))[1])
    read([Measurement(torch.ones(2, 3), ("sum", "max", "own")) for _ in range(5)], Consensus())
    assert transfers == [30]
