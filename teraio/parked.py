"""What `teraio.park` tells: what has left the device, and what is still there and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

BESIDE = "of your code and of libraries, and gaps between what stays"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """The device is empty but for what is named here, until the next compiled region or optimizer step.

    left_bytes: have left the device now. staying_bytes: of what PyTorch still holds there, by the reason why it does.
    seconds: that parking took.

    As a context it only shows for how long the device is yours: blocks come back with the next region, not at the end.
    """

    left_bytes: int
    staying_bytes: Mapping[str, int]
    seconds: float

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing comes back before it is needed."""
