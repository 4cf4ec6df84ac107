"""The stream mover under the pager, on a device that runs its lanes in any order that their events allow.

Every sequence is random, and so is the order in which the device runs queued work. Stages, copies and user code must always
see the bytes that were written last. `test_every_wait_is_needed` removes one wait at a time and checks that the tests fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from planner.errors import ChecksumError
from runtime.device import Lane
from runtime.paging import Block, State
from runtime.storage import ALIGNMENT_BYTES

from ...thoroughness import by_profile
from ..block_machine import SLICES, TIERS
from ..simulated_device import SimulatedDevice, SimulatedEvent, SimulatedPieces
from ..simulated_machine import UNIT, SimulatedMachine

STEPS = 120
SEEDS = by_profile(ci=4, long=40)


MODES = pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
"""The debug mode adds waits. All tests must pass with and without them."""


Scene = Callable[[SimulatedMachine], None]


def unchanged(machine: SimulatedMachine) -> None:
    """All rules are kept."""


def run(
    seed: int,
    tiers: Sequence[str],
    prepare: Scene = unchanged,
    *,
    lends: bool = False,
    regions: int = STEPS // 8,
    **settings: Any,
) -> SimulatedMachine:
    """Run a random sequence. lends: blocks are updated in slices in their tier, too."""
    blocks = random.Random(seed).randint(4, 7)
    unit = SLICES * ALIGNMENT_BYTES if lends else UNIT
    machine = SimulatedMachine(seed, budget_blocks=blocks, tiers=tiers, unit=unit, lends=lends, **settings)
    prepare(machine)
    try:
        machine.run(regions)
        return machine
    finally:
        machine.mover.close()


@MODES
@pytest.mark.parametrize("lends", [False, True], ids=["whole", "slices"])
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_sequence_in_any_order(
    seed: int, tiers: Sequence[str], lends: bool, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every other one, the device is parked between some regions."""
    updates = []
    update = SimulatedMachine.update
    monkeypatch.setattr(SimulatedMachine, "update", lambda machine: (updates.append(1), update(machine)))
    machine = run(seed, tiers, lambda machine: setattr(machine, "parks", seed % 2 == 1), lends=lends, debug=debug)
    assert machine.parks or machine.pager.account.evictions > (len(updates) if lends else 20)
    assert len(updates) >= 5 * lends
    slots = {block.slot for block in machine.tensors if block.slot is not None}
    machine.tensors.clear()
    machine.device.synchronise()
    machine.pager.forget_dead()
    assert slots and machine.slab.used_bytes == machine.files.used_bytes == 0, "every slot came back"
    assert machine.checked is None or not (machine.checked._sums or machine.checked._unseen), "blocks that are gone are forgotten"


@MODES
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_blocks_that_make_way_on_the_device_keep_their_bytes(tiers: Sequence[str], debug: bool) -> None:
    """[Note: Memory in pieces]: before a stage, any blocks move that no copy and nobody else uses."""
    moved = 0
    for seed in range(SEEDS):

        def prepare(machine: SimulatedMachine, seed: int = seed) -> None:
            machine.device.pieces = SimulatedPieces(machine.device, seed)

        machine = run(seed, tiers, prepare, debug=debug, lends=bool(seed % 2), crumbles=0.02)
        moved += machine.device.pieces.moved
    assert moved > 5 * SEEDS


def dies_while_it_arrives(machine: SimulatedMachine) -> None:
    """A block is prefetched and freed before its copy in has ended. A stage makes another block at once."""
    machine.slow(Lane.INWARD)
    with machine.in_region():
        block = machine.made()
        machine.pager.offload(block)
        machine.device.synchronise()
        machine.pager.forget_dead()
        assert block.state is State.OFFLOADED
        machine.pager.prefetch(block)
        del machine.tensors[block], machine.expected[block]
        machine.made()


def arrives_while_user_code_runs(machine: SimulatedMachine) -> None:
    """User code reads a block and frees it. Then a drive frees memory for a prefetch, which may get the same memory."""
    machine.slow(Lane.USER)
    with machine.in_region():
        fetched, leaving, seen = machine.made(), machine.made(), machine.made(visible=True)
        machine.pager.offload(fetched, "host")
        machine.device.synchronise()
        machine.pager.forget_dead()
        other = machine.made()
        machine.pager.offload(leaving, "storage")
        machine.pager.prefetch(fetched)
        assert fetched.state is State.OFFLOADED, "there is no room yet"
    machine.between_regions = True
    machine.kernel(Lane.USER, seen, None)
    del machine.tensors[seen], machine.expected[seen]
    machine.drive.finish()
    assert fetched.state is State.ON_DEVICE and other.state is State.ON_DEVICE
    machine.between_regions = False


def leaves_twice_before_the_fence(machine: SimulatedMachine) -> None:
    """At the end of a region, a copy to a drive ends before an earlier copy to the host tier."""
    machine.slow(Lane.OUTWARD)
    with machine.in_region():
        block = machine.made(visible=True)
        machine.pager.offload(block, "host")
        machine.pager.acquire([block], 0, "write")
        machine.kernel(Lane.COMPUTE, block, machine.new_value())
        machine.pager.retire([block], [block])
        machine.pager.offload(block, "storage")
    assert block.state is State.OFFLOADED


def memory_of_the_user_is_unmapped(machine: SimulatedMachine) -> None:
    """A parameter leaves for the first time. Before its copy out has ended, the allocator has to take its free memory away."""
    machine.slow(Lane.OUTWARD, Lane.COMPUTE)
    value = machine.new_value()
    tensor = machine.allocated_by_user(value)
    with machine.in_region():
        block = machine.adopt(tensor, value)
        machine.pager.offload(block)
        machine.pager.acquire([], machine.unit, "the next stage")  # takes the memory of the block
        assert block.state is State.OFFLOADED
        machine.device.arena.unmap()
        machine.device.synchronise()
        machine.pager.retire([], [])


def another_device_is_current(machine: SimulatedMachine) -> None:
    """The same, and the allocator waits for the default stream of another device."""
    machine.device.elsewhere = True
    memory_of_the_user_is_unmapped(machine)


def leaves_clean_after_its_last_use(machine: SimulatedMachine) -> None:
    """A parameter whose copy is valid leaves without a copy, while a stage still reads it. Then its memory is unmapped."""
    value = machine.new_value()
    tensor = machine.allocated_by_user(value)
    with machine.in_region():
        block = machine.adopt(tensor, value)
        machine.pager.offload(block)
        machine.pager.acquire([block], 0, "read")
        machine.slow(Lane.COMPUTE)
        machine.kernel(Lane.COMPUTE, block, None)
        machine.pager.retire([block], [])
        assert block.copy_is_valid
        machine.pager.offload(block)
        machine.device.arena.unmap()


def dies_while_it_leaves(machine: SimulatedMachine) -> None:
    """A block is freed while its copy out still reads it. Then its memory is unmapped."""
    machine.slow(Lane.OUTWARD)
    with machine.in_region():
        block = machine.made()
        machine.pager.offload(block)
        del machine.tensors[block], machine.expected[block]
        machine.pager.forget_dead()
        machine.device.arena.unmap()


def freed_by_the_stage_that_reads_it(machine: SimulatedMachine) -> None:
    """A gradient that user code has made dies with the stage that reads it. Then its memory is unmapped."""
    machine.slow(Lane.COMPUTE)
    value = machine.new_value()
    tensor = machine.allocated_by_user(value)
    with machine.in_region():
        block = machine.adopt(tensor, value)
        del tensor, machine.tensors[block], machine.expected[block]
        machine.pager.forget_dead()
        machine.device.arena.unmap()


def makes_way_while_it_leaves(machine: SimulatedMachine) -> None:
    """A block is needed again before its copy out has ended, and makes way on the device. Later it leaves without a copy."""
    machine.device.pieces = SimulatedPieces(machine.device, machine.device.draw.randrange(1000))
    with machine.in_region():
        block = machine.made()
        for _ in range(2):
            machine.pager.acquire([], 0, "stage")  # is recorded
            machine.pager.retire([], [])
        machine.slow(Lane.OUTWARD)
        machine.pager.offload(block)
        machine.pager.acquire([block], 0, "stage")
        machine.kernel(Lane.COMPUTE, block, None)
        machine.pager.retire([block], [])
        machine.device.synchronise()
        assert block.copy_is_valid
        machine.pager.offload(block)
        assert block.state is State.OFFLOADED


BLOCKS: dict[Scene, int] = {
    makes_way_while_it_leaves: 2,
    freed_by_the_stage_that_reads_it: 1,
    dies_while_it_arrives: 2,
    arrives_while_user_code_runs: 3,
    leaves_twice_before_the_fence: 3,
    memory_of_the_user_is_unmapped: 1,
    another_device_is_current: 1,
    leaves_clean_after_its_last_use: 2,
    dies_while_it_leaves: 2,
}
"""How many fit on the device."""


def play(scene: Scene | None, seed: int, prepare: Scene = unchanged, *, debug: bool = False) -> None:
    """Play a scene, or any sequence, and read all blocks that are left."""
    if scene is None:
        run(seed, ("host", "storage"), prepare, debug=debug)
        return
    tiers = ("host", "storage") if BLOCKS[scene] == 3 else ("host",)
    machine = SimulatedMachine(seed, budget_blocks=BLOCKS[scene], tiers=tiers, debug=debug)
    prepare(machine)
    scene(machine)
    machine.finish()
    machine.mover.close()


@MODES
@pytest.mark.parametrize("scene", BLOCKS)
def test_scenes(scene: Scene, debug: bool) -> None:
    for seed in range(by_profile(ci=8, long=40)):
        play(scene, seed, debug=debug)


def test_the_end_waits_for_copies_from_memory_that_goes() -> None:
    machine = SimulatedMachine(0, budget_blocks=2, tiers=("host",))
    machine.slow(Lane.INWARD)
    with machine.in_region():
        block = machine.made(visible=True)
        machine.pager.offload(block)
    assert block.state is State.OFFLOADED
    with machine.device.region():
        machine.pager.closing.bring_back()
        machine.kernel(Lane.COMPUTE, block, None)
    assert machine.device.lanes[Lane.INWARD], "the copy is queued"
    machine.mover.close()
    assert not machine.device.lanes[Lane.INWARD]
    machine.device.synchronise()
    assert not machine.wrong


def test_copies_that_begin_together_share_marks_and_are_counted_without_gaps() -> None:
    """A copy begins where the one before it ends, unless its lane has waited for something in between."""
    machine = SimulatedMachine(0, budget_blocks=8, tiers=("host",))
    marks: list[SimulatedEvent] = []
    mark_lane = machine.device.mark_lane

    def noted(lane: Lane) -> SimulatedEvent:
        marks.append(mark_lane(lane))
        return marks[-1]

    machine.device.mark_lane = noted  # type: ignore[method-assign]
    with machine.in_region():
        blocks = [machine.made() for _ in range(4)]
        machine.pager.offload_all([(block, "host") for block in blocks[:3]])
        together = len(marks)
        machine.pager.offload(blocks[3])
        machine.device.synchronise()
        machine.pager.forget_dead()
    assert (together, len(marks)) == (4, 6)
    assert machine.mover.moved_bytes["device->host"] == sum(block.size_bytes for block in blocks)
    busy = marks[3].at_step - marks[0].at_step + marks[5].at_step - marks[4].at_step
    assert machine.mover.busy_seconds["device->host"] == busy
    machine.finish()
    machine.mover.close()


class Deaf(SimulatedDevice):
    """A device on which some lanes do not wait."""

    deaf: tuple[Lane, ...] = ()

    def wait(self, lane: Lane, event: SimulatedEvent) -> None:
        if lane not in self.deaf:
            super().wait(lane, event)


def no_wait(lane: Lane) -> Callable[[SimulatedMachine], None]:
    def prepare(machine: SimulatedMachine) -> None:
        machine.device.__class__ = Deaf
        machine.device.deaf = (lane,)  # type: ignore[attr-defined]

    return prepare


def no_landing(machine: SimulatedMachine) -> None:
    machine.mover.wait_resident = lambda blocks: [machine.mover._in.pop(block, None) for block in blocks]  # type: ignore


def no_wait_to_release(machine: SimulatedMachine) -> None:
    release = machine.mover.release

    def hasty(block: Block) -> None:
        machine.mover._out.pop(block, None)
        release(block)

    machine.mover.release = hasty  # type: ignore[method-assign]


def no_wait_to_make_way(machine: SimulatedMachine) -> None:
    install = machine.mover.install

    def hasty(block: Block, *fresh: torch.UntypedStorage) -> None:
        machine.mover._out.pop(block, None)
        install(block, *fresh)

    machine.mover.install = hasty  # type: ignore[method-assign]


def point_is_kept(machine: SimulatedMachine) -> None:
    """Copies that begin together share a point of computation, although computation has waited for another copy since."""
    machine.mover.together.passed = lambda: None  # type: ignore[method-assign]


def no_hold(machine: SimulatedMachine) -> None:
    """Copies do not keep their storages alive."""
    for direction in ("in", "out"):
        copy, copies = getattr(machine.mover, f"copy_{direction}"), getattr(machine.mover, f"_{direction}")

        def careless(block: Block, *arguments: Any, copy: Any = copy, copies: Any = copies) -> bool:
            if queued := copy(block, *arguments):
                event, _, number = copies[block]
                copies[block] = event, torch.UntypedStorage(0), number
            return queued

        setattr(machine.mover, f"copy_{direction}", careless)


def memory_is_as_any_other(machine: SimulatedMachine) -> None:
    """What user code allocated is given back like the memory of stages."""
    machine.device.keep_until_computed = lambda storage: None  # type: ignore[method-assign]


def no_user(machine: SimulatedMachine) -> None:
    """Between regions, copies in do not wait for user code."""
    record = machine.device.record

    def forgetful(lane: Lane) -> SimulatedEvent:
        event = record(lane)
        event.passed = event.passed or lane is Lane.USER and machine.between_regions
        return event

    machine.device.record = forgetful  # type: ignore[method-assign]


def slots_are_not_awaited(machine: SimulatedMachine) -> None:
    """The host's processor updates a block in a slot that copies may still write or read."""
    machine.mover.finished = list  # type: ignore[method-assign]


def computation_is_not_awaited(machine: SimulatedMachine) -> None:
    """The host's processor updates a block in a slot that user code may still write or read through the bus."""
    set_aside = machine.set_aside

    def hasty() -> None:
        set_aside()
        for _, _, device_passed in machine.host_work:
            device_passed.passed = True

    machine.set_aside = hasty  # type: ignore[method-assign]


def drives_do_not_wait(machine: SimulatedMachine) -> None:
    finish = machine.drive.finish

    def hasty() -> bool:
        if machine.drive.queue:
            move, on_done, _, transfer = machine.drive.queue.popleft()
            machine.drive.queue.appendleft((move, on_done, lambda: None, transfer))
        return finish()

    machine.drive.finish = hasty  # type: ignore[method-assign]


@MODES
@pytest.mark.parametrize(
    ("scene", "without"),
    [
        pytest.param(None, no_wait(Lane.OUTWARD), id="rule 1"),
        pytest.param(None, no_wait(Lane.INWARD), id="rule 2"),
        pytest.param(arrives_while_user_code_runs, no_user, id="rule 2, user code"),
        pytest.param(None, no_landing, id="rule 3"),
        pytest.param(None, no_wait_to_release, id="rule 4"),
        pytest.param(makes_way_while_it_leaves, no_wait_to_make_way, id="rule 4, on the device"),
        pytest.param(dies_while_it_arrives, no_hold, id="rule 5"),
        pytest.param(dies_while_it_leaves, no_hold, id="rule 5, on the way out"),
        pytest.param(memory_of_the_user_is_unmapped, memory_is_as_any_other, id="rule 6"),
        pytest.param(another_device_is_current, memory_is_as_any_other, id="rule 6, another current device"),
        pytest.param(leaves_clean_after_its_last_use, memory_is_as_any_other, id="rule 6, without a copy"),
        pytest.param(freed_by_the_stage_that_reads_it, memory_is_as_any_other, id="rule 6, in a region"),
        pytest.param(None, slots_are_not_awaited, id="rule 7"),
        pytest.param(None, computation_is_not_awaited, id="rule 7, computation"),
        pytest.param(None, drives_do_not_wait, id="drives"),
    ],
)
def test_every_wait_is_needed(scene: Scene | None, without: Scene, debug: bool) -> None:
    is_needed(lambda seed: play(scene, seed, without, debug=debug))


def test_copies_that_begin_together_need_a_point_after_the_last_wait() -> None:
    """As above, for rules 2 and 4. In the debug mode no copies share a point."""
    is_needed(lambda seed: play(None, seed, point_is_kept))


def is_needed(broken: Callable[[int], object]) -> None:
    """Break one rule of [Note: What orders what] at a time. In some order of events there must be wrong bytes."""
    for seed in range(100):
        try:
            broken(seed)
        except ChecksumError:
            return
        except AssertionError as error:
            assert "instead of" in str(error)
            return
    pytest.fail("nothing noticed that the rule was broken")
