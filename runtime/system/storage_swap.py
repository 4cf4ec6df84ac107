"""Gives storages other memory. Tensors that share a storage keep their sizes, views and identity. For every device."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from runtime.system import native


def lend(storage: torch.UntypedStorage, address: int) -> None:
    """Give a storage memory that the caller owns, on its device or readable from there. Free the memory that it had."""
    _library().teraio_lend(storage._cdata, address)


def without_memory(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a new storage of this size that has no memory. Nobody may access its data before it gets some."""
    storage = torch.UntypedStorage(0, device=device)  # type: ignore[no-untyped-call]
    _library().teraio_size(storage._cdata, size_bytes)
    return storage


def close(storage: torch.UntypedStorage, message: str) -> None:
    """Let every access to the storage's data raise a RuntimeError with this message."""
    _library().teraio_close(storage._cdata, message.encode())


def reopen(storage: torch.UntypedStorage) -> None:
    """End `close`."""
    _library().teraio_set_closed(storage._cdata, False)


def tensor_over(storage: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over a storage, in row-major order. The storage may be closed, which PyTorch's `set_` refuses."""
    was_closed = _library().teraio_set_closed(storage._cdata, False)
    try:
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        return tensor.set_(storage, 0, tuple(shape))  # type: ignore[call-overload,no-any-return]
    finally:
        _library().teraio_set_closed(storage._cdata, was_closed)


def address(storage: torch.UntypedStorage) -> int:
    """Return where the data lies, 0 if there is none. Works for a closed storage too."""
    return int(_library().teraio_address(storage._cdata) or 0)


def changed(keys: Sequence[int], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the positions of the storages whose address or size is not the given one.

    keys: their `_cdata`. Of a dead storage, a weak reference must be left.
    """
    columns = [array("Q", column) for column in (keys, addresses, sizes)]
    found = array("I", bytes(4 * len(keys)))
    count = _library().teraio_changed(len(keys), *(column.buffer_info()[0] for column in (*columns, found)))
    return found[:count].tolist()


def discard(storage: torch.UntypedStorage, message: str) -> None:
    """Free the memory of a storage, and let every access to its data raise a RuntimeError with this message."""
    lend(storage, 0)
    close(storage, message)


def install(storage: torch.UntypedStorage, fresh: torch.UntypedStorage) -> int:
    """Open a storage, if it is closed, and exchange its memory with that of `fresh`. Return where its data lies now."""
    return int(_library().teraio_install(storage._cdata, fresh._cdata))


@functools.cache
def _library() -> SimpleNamespace:
    """Return the functions. `CDLL` itself looks each of them up in Python's slow way."""
    pointer = ctypes.c_void_p
    functions: dict[str, native.Signature] = {
        "teraio_lend": (None, [pointer, pointer]),
        "teraio_size": (None, [pointer, ctypes.c_size_t]),
        "teraio_close": (None, [pointer, ctypes.c_char_p]),
        "teraio_set_closed": (ctypes.c_int, [pointer, ctypes.c_int]),
        "teraio_install": (pointer, [pointer, pointer]),
        "teraio_address": (pointer, [pointer]),
        "teraio_changed": (ctypes.c_size_t, [ctypes.c_size_t, *[pointer] * 4]),
    }
    source = Path(__file__).with_name("storage_swap.cpp")
    library = native.load(source, functions, purpose="giving tensors other memory", short=True)
    return SimpleNamespace(**{name: getattr(library, name) for name in functions})
