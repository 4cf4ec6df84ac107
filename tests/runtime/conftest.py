"""What several tests of the runtime start from."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.cpu import CpuMemory
from runtime.storage import PosixStore


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture
def store(folders: list[Path]) -> Iterator[PosixStore]:
    """An empty store over two directories, so that each slot has two extents."""
    store = PosixStore(folders, budget_bytes=None)
    yield store
    store.close()


@pytest.fixture
def memory() -> Iterator[CpuMemory]:
    """The memory of the CPU's tensors, with no spare pages; it stands back at the end."""
    memory = CpuMemory()
    memory.trim(0)
    yield memory
    memory.stand_back()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two ranks, of which the other one does not exist. What was frozen before is passed over also by searches of all objects."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
