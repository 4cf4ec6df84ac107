"""Where stages run: devices, streams and events, and which bytes are theirs."""

from runtime.device.device import CpuDevice, Device, Mark, WallMark
from runtime.device.device_bytes import DeviceBytes
from runtime.device.span import MIN_MOVED_BYTES, Span
from runtime.device.streams import Event, Lane, Streams, TimedEvent

__all__ = [
    "CpuDevice",
    "Device",
    "DeviceBytes",
    "Event",
    "Lane",
    "MIN_MOVED_BYTES",
    "Mark",
    "Span",
    "Streams",
    "TimedEvent",
    "WallMark",
]
