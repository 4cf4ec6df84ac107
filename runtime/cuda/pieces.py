"""The pieces in which stages take memory from PyTorch's allocator of a GPU, and room for them there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from runtime.cuda.compaction import gather, history_of, serve
from runtime.device import DeviceBytes, DeviceMemoryError

_LONGEST_HISTORY = 100_000  # allocations and frees of one stage
_PAGE_BYTES = 20 << 20  # the allocator takes memory in such units
_LEFT_BYTES = 64 << 20  # for small blocks, which have pages of their own


class AllocatorPieces:
    """`Pieces` of one GPU, and the `Pool` of its lane of computation.

    compute: the stream of that lane. allocate: from its pool. limit_bytes: returns how much the allocator may take. in_region:
    whether what user code has queued comes before what is queued there.
    """

    def __init__(
        self,
        device: torch.device,
        compute: torch.cuda.Stream,
        allocate: Callable[[int], torch.UntypedStorage],
        limit_bytes: Callable[[], int],
        in_region: Callable[[], bool],
    ) -> None:
        self.allocate = allocate
        self._device = device
        self._compute = compute
        self._limit_bytes = limit_bytes
        self._in_region = in_region

    # -- Pieces

    def begin_recording(self) -> bool:
        if torch._C._cuda_isHistoryEnabled():
            return False  # the user records, and would lose it
        self._record("all")
        return True

    def recorded(self, least_bytes: int) -> Sequence[int]:
        trace = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]
        self._record(None)
        return history_of([event for event in trace if event["stream"] == self._compute.cuda_stream], least_bytes)

    def gather(
        self,
        history: Sequence[int],
        movable: Callable[[], MutableMapping[int, int]],
        install: Callable[[int, torch.UntypedStorage], None],
    ) -> None:
        def move(address: int, fresh: torch.UntypedStorage) -> None:
            with torch.cuda.stream(self._compute):
                self._bytes(fresh.data_ptr(), fresh.nbytes()).copy_(self._bytes(address, fresh.nbytes()))
            install(address, fresh)

        if not self._in_region():
            return
        taken = self._all_segments()
        own = self._own(taken)
        if serve(own, history) or not all(segment["is_expandable"] for segment in own):
            return  # it cannot be helped where the user's settings keep ranges apart
        room = self._limit_bytes() - sum(s["total_size"] for s in taken if s["device"] == self._device.index) - _LEFT_BYTES
        if room >= _PAGE_BYTES:
            # Taken piece by piece, it would lie in gaps that retries have left, and serve nothing large.
            with contextlib.suppress(DeviceMemoryError):
                self.allocate(room)
        gather(self, history, movable, move)

    # -- Pool

    def segments(self) -> Sequence[Mapping[str, Any]]:
        return self._own(self._all_segments())

    def _all_segments(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
        return found

    def _own(self, segments: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        stream = self._compute.cuda_stream
        large = (segment for segment in segments if segment["stream"] == stream and segment["segment_type"] == "large")
        return [segment for segment in large if tuple(segment["segment_pool_id"]) == (0, 0)]  # no pool of the user's

    def _bytes(self, address: int, size_bytes: int) -> torch.Tensor:
        return torch.as_tensor(DeviceBytes(address, size_bytes), device=self._device)

    def _record(self, what: str | None) -> None:
        record = torch.cuda.memory._record_memory_history
        record(what, context=None, stacks="python", max_entries=_LONGEST_HISTORY, clear_history=True)  # type: ignore[arg-type]
