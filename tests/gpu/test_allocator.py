"""Within PyTorch's allocator of a GPU: memory in pieces, settings of the user, and what measurements leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import teraio
from runtime.cuda import CudaStreams, computing
from runtime.device import COMPUTE
from teraio.machine import open_machine
from teraio.options import Options

from .training import GPU_SCALE, Case, Perceptron, check_equal, train, unlimited

DEVICE = torch.device("cuda", 0)
CASE = Case(name="perceptron", model=Perceptron)


@pytest.mark.parametrize("tiny", [16 << 20, 112 << 20])
def test_the_smallest_budget_that_an_error_names_trains_with_the_same_bits(tiny: int) -> None:
    """Small budgets are where memory in pieces hurts most: blocks of 8 MiB in pages of 20."""
    wanted = unlimited(CASE)
    budget = tiny
    for _ in range(3):  # the optimizer's update and what operators take are known later only
        torch.cuda.empty_cache()
        try:
            found = train(CASE, {"memory_budget": budget, "host_budget": 2 * wanted.peak_bytes}, device=DEVICE)
            break
        except teraio.BudgetError as error:
            assert error.smallest_bytes > budget
            budget = error.smallest_bytes
    else:
        pytest.fail(f"no budget that errors have named trains; the last was {budget}")
    assert budget < wanted.peak_bytes
    check_equal(found, wanted)
    assert found.reserved_bytes is not None and found.reserved_bytes <= budget + 8 * GPU_SCALE.rows * GPU_SCALE.width


@pytest.fixture
def own_settings() -> Iterator[str]:
    text = "garbage_collection_threshold:0.7,max_split_size_mb:256"
    torch._C._accelerator_setAllocatorSettings(text)
    yield text
    torch._C._accelerator_setAllocatorSettings("")


def settings() -> dict[str, Any]:
    found: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    return found


def page_bytes() -> int:
    """Return the unit in which the allocator takes memory for a stream that has none yet."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        held = torch.empty(11 << 20, dtype=torch.uint8, device=DEVICE)
    taken = torch.cuda.memory_reserved(DEVICE) - before
    del held
    torch.cuda.empty_cache()
    return taken


def test_settings_of_the_user_survive(own_settings: str) -> None:
    for _ in range(2):
        machine = open_machine(Options(memory_budget=512 << 20, host_budget=16 << 20), DEVICE)
        try:
            within = settings()
            assert page_bytes() == 16 << 20, "most blocks fill whole pages"
        finally:
            machine.close()
        assert within["expandable_segments"] and within["garbage_collection_threshold"] == 0.7
        assert within["max_split_size"] == 256 << 20
        after = settings()
        assert after["PYTORCH_CUDA_ALLOC_CONF"] == own_settings and not after["expandable_segments"]
        assert after["garbage_collection_threshold"] == 0.7 and after["max_split_size"] == 256 << 20


def test_pages_of_the_allocator_are_its_own_again() -> None:
    open_machine(Options(memory_budget=512 << 20, host_budget=16 << 20), DEVICE).close()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        assert page_bytes() == 20 << 20
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch._C._accelerator_setAllocatorSettings("")


def test_pages_of_the_user_are_not_taken_away_while_a_stage_reads_them() -> None:
    """A gradient that user code made dies in a region. By itself, the allocator takes its pages away without a wait."""
    streams = CudaStreams(DEVICE)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        gradient = torch.ones(40 << 20, dtype=torch.uint8, device=DEVICE)  # whole pages
        with streams.region():
            streams.keep_until_computed(gradient.untyped_storage())
            torch.cuda._sleep(200_000_000)
            read = gradient + 1
            del gradient
            torch.cuda.empty_cache()
        assert bool((read == 2).all())
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch._C._accelerator_setAllocatorSettings("")


def test_a_device_that_was_kept_busy_has_its_memory_back() -> None:
    torch.cuda.synchronize(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    with computing(DEVICE):
        pass
    assert torch.cuda.memory_allocated(DEVICE) <= before, "less, where products before it had workspaces"


@pytest.fixture
def expandable() -> Iterator[None]:
    """As a run sets it."""
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_what_is_allocated_is_recorded_in_its_order() -> None:
    streams, size = CudaStreams(DEVICE), 8 << 20
    with streams.region():
        assert streams.pieces.begin_recording() and not streams.pieces.begin_recording(), "another recording goes on"
        kept = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        torch.empty(3 * size, dtype=torch.uint8, device=DEVICE)
        small = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)  # has memory of its own: no block makes way for it
        block = streams.allocate(2 * size)  # is not the stage's
        assert streams.pieces.recorded() == (size, 3 * size, -2)
        del small, block, kept


@pytest.mark.parametrize(
    ("size", "pieces", "retried"),
    [
        pytest.param(8 << 20, (16 << 20, 12 << 20), False, id="blocks smaller than pages"),
        pytest.param(40 << 20, (120 << 20, 60 << 20), True, id="gaps that a retry has left"),
    ],
)
def test_blocks_make_way_for_pieces_and_the_allocator_finds_them(
    expandable: None, size: int, pieces: tuple[int, ...], retried: bool
) -> None:
    """[Note: Memory in pieces], with the allocator that it is made for."""
    streams = CudaStreams(DEVICE)
    held = {number: streams.allocate(size) for number in range(15)}
    with torch.cuda.stream(streams._streams[COMPUTE]):
        for number, storage in held.items():
            tensor_over(storage).fill_(number)
    streams.limit_bytes = streams.reserved_bytes + 2 * size * retried
    for number in range(1, 15, 2):
        del held[number]
    where, moved = {storage.data_ptr(): number for number, storage in held.items()}, []

    def move(address: int, fresh: torch.UntypedStorage) -> None:
        streams.pieces.copy(address, fresh)
        moved.append(number := where.pop(address))
        held[number], where[fresh.data_ptr()] = fresh, number

    with streams.region():
        before = streams.retries
        if retried:
            torch.cuda.empty_cache()  # as the allocator does
        streams.pieces.gather(pieces, lambda: dict.fromkeys(where, size), move, lambda size_bytes: False)
        assert moved
        large = [torch.empty(part, dtype=torch.uint8, device=DEVICE) for part in pieces]
        assert streams.retries == before
        for tensor in large:
            tensor.fill_(255)
    assert all(bool((tensor_over(storage) == number).all()) for number, storage in held.items())


def tensor_over(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage)
