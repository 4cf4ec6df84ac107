"""Free memory in pieces, in a pool that hands out ranges as PyTorch's allocator of a GPU does."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from runtime.cuda.compaction import Chunk, Layout, history_of
from runtime.cuda.streams import AllocatorPieces
from runtime.device import DeviceMemoryError

from ...thoroughness import by_profile

UNIT = 512
GAP = 1000 * UNIT
COMPUTE = {"device": 0, "stream": 1, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": True}
ELSEWHERE = [{"device": 1, "stream": 2}, {"segment_type": "small"}, {"segment_pool_id": (0, 1)}]  # serves no stage


class Held:
    """What was allocated from a pool; free once nobody holds it."""

    def __init__(self, pool: BestFit, address: int, size_bytes: int) -> None:
        self._pool, self._address, self._size_bytes = pool, address, size_bytes

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._size_bytes

    def __del__(self) -> None:
        self._pool.free(self._address)


class BestFit:
    """A pool of ranges with gaps between. It hands out the smallest free range that is large enough, at its begin. If none is,
    it takes memory for the first gap that is, up to `limit_bytes` in all.

    retries: requests that found no free range. blocks, content: the bytes of blocks and what is in them, by address. leaving: the
    addresses of those that let go of their memory where they are asked to, in this order.
    """

    def __init__(self, runs: Sequence[Sequence[int]]) -> None:
        """runs: the ranges that follow each other, in units: negative ones are free."""
        self.retries = 0
        self.limit_bytes, self.in_region, self.expandable = 0, True, True
        self.device = torch.device("cuda", 0)
        self.blocks: dict[int, int] = {}
        self.leaving: list[int] = []
        self.content: dict[int, str] = {}
        self._held: dict[int, Held] = {}
        self._chunks: list[Chunk] = []
        address = GAP
        for number, run in enumerate(runs):
            for units in run:
                chunk = Chunk(address, abs(units) * UNIT, units < 0)
                self._chunks.append(chunk)
                if units > 0:
                    self.blocks[address], self.content[address] = chunk.size_bytes, f"{number} {address}"
                address = chunk.end
            address += GAP
        streams: Any = self
        self.pieces = AllocatorPieces(streams, mock.Mock(cuda_stream=1))

    @property
    def reserved_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self._chunks)

    def segments(self) -> Sequence[Mapping[str, Any]]:
        runs: list[list[Chunk]] = []
        for chunk in self._chunks:
            if not runs or runs[-1][-1].end != chunk.address:
                runs.append([])
            runs[-1].append(chunk)
        blocks = [[_as_block(chunk) for chunk in run] for run in runs]
        own = [{"address": run[0]["address"], "total_size": sum(each["size"] for each in run), "blocks": run} for run in blocks]
        others = [{**other, "address": 0, "total_size": 0, "blocks": [_as_block(Chunk(0, GAP, True))]} for other in ELSEWHERE]
        return [{**COMPUTE, "is_expandable": self.expandable, **each} for each in (*own, *others)]

    def allocate(self, size_bytes: int) -> Any:
        size = -(-size_bytes // UNIT) * UNIT
        fitting = [chunk for chunk in self._chunks if chunk.free and chunk.size_bytes >= size] or self._taken(size)
        if fitting:
            chunk = min(fitting, key=lambda chunk: (chunk.size_bytes, chunk.address))
        else:
            self.retries += 1
            raise DeviceMemoryError
        left = Chunk(chunk.address + size, chunk.size_bytes - size, True)
        place = self._chunks.index(chunk)
        self._chunks[place : place + 1] = [Chunk(chunk.address, size, False), *([left] if left.size_bytes else [])]
        return Held(self, chunk.address, size_bytes)

    def _taken(self, size: int) -> list[Chunk]:
        for place, chunk in enumerate(self._chunks):
            last = place + 1 == len(self._chunks)
            more = size - chunk.size_bytes * chunk.free
            gap = self.limit_bytes if last else self._chunks[place + 1].address - chunk.end
            if gap and more <= gap and self.reserved_bytes + more <= self.limit_bytes:
                self._chunks.insert(place + 1, Chunk(chunk.end, more, False))
                self.free(chunk.end)
                return [each for each in self._chunks if each.free and each.size_bytes >= size]
        return []

    def free(self, address: int) -> None:
        layout = Layout([])
        layout.chunks = self._chunks
        layout.free(address)

    def move(self, address: int, fresh: Any) -> None:
        self.blocks[fresh.data_ptr()] = self.blocks.pop(address)
        self.content[fresh.data_ptr()] = self.content.pop(address)
        if address in self._held:
            del self._held[address]
        else:
            self.free(address)
        self._held[fresh.data_ptr()] = fresh

    def let_go(self, size_bytes: int) -> bool:
        freed = 0
        while self.leaving and freed < size_bytes:
            address = self.leaving.pop(0)
            freed += self.blocks.pop(address)
            del self.content[address]
            self.free(address)
        return freed > 0

    def gather(self, *units: int, stay: Sequence[int] = (), leaving: Sequence[int] = ()) -> bool:
        """Let blocks make way for pieces, not those at the positions `stay` and `leaving`. Return whether the pool has the pieces
        then."""
        addresses = sorted(self.blocks)
        self.leaving = [addresses[position] for position in leaving]
        staying = {addresses[position] for position in (*stay, *leaving)}
        before = {text for address, text in self.content.items() if address not in self.leaving}
        self.ask([unit * UNIT for unit in units], staying)
        assert before <= set(self.content.values()) and not self.retries
        assert staying - {addresses[position] for position in leaving} | set(self.leaving) <= set(self.blocks)
        used = {chunk.address: chunk.size_bytes for chunk in self._chunks if not chunk.free}
        assert used == {address: -(-size // UNIT) * UNIT for address, size in self.blocks.items()}, "nothing stays held"
        return self.has(*units)

    def ask(self, history: Sequence[int], staying: Container[int] = ()) -> bool:
        """Return whether none had to make way."""

        def movable() -> dict[int, int]:
            return {address: size for address, size in self.blocks.items() if address not in staying}

        with mock.patch.object(torch.cuda, "memory_snapshot", lambda include_traces: self.segments()):
            return self.pieces.gather(history, movable, self.move, self.let_go)

    def has(self, *units: int) -> bool:
        self.limit_bytes = 0
        try:
            held = [self.allocate(unit * UNIT) for unit in units]
        except DeviceMemoryError:
            self.retries = 0
            return False
        return bool(held)


def _as_block(chunk: Chunk) -> Mapping[str, Any]:
    return {"address": chunk.address, "size": chunk.size_bytes, "state": "inactive" if chunk.free else "active_allocated"}


@pytest.mark.parametrize(
    ("runs", "pieces"),
    [
        pytest.param([[4, -4, 2, -4, 8]], [8], id="a block goes down to where its neighbour's free range begins"),
        pytest.param([[4, -4, 2, -4, 8], [-2, 6]], [8], id="a block goes elsewhere"),
        pytest.param([[-6, 4, -6, 4, -6]], [12, 6], id="two pieces at once"),
        pytest.param([[-8, 3, -2, 3, -2, 3, -2]], [14], id="many small blocks behind a free range"),
        pytest.param([[2, -3, 2, -3, 2], [-2, 3, -2]], [5], id="through what was full"),
        pytest.param([[-3, 5, 3, -6]], [4, 4], id="two pieces, of which the first one lies in the way of the second"),
        pytest.param([[1, -5, *[4, -1] * 30, 1]], [30], id="all of a long run goes down"),
        pytest.param([[1, -8]], [4, 4], id="one free range serves two"),
        pytest.param([[4, -4, 7, -5]], [6], id="a free range on the way would take what has to go"),
    ],
)
def test_blocks_make_way_and_keep_their_contents(runs: Sequence[Sequence[int]], pieces: Sequence[int]) -> None:
    assert BestFit(runs).gather(*pieces)


def test_what_may_not_move_stays_and_neighbours_of_a_gap_are_no_neighbours() -> None:
    assert not BestFit([[-4, 2, -4]]).gather(8, stay=[0])
    assert not BestFit([[-4], [-4]]).gather(8)
    assert not BestFit([[-4, 6, -4]]).gather(8), "there is no place for what would have to go"
    assert not BestFit([[9, -3, 3, 6, -8, 8, -3]]).gather(13), "it goes otherwise than foreseen"


def test_where_there_is_no_way_what_leaves_lets_go() -> None:
    pool = BestFit([[-4, 2, 3, -2, 2, 6]])
    assert pool.gather(6, leaving=[2, 0]) and not pool.leaving, "the first one to leave is not enough"
    assert not BestFit([[-4, 2, 9]]).gather(8, leaving=[0])
    pool = BestFit([[-6, 2, -4]])
    assert pool.gather(6, leaving=[0]) and pool.leaving, "nothing has to"


@pytest.mark.parametrize("seed", range(by_profile(ci=10, long=40)))
def test_random_pools(seed: int) -> None:
    """Whatever lies where: no content is lost, nothing that may not move has moved, and the pool never had to look for memory."""
    draw = random.Random(seed)
    reached = 0
    for _ in range(20):
        runs = [[draw.randint(1, 16) * draw.choice((1, 1, -1)) for _ in range(draw.randint(3, 40))] for _ in range(3)]
        for run in runs:  # the pool knows no two free ranges that follow each other
            run[1:] = [units if units > 0 or before > 0 else -units for before, units in zip(run, run[1:], strict=False)]
            for place in range(1, len(run)):
                if run[place] < 0 and run[place - 1] < 0:
                    run[place] = -run[place]
        pool = BestFit(runs)
        free = -sum(units for run in runs for units in run if units < 0)
        stay = [place for place in range(len(pool.blocks)) if draw.random() < 0.05]
        pieces = sorted((max(free // 4, 1), max(free // 8, 1)), reverse=True)
        reached += pool.gather(*pieces, stay=stay)
    assert reached >= 16


def test_a_layout_hands_nothing_out_twice() -> None:
    layout = Layout(BestFit([[3, -8, 2]]).segments())
    begin = GAP + 3 * UNIT
    assert layout.take(begin, 2 * UNIT + 1) and not layout.take(begin, UNIT) and not layout.take(GAP * 9, UNIT)


def events(*steps: tuple[str, int, int]) -> list[Mapping[str, Any]]:
    return [{"action": action, "addr": address, "size": size} for action, address, size in steps]


def test_a_history_has_what_is_allocated_and_freed_in_order() -> None:
    history = events(
        ("alloc", 1, 30),
        ("alloc", 2, 5),  # too small to count
        ("free_requested", 1, 30),
        ("free_completed", 1, 30),
        ("alloc", 3, 20),
        ("alloc", 1, 40),
        ("free_requested", 3, 20),
        ("segment_map", 9, 90),
        ("free_requested", 2, 5),
        ("free_requested", 7, 10),  # from before
        ("free_requested", 1, 40),
    )
    assert history_of([*history, {"action": "oom", "size": 3}], 10) == (30, -1, 20, 40, -2, -3)
    assert history_of(history, 10, others=[1, 7]) == (30, -1, 20, -2), "the last one there was somebody else's"
    assert history_of([], 10) == ()


def test_smaller_pieces_that_come_first_do_not_take_the_place_of_larger_ones() -> None:
    assert BestFit([[-5, 9, -3, 9, -2, 9]]).gather(2, 2, 5), "the second one would be put where the last one has to go"
    pool = BestFit([[-8, 2, -4]])
    before = dict(pool.content)
    history = [8 * UNIT, -1, 4 * UNIT, 4 * UNIT, 4 * UNIT]
    assert pool.ask(history), "what is freed serves again"
    assert pool.content == before
    assert not pool.ask([*history, UNIT])


@pytest.mark.parametrize(
    ("settings", "filled"),
    [({}, True), ({"limit_bytes": 0}, False), ({"in_region": False}, False), ({"expandable": False}, False)],
)
def test_gaps_are_filled_with_what_the_limit_leaves(settings: dict[str, Any], filled: bool) -> None:
    """The pieces that are free elsewhere come first. What the gaps leave comes after all others."""
    pool = BestFit([[2, -4], [-5, 2], [-6, 1], [-3, 1]])
    more = (128 << 20) // UNIT
    pool.limit_bytes = pool.reserved_bytes + (64 << 20) + more * UNIT
    for name, value in settings.items():
        setattr(pool, name, value)
    assert pool.gather(4 + 1000 + 5, 1000 + 6, 1000 + 3, more - 3000) == filled
