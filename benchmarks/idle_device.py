"""A device with streams on which nothing is done. What is left is what the host pays in Python, without the calls of a driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from runtime.device import Event, Lane

SMALLEST_MOVED_BYTES = 8192
"""Smaller storages stay on the device."""


class IdleEvent:
    """A point in a lane, which the device passes when the host has begun `IdleDevice.lag_stages` more stages, or waits."""

    __slots__ = ("_at", "_device")

    def __init__(self, device: IdleDevice) -> None:
        self._device = device
        self._at = device.stages + device.lag_stages

    def done(self) -> bool:
        return self._device.stages >= self._at

    def wait(self) -> None:
        self._device.stages = max(self._device.stages, self._at)

    def seconds_since(self, earlier: IdleEvent) -> float:
        return 1e-3


class IdleMark:
    """A point in time, like all others."""

    __slots__ = ()

    def seconds_since(self, earlier: IdleMark) -> float:
        return 1e-3

    def wait(self) -> None:
        """The device has passed it."""


class IdleDevice:
    """`Streams` and `Device` in main memory that nobody reads or writes.

    lag_stages: so many stages later the device has ended a copy. stages: that have run so far. calls: of the methods that ask a
    GPU for something.
    """

    asynchronous = True
    pieces = None
    retries = 0
    device = torch.device("cpu")

    def __init__(self, lag_stages: int) -> None:
        self.lag_stages = lag_stages
        self.in_region = False
        self.stages = 0
        self.calls = 0

    # -- Device

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        self.in_region = True
        try:
            yield
        finally:
            self.in_region = False

    def mark(self) -> IdleMark:
        self.calls += 1
        return IdleMark()

    def synchronize(self) -> None:
        self.calls += 1

    def keep_until_computed(self, storage: torch.UntypedStorage) -> None:
        self.calls += 1

    def try_memory(self, size_bytes: int) -> None:
        self.calls += 1

    def give_back_memory(self) -> None:
        self.calls += 1

    def external_bytes(self, known_bytes: int) -> int:
        return 0

    # -- Streams

    def record(self, lane: Lane) -> IdleEvent:
        self.calls += 1
        return IdleEvent(self)

    def wait(self, lane: Lane, event: Event) -> None:
        self.calls += 1

    def mark_lane(self, lane: Lane) -> IdleEvent:
        self.calls += 1
        return IdleEvent(self)

    def copy(self, lane: Lane, *, target: int, source: int, size_bytes: int) -> None:
        self.calls += 1

    def fill(self, lane: Lane, address: int, size_bytes: int, value: int) -> None:
        self.calls += 1

    def read(self, lane: Lane, address: int, size_bytes: int) -> memoryview:
        raise NotImplementedError("an idle device has no bytes")

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        self.calls += 1
        return torch.UntypedStorage(size_bytes)  # type: ignore[no-untyped-call]

    def can_move(self, storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() >= SMALLEST_MOVED_BYTES

    def trim(self, spare_bytes: int) -> None:
        """Nothing is kept for reuse."""

    # -- MeasuredMemory

    allocated_bytes = 0
    peak_bytes = 0

    def reset_peak(self) -> None:
        """No peak is measured."""
