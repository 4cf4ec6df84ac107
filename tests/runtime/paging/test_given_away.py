"""Which tensors count as given away: those that code outside of PyTorch holds, and no others."""

from __future__ import annotations

import numpy as np
import torch

from runtime.paging import StorageOwnership, given_away


class Owner:
    """Stands for a mover."""


def test_the_tensors_whose_memory_is_held() -> None:
    given, kept, frozen = (torch.nn.Parameter(torch.zeros(4), requires_grad=i < 2) for i in range(3))
    held = [np.from_dlpack(given.detach()), torch.from_dlpack(frozen)]
    found = given_away([given, kept, frozen])
    assert len(found) == 2 and found[0] is given and found[1] is frozen
    del held
    assert given_away([given, kept, frozen]) == []


def test_aliases_views_and_what_autograd_holds_do_not_count() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    data = weight.data
    views = [data.view(-1), data[0], weight.detach().T, weight[0]]
    due = (weight @ torch.ones(4)).sum()
    assert given_away([weight]) == []
    del views, due


def test_a_storage_that_is_left_gets_no_owner() -> None:
    ownership, owner = StorageOwnership(), Owner()
    left, other = torch.zeros(4).untyped_storage(), torch.zeros(4).untyped_storage()
    ownership.leave(left)
    assert ownership.stays(left) and not ownership.claim(left, owner)
    assert not ownership.stays(other) and ownership.claim(other, owner) and not ownership.stays(other)
