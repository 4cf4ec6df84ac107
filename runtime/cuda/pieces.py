"""The pieces in which stages take memory from PyTorch's allocator of a GPU, and room for them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from runtime.cuda.compaction import gather, pieces_of
from runtime.device import DeviceBytes

_LONGEST_HISTORY = 100_000  # allocations and frees of one stage
_PAGE_BYTES = 20 << 20  # the allocator takes memory in such units


class AllocatorPieces:
    """`Pieces` of one GPU, and the `Pool` of its lane of computation.

    compute: the stream of that lane. allocate: from its pool. room_bytes: returns by how much the allocator may grow.
    """

    def __init__(
        self,
        device: torch.device,
        compute: torch.cuda.Stream,
        allocate: Callable[[int], torch.UntypedStorage],
        room_bytes: Callable[[], int],
    ) -> None:
        self.allocate = allocate
        self._device = device
        self._compute = compute
        self._room_bytes = room_bytes

    # -- Pieces

    def begin_recording(self) -> bool:
        if torch._C._cuda_isHistoryEnabled():
            return False  # the user records, and would lose it
        self._record("all")
        return True

    def recorded(self, least_bytes: int) -> Sequence[int]:
        trace = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]
        self._record(None)
        return pieces_of([event for event in trace if event["stream"] == self._compute.cuda_stream], least_bytes)

    def gather(
        self,
        pieces: Sequence[int],
        movable: Callable[[], MutableMapping[int, int]],
        install: Callable[[int, torch.UntypedStorage], None],
    ) -> None:
        def move(address: int, fresh: torch.UntypedStorage) -> None:
            with torch.cuda.stream(self._compute):
                self._bytes(fresh.data_ptr(), fresh.nbytes()).copy_(self._bytes(address, fresh.nbytes()))
            install(address, fresh)

        gather(self, pieces, movable, move)

    # -- Pool

    def segments(self) -> Sequence[Mapping[str, Any]]:
        own = self._compute.cuda_stream
        found = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
        return [
            segment
            for segment in found
            if segment["stream"] == own and segment["segment_type"] == "large" and tuple(segment["segment_pool_id"]) == (0, 0)
        ]

    def other_bytes(self) -> int:
        """Return what the allocator has taken for others than the large blocks of computation."""
        own: int = sum(segment["total_size"] for segment in self.segments())
        reserved: int = torch.cuda.memory_reserved(self._device)
        return reserved - own

    @property
    def growth_bytes(self) -> int:
        return self._room_bytes() - 2 * _PAGE_BYTES

    def _bytes(self, address: int, size_bytes: int) -> torch.Tensor:
        return torch.as_tensor(DeviceBytes(address, size_bytes), device=self._device)

    def _record(self, what: str | None) -> None:
        record = torch.cuda.memory._record_memory_history
        record(what, context=None, stacks="python", max_entries=_LONGEST_HISTORY, clear_history=True)  # type: ignore[arg-type]
