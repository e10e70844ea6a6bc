"""The dtype that sums over many elements are held in: :func:`wide_dtype`. Used wherever a device adds up."""

import torch


def wide_dtype(device: torch.device) -> torch.dtype:
    """FP64 where the device has it; Apple's GPUs (``mps``) do not."""
    return torch.float32 if device.type == "mps" else torch.float64
