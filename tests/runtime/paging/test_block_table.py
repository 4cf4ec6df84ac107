"""Which blocks there are, and which of them are dead."""

from __future__ import annotations

import threading

import torch

from runtime.paging.block import Block
from runtime.paging.block_table import BlockTable


def added(table: BlockTable, tensor: torch.Tensor) -> Block:
    storage = tensor.untyped_storage()
    block = Block(storage=storage, name="b", kind="activation", user_visible=False, span=None)
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
