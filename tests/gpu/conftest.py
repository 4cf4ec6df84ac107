"""Without a GPU these tests are not collected, so `pytest tests/gpu` fails with "no tests ran".

`make test-gpu` says why first. Every test begins and ends without runtimes, compiled graphs or cached memory.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from runtime.cuda import drive_paths
from runtime.transfer import Engine
from teraio.registry import REGISTRY
from teraio.stages import CutPolicy

from ..teraio.in_process import InProcessJob
from ..training import forget
from .sticky import sticky_error
from .training import MADE_UP

# cuBLAS reads these at its first use. They make cuBLAS deterministic and its workspaces small (the default is 32 MiB per thread).
# cuBLASLt shares the workspace, and PyTorch warns if it asks for more: 8 times 16 KiB.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

_ADVICE_OF_PYTORCH = (
    "ignore:TensorFloat32 tensor cores:UserWarning",  # these tests compare bits
    "ignore:\\s*Online softmax is disabled:UserWarning",
    "ignore:Synchronization debug mode is a prototype:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore advice that PyTorch gives only if there is a GPU."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for rule in _ADVICE_OF_PYTORCH:
                item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End the session after a test that left a sticky error: all later tests would fail with it."""
    report = yield
    if report.failed and (error := sticky_error()) is not None:
        item.session.shouldstop = f"sticky CUDA error in {item.name}: {error}"
    return report


@pytest.fixture(autouse=True)
def quick_measurements_on_a_made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor needs half a minute for the products that keep a real GPU busy for a millisecond. The rates mean nothing."""
    if MADE_UP:
        monkeypatch.setattr(drive_paths, "_SIDE", 64)
        monkeypatch.setattr(Engine, "measure", functools.partialmethod(Engine.measure, 1 << 20))


@pytest.fixture(autouse=True)
def cut_as_large_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow short stages. A stage of a large model takes about a millisecond; a GPU needs less for layers of a small model."""
    policy = CutPolicy(shortest_seconds=1e-6, max_stages=96)
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, cut_policy=policy))


@pytest.fixture
def planning_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own imports for seconds."""
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=InProcessJob))


@pytest.fixture(autouse=True)
def fresh_process_state() -> Iterator[None]:
    """Remove everything that other tests left, and make sums deterministic."""
    _forget()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    _forget()


def _forget() -> None:
    forget()
    torch.manual_seed(0)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
