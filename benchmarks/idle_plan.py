"""A plan for blocks with known uses: each leaves after a use, and comes back a few stages before the next one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.idle_device import SMALLEST_MOVED_BYTES, IdleDevice
from runtime.cuda import StreamMover
from runtime.paging import Pager, Tier, Tiers
from runtime.storage import HostStore, align_up

AHEAD = 8
"""Stages between the begin of a copy in and the stage that needs it."""
LAG_STAGES = 4
"""Stages after which a copy has ended."""


@dataclass(slots=True)
class Life:
    """A block that may move. uses: positions, ascending. lasts: for ever; else it is made at the first use, dies at the last."""

    size_bytes: int
    lasts: bool = True
    uses: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Block number `block` leaves after position `after`, and is asked for at position `fetch`, maybe of the next iteration."""

    block: int
    after: int
    fetch: int


def moves_of(lives: Sequence[Life], positions: int) -> list[Move]:
    """Return a move for each pair of uses that are far enough apart. positions: in an iteration."""
    found = []
    for number, life in enumerate(lives):
        uses = [*life.uses, life.uses[0] + positions] if life.lasts else life.uses
        for before, after in itertools.pairwise(uses):
            if after - before > AHEAD + LAG_STAGES + 1:
                found.append(Move(block=number, after=before, fetch=after - AHEAD))
    return found


def need_bytes(lives: Sequence[Life], moves: Sequence[Move], positions: int) -> int:
    """Return the most bytes on the device: a block counts from `fetch` until its copy out has ended."""
    here = [0] * positions
    for life in lives:
        for position in range(positions) if life.lasts else range(life.uses[0], life.uses[-1] + 1):
            here[position] += life.size_bytes
    for move in moves:
        for position in range(move.after + LAG_STAGES + 1, move.fetch):
            here[position % positions] -= lives[move.block].size_bytes
    return max(here)


def size_bytes(number: int) -> int:
    """Return one of 16 sizes."""
    return align_up(SMALLEST_MOVED_BYTES) * (1 + number % 16)


def host_tier(blocks: int) -> HostStore:
    """Return a host tier with room for all blocks. Nobody touches its memory, so that it takes none."""
    return HostStore(sum(map(size_bytes, range(16))) * (blocks // 8 + 1))


def idle_pager(store: HostStore) -> tuple[Pager, IdleDevice]:
    """Return a pager without a budget over a host tier and a device on which nothing is done, and that device."""
    device = IdleDevice(LAG_STAGES)
    mover = StreamMover(device, Tiers([Tier(store=store, engine=None)]))
    return Pager(mover=mover, budget_bytes=None, device=device), device
