"""Where stages run: devices, streams and events, and which bytes are theirs."""

from runtime.device.device import CpuDevice, Device, DeviceMemoryError, Mark, WallMark
from runtime.device.device_bytes import DeviceBytes
from runtime.device.span import MIN_MOVED_BYTES, Span
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
