"""Makes the free memory of a pool lie in pieces that are large enough: blocks make way, by copies on the device.

The pool hands out the smallest free range that is large enough (best fit), as PyTorch's allocator of a GPU does. So what goes
where can be foreseen, but not chosen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

_UNIT_BYTES = 512  # of PyTorch's allocator: all sizes are multiples of it
_LOOKED_AT = 128  # places are looked at closely: some 10 µs for each way from there
_LONGER = 24  # so many neighbours more than needed may be part of a way: they make room for blocks that find none elsewhere
# From so many free ranges on, the largest first, all go down until as much is free as is needed, and so many neighbours more.
_SLIDING, _SLIDING_LONGER = 8, 4
_ATTEMPTS = 4  # where blocks go elsewhere than foreseen, the range becomes larger, but not as large as it should
_TRIES = 64  # to get memory elsewhere than in the window


class Chunk(NamedTuple):
    """A range of memory that is free, or that the pool has handed out as a whole."""

    address: int
    size_bytes: int
    free: bool

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


class Pool(Protocol):
    """Memory that computation allocates from."""

    def segments(self) -> Sequence[Mapping[str, Any]]:
        """Return its ranges of addresses with their blocks, in the form of `torch.cuda.memory_snapshot`."""

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        """Allocate memory from it."""


def gather(
    pool: Pool,
    history: Sequence[int],
    movable: Callable[[], MutableMapping[int, int]],
    move: Callable[[int, torch.UntypedStorage], None],
    let_go: Callable[[int], bool],
) -> None:
    """Let blocks make way so that what is allocated next finds free ranges, as far as that can be.

    history: what that is, in the form of `history_of`; `serve` says whether it does already. movable, move, let_go: see
    `Pieces.gather` in `runtime.device`.
    """
    blocks = movable()  # first: what copies that have ended kept alive is freed then
    gathering = _Gathering(pool, Layout(pool.segments()), blocks, move)
    attempts = 0
    while attempts < _ATTEMPTS:
        outcome = gathering.rehearse(history)
        if not outcome.missing_bytes and not outcome.moved:
            return
        if outcome.missing_bytes and not gathering.make_free(outcome.together_bytes):
            if not let_go(outcome.missing_bytes):
                return
            gathering.look()
        else:
            attempts += 1  # blocks have moved: each request may go elsewhere now


class _Outcome(NamedTuple):
    """Of a rehearsal. moved: blocks made way. missing_bytes: of the request at which it ended, for which nothing could be made
    free; 0 if there was none. together_bytes: these with what was held then."""

    moved: bool
    missing_bytes: int = 0
    together_bytes: int = 0


class _Gathering:
    """A pool and what lies where in it. blocks, move: see `gather`."""

    def __init__(
        self, pool: Pool, layout: Layout, blocks: MutableMapping[int, int], move: Callable[[int, torch.UntypedStorage], None]
    ) -> None:
        self._pool, self._layout, self._blocks, self._move = pool, layout, blocks, move

    def look(self) -> None:
        """See what lies where by now."""
        self._layout = Layout(self._pool.segments())

    def rehearse(self, history: Sequence[int]) -> _Outcome:
        """Allocate and free all of it. Where there is no free range, blocks make way. Ends where the pool does otherwise than
        foreseen, as if none had to."""
        held: dict[int, torch.UntypedStorage] = {}
        count, moved = 0, False
        try:
            for step in history:
                if step < 0:
                    self._layout.free(held.pop(-step).data_ptr())
                    continue
                if not self._layout.fits(step):
                    moved = True
                    if not self.make_free(step):
                        return _Outcome(moved, step, step + sum(area.nbytes() for area in held.values()))
                count += 1
                held[count] = self._pool.allocate(step)
                if not self._layout.take(held[count].data_ptr(), step):
                    return _Outcome(moved=False)
        finally:
            while held:
                self._layout.free(held.popitem()[1].data_ptr())
        return _Outcome(moved)

    def make_free(self, size_bytes: int) -> bool:
        """Make one free range of `size_bytes`, where there is none. Returns whether there is."""
        for _ in range(_ATTEMPTS):
            way = cheapest_way(self._layout.chunks, size_bytes, self._blocks)
            if way is None:
                return False
            if not self._clear(way):
                self.look()  # some have moved: there may be another way now
            if self._layout.fits(size_bytes):
                return True
        return False

    def _clear(self, way: Way) -> bool:
        """Go that way. Returns False where the pool does otherwise than foreseen."""
        kept: list[torch.UntypedStorage] = []  # the pool must not hand these out again before all have left
        pool, layout = self._pool, self._layout
        try:
            for chunk in way.leaving:
                size = self._blocks.pop(chunk.address)
                for _ in range(_TRIES):
                    if not layout.fits(size):
                        return False
                    fresh = pool.allocate(size)
                    address = fresh.data_ptr()
                    if not layout.take(address, size):
                        return False
                    if not chunk.address <= address < way.end:
                        break
                    kept.append(fresh)
                else:
                    return False
                self._move(chunk.address, fresh)
                del fresh
                layout.free(chunk.address)
                self._blocks[address] = size
        finally:
            while kept:
                layout.free(kept.pop().data_ptr())
        return True


class Layout:
    """What lies where in a pool."""

    def __init__(self, segments: Sequence[Mapping[str, Any]]) -> None:
        blocks = (block for segment in segments for block in segment["blocks"])
        self.chunks = sorted(Chunk(block["address"], block["size"], block["state"] == "inactive") for block in blocks)

    def fits(self, size_bytes: int) -> bool:
        """Whether a free range is so large."""
        return any(chunk.free and chunk.size_bytes >= size_bytes for chunk in self.chunks)

    def take(self, address: int, size_bytes: int) -> bool:
        """So many bytes from an address on were handed out. Returns False if they were not free."""
        place, chunk = self._at(address)
        end = address + -(-size_bytes // _UNIT_BYTES) * _UNIT_BYTES
        if not chunk.free or not chunk.address <= address <= end <= chunk.end:
            return False
        parts = (
            Chunk(chunk.address, address - chunk.address, True),
            Chunk(address, end - address, False),
            Chunk(end, chunk.end - end, True),
        )
        self.chunks[place : place + 1] = [part for part in parts if part.size_bytes]
        return True

    def free(self, address: int) -> None:
        """What was handed out at an address is free, and one range with its free neighbours."""
        place, chunk = self._at(address)
        first, last, begin, end = place, place + 1, chunk.address, chunk.end
        if place and self.chunks[place - 1].free and self.chunks[place - 1].end == begin:
            first, begin = place - 1, self.chunks[place - 1].address
        if last < len(self.chunks) and self.chunks[last].free and self.chunks[last].address == end:
            last, end = last + 1, self.chunks[last].end
        self.chunks[first:last] = [Chunk(begin, end - begin, True)]

    def _at(self, address: int) -> tuple[int, Chunk]:
        place = max(bisect_right(self.chunks, address, key=lambda chunk: chunk.address) - 1, 0)
        return place, self.chunks[place]


class Way(NamedTuple):
    """How neighbours become one free range. end: theirs. leaving: which blocks move, in this order; those for which there is no
    room elsewhere move down, to where others have left."""

    end: int
    leaving: tuple[Chunk, ...]


def cheapest_way(chunks: Sequence[Chunk], size_bytes: int, movable: Container[int]) -> Way | None:
    """Return how to get a free range of `size_bytes` by moving few bytes; None if no way is seen.

    chunks: in the order of their addresses. movable: where the blocks begin that may move.
    """
    holes = sorted(chunk.size_bytes for chunk in chunks if chunk.free)
    for _, first in sorted(_windows(chunks, size_bytes, movable))[:_LOOKED_AT]:
        way = _way_from(chunks, first, holes, size_bytes, movable)
        if way is not None:
            return way
    free = sorted((-chunk.size_bytes, place) for place, chunk in enumerate(chunks) if chunk.free)
    ways = (_way_from(chunks, first, holes, size_bytes, movable, sliding=True) for _, first in free[:_SLIDING])
    return next(filter(None, ways), None)


def _windows(chunks: Sequence[Chunk], size_bytes: int, movable: Container[int]) -> Iterator[tuple[int, int]]:
    """Yield the bytes that are not free, and the first position, of neighbours that are large enough if all leave."""
    first = length = used = 0
    for position, chunk in enumerate(chunks):
        stays = not chunk.free and chunk.address not in movable
        if stays or position and chunk.address != chunks[position - 1].end:
            first, length, used = position + stays, 0, 0
            if stays:
                continue
        length += chunk.size_bytes
        used += 0 if chunk.free else chunk.size_bytes
        while length >= size_bytes:
            yield used, first
            length -= chunks[first].size_bytes
            used -= 0 if chunks[first].free else chunks[first].size_bytes
            first += 1


def _way_from(
    chunks: Sequence[Chunk], first: int, holes: Sequence[int], size_bytes: int, movable: Container[int], *, sliding: bool = False
) -> Way | None:
    """Return how neighbours become a free range, from the first one on: as few as do. None if no way is seen.

    holes: the sizes of all free ranges, sorted. sliding: as much as is needed is free between them.
    """
    elsewhere, length, longer, end, free_bytes = list(holes), 0, 0, chunks[first].address, 0
    for last in range(first, len(chunks)):
        chunk = chunks[last]
        if chunk.address != end or not chunk.free and chunk.address not in movable:
            break
        end, length = chunk.end, length + chunk.size_bytes
        if chunk.free:  # whatever is put there would have to leave, too: see `_Gathering._clear`
            elsewhere.pop(bisect_left(elsewhere, chunk.size_bytes))
            free_bytes += chunk.size_bytes
        if (free_bytes if sliding else length) >= size_bytes:
            leaving = _leaving(chunks[first : last + 1], elsewhere, size_bytes)
            if leaving is not None:
                return Way(end, leaving)
            longer += 1
            if longer > (_SLIDING_LONGER if sliding else _LONGER):
                break
    return None


def _leaving(neighbours: Sequence[Chunk], holes: Sequence[int], size_bytes: int) -> tuple[Chunk, ...] | None:
    """Return which of these neighbours leave for others to be one free range; None if some cannot.

    holes: the sizes of the free ranges elsewhere, sorted. A block goes to the smallest one that is large enough, or down to what
    others have left, if that is smaller still.
    """
    elsewhere, gap, leaving = list(holes), 0, []
    for chunk in neighbours:
        if chunk.free:
            gap += chunk.size_bytes
            continue
        place = bisect_left(elsewhere, chunk.size_bytes)
        best = elsewhere[place] if place < len(elsewhere) else None
        if best is not None and not chunk.size_bytes <= gap < best:
            _cut(elsewhere, place, chunk.size_bytes)
            gap += chunk.size_bytes
        elif chunk.size_bytes > gap:
            return None
        leaving.append(chunk)
    return tuple(leaving) if gap >= size_bytes else None


def serve(segments: Sequence[Mapping[str, Any]], history: Iterable[int]) -> bool:
    """Whether all of a history finds a free range, each the smallest that is large enough, even if what it frees joins none."""
    holes = sorted(block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive")
    sizes: list[int] = []
    for step in history:
        if step < 0:
            insort(holes, sizes[-step - 1])
            continue
        sizes.append(step)
        place = bisect_left(holes, step)
        if place == len(holes):
            return False
        _cut(holes, place, step)
    return True


def _cut(holes: list[int], place: int, size_bytes: int) -> None:
    left = holes.pop(place) - size_bytes
    if left:
        insort(holes, left)


def history_of(events: Sequence[Mapping[str, Any]], least_bytes: int, others: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the bytes of allocations in their order, and where the nth of them was freed, -n.

    Those below `least_bytes` do not count, nor do the last ones at the addresses `others`. events: in the form of the traces of
    `torch.cuda.memory._snapshot`.
    """
    other = Counter(others)
    skipped = set()
    for place in reversed(range(len(events))):
        if events[place]["action"] == "alloc" and other[events[place]["addr"]]:
            other[events[place]["addr"]] -= 1
            skipped.add(place)
    history: list[int] = []
    numbers: dict[int, int] = {}  # of what is held, by address
    count = 0
    for place, event in enumerate(events):
        if event["action"] == "free_requested" and event["addr"] in numbers:
            history.append(-numbers.pop(event["addr"]))
        elif event["action"] == "alloc" and event["size"] >= least_bytes and place not in skipped:
            count += 1
            numbers[event["addr"]] = count
            history.append(event["size"])
    return tuple(history)
