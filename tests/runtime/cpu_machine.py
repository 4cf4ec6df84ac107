"""A pager and a CPU mover over real memory, real files and real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from runtime.cpu import CheckedCpuMover, CpuMemory, CpuMover
from runtime.paging import Block, Pager, State, StorageOwnership, Tier, Tiers
from runtime.storage import Chunk, HostStore, PosixStore, Slot
from runtime.transfer import Engine

MIB = 1 << 20
SECONDS = 30


class Drive(PosixStore):
    """Writes once `go_on` is set, and reads the chunks that `reads` lets through."""

    reads: Callable[[Chunk], bool] = staticmethod(lambda chunk: True)  # type: ignore[assignment]

    def __init__(self, folders: tuple[Path, ...]) -> None:
        super().__init__(folders, budget_bytes=None)
        self.go_on = threading.Event()
        self.go_on.set()

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        assert self.go_on.wait(SECONDS)
        super().write_chunk(slot, chunk, address)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        if self.reads(chunk):
            super().read_chunk(slot, chunk, address)


class CpuMachine:
    """A mover and a pager over a host tier of `host_bytes`, if that is not 0, and over files in the folders, if there are any."""

    def __init__(
        self,
        *folders: Path,
        host_bytes: int = 0,
        budget_bytes: int | None = None,
        checksums: bool = False,
        debug: bool = False,
        unchanged: bool = False,
        ownership: StorageOwnership | None = None,
    ) -> None:
        self.memory = CpuMemory()
        self.ownership = ownership or StorageOwnership()
        stores: dict[str, HostStore | Drive] = {"host": HostStore(host_bytes)} if host_bytes else {}
        if folders:
            stores["storage"] = Drive(folders)
        self.store = stores["storage" if folders else "host"]
        known = {"threads": 2, "chunk_bytes": 256 << 10, "checksums": checksums, "unchanged": unchanged}
        opened = [
            Tier(store=each, engine=Engine(each, **known))  # type: ignore[arg-type]
            for each in stores.values()
        ]
        self.engine = opened[-1].threads()
        checks = checksums or debug
        self.tiers = Tiers(opened, ownership=self.ownership, mapped=not checks)
        self.plain = CpuMover(self.memory, self.tiers, poison=debug)
        self.mover = CheckedCpuMover(self.plain, debug=debug) if checks else self.plain
        self.pager = Pager(mover=self.mover, budget_bytes=budget_bytes)
        self.pager.enter_region()
        self.memory.trim(0)

    def close(self) -> None:
        for tier in self.tiers:
            tier.threads().close()
        self.tiers.close()
        for tier in self.tiers:
            tier.store.close()
        self.memory.stand_back()

    def make(self, size_bytes: int, fill: int, name: str = "w") -> tuple[torch.Tensor, Block]:
        """Run a stage that makes a block. Return its tensor and the block."""
        self.pager.acquire([], size_bytes, "make")
        tensor = torch.full((size_bytes,), fill, dtype=torch.uint8)
        block = self.pager.block_of(tensor, name=name, kind="activation", user_visible=False)
        assert block.span is not None
        self.pager.retire([], [])
        return tensor, block

    def use(self, block: Block, *, writes: bool = False) -> None:
        """Run a stage that reads a block, or that may have written it."""
        within(SECONDS, lambda: self.pager.acquire([block], 0, "use"))
        self.pager.retire([block], [block] if writes else [])

    def until(self, block: Block, *states: State) -> None:
        """Wait until a block is in one of these states and its memory has followed: only then the lock is free."""
        deadline = time.monotonic() + SECONDS
        while True:
            with self.pager.condition:
                if block.state in states:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def leave(self, block: Block) -> None:
        self.pager.offload(block)
        self.until(block, State.OFFLOADED)


def within(seconds: float, work: Callable[[], None]) -> None:
    """Run `work` in a separate thread. Fail if it does not end in time."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # the test raises it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


def slot_of(block: Block) -> Slot:
    assert block.slot is not None
    return block.slot
