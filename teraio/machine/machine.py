"""The machine of a training run: its device, its lower tiers, the links between them, how it is opened and closed.

Budgets first, then the tiers that the options allow, then the rates of their links.
"""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psutil
import torch

import planner
from planner.errors import StorageFullError, UnsupportedError
from planner.schema import Tier as AnyTier
from runtime.cpu import CheckedCpuMover, CpuMemory, CpuMover, system_tells
from runtime.cuda import CudaMemory, CudaStreams, StreamMover, cuda_candidates, measure_host_links
from runtime.device import CpuDevice, Device
from runtime.execution import MeasuredMemory
from runtime.paging import CheckedMover, Mover, StorageOwnership, Tier, Tiers
from runtime.storage import HostStore, Store
from runtime.system import CudaPinner, pci_address, processors_near
from runtime.transfer import Engine, LinkRates, OpenEngine, PathCandidate, choose_path, cpu_candidates, open_path
from teraio.machine.budgets import ResolvedBudgets, resolve_budgets, seen_by_ranks
from teraio.options import Options
from teraio.ranks import RankGroup

logger = logging.getLogger("teraio")


# Two links are independent if together they carry at least this share of the sum of what each carries alone.
_INDEPENDENT = 0.95
_IO_THREADS = 4  # I/O threads for each direction of a drive, of all ranks together


def io_threads(options: Options) -> int:
    """Return how many I/O threads this rank has for each direction of a drive."""
    return max(_IO_THREADS // options.local_ranks, 1)


@dataclass(slots=True)
class Shared:
    """What the machines of a process share: paths, each measured only once, and which mover owns which storage.

    storage: name and rates of the path that was chosen, by the drives of the storage directories and by the options that matter.
    host: rates of copies in main memory; None before they are measured.
    """

    storage: dict[Hashable, tuple[str, LinkRates]] = field(default_factory=dict)
    host: LinkRates | None = None
    ownership: StorageOwnership = field(default_factory=StorageOwnership)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTier:
    """An open lower tier.

    path: how blocks are copied there, in a word or two. measure: measures the rates again, which waits for that.
    alone: rates while the other ranks of the machine were idle, where `rates` are those with all busy.
    moved_bytes, busy_seconds: return the totals since the start, by link.
    """

    tier: Tier
    rates: LinkRates
    path: str
    measure: Callable[[], LinkRates]
    alone: LinkRates | None = None
    moved_bytes: Callable[[], Mapping[str, int]]
    busy_seconds: Callable[[], Mapping[str, float]]

    @classmethod
    def with_threads(cls, store: Store, engine: Engine, rates: LinkRates, path: str) -> OpenTier:
        """Return a tier whose blocks are copied by the threads of `engine`."""
        return cls(
            tier=Tier(store=store, engine=engine),
            rates=rates,
            path=path,
            measure=engine.measure,
            moved_bytes=lambda: {link: each.moved_bytes for link, each in engine.links.items()},
            busy_seconds=lambda: {link: each.busy_seconds for link, each in engine.links.items()},
        )

    def links(self) -> tuple[planner.Link, ...]:
        """Return the link to the tier and the link back, for the trace."""
        outward: tuple[AnyTier, AnyTier] = ("device", self.tier.name)
        return tuple(
            planner.Link(
                from_tier=ends[0],
                to_tier=ends[1],
                path=self.path,
                bytes_per_second=self.rates[way].bytes_per_second,
                latency_seconds=self.rates[way].latency_seconds,
                alone_bytes_per_second=None if self.alone is None else self.alone[way].bytes_per_second,
            )
            for way, ends in enumerate((outward, outward[::-1]))
        )

    def shared_rates(self) -> tuple[planner.SharedRate, ...]:
        """Return the rate that its two links share, if they slow each other down."""
        both = sum(each.duplex_bytes_per_second for each in self.rates)
        links = self.links()
        if both >= _INDEPENDENT * sum(link.bytes_per_second for link in links):
            return ()
        name = "drives" if self.tier.name == "storage" else "host memory"
        return (planner.SharedRate(name=name, links=tuple(link.name for link in links), bytes_per_second=both),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device, its lower tiers and what belongs to them, opened for one training run.

    mover: None if there is no lower tier. memory: the memory that stages allocate from; None if it cannot be measured.
    measured_runs: in how many of its runs a stage is measured there; None for all. tiers: the lower tiers, fastest first.
    bus: rates that links of different tiers share. reserved_bytes: returns what an allocator has taken from the device, handed
    out or not; None on the CPU.
    trim: frees memory that is kept for reuse and exceeds what the budget leaves; for a time when no block is away.
    free_bytes: returns what the device has free, whatever the budget; 0 where nobody needs more than the budget at the end.
    lift_limit: allows the device to hold more than the budget, for the end. described: takes the place of what is measured.
    undo: closes everything.
    """

    name: str
    device: Device
    device_memory_bytes: int
    budgets: ResolvedBudgets
    memory: MeasuredMemory | None
    measured_runs: int | None = None
    mover: Mover | None
    tiers: Sequence[OpenTier] = ()
    bus: tuple[planner.SharedRate, ...] = ()
    reserved_bytes: Callable[[], int | None] = lambda: None
    trim: Callable[[], None] = lambda: None
    free_bytes: Callable[[], int] = lambda: 0
    lift_limit: Callable[[], None] = lambda: None
    described: planner.Hardware | None = None
    undo: ExitStack

    @property
    def host_bytes(self) -> int | None:
        """Capacity of the host tier; None if there is no host tier."""
        return next((each.tier.store.capacity_bytes for each in self.tiers if each.tier.name == "host"), None)

    @contextlib.contextmanager
    def host_scratch(self, size_bytes: int) -> Iterator[int | None]:
        """Reserve memory of the host tier within the block. Gives its address, or None if no contiguous range is large enough.

        Waits for the device: copies of the block that had the memory before may still use it (rule 7).
        """
        store = next((each.tier.store for each in self.tiers if each.tier.name == "host"), None)
        if not isinstance(store, HostStore):
            yield None
            return
        try:
            slot = store.allocate(size_bytes, "scratch")
        except StorageFullError:
            yield None
            return
        try:
            self.device.synchronize()
            yield slot.address
        finally:
            store.release(slot)

    def ensure_room(self, size_bytes: int) -> None:
        """Reserve room in the spill files for what the host tier cannot hold of `size_bytes`. Raises StorageFullError."""
        missing = size_bytes - (self.host_bytes or 0)
        if not self.tiers or missing <= 0:
            return
        last = self.tiers[-1]
        last.tier.store.ensure_capacity(missing if last.tier.name == "storage" else size_bytes)

    def hardware(self) -> planner.Hardware:
        """Return capacities and measured link rates, for the trace."""
        if self.described is not None:
            return self.described
        tiers = self.tiers
        storage = sum(each.tier.store.limit_bytes for each in tiers if each.tier.name == "storage")
        return planner.Hardware(
            name=self.name,
            device_memory_bytes=self.device_memory_bytes,
            host_memory_bytes=self.host_bytes or 0,
            storage_bytes=storage,
            links=tuple(link for each in tiers for link in each.links()),
            shared=(*(rate for each in tiers for rate in each.shared_rates()), *self.bus),
        )

    def used_bytes(self) -> dict[str, int]:
        """Return the bytes of the slots in each lower tier that has any."""
        used = {each.tier.name: each.tier.store.used_bytes for each in self.tiers}
        return {name: size_bytes for name, size_bytes in used.items() if size_bytes}

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes moved since the start, by link."""
        return {link: size for each in self.tiers for link, size in each.moved_bytes().items()}

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds in which each link was copying since the start, by link."""
        return {link: seconds for each in self.tiers for link, seconds in each.busy_seconds().items()}

    def close(self) -> None:
        """Stop the I/O threads, free the host tier and remove the spill files. A failure of one does not keep the others.

        Waits until copies in flight have ended. Raises StorageError if a drive no longer answers.
        """
        self.undo.close()


def open_storage(
    options: Options, candidates: Sequence[PathCandidate], open_engine: OpenEngine, device: str, shared: Shared, undo: ExitStack
) -> OpenTier:
    """Open the path to the drives that the options ask for, or the fastest one. Measures it unless `shared` knows it.

    undo: gets the calls that close the tier. Raises UnsupportedError, StorageError, StorageFullError.
    """
    forced = None if options.storage_path == "auto" else options.storage_path
    drives = tuple(path.stat().st_dev for path in options.storage if path.is_dir())  # a missing one is reported when it is opened
    key = device, drives, forced, options.checksums
    if key in shared.storage:
        path = open_path(candidates, *shared.storage[key], open_engine=open_engine)
    else:
        path = choose_path(candidates, open_engine=open_engine, forced=forced)
        shared.storage[key] = path.name, path.rates
    undo.callback(path.store.close)
    undo.callback(path.engine.close)
    return OpenTier.with_threads(path.store, path.engine, path.rates, path.name)


# -- how it is opened


def open_machine(options: Options, device: torch.device, shared: Shared | None = None, ranks: RankGroup | None = None) -> Machine:
    """Resolve the budgets, open the lower tiers if the options ask for any, and measure their links.

    shared: by all machines of the process; None: with no other one. ranks: those of this machine that open theirs at the same
    time: they divide what the machine has, and links are measured once more, by one rank after the other and then by all
    together. Plans use the last rates.
    Raises OptionsError, UnsupportedError for devices that are neither CPU nor GPU, StorageError, StorageFullError, RankError.
    """
    shared = shared or Shared()
    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type  # PyTorch for AMD's GPUs calls them "cuda"
    if kind not in ("cpu", "cuda"):
        raise UnsupportedError(f"teraio does not know devices of type {kind!r}; train on cpu or cuda, an NVIDIA GPU")
    budgets = resolve_budgets(options, *seen_by_ranks(options, device, ranks))
    if device.type == "cpu":
        opened = open_cpu(options, budgets, shared)
    else:
        opened = open_cuda(options, budgets, device, shared)
    if ranks is None:
        return opened
    try:
        return replace(opened, tiers=_measured_by_all(opened.tiers, ranks))
    except BaseException:
        opened.close()
        raise


def _measured_by_all(tiers: Sequence[OpenTier], ranks: RankGroup) -> list[OpenTier]:
    """Return the tiers with the rates that all ranks reach when they copy at the same time, and those of each rank alone."""
    with ranks.turn("measuring its links alone"):
        alone = [each.measure() for each in tiers]
    ranks.gather("measuring all links")
    found = [replace(each, rates=each.measure(), alone=rates) for each, rates in zip(tiers, alone, strict=True)]
    ranks.gather("ending the measurement")
    for each, rates in zip(found, alone, strict=True):
        logger.info(
            "the %s tier with all %d ranks of this machine %s; alone it %s", each.tier.name, len(ranks.ranks), each.rates, rates
        )
    return found


# -- training on CPU: main memory under a budget is the device, a second pool and files are the lower tiers

_HOST_THREADS = 2  # threads for copies in main memory; a few threads use all that the memory bus can carry


def open_cpu(options: Options, budgets: ResolvedBudgets, shared: Shared) -> Machine:
    """Open the tiers that the options ask for. Raises UnsupportedError, StorageError, StorageFullError.

    shared: is filled with what is measured here.
    """
    with ExitStack() as undo:
        tiers: list[OpenTier] = []
        if budgets.host is not None:
            pool = HostStore(budgets.host)
            undo.callback(pool.close)
            engine = Engine(pool, threads=_HOST_THREADS, checksums=options.checksums)
            undo.callback(engine.close)
            shared.host = shared.host or engine.measure()
            tiers.append(OpenTier.with_threads(pool, engine, shared.host, "copies by threads"))
        if options.storage:
            candidates = cpu_candidates(options.storage, budget_bytes=budgets.storage)
            open_engine = partial(
                Engine,
                checksums=options.checksums,
                unchanged=True,
                threads=io_threads(options),
                stuck_after_seconds=options.storage_timeout,
            )
            tiers.append(open_storage(options, candidates, open_engine, "cpu", shared, undo))
        memory = CpuMemory()  # after the tiers, so that measuring them leaves no free pages in its pool
        mover = _cpu_mover(options, memory, tiers, shared.ownership, undo) if tiers else None
        undo.callback(memory.stand_back)
        opened = Machine(
            name=f"{platform.node()} cpu",
            device=CpuDevice(memory.trim),
            device_memory_bytes=psutil.virtual_memory().total,
            budgets=budgets,
            memory=memory,
            mover=mover,
            tiers=tiers,
            trim=lambda: memory.trim(budgets.device - memory.allocated_bytes) if budgets.device is not None else None,
            undo=undo.pop_all(),
        )
    return opened


def _cpu_mover(
    options: Options, memory: CpuMemory, opened: list[OpenTier], ownership: StorageOwnership, undo: ExitStack
) -> Mover:
    checks = options.checksums or options.debug
    checks_all = checks and system_tells()
    if checks and not checks_all:
        logger.warning(
            "no byte of parameters, gradients and optimizer states is checked by checksums or debug here, only activations are: "
            "your code can write to the others while they wait, and /proc/self/pagemap of this system does not tell which pages "
            "it wrote"
        )
    tiers = Tiers([each.tier for each in opened], ownership=ownership, mapped=not checks_all)
    undo.callback(tiers.close)
    mover = CpuMover(memory, tiers, poison=options.debug)
    return CheckedCpuMover(mover, debug=options.debug) if checks else mover


# -- training on a GPU: pinned main memory and drives are the lower tiers

_MEASURED_RUNS = 4  # runs of a stage in which its workspace is measured
# Unit in which PyTorch's allocator maps memory for segments that grow. Blocks are often powers of two: in its own pages of 20
# MiB, the ends of most are parts of pages, which nobody else can use. It takes no pages below 11 MiB.
_PAGE_MIB = 16
# What the end of the last page may take beyond the budget: PyTorch's own unit, which a user may have kept.
_PAGE_BYTES = 20 << 20
_MEASURED_BYTES = 256 << 20  # copied to measure the link to main memory, if the budget has room
# Copied also where it has none, as long as the model is on the device: latencies would slow copies of less.
_FEWEST_MEASURED_BYTES = 16 << 20
# Bytes of the budget that no block uses, at least; see `CudaStreams`. A stage must find room when all else has left: in the
# allocator's last page in the pool of stages and in the user's, and in some pages of 2 MiB for small tensors.
_SPARE_BYTES = 64 << 20
_SPARE_SHARE = 16  # plans leave the budget divided by this number unused, if that is more than _SPARE_BYTES


def open_cuda(options: Options, budgets: ResolvedBudgets, device: torch.device, shared: Shared) -> Machine:
    """Open the tiers that the options ask for. Raises UnsupportedError, StorageError, StorageFullError.

    shared: is filled with what is measured here.
    """
    with ExitStack() as undo:
        streams = CudaStreams(device)
        device, budget = streams.device, budgets.device
        undo.callback(torch._C._cuda_clearCublasWorkspaces)  # one for each stream, 32 MiB on Hopper; the user's comes again
        if budget is not None:
            _grow_segments(undo)
        store = _open_slab(budgets.host, device, undo) if budgets.host is not None else None
        storage = _open_storage(options, budgets, device, shared, undo) if options.storage else None
        tiers: list[OpenTier] = [storage] if storage is not None else []
        mover = _stream_mover(streams, store, tiers, shared.ownership, undo, poison=options.debug)
        if store is not None and mover is not None:
            tiers.insert(0, _host_tier(streams, store, mover, None if budget is None else budget - _PAGE_BYTES))
        if budget is not None:
            # A hard limit for everything that runs in regions. The allocator maps memory for growing segments in whole pages. It
            # does not count the rest of the last page beforehand, so the limit is one page lower.
            streams.limit_bytes = max(budget - _PAGE_BYTES, 0)
            streams.spare_bytes = _PAGE_BYTES + max(budget // _SPARE_SHARE, _SPARE_BYTES)
            torch.cuda.empty_cache()  # cached memory counts towards the limit
        opened = Machine(
            name=torch.cuda.get_device_name(device),
            device=streams,
            device_memory_bytes=torch.cuda.get_device_properties(device).total_memory,
            budgets=budgets,
            memory=streams,
            measured_runs=_MEASURED_RUNS,
            mover=CheckedMover(mover, mover.read) if mover is not None and options.debug else mover,
            tiers=tiers,
            bus=_shared(tiers),
            reserved_bytes=lambda: streams.reserved_bytes,
            free_bytes=lambda: streams.free_bytes,
            lift_limit=lambda: setattr(streams, "limit_bytes", None),
            undo=undo.pop_all(),
        )
    return opened


def _stream_mover(
    streams: CudaStreams,
    store: HostStore | None,
    drives: Sequence[OpenTier],
    ownership: StorageOwnership,
    undo: ExitStack,
    *,
    poison: bool,
) -> StreamMover | None:
    """Return the mover over the host tier and the drives; None if there is neither."""
    tiers = [Tier(store=store, engine=None)] if store is not None else []
    tiers += [drive.tier for drive in drives]
    if not tiers:
        return None
    in_reach = store is not None and store.pinned
    mover = StreamMover(streams, Tiers(tiers, ownership=ownership), in_reach=in_reach, poison=poison)
    undo.callback(mover.close)
    return mover


def _host_tier(streams: CudaStreams, store: HostStore, mover: StreamMover, most_bytes: int | None) -> OpenTier:
    """Measure the copies to main memory, which the mover makes itself, and return the tier.

    most_bytes: of the device that PyTorch may have reserved meanwhile; None: any.
    """

    def measure() -> LinkRates:
        if most_bytes is None:
            return measure_host_links(streams, store, _MEASURED_BYTES)
        torch.cuda.empty_cache()
        room = most_bytes - torch.cuda.memory_reserved(streams.device)
        return measure_host_links(streams, store, min(max(room, _FEWEST_MEASURED_BYTES), _MEASURED_BYTES))

    return OpenTier(
        tier=Tier(store=store, engine=None),
        rates=measure(),
        measure=measure,
        path=f"copies by the GPU, {'pinned' if store.pinned else 'pageable'} memory",
        moved_bytes=lambda: mover.moved_bytes,
        busy_seconds=lambda: mover.busy_seconds,
    )


def _grow_segments(undo: ExitStack) -> None:
    """Let the allocator's segments grow, unless the user has decided otherwise. All other settings stay as they are."""
    # Without that, the allocator's cache becomes fragmented as blocks come and go.
    known: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]  # PyTorch 2.11 has no function that tells them
    before: str = known["PYTORCH_CUDA_ALLOC_CONF"]
    if known["expandable_segments"] or "expandable_segments" in before:
        return
    page = "large_segment_size_mb"
    own, usual = ["expandable_segments:True"], ["expandable_segments:False"]
    if page not in before:
        own, usual = [*own, f"{page}:{_PAGE_MIB}"], [*usual, f"{page}:20"]
    change = torch._C._accelerator_setAllocatorSettings  # a call resets all settings that it does not name, but for these two
    change(",".join(filter(None, (before, *own))))
    undo.callback(change, before)
    undo.callback(change, ",".join(usual))  # called first; then the user's text is known again as it was


def _open_slab(size_bytes: int, device: torch.device, undo: ExitStack) -> HostStore:
    properties: Any = torch.cuda.get_device_properties(device)
    near = processors_near(pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id))
    store = HostStore(size_bytes, processors=near, pinner=CudaPinner(device))
    undo.callback(store.close)
    return store


def _open_storage(options: Options, budgets: ResolvedBudgets, device: torch.device, shared: Shared, undo: ExitStack) -> OpenTier:
    candidates = cuda_candidates(
        options.storage, device, budget_bytes=budgets.storage, checksums=options.checksums, forced=options.storage_path
    )

    def open_engine(store: Store) -> Engine:
        memory = CudaMemory(device)
        return Engine(store, memory=memory, threads=io_threads(options), stuck_after_seconds=options.storage_timeout)

    return open_storage(options, candidates, open_engine, str(device), shared, undo)


def _shared(tiers: list[OpenTier]) -> tuple[planner.SharedRate, ...]:
    """Return the rates of the bus, one per direction, which the links of host and storage share."""
    if len(tiers) < 2:
        return ()
    host, storage = tiers
    return tuple(
        planner.SharedRate(name=name, links=(one.name, other.name), bytes_per_second=one.bytes_per_second)
        for name, one, other in zip(("bus, outward", "bus, inward"), host.links(), storage.links(), strict=True)
    )
