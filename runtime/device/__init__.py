"""Where stages run: devices, streams and events, and which bytes are theirs."""

from runtime.device.device import MIN_MOVED_BYTES, CpuDevice, Device, DeviceBytes, DeviceMemoryError, Mark, Span, WallMark
from runtime.device.streams import COMPUTE, INWARD, OUTWARD, USER, Event, Lane, Streams, TimedEvent

__all__ = [
    "COMPUTE",
    "CpuDevice",
    "Device",
    "DeviceBytes",
    "DeviceMemoryError",
    "Event",
    "INWARD",
    "Lane",
    "MIN_MOVED_BYTES",
    "Mark",
    "OUTWARD",
    "Span",
    "Streams",
    "TimedEvent",
    "USER",
    "WallMark",
]
