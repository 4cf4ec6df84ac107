"""Tensors over bytes of which only the address is known."""

from __future__ import annotations

import ctypes

import torch

from runtime.cuda.streams import host_bytes


def test_a_tensor_over_host_memory_shares_its_bytes_and_is_kept() -> None:
    memory = ctypes.create_string_buffer(b"some bytes")
    address = ctypes.addressof(memory)
    found = host_bytes(address + 5, 5)
    assert bytes(found.tolist()) == b"bytes" and found is host_bytes(address + 5, 5)
    found[0] = ord("k")
    assert memory.value == b"some kytes"


def test_what_inference_mode_has_made_can_be_written_outside_of_it() -> None:
    memory = ctypes.create_string_buffer(4)
    with torch.inference_mode():
        made = host_bytes(ctypes.addressof(memory), 4)
    made.copy_(torch.ones(4, dtype=torch.uint8))
    assert memory.raw == bytes([1, 1, 1, 1])
