"""How thorough the tests are: `TEST_PROFILE=ci`, the default, or `long`. Nothing else in the tests reads that variable.

Trainings do not find the plans of others, also those in other processes: `plan_cache` is off unless a test asks for it.

ci: what `make test` runs. long: more examples, more steps and the tests with the mark `long`, as `make test-long` does.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from .runtime.processes import Forking

os.environ["TERAIO_PLAN_CACHE"] = "off"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each process of its own for that imports PyTorch once more

settings.register_profile("ci", max_examples=15, deadline=None)
settings.register_profile("long", max_examples=300, deadline=None)
settings.load_profile(os.environ.get("TEST_PROFILE", "ci"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests with the mark `long`, unless that profile is loaded."""
    if settings.get_current_profile_name() != "long":
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Have garbage collections pass over what is there, as in a program that freezes it: a fifth of the time of trainings."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    assert gc.isenabled()
    yield
    pytest_collection_finish()


@pytest.fixture(scope="session")
def forking_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    forking = Forking(tmp_path_factory.mktemp("processes"))
    yield forking
    forking.close()


@pytest.fixture
def forking(forking_process: Forking) -> Iterator[Forking]:
    """Starts processes. What still runs at the end is killed."""
    yield forking_process
    forking_process.end_all()
