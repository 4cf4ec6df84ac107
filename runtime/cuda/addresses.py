"""Tensors over raw addresses, for copies that know nothing but an address and a size."""

from __future__ import annotations

import ctypes

import torch

from runtime.device import DeviceBytes


def device_bytes(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a tensor over bytes in the memory of `device`. It owns nothing."""
    return torch.as_tensor(DeviceBytes(address, size_bytes), device=device)


def host_bytes(address: int, size_bytes: int) -> torch.Tensor:
    """Return a tensor over bytes in main memory. It owns nothing."""
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)
