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
    directories: Sequence[Path], device: torch.device, *, budget_bytes: int | None, checksums: bool
) -> tuple[PathCandidate, ...]:
    """Return the paths between the memory of `device` and spill files in `directories`.

    Checksums need the path through host memory, where the processor computes them.
    """

    def kvikio() -> Store:
        if checksums:
            raise UnsupportedError("checksums are computed by the processor, which does not see what cuFile moves; leave one out")
        return KvikioStore(directories, budget_bytes=budget_bytes)

    def staged() -> Store:
        files = PosixStore(directories, budget_bytes=budget_bytes)
        return StagedStore(files, CudaCopier(device), chunk_io=Checksums(files) if checksums else None)

    return PathCandidate(name="kvikio", open=kvikio), PathCandidate(name="staged", open=staged)
