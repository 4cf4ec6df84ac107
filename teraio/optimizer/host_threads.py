"""Threads that compute updates on the host with more cores than the training thread.

torchrun gives each process one compute thread (OMP_NUM_THREADS=1): right beside a GPU, and wrong for updates on the host.
PyTorch's number of compute threads belongs to the thread that sets it, and to threads that begin to compute later.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from runtime.system import machine_cores

__all__ = ["compute_pool", "host_threads"]


def host_threads(local_ranks: int) -> int | None:
    """Return this rank's share of the cores that control groups leave; None if PyTorch has as many compute threads itself."""
    if local_ranks == 1:
        return None
    cores = max(min(int(machine_cores() / local_ranks), len(os.sched_getaffinity(0))), 1)
    return cores if cores > torch.get_num_threads() else None


def compute_pool(workers: int, threads: int | None, name: str = "") -> ThreadPoolExecutor:
    """Return a pool whose threads compute with so many threads each; None: as PyTorch has it. Waits until they have begun."""
    if threads is None:
        return ThreadPoolExecutor(workers, thread_name_prefix=name)
    before = torch.get_num_threads()
    each = max(threads // workers, 1)

    def begin() -> None:
        torch.get_num_threads()  # PyTorch sets the number of a new thread at its first call
        torch.set_num_threads(each)

    pool = ThreadPoolExecutor(workers, thread_name_prefix=name, initializer=begin)
    for begun in [pool.submit(torch.get_num_threads) for _ in range(workers)]:
        begun.result()
    torch.set_num_threads(before)  # for threads that begin later
    return pool
