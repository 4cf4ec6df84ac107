"""Memory of a PyTorch device, to measure a store with and to verify that it works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from planner.errors import StorageError
from runtime.storage import ALIGNMENT_BYTES


class TorchMemory:
    """The memory of `device`: the addresses that an engine is given point there.

    on_host: whether the processor can read it.
    load: within, the device works as it will while blocks move. A store is measured so.
    """

    def __init__(
        self, device: torch.device, *, load: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        self._device = device
        self.load = load
        self.on_host = device.type == "cpu"

    @contextmanager
    def allocate(self, size_bytes: int) -> Iterator[TorchBuffer]:
        """Yield aligned memory, which goes back to PyTorch's allocator when the context ends. Raises StorageError."""
        try:
            memory = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise StorageError(
                f"{self._device} has no {size_bytes:,} bytes free to try the storage path with; free memory there before the "
                "model is compiled"
            ) from error
        yield TorchBuffer(memory)


class TorchBuffer:
    """A tensor of bytes from its first aligned address on. `write` and `read` wait until the bytes have moved.

    address: of the first byte, for a store.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        skipped = -tensor.data_ptr() % ALIGNMENT_BYTES
        self._bytes = tensor[skipped : tensor.numel() - ALIGNMENT_BYTES + skipped]
        self.address = self._bytes.data_ptr()

    def write(self, offset_bytes: int, content: bytes) -> None:
        """Put `content` at an offset."""
        # A copy from pageable memory returns when it has ended, so other streams and drives may read the bytes then.
        source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._bytes[offset_bytes : offset_bytes + len(content)].copy_(source)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return the bytes at an offset."""
        return self._bytes[offset_bytes : offset_bytes + length_bytes].cpu().numpy().tobytes()
