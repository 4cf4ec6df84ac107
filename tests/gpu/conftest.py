"""Without a GPU these tests are not collected, so `pytest tests/gpu` fails with "no tests ran".

`make test-gpu` says why first. Every test begins and ends without runtimes, compiled graphs or cached memory.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from teraio.registry import REGISTRY
from teraio.stages.cut import CutPolicy

from ..training import forget

# cuBLAS reads this at its first use. It makes cuBLAS deterministic and its workspaces small (the default is 32 MiB per thread).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

_ADVICE_OF_PYTORCH = (
    "ignore:TensorFloat32 tensor cores:UserWarning",  # these tests compare bits
    "ignore:.*Online softmax is disabled:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore advice that PyTorch gives only if there is a GPU."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for rule in _ADVICE_OF_PYTORCH:
                item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.fixture(autouse=True)
def cut_as_large_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow short stages. A stage of a large model takes about a millisecond; a GPU needs less for layers of a small model."""
    policy = CutPolicy(shortest_seconds=1e-6, max_stages=96)
    monkeypatch.setattr(REGISTRY, "new_run", functools.partial(REGISTRY.new_run, cut_policy=policy))


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
