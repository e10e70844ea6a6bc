"""What computes: versions of the libraries and the device, for the manifest."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from lightning_amp_plus._version import __version__
from lightning_amp_plus.checkpoint.manifest import Hardware, Versions


@cache
def versions() -> Versions:
    """Versions of Python and of the libraries that compute; optional ones are asked for, not imported."""
    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        lightning=_version("lightning") or _version("pytorch-lightning") or "unknown",
        lightning_amp_plus=__version__,
        torchao=_version("torchao"),
        transformer_engine=_version("transformer-engine") or _version("transformer_engine"),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def hardware(device: torch.device) -> Hardware:
    """The device a rank computes on."""
    if device.type != "cuda":
        capability = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else None
        return Hardware(device=device.type, name=platform.processor() or platform.machine(), capability=capability)
    properties = torch.cuda.get_device_properties(device)
    return Hardware(
        device=device.type,
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        driver=_driver(),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
    )


def _driver() -> str | None:
    # Newest CUDA that the driver supports: what kernels see of it. torch has no public name for it.
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    number = 0 if ask is None else int(ask())
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else None
