"""The host's processor in memory that the GPU copies to and from: it waits until the copies have ended.

The lanes are kept busy meanwhile, so that what does not wait reads old bytes, or is overwritten.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from runtime.cuda import CudaStreams, StreamMover
from runtime.device import Lane
from runtime.paging import Block, Pager, Tier, Tiers
from runtime.storage import HostStore
from runtime.system import CudaPinner
from teraio.machine import open_machine
from teraio.options import Options

DEVICE = torch.device("cuda", 0)
SIZE = 4 << 20
BUSY_CYCLES = 500_000_000
"""A quarter of a second and more, in which copies that are queued behind do not begin."""


@dataclass
class Bench:
    streams: CudaStreams
    mover: StreamMover
    pager: Pager

    def block(self, value: int) -> tuple[torch.Tensor, Block]:
        tensor = torch.full((SIZE,), value, dtype=torch.uint8, device=DEVICE)
        return tensor, self.pager.block_of(tensor, name=f"block {value}", kind="activation", user_visible=False)

    def keep_busy(self, lane: Lane) -> None:
        with torch.cuda.stream(self.streams._streams[lane]):
            torch.cuda._sleep(BUSY_CYCLES)


@pytest.fixture
def bench() -> Iterator[Bench]:
    host, streams = HostStore(8 * SIZE, pinner=CudaPinner(DEVICE)), CudaStreams(DEVICE)
    mover = StreamMover(streams, Tiers([Tier(store=host, engine=None)]))
    try:
        with streams.region():
            pager = Pager(mover=mover, device=streams, budget_bytes=2 * SIZE)
            pager.enter_region()
            yield Bench(streams, mover, pager)
    finally:
        mover.close()
        host.close()


@pytest.mark.parametrize("left", ["under pressure", "and came back"])
def test_an_update_waits_for_the_copies_of_its_slot(bench: Bench, left: str) -> None:
    """A block is set aside while its copy out is queued. Then its memory is taken, or a stage has it for a while."""
    tensor, block = bench.block(7)
    bench.keep_busy(Lane.OUTWARD)
    bench.pager.offload(block)
    assert bench.pager.lending.reserve_for_host([block])
    bench.pager.device.mark().wait()
    bench.pager.acquire([], 2 * SIZE, "a stage that needs room")
    bench.pager.retire([], [])
    found = tensor
    if left == "and came back":
        bench.keep_busy(Lane.INWARD)
        bench.pager.acquire([block], 0, "a stage that needs the block")
        found = tensor.clone()
        bench.pager.retire([block], [])
        bench.pager.acquire([], 2 * SIZE, "another stage that needs room")
        bench.pager.retire([], [])
    addresses = bench.pager.lending.lend_memory([block])
    assert addresses is not None
    assert set(ctypes.string_at(addresses[0], SIZE)) == {7}, "what the copy has brought"
    ctypes.memset(addresses[0], 9, SIZE)
    torch.cuda.synchronize(DEVICE)
    assert set(ctypes.string_at(addresses[0], SIZE)) == {9}, "no copy has come later"
    bench.pager.lending.give_back([block])
    if left == "and came back":
        assert set(found.cpu().numpy().tobytes()) == {7}, "no copy has read what was written later"


def test_scratch_memory_is_left_alone_by_the_copies_of_a_dead_block() -> None:
    """The slot of a block that has died is free before the copy has ended that writes to it."""
    options = Options(memory_budget=256 << 20, host_budget=64 << 20)
    machine = open_machine(options, DEVICE)
    try:
        assert isinstance(machine.device, CudaStreams) and isinstance(machine.mover, StreamMover)
        pager = Pager(mover=machine.mover, device=machine.device, budget_bytes=machine.budgets.device)
        bench = Bench(machine.device, machine.mover, pager)
        with machine.device.region():
            pager.enter_region()
            tensor, block = bench.block(7)
            bench.keep_busy(Lane.OUTWARD)
            pager.offload(block)
            pager.acquire([], 0, "a stage")
            assert block.slot is not None
            freed = block.slot.address
            del tensor
            machine.mover.forget(block)
            with machine.host_scratch(SIZE) as address:
                assert address == freed, "else the test shows nothing"
                ctypes.memset(address, 9, SIZE)
                torch.cuda.synchronize(DEVICE)
                assert set(ctypes.string_at(address, SIZE)) == {9}
    finally:
        machine.close()


def test_marks_of_two_streams_tell_a_time() -> None:
    """User code may go on in another stream: the earlier mark need not be passed first."""
    streams, other = CudaStreams(DEVICE), torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(other):
        torch.cuda._sleep(BUSY_CYCLES)
        begin = streams.mark()
    end = streams.mark()
    assert abs(end.seconds_since(begin)) < 3600
