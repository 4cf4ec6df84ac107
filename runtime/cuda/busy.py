"""Keeps a GPU computing while paths to drives are measured, as it will be in training.

KvikIO's compatibility mode copies on streams that wait for the default stream. In training the default stream waits for the lane
of computation at the end of each region, so that such copies wait for stages. An idle GPU does not show that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_SIDE = 2048
_PRODUCTS = 32
"""Products of matrices that are queued at a time: about a millisecond."""


@contextlib.contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Within, a stream of `device` multiplies matrices, and the default stream waits for each millisecond of that.

    Takes 24 MiB of the device, and what cuBLAS takes. Without room for them the device stays idle. Waits at the end until the
    last product is done, and leaves nothing behind.
    """
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            factor = torch.full((_SIDE, _SIDE), 1e-3, dtype=torch.bfloat16, device=device)
            product = torch.empty_like(factor)
    except torch.OutOfMemoryError:
        yield
        return
    stop = threading.Event()

    def compute() -> None:
        before = _ended(stream)
        while not stop.is_set():
            with torch.cuda.stream(stream):
                for _ in range(_PRODUCTS):
                    torch.mm(factor, factor, out=product)
            now = _ended(stream)
            torch.cuda.default_stream(device).wait_event(now)
            before.synchronize()  # never more than two portions ahead
            before = now
        before.synchronize()

    thread = threading.Thread(target=compute, name="teraio computes while it measures", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        torch._C._cuda_clearCublasWorkspaces()  # this stream's: 32 MiB on Hopper, which nobody would use again


def _ended(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
