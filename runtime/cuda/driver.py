"""A call of CUDA's driver: there are hundreds of copies an iteration, and PyTorch takes the host several times as long."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the calling thread has used no GPU yet


def copy(stream: torch.cuda.Stream, *, target: int, source: int, size_bytes: int) -> None:
    """Queue a copy between two addresses, of a GPU or of main memory, in `stream`. Waits for it if main memory is not pinned.

    Raises RuntimeError if the driver refuses it, or with an earlier error of the device.
    """
    status = _calls().cuMemcpyAsync(target, source, size_bytes, stream.cuda_stream)
    if status == _NO_CONTEXT:
        stream.record_event()  # gives the thread the context that PyTorch works in
        status = _calls().cuMemcpyAsync(target, source, size_bytes, stream.cuda_stream)
    if status:
        name = ctypes.c_char_p()
        _calls().cuGetErrorName(status, ctypes.byref(name))
        found = name.value.decode() if name.value else "unknown"
        raise RuntimeError(f"CUDA error {status} ({found}) in a copy of {size_bytes:,} bytes from {source:#x} to {target:#x}")


@functools.cache
def _calls() -> Any:
    # Calls keep the interpreter's lock: whoever lets go of it may wait milliseconds until another thread gives it back.
    library = ctypes.PyDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return library
