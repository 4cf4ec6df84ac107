"""A copier whose copies end late. Code that does not wait for them finds wrong bytes."""

from __future__ import annotations

import ctypes
import random
import threading
import time

from ..memory import Memory

POISON = 0xA5


class SlowCopy(threading.Thread):
    """Fills the target with poison at once, and copies the source up to two milliseconds later."""

    def __init__(self, target_address: int, source_address: int, size_bytes: int, delay_seconds: float) -> None:
        super().__init__(daemon=True)
        self._copy = (target_address, source_address, size_bytes)
        self._delay_seconds = delay_seconds
        ctypes.memset(target_address, POISON, size_bytes)
        self.start()

    def run(self) -> None:
        time.sleep(self._delay_seconds)
        ctypes.memmove(*self._copy)

    def wait(self) -> None:
        self.join()


class SlowCopier:
    """A `Copier` between ordinary memory and ordinary memory. buffers: the bytes of each buffer that was asked for."""

    def __init__(self) -> None:
        self.buffers: list[int] = []
        self._random = random.Random(0)

    def buffer(self, size_bytes: int) -> Memory:
        self.buffers.append(size_bytes)
        return Memory(size_bytes)

    def to_host(self, target_address: int, source_address: int, size_bytes: int) -> SlowCopy:
        return self._begin("out", target_address, source_address, size_bytes)

    def to_device(self, target_address: int, source_address: int, size_bytes: int) -> SlowCopy:
        return self._begin("in", target_address, source_address, size_bytes)

    def _begin(self, direction: str, target_address: int, source_address: int, size_bytes: int) -> SlowCopy:
        return SlowCopy(target_address, source_address, size_bytes, self._random.choice((0.0, 0.0005, 0.002)))
