"""A GPU as the device: with pinned main memory and drives as the tiers below it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import psutil
import torch

import planner
from runtime.cuda import CudaStreams, StreamMover, cuda_candidates, measure_host_links
from runtime.paging import Debug, Tier, Tiers
from runtime.storage import Extent, HostStore, Store
from runtime.system import CudaPinner, pci_address, processors_near
from runtime.transfer import Engine, LinkRates, TorchMemory
from teraio.machine.tiers import MachineTiers, OpenTier, open_storage
from teraio.options import Options

_RESERVE = 0.1
_SEGMENT_PAGE_BYTES = 20 << 20
_HOST_SHARE = 0.5
"""Of the main memory that is available: the host tier where a budget is given, but no tier below it."""
_MEASURED_RUNS = 4
_SPARE_SHARE = 32
_SPARE_BYTES = 64 << 20
"""What of a budget is not planned with, see `CudaStreams`: so many bytes, or one part in _SPARE_SHARE if that is more, but
never more than an eighth."""


def open_cuda(options: Options, device: torch.device) -> MachineTiers:
    """Raises UnsupportedError, StorageError, StorageFullError."""
    host_bytes = options.host_budget
    if options.memory_budget is not None and host_bytes is None and not options.storage:
        host_bytes = int(psutil.virtual_memory().available * _HOST_SHARE)
    with ExitStack() as undo:
        streams = CudaStreams(device)
        device = streams.device
        budget = options.memory_budget
        if budget is None and (host_bytes is not None or options.storage):
            free, _ = torch.cuda.mem_get_info(device)
            budget = int((free + torch.cuda.memory_reserved(device)) * (1 - _RESERVE))
        if budget is not None:
            _grow_segments(undo)
        store = _open_slab(host_bytes, device, undo) if host_bytes is not None else None
        storage = _open_storage(options, device, undo) if options.storage else None
        mover, tiers = _mover(streams, store, storage, Debug() if options.debug else None, undo)
        if budget is not None:
            _limit(streams, budget)
        opened = MachineTiers(
            name=torch.cuda.get_device_name(device),
            device=streams,
            device_memory_bytes=torch.cuda.get_device_properties(device).total_memory,
            memory=streams,
            measured_runs=_MEASURED_RUNS,
            budget_bytes=budget,
            mover=mover,
            tiers=tiers,
            shared=_shared(tiers),
            lift_limit=lambda: _lift_limit(streams),
            undo=undo.pop_all(),
        )
    return opened


def _mover(
    streams: CudaStreams, store: HostStore | None, storage: OpenTier | None, debug: Debug | None, undo: ExitStack
) -> tuple[StreamMover | None, list[OpenTier]]:
    known = [Tier(name="host", store=store, engine=None)] if store is not None else []
    known += [storage.tier] if storage is not None else []
    if not known:
        return None, []
    address_of, in_reach = (store.address_of, store.pinned) if store is not None else (_nowhere, False)
    mover = StreamMover(streams, Tiers(known), address_of, in_reach=in_reach, debug=debug)
    undo.callback(mover.close)
    tiers = [storage] if storage is not None else []
    if store is not None:
        pinned = "pinned" if store.pinned else "pageable"
        tiers.insert(
            0,
            OpenTier(
                tier=known[0],
                rates=measure_host_links(streams, store),
                path=f"copies by the GPU, {pinned} memory",
                moved_bytes=lambda: mover.moved_bytes,
                busy_seconds=lambda: mover.busy_seconds,
            ),
        )
    return mover, tiers


def _nowhere(extent: Extent) -> int:
    raise planner.StorageError("there is no host tier; this is a bug in teraio, please report it")


def _grow_segments(undo: ExitStack) -> None:
    """Segments that grow keep the allocator's cache from falling to pieces as blocks come and go; unless the user decided."""
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    before = settings() if settings is not None else ""  # PyTorch 2.11 does not tell
    if "expandable_segments" not in before:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (before, "expandable_segments:True"))))
        undo.callback(torch._C._accelerator_setAllocatorSettings, before or "expandable_segments:False")


def _limit(streams: CudaStreams, budget_bytes: int) -> None:
    """The budget is hard for all that runs in regions.

    The allocator maps memory for growing segments in whole pages, and does not count the rest of the last one beforehand.
    """
    page = min(_SEGMENT_PAGE_BYTES, budget_bytes // 8)
    streams.limit_bytes = budget_bytes - page
    streams.spare_bytes = page + min(max(budget_bytes // _SPARE_SHARE, _SPARE_BYTES), budget_bytes // 8)
    torch.cuda.empty_cache()  # what the cache holds counts


def _lift_limit(streams: CudaStreams) -> None:
    streams.limit_bytes = None


def _open_slab(size_bytes: int, device: torch.device, undo: ExitStack) -> HostStore:
    properties: Any = torch.cuda.get_device_properties(device)
    near = processors_near(pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id))
    store = HostStore(size_bytes, processors=near, pinner=CudaPinner(device))
    undo.callback(store.close)
    return store


def _open_storage(options: Options, device: torch.device, undo: ExitStack) -> OpenTier:
    candidates = cuda_candidates(options.storage, device, budget_bytes=options.storage_budget, checksums=options.checksums)

    def open_engine(store: Store) -> Engine:
        return Engine(store, memory=TorchMemory(device), stuck_after_seconds=options.storage_timeout)

    return open_storage(options, candidates, open_engine, str(device), undo)


def _shared(tiers: list[OpenTier]) -> tuple[planner.SharedRate, ...]:
    """What the links of both tiers have in common: the bus, in each direction."""
    if len(tiers) < 2:
        return ()
    host, storage = tiers
    return tuple(
        planner.SharedRate(name=name, links=(host.links()[way].name, storage.links()[way].name), bytes_per_second=rate)
        for way, (name, rate) in enumerate(_bus(host.rates))
    )


def _bus(rates: LinkRates) -> tuple[tuple[str, float], tuple[str, float]]:
    return ("bus, outward", rates.write_bytes_per_second), ("bus, inward", rates.read_bytes_per_second)
