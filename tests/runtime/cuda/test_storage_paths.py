"""Which paths to drives a GPU has, and that KvikIO's compatibility mode is taken only if it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.errors import UnsupportedError
from runtime.cuda import cuda_candidates
from runtime.storage import kvikio as kvikio_file
from runtime.transfer import PathCandidate

from ..storage.fake_kvikio import FakeKvikio

CUDA = torch.device("cuda", 0)


def kvikio_candidate(folder: Path, module: FakeKvikio, monkeypatch: pytest.MonkeyPatch, forced: str) -> PathCandidate:
    monkeypatch.setattr(kvikio_file, "load_kvikio", lambda: module)
    kvikio, staged = cuda_candidates([folder], CUDA, budget_bytes=None, checksums=False, forced=forced)
    assert (kvikio.name, staged.name) == ("kvikio", "staged")
    return kvikio


@pytest.mark.parametrize("forced", ["auto", "kvikio"])
def test_direct_storage_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: str) -> None:
    store = kvikio_candidate(tmp_path, FakeKvikio(compatible_only=False), monkeypatch, forced).open()
    store.close()


def test_the_compatibility_mode_must_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeKvikio()
    candidate = kvikio_candidate(tmp_path, module, monkeypatch, "auto")
    with pytest.raises(UnsupportedError, match=r"compatibility mode .* would wait for stages; give storage_path='kvikio'"):
        candidate.open()
    assert not module.live and not list(tmp_path.iterdir())
    store = kvikio_candidate(tmp_path, module, monkeypatch, "kvikio").open()
    assert store.directories
    store.close()
