"""Tensors over raw addresses, for copies that know nothing but an address and a size."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from runtime.device import DeviceBytes


def device_bytes(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a tensor over bytes in the memory of `device`. It owns nothing."""
    return torch.as_tensor(DeviceBytes(address, size_bytes), device=device)


@functools.lru_cache(maxsize=4096)
def host_bytes(address: int, size_bytes: int) -> torch.Tensor:
    """Return a tensor over bytes in main memory. It owns nothing.

    Blocks have the same slots in each iteration, so it is kept for a while.
    """
    with torch.inference_mode(mode=False):  # else nobody could write to it outside of that mode later on
        return fresh_host_bytes(address, size_bytes)


def fresh_host_bytes(address: int, size_bytes: int) -> torch.Tensor:
    """Return what `host_bytes` does, made anew."""
    return torch.frombuffer(_bytes_type(size_bytes).from_address(address), dtype=torch.uint8)


@functools.lru_cache(maxsize=4096)
def _bytes_type(size_bytes: int) -> Any:
    """Return the type of so many bytes. ctypes forgets types that nobody holds, and takes 40 µs to make one."""
    return ctypes.c_char * size_bytes
