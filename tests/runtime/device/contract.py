"""The contracts of devices and of streams, for main memory, simulated lanes and a GPU, as classes that test modules inherit.

The module provides a fixture `case`: one DeviceCase for each kind of device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from runtime.device import COMPUTE, INWARD, OUTWARD, USER, Device


@dataclass(frozen=True, kw_only=True)
class DeviceCase:
    """A kind of device. host_bytes: makes memory that it can copy from and to; its address. unit: bytes of a block."""

    device: Device
    streams: Any = None
    host_bytes: Callable[[int], int] = int
    unit: int = 64


class DeviceContract:
    """What the pager and the executor rely on."""

    def test_marks_are_passed_in_order_and_tell_the_time_between(self, case: DeviceCase) -> None:
        first, second = case.device.mark(), case.device.mark()
        second.wait()
        first.wait()
        assert second.seconds_since(first) >= 0 and first.seconds_since(first) == 0
        assert isinstance(case.device.asynchronous, bool)

    def test_regions_follow_each_other_also_after_an_error(self, case: DeviceCase) -> None:
        for _ in range(2):
            with pytest.raises(KeyError), case.device.region():
                raise KeyError
            with case.device.region():
                begin = case.device.mark()
            case.device.synchronize()
            assert case.device.mark().seconds_since(begin) >= 0

    def test_memory_that_nobody_uses_is_given_back_and_what_is_known_is_not_counted_twice(self, case: DeviceCase) -> None:
        case.device.try_memory(case.unit)
        case.device.give_back_memory()
        case.device.trim(0)
        assert case.device.external_bytes(0) >= case.device.external_bytes(1 << 60) >= 0


class StreamsContract:
    """[Note: What orders what] in `runtime.device`: what a lane does in order, and what another one waits for."""

    def test_what_is_filled_is_read_and_copied_to_the_host_and_back(self, case: DeviceCase) -> None:
        streams, host = case.streams, case.host_bytes(case.unit)
        with streams.region():
            assert streams.in_region
            one, other = (streams.allocate(case.unit) for _ in range(2))
            assert one.nbytes() == case.unit and one.device == streams.device and streams.can_move(one)
            streams.fill(COMPUTE, one.data_ptr(), case.unit, 7)
            streams.fill(COMPUTE, other.data_ptr(), case.unit, 9)
            streams.wait(OUTWARD, streams.record(COMPUTE))
            streams.copy(OUTWARD, target=host, source=one.data_ptr(), size_bytes=case.unit)
            streams.wait(INWARD, streams.record(OUTWARD))
            streams.copy(INWARD, target=other.data_ptr(), source=host, size_bytes=case.unit)
            streams.wait(COMPUTE, streams.record(INWARD))
            found = streams.read(COMPUTE, other.data_ptr(), case.unit)
        assert not streams.in_region and bytes(found) == bytes([7]) * case.unit == ctypes.string_at(host, case.unit)

    def test_an_event_has_passed_when_its_lane_is_there_and_a_mark_tells_when(self, case: DeviceCase) -> None:
        streams = case.streams
        with streams.region():
            memory = streams.allocate(case.unit)
            begin = streams.mark_lane(COMPUTE)
            streams.fill(COMPUTE, memory.data_ptr(), case.unit, 1)
            end, event = streams.mark_lane(COMPUTE), streams.record(COMPUTE)
        event.wait()
        assert event.done() and end.done() and end.seconds_since(begin) >= 0

    def test_user_code_comes_after_the_region_before_it(self, case: DeviceCase) -> None:
        streams = case.streams
        with streams.region():
            memory = streams.allocate(case.unit)
            streams.fill(COMPUTE, memory.data_ptr(), case.unit, 5)
        assert bytes(streams.read(USER, memory.data_ptr(), case.unit)) == bytes([5]) * case.unit
