"""Fake tensors on a GPU that is not there: shapes on "cuda", for which nothing is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from runtime.system import native


@contextlib.contextmanager
def missing_gpu() -> Iterator[None]:
    """Let fake tensors be on "cuda" within the block, also in backward passes of this thread. With a GPU, they can be anyway.

    PyTorch would end the process at the first gradient in a build without CUDA. Waits for a compiler the first time; raises
    UnsupportedError without one. Not to be nested.
    """
    if torch.cuda.is_available():
        yield
        return
    functions: dict[str, native.Signature] = {"teraio_pretend": (None, []), "teraio_pretend_no_more": (None, [])}
    source = Path(__file__).with_name("missing_gpu.cpp")
    library = native.load(source, functions, purpose='capturing a step on "cuda" without a GPU')
    library.teraio_pretend()
    try:
        with torch.autograd.set_multithreading_enabled(False):  # otherwise each GPU has a thread
            yield
    finally:
        library.teraio_pretend_no_more()
