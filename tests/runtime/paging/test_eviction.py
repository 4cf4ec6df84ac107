"""Who leaves first."""

from __future__ import annotations

import torch

from runtime.device import Span
from runtime.paging.block import Block, State
from runtime.paging.eviction import EvictionPolicy


def block(name: str, next_use: int) -> Block:
    storage = torch.zeros(4, dtype=torch.uint8).untyped_storage()
    made = Block(storage=storage, name=name, kind="activation", user_visible=False, span=Span(0, 4))
    made.next_use = next_use
    return made


def test_furthest_next_use_first() -> None:
    soon, late, middle = block("soon", 1), block("late", 9), block("middle", 5)
    assert EvictionPolicy().order([soon, late, middle]) == [late, middle, soon]


def test_no_known_next_use_comes_before_all() -> None:
    policy = EvictionPolicy()
    policy.clock = 5
    past, now, ahead = block("past", 3), block("now", 5), block("ahead", 100)
    assert policy.order([ahead, past, now]) == [past, now, ahead], "equals keep their order"


def test_only_what_can_leave_now() -> None:
    kept, pinned, fixed, away, free = (block(name, 1) for name in ("kept", "pinned", "fixed", "away", "free"))
    pinned.pins, fixed.span, away.state = 1, None, State.OFFLOADED
    assert EvictionPolicy().order([kept, pinned, fixed, away, free], keep=[kept]) == [free]
