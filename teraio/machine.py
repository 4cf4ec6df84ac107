"""The tiers of this machine as far as the options allow them: device memory, spill files, and the links between."""

from __future__ import annotations

import platform
from contextlib import ExitStack

import psutil
import torch

import planner
from planner.errors import UnsupportedError
from runtime.cpu_memory import CpuMemory
from runtime.engine import Engine, LinkRates
from runtime.mover import CpuMover, Mover
from runtime.storage.posix import PosixStore
from teraio.options import Options

_RESERVE = 0.1
_INDEPENDENT = 0.95
"""Links that together carry this share of the sum of what each carries alone share nothing."""


_rates_by_drives: dict[tuple[int, ...], LinkRates] = {}
"""Measured once in a process: by the drives that the storage directories are on."""


def _measured_rates(engine: Engine, options: Options) -> LinkRates:
    drives = tuple(path.stat().st_dev for path in options.storage)
    if drives not in _rates_by_drives:
        _rates_by_drives[drives] = engine.measure()
    return _rates_by_drives[drives]


class Machine:
    """Opens the storage tier if something may have to move, and measures its links.

    budget_bytes: the device budget, None where nothing limits it. mover: None where blocks have nowhere to go.
    memory: the device's, None if it is not the CPU's.
    Raises UnsupportedError, StorageError.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        if options.host_budget is not None:
            raise UnsupportedError(
                "host_budget: there is no host tier yet, and on CPU the device is main memory already; leave it out "
                "and give storage"
            )
        if device.type != "cpu" and options.memory_budget is not None:
            raise UnsupportedError(
                f"memory_budget on {device}: blocks of {device.type} devices cannot move yet, only those of the CPU; "
                "leave memory_budget out to run without a limit"
            )
        self.mover: Mover | None = None
        self._store: PosixStore | None = None
        self._engine: Engine | None = None
        self._rates: LinkRates | None = None
        self.memory = CpuMemory() if device.type == "cpu" else None
        self._device = device
        self.budget_bytes = options.memory_budget
        if self.memory is not None and options.storage:
            if self.budget_bytes is None:
                self.budget_bytes = int(psutil.virtual_memory().available * (1 - _RESERVE))
            try:
                self._open(options, self.memory)
            except BaseException:
                self.close()
                raise

    def _open(self, options: Options, memory: CpuMemory) -> None:
        self._store = PosixStore(options.storage, budget_bytes=options.storage_budget)
        self._engine = Engine(self._store, stuck_after_seconds=options.storage_timeout)
        self._rates = _measured_rates(self._engine, options)
        self.mover = CpuMover(memory, self._store, self._engine)

    def trim(self) -> None:
        """While nothing is away: let free memory that is kept for reuse not exceed what the budget leaves."""
        if self.memory is not None and self.budget_bytes is not None:
            self.memory.trim(self.budget_bytes - self.memory.allocated_bytes)

    def ensure_spill_room(self, size_bytes: int) -> None:
        """Reserve room in the spill files. Raises StorageFullError if there is not enough."""
        if self._store is not None and size_bytes > 0:
            self._store.ensure_capacity(size_bytes)

    def hardware(self) -> planner.Hardware:
        """Capacities and measured link rates, for the trace."""
        links: tuple[planner.Link, ...] = ()
        shared: tuple[planner.SharedRate, ...] = ()
        if self._rates is not None:
            links = (
                planner.Link(
                    from_tier="device",
                    to_tier="storage",
                    bytes_per_second=self._rates.write_bytes_per_second,
                    latency_seconds=self._rates.write_latency_seconds,
                ),
                planner.Link(
                    from_tier="storage",
                    to_tier="device",
                    bytes_per_second=self._rates.read_bytes_per_second,
                    latency_seconds=self._rates.read_latency_seconds,
                ),
            )
            names = tuple(link.name for link in links)
            both = self._rates.duplex_write_bytes_per_second + self._rates.duplex_read_bytes_per_second
            if both < _INDEPENDENT * sum(link.bytes_per_second for link in links):
                shared = (planner.SharedRate(name="drives", links=names, bytes_per_second=both),)
        memory = psutil.virtual_memory().total
        if self._device.type == "cuda":
            memory = torch.cuda.get_device_properties(self._device).total_memory
        return planner.Hardware(
            name=f"{platform.node()} {self._device.type}",
            device_memory_bytes=memory,
            storage_bytes=self._store.limit_bytes if self._store is not None else 0,
            links=links,
            shared=shared,
        )

    def moved_bytes(self) -> dict[str, int]:
        """Bytes moved since the start, by link."""
        if self._engine is None:
            return {"device->storage": 0, "storage->device": 0}
        return {
            "device->storage": self._engine.write_link.moved_bytes,
            "storage->device": self._engine.read_link.moved_bytes,
        }

    def spill_directories(self) -> tuple[str, ...]:
        """Where the spill files are."""
        return tuple(map(str, self._store.directories)) if self._store is not None else ()

    def close(self) -> None:
        """Stop the I/O threads and remove the spill files, also where that fails for one of them.

        Blocks until copies in flight have ended. Raises StorageError where a drive does not answer any more.
        """
        with ExitStack() as last:
            if self._store is not None:
                last.callback(self._store.close)
            if self.mover is not None:
                last.callback(self.mover.close)
            if self._engine is not None:
                last.callback(self._engine.close)
            if self.memory is not None:
                self.memory.stand_back()
