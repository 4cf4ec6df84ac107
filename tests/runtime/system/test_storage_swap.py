"""A quick look at many storages: which of them have other memory than they had."""

from __future__ import annotations

import torch

from runtime.system import storage_swap


def test_storages_with_another_address_or_size_are_found() -> None:
    storages = [torch.zeros(8, dtype=torch.uint8).untyped_storage() for _ in range(5)]
    known = [[s._cdata for s in storages], [s.data_ptr() for s in storages], [s.nbytes() for s in storages]]
    assert storage_swap.changed(*known) == []
    storages[1].resize_(1 << 20)
    known[1][2], known[2][4] = known[1][0], 7
    storage_swap.discard(storages[3], "away")
    assert storage_swap.changed(*known) == [1, 2, 3, 4]
    known[1][3] = 0
    assert storage_swap.changed(*known) == [1, 2, 4] and storage_swap.changed([], [], []) == []
