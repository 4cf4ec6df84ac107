"""Updates on the host get a rank's share of the cores, and nothing else does."""

import os
import sys

import pytest
import torch

from teraio.optimizer.host import compute_pool, host_threads


def test_a_rank_gets_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch, one_compute_thread: None) -> None:
    monkeypatch.setattr(sys.modules[host_threads.__module__], "machine_cores", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert [host_threads(ranks) for ranks in (1, 2, 8, 16, 32)] == [None, 8, 2, None, None]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6})  # a rank that is bound to cores of its own
    assert host_threads(2) == 3


def test_a_quota_of_processor_time_is_divided(monkeypatch: pytest.MonkeyPatch, one_compute_thread: None) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(sys.modules[host_threads.__module__], "machine_cores", lambda: 6.5)
    assert [host_threads(ranks) for ranks in (2, 3, 8)] == [3, 2, None]


def test_only_the_pool_computes_with_more_threads(one_compute_thread: None) -> None:
    def used() -> int:
        torch.ones(1 << 18).add_(1)
        return torch.get_num_threads()

    with compute_pool(1, 2) as pool, compute_pool(1, None) as plain:
        assert pool.submit(used).result() == 2
        assert used() == plain.submit(used).result() == 1
