"""The storage paths between a GPU and drives: cuFile through KvikIO, or staging through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from planner.errors import UnsupportedError
from runtime.cuda.copier import CudaCopier
from runtime.storage import Checksums, KvikioStore, PosixStore, StagedStore, Store
from runtime.transfer import PathCandidate


def cuda_candidates(
    directories: Sequence[Path], device: torch.device, *, budget_bytes: int | None, checksums: bool, forced: str | None = None
) -> tuple[PathCandidate, ...]:
    """Return the paths between the memory of `device` and spill files in `directories`.

    Checksums need the path through host memory, where the processor computes them. In its compatibility mode KvikIO goes through
    host memory too, and its copies wait for the default stream, which in training waits for stages; so it is then left out.
    forced: the name of a path that is to be taken in spite of that.
    """

    def kvikio() -> Store:
        if checksums:
            raise UnsupportedError("checksums are computed by the processor, which does not see what cuFile moves; leave one out")
        store = KvikioStore(directories, budget_bytes=budget_bytes)
        if not store.bypasses_host and forced != "kvikio":
            store.close()
            raise UnsupportedError(
                f"{store.description}: its copies would wait for stages; give storage_path='kvikio' to use it all the same"
            )
        return store

    def staged() -> Store:
        files = PosixStore(directories, budget_bytes=budget_bytes)
        return StagedStore(files, CudaCopier(device), chunk_io=Checksums(files) if checksums else None)

    return PathCandidate(name="kvikio", open=kvikio), PathCandidate(name="staged", open=staged)
