"""The sums of pages: what changes is found, what has no sum is let pass."""

from __future__ import annotations

import ctypes
import os

from hypothesis import given
from hypothesis import strategies as st

from runtime.storage.page_sums import PAGE_BYTES, PageSums

PAGES = 5


@given(data=st.data(), length=st.integers(1, PAGES * PAGE_BYTES))
def test_a_changed_bit_is_found(data: st.DataObject, length: int) -> None:
    memory = ctypes.create_string_buffer(os.urandom(length), length)
    sums = PageSums(length)
    sums.note(0, ctypes.addressof(memory), length)
    assert sums.compare(0, ctypes.addressof(memory), length) is None
    place = data.draw(st.integers(0, length - 1))
    memory[place] = memory.raw[place] ^ 1 << data.draw(st.integers(0, 7))
    found = sums.compare(0, ctypes.addressof(memory), length)
    assert found is not None and found.expected != found.found
    assert found.offset_bytes == place // PAGE_BYTES * PAGE_BYTES


def test_pages_without_a_sum_are_not_compared_and_order_counts() -> None:
    memory = ctypes.create_string_buffer(bytes(2 * PAGE_BYTES), 2 * PAGE_BYTES)
    address = ctypes.addressof(memory)
    sums = PageSums(3 * PAGE_BYTES)
    assert sums.compare(0, address, 2 * PAGE_BYTES) is None
    sums.note(PAGE_BYTES, address, PAGE_BYTES)
    assert sums.compare(0, address, 2 * PAGE_BYTES) is None
    for place, word in ((0, 1), (8, 2)):
        memory[place] = word
    sums.note(0, address, PAGE_BYTES)
    memory[0], memory[8] = 2, 1
    assert sums.compare(0, address, 2 * PAGE_BYTES) is not None
