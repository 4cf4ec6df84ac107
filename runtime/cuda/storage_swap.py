"""Gives storages other memory while all tensors that share them stay what they are; for every device."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from runtime.system import native


def exchange(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Two storages exchange their memory, not their sizes. Nobody may be using either."""
    _library().teraio_exchange(one._cdata, other._cdata)


def lend(storage: torch.UntypedStorage, address: int) -> None:
    """Give a storage memory that stays the caller's, on the storage's device or readable from there; frees what it had."""
    _library().teraio_lend(storage._cdata, address)


def close(storage: torch.UntypedStorage, message: str) -> None:
    """Whoever asks for the storage's data from now on gets a RuntimeError with this message."""
    _library().teraio_close(storage._cdata, message.encode())


def open_again(storage: torch.UntypedStorage) -> None:
    """End what `close` began."""
    _library().teraio_open(storage._cdata)


def address(storage: torch.UntypedStorage) -> int:
    """Where the data lies, 0 for nowhere; also of a closed storage."""
    return int(_library().teraio_address(storage._cdata) or 0)


@functools.cache
def _library() -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    functions: dict[str, native.Signature] = {
        "teraio_exchange": (None, [pointer, pointer]),
        "teraio_lend": (None, [pointer, pointer]),
        "teraio_close": (None, [pointer, ctypes.c_char_p]),
        "teraio_open": (None, [pointer]),
        "teraio_address": (pointer, [pointer]),
    }
    return native.load(Path(__file__).with_name("storage_swap.cpp"), functions, purpose="moving the blocks of a GPU")
