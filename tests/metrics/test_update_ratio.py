"""update_ratio, rounded_away and the Metric: their definitions, ends of their range, and errors."""

from __future__ import annotations

import pytest
import torch

from lightning_amp_plus.metrics import UpdateRatio, rounded_away, update_ratio


def test_several_tensors_are_one_layer() -> None:
    before, after = [torch.zeros(2), torch.tensor([3.0])], [torch.zeros(2), torch.tensor([4.0])]
    assert float(update_ratio(before, after)) == pytest.approx(0.25)
    assert float(update_ratio(torch.zeros(3), torch.ones(3))) == pytest.approx(1.0)
    assert float(update_ratio(torch.zeros(3), torch.zeros(3))) == 0.0
    assert float(update_ratio([], [])) == 0.0


def test_shapes_have_to_agree() -> None:
    with pytest.raises(ValueError, match=r"\[\(2,\)\] before the step, \[\(3,\)\] after"):
        update_ratio(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"weights of shape \(2,\), update of \(3,\)"):
        rounded_away(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize(
    ("dtype", "half"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11), (torch.float32, 2.0**-24)]
)
def test_half_an_ulp_is_where_updates_vanish(dtype: torch.dtype, half: float) -> None:
    ones = torch.ones(4, dtype=dtype)
    update = torch.tensor([0.0, half, half * 1.01, -half * 0.49], dtype=torch.float64)
    assert (
        float(rounded_away(ones, update)) == 0.5
    )  # the tie goes to the even neighbor, 1; below 1 an ulp is half as large
    assert float(rounded_away(ones, update[[0]].expand(4))) == 0.0
    assert float(rounded_away(torch.zeros(0, dtype=dtype), torch.zeros(0))) == 0.0


def test_metric_adds_up_squares_over_updates() -> None:
    metric = UpdateRatio()
    assert float(metric.compute()) == 0.0
    before, after = torch.randn(50, 4), torch.randn(50, 4)
    for a, b in zip(before.split(10), after.split(10), strict=True):
        metric.update(a, b)
    assert float(metric.compute()) == pytest.approx(float(update_ratio(before, after)))
