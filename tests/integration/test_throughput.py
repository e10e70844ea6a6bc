"""Throughput monitors compare with the peak of the dtype that matrix products run in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

import lightning_amp_plus.integration.throughput as throughput
from lightning_amp_plus import AmpPrecision, PrecisionPolicy
from tests.support.models import TinyRegressor
from tests.support.training import fit, regression_batches

PEAKS = {torch.float32: 100, torch.bfloat16: 200, torch.float16: 300}


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A CPU has no listed peak, so one is given here; holds the devices that were asked for."""
    asked: list[Any] = []

    def available(device: torch.device, dtype: torch.dtype) -> int:
        asked.append(device)
        return PEAKS[dtype]

    monkeypatch.setattr(throughput, "get_available_flops", available)
    return asked


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("32-true", torch.float32),
        ("bf16-mixed", torch.bfloat16),
        ("bf16-true", torch.bfloat16),
        ("16-mixed", torch.float16),
        (PrecisionPolicy("fp16", params="fp16", master_weights=True), torch.float16),
    ],
)
def test_a_monitor_gets_the_peak_of_the_compute_dtype(
    policy: Any, dtype: torch.dtype, peaks: list[Any], tmp_path: Path
) -> None:
    monitor = ThroughputMonitor(batch_size_fn=len)
    options = {"loss_scale": 8.0} if dtype == torch.float16 else {}
    fit(
        TinyRegressor(),
        AmpPrecision(policy, **options),
        regression_batches(2),
        callbacks=[monitor],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    assert monitor.available_flops == PEAKS[dtype]
    assert monitor._throughputs
    assert {one.available_flops for one in monitor._throughputs.values()} == {PEAKS[dtype]}
    assert peaks == [torch.device("cpu")]


def test_without_a_monitor_no_peak_is_looked_up(peaks: list[Any]) -> None:
    fit(TinyRegressor(), AmpPrecision("bf16-mixed"), regression_batches(1))
    assert peaks == []
