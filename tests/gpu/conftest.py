"""Where there is no GPU its tests are not even collected, so that `pytest tests/gpu` fails ("no tests ran").

`make test-gpu` first says why. Every test begins and ends without runtimes, compiled graphs or cached memory.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import teraio
from teraio.registry import REGISTRY
from teraio.stages.cut import CutPolicy

# Read when cuBLAS is first used: deterministic, and small beside the budgets of these tests (the default takes 32 MiB a thread).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

_NOT_OURS = (
    "ignore:TensorFloat32 tensor cores:UserWarning",  # these tests compare bits
    "ignore:.*Online softmax is disabled:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Advice that PyTorch gives only where there is a GPU is no error."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for rule in _NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.fixture(autouse=True)
def cut_as_large_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of a large model lasts about a millisecond; in that time a GPU is done with several layers of a small one."""
    policy = CutPolicy(shortest_seconds=1e-6, most_stages=96)
    monkeypatch.setattr(REGISTRY, "new_run", functools.partial(REGISTRY.new_run, cut_policy=policy))


@pytest.fixture(autouse=True)
def fresh_process_state() -> Iterator[None]:
    """Nothing is left of other tests, and equal sums give equal bits."""
    _forget()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    _forget()


def _forget() -> None:
    teraio.reset()
    torch._dynamo.reset()
    torch.manual_seed(0)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
