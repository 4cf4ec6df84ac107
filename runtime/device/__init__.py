"""Where stages run: devices, streams and events, and which bytes are theirs."""

from runtime.device.device import (
    COMPUTE,
    INWARD,
    MIN_MOVED_BYTES,
    OUTWARD,
    USER,
    CpuDevice,
    Device,
    DeviceBytes,
    DeviceMemoryError,
    Event,
    Lane,
    Mark,
    Pieces,
    Span,
    Streams,
    TimedEvent,
    WallMark,
)
