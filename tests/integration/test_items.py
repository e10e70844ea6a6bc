"""Numbers of items read off what ``training_step`` returns."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp_plus import AmpPrecision
from lightning_amp_plus.integration.items import ItemCounts
from tests.support.models import ExactLinear
from tests.support.training import fit

LOSS = torch.tensor(1.0)


def counted(*outputs: Any) -> ItemCounts:
    counts = ItemCounts()
    for output in outputs:
        counts.note(output)
    return counts


def with_items(number: Any) -> dict[str, Any]:
    return {"loss": LOSS, "num_items": number}


@pytest.mark.parametrize("output", [LOSS, {"loss": LOSS}, {"loss": LOSS, "num_items": None}])
def test_without_num_items_there_is_no_total(output: Any) -> None:
    assert counted(output, output).total() is None
    assert counted().total() is None


def test_numbers_of_the_host_are_added_on_the_host() -> None:
    total = counted(with_items(3), with_items(0), with_items(4.5)).total()
    assert total == 7.5
    assert type(total) is float


@pytest.mark.parametrize("number", [torch.tensor(3), torch.tensor([3]), torch.tensor([[3.0]], dtype=torch.bfloat16)])
def test_tensors_of_one_element_are_added_on_their_device(number: Tensor) -> None:
    total = counted(with_items(number), with_items(2), with_items(number)).total()
    assert isinstance(total, Tensor)
    assert (total.item(), total.shape) == (8.0, ())


def test_large_counts_are_added_exactly() -> None:
    total = counted(with_items(torch.tensor(2**24)), with_items(torch.tensor(1))).total()
    assert isinstance(total, Tensor)
    assert total.item() == 2**24 + 1


def test_tensors_are_added_without_a_transfer_and_without_a_graph() -> None:
    nowhere = torch.ones((), device="meta", requires_grad=True)
    total = counted(with_items(nowhere), with_items(nowhere)).total()
    assert isinstance(total, Tensor)
    assert total.device.type == "meta"
    assert not total.requires_grad


def test_any_mapping_is_read() -> None:
    assert counted(UserDict(with_items(2))).total() == 2.0


@pytest.mark.parametrize("output", [None, {"loss": None, "num_items": 5}, {"num_items": 5}])
def test_a_micro_batch_without_a_loss_contributes_nothing(output: Any) -> None:
    assert counted(with_items(2), output).total() == 2.0
    assert counted(output).total() is None


def test_clearing_begins_a_new_window() -> None:
    counts = counted(with_items(2), LOSS)
    counts.clear()
    counts.note(with_items(3))
    assert counts.total() == 3.0


@pytest.mark.parametrize("number", [-1, -0.5, True, "3", [3], math.nan, math.inf])
def test_what_is_no_number_of_items_is_refused(number: Any) -> None:
    with pytest.raises(ValueError, match=r"num_items=.*expected the number of items, 0 or more"):
        counted(with_items(number))


def test_a_tensor_of_several_elements_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"num_items of shape \(2, 3\); expected one number"):
        counted(with_items(torch.ones(2, 3)))


def test_a_window_of_which_only_some_micro_batches_have_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"for 1 of the 3 micro-batches.*cannot be mixed.*always or never"):
        counted(LOSS, with_items(2), {"loss": LOSS}).total()


def test_a_window_without_any_item_counts_zero_here_and_is_for_all_ranks_to_judge() -> None:
    assert counted(with_items(0), with_items(0)).total() == 0.0


class Summed(ExactLinear):
    """The loss is summed over rows; micro-batches have unequal numbers of rows."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__()
        self.as_tensor = as_tensor

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        count = len(batch)
        return {"loss": self.loss(batch), "num_items": torch.tensor(count) if self.as_tensor else count}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_unequal_micro_batches_move_weights_by_the_mean_over_all_items(precision: str, as_tensor: bool) -> None:
    options = {"loss_scale": 1024.0} if precision == "16-mixed" else {}
    batches = [torch.full((1, 4), 8.0), torch.full((3, 4), 4.0), torch.full((2, 4), 6.0)]
    model = Summed(as_tensor)
    fit(model, AmpPrecision(precision, **options), batches, accumulate_grad_batches=2)
    # A window of 8 and three times 4 has the mean 5; the last one, shorter, has the mean 6.
    assert torch.equal(torch.stack(model.at_step), torch.tensor([[5.0] * 4, [6.0] * 4]))
