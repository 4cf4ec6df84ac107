"""Which blocks there are, and which of them are dead."""

from __future__ import annotations

import threading
from typing import Any

import torch

from runtime.paging.block import Block
from runtime.paging.block_table import BlockTable


def added(table: BlockTable, tensor: torch.Tensor, span: Any = None) -> Block:
    storage = tensor.untyped_storage()
    block = Block(storage=storage, name="b", kind="activation", user_visible=False, span=span)
    table.add(block, storage)
    return block


def test_a_storage_that_dies_is_reported_by_itself() -> None:
    """In whatever thread its last reference goes, which may be one of autograd's or a view in C++."""
    table, tensors = BlockTable(None), [torch.zeros(4) for _ in range(3)]
    kept, viewed, freed = (added(table, tensor) for tensor in tensors)
    views = [tensors[1][1:]]
    thread = threading.Thread(target=lambda: (tensors.pop(), tensors.pop()))
    thread.start()
    thread.join()
    assert table.dead() == [freed] == table.dead(), "until it is removed"
    table.remove(freed)
    views.clear()
    assert table.dead() == [viewed]
    table.remove(viewed)
    assert not table.dead() and list(table) == [kept]


def test_a_block_that_was_removed_is_not_reported() -> None:
    table, tensor = BlockTable(None), torch.zeros(4)
    table.remove(added(table, tensor))
    del tensor
    assert not table.dead()


def test_sizes_are_those_of_living_blocks() -> None:
    table, tensors = BlockTable(None), [torch.zeros(size, dtype=torch.uint8) for size in (1, 2, 4, 8)]
    for number, tensor in enumerate(tensors):
        added(table, tensor, span=object() if number % 2 else None)
    assert (table.size_bytes(movable=True), table.size_bytes(movable=False)) == (2 + 8, 1 + 4)
    del tensor, tensors[:2]
    assert (table.size_bytes(movable=True), table.size_bytes(movable=False)) == (8, 4), "before they are removed"
    for block in table.dead():
        table.remove(block)
    assert (table.size_bytes(movable=True), table.size_bytes(movable=False)) == (8, 4)
