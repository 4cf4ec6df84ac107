"""The contracts of devices and streams, for main memory and for the simulated lanes that other tests rely on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.device import CpuDevice

from ..block_machine import Allocator
from ..memory import Memory
from ..simulated_device import SimulatedDevice
from .contract import DeviceCase, DeviceContract, StreamsContract


def simulated(seed: int) -> DeviceCase:
    streams = SimulatedDevice(seed, pieces=4, unit=64)
    kept: list[Memory] = []

    def host_bytes(size: int) -> int:
        kept.append(Memory(size))
        return kept[-1].address

    return DeviceCase(device=Allocator(streams), streams=streams, host_bytes=host_bytes)


class TestDevice(DeviceContract):
    """The contract of devices."""

    @pytest.fixture(params=["main memory", "simulated"])
    def case(self, request: pytest.FixtureRequest) -> DeviceCase:
        return DeviceCase(device=CpuDevice()) if request.param == "main memory" else simulated(0)


class TestStreams(StreamsContract):
    """The contract of streams, in several orders of the lanes."""

    @pytest.fixture(params=range(5))
    def case(self, request: pytest.FixtureRequest) -> Iterator[DeviceCase]:
        made = simulated(request.param)
        yield made
        made.streams.synchronise()
        assert not made.streams.faults
