"""How much host memory training may take, and whether it can be pinned."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import torch

from planner.errors import StorageError
from runtime.storage import HostStore
from runtime.system import CudaPinner, host_limits
from teraio.doctor.finding import Finding

_PINNED_BYTES = 64 << 20


def memory() -> Iterator[Finding]:
    """Yield the limit of host memory. On a machine with a GPU, pins and unpins 64 MiB."""
    lowest = min(host_limits(), key=lambda limit: limit.available_bytes)
    yield Finding(what="host memory", verdict="ok", found=f"{lowest.what} {lowest.available_bytes / 2**30:.1f} GiB")
    if torch.cuda.is_available():
        yield _pinning()


def _pinning() -> Finding:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "no limit" if locked == resource.RLIM_INFINITY else f"a limit of {locked / 2**30:.2f} GiB"
    try:
        HostStore(_PINNED_BYTES, pinner=CudaPinner(torch.device("cuda"))).close()
    except StorageError as error:
        return Finding(
            what="pinned memory",
            verdict="slow",
            found=str(error),
            effect="copies between GPU and host memory are slower, and wait for the processor",
            remedy="raise the limit on locked memory: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )
    return Finding(what="pinned memory", verdict="ok", found=f"works; {limit} on locked memory")
