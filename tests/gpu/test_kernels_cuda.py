"""Kernels as a GPU names them. Skipped where there is none that has FP8; sized for seconds of one GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_amp_plus.fp8.coverage.kernels import KernelTimes

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="needs a CUDA GPU with FP8 (compute capability 8.9); this machine has none"),
]


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_one_scaled_mm_is_one_fp8_gemm(formats: tuple[str, str]) -> None:
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    left, right = (torch.randn(256, 256, device="cuda").to(dtypes[name]) for name in formats)
    scale = torch.ones((), device="cuda")
    times = KernelTimes(torch.device("cuda"))
    times.begin()
    torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)
    times.end()
    assert times.fp8_gemms == 1 and times.nanoseconds["fp8 gemm"] > 0, (times.nanoseconds, times.note)


def test_casts_and_gemms_in_bf16_are_told_apart() -> None:
    x = torch.randn(512, 512, device="cuda")
    times = KernelTimes(torch.device("cuda"))
    times.begin()
    narrow = x.to(torch.bfloat16)
    narrow.to(torch.float8_e4m3fn)
    narrow @ narrow
    times.end()
    assert times.fp8_gemms == 0 and {"gemm", "cast"} <= times.nanoseconds.keys(), times.nanoseconds
