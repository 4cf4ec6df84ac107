"""Finds the paths on which blocks can move between a device and the drives of this machine, and chooses the fastest.

[Note: How a storage path is chosen]
Each path is tried: random bytes are written from the device's memory, read back and compared. A path that does not work is
left out, and the log says why. Of those that work, the fastest is chosen: the one with the highest harmonic mean of both
directions' rates while both are busy. That mean is the rate at which blocks can go out and come back.

The page cache is a last resort. It is only used if the file system has no direct I/O, for two reasons: it takes host memory
that no budget counts, and a measurement shows the speed of the cache until the cache is full. It is never used because a
drive fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import harmonic_mean

from planner.errors import StorageError, StorageFullError, TeraioError, UnsupportedError
from runtime.storage import PosixStore, Store
from runtime.transfer.engine import Engine, LinkRates

_log = logging.getLogger("teraio")

OpenEngine = Callable[[Store], Engine]  # makes the engine of a store. The engine measures with memory of the device.


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCandidate:
    """A storage path that may work.

    name: the value of the option storage_path that asks for it.
    open: makes its store. Raises UnsupportedError if this machine does not have the path, StorageError if it failed.
    last_resort: see [Note: How a storage path is chosen].
    """

    name: str
    open: Callable[[], Store]
    last_resort: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePath:
    """An open storage path that works. Its owner calls `close`, or closes the engine and then the store.

    rates: as measured by the engine. refused: why other paths do not work, by name.
    """

    name: str
    store: Store
    engine: Engine
    rates: LinkRates
    refused: Mapping[str, str]

    def close(self) -> None:
        """Close engine and store, and wait until moves have ended. Raises StorageError if a drive no longer answers."""
        with ExitStack() as last:
            last.callback(self.store.close)
            last.callback(self.engine.close)


def cpu_candidates(directories: Sequence[Path], *, budget_bytes: int | None) -> tuple[PathCandidate, ...]:
    """Return the paths between main memory and spill files in `directories`: direct I/O ("posix"), page cache ("buffered")."""

    def posix() -> Store:
        store = PosixStore(directories, budget_bytes=budget_bytes)
        if not store.direct:
            store.close()
            raise UnsupportedError(
                f"not all file systems have direct I/O (storage: {', '.join(map(str, directories))}); give storage on others"
            )
        return store

    def buffered() -> Store:
        return PosixStore(directories, budget_bytes=budget_bytes, direct=False)

    return PathCandidate(name="posix", open=posix), PathCandidate(name="buffered", open=buffered, last_resort=True)


def choose_path(candidates: Sequence[PathCandidate], *, open_engine: OpenEngine, forced: str | None = None) -> StoragePath:
    """Try and measure all candidates, and open the best one, see [Note: How a storage path is chosen].

    forced: the name of the only candidate to use.
    Takes some seconds, and memory and bytes in the directories during that time (see `Engine.measure`). Logs the result.
    Raises UnsupportedError if the forced path does not work; the message gives the reason and the others.
    Raises StorageFullError if the drives or the storage budget are full. If nothing works, raises the only reason, or
    StorageError with all of them.
    """
    refused: dict[str, TeraioError] = {}
    if forced is not None:
        path = _forced(candidates, forced, open_engine)
    else:
        working = _working(candidates, open_engine, refused)
        if not working and len(set(map(str, refused.values()))) == 1:
            raise next(iter(refused.values()))
        if not working:
            reasons = "; ".join(f"{name}: {error}" for name, error in refused.items())
            raise StorageError(f"blocks cannot get to storage: {reasons}")
        path = max(working, key=lambda path: harmonic_mean([each.duplex_bytes_per_second for each in path.rates]))
        for other in working:
            if other is not path:
                other.close()
    path = replace(path, refused={name: str(error) for name, error in refused.items()})
    _tell(path, last_resort=any(candidate.last_resort for candidate in candidates if candidate.name == path.name))
    return path


def open_path(candidates: Sequence[PathCandidate], name: str, rates: LinkRates, *, open_engine: OpenEngine) -> StoragePath:
    """Open the path called `name`, which this process has already chosen and measured. Raises as its `open` does."""
    (candidate,) = (candidate for candidate in candidates if candidate.name == name)
    return _opened(candidate, open_engine, rates)


def _opened(candidate: PathCandidate, open_engine: OpenEngine, rates: LinkRates | None = None) -> StoragePath:
    """Open a path. Try it with real data and measure it, unless its rates are known."""
    with ExitStack() as undo:
        store = candidate.open()
        undo.callback(store.close)
        engine = open_engine(store)
        undo.callback(engine.close)
        if rates is None:
            engine.verify()
            rates = engine.measure()
        undo.pop_all()
    return StoragePath(name=candidate.name, store=store, engine=engine, rates=rates, refused={})


def _working(candidates: Iterable[PathCandidate], open_engine: OpenEngine, refused: dict[str, TeraioError]) -> list[StoragePath]:
    """Open all paths that work. Put the reasons of the others into `refused`."""
    working: list[StoragePath] = []
    with ExitStack() as undo:
        for candidate in sorted(candidates, key=lambda candidate: candidate.last_resort):
            failed = any(isinstance(error, StorageError) for error in refused.values())
            # Only if this machine has none of the other paths: a drive that failed is no reason to go through host memory.
            if candidate.last_resort and (working or failed):
                continue
            try:
                working.append(_opened(candidate, open_engine))
                undo.callback(working[-1].close)
            except StorageFullError:
                raise  # it would stop all others too
            except (UnsupportedError, StorageError) as error:
                refused[candidate.name] = error
        undo.pop_all()
    return working


def _forced(candidates: Sequence[PathCandidate], name: str, open_engine: OpenEngine) -> StoragePath:
    try:
        for candidate in candidates:
            if candidate.name == name:
                return _opened(candidate, open_engine)
        raise UnsupportedError("there is no such path between this device and drives")
    except UnsupportedError as error:
        others = ", ".join(repr(candidate.name) for candidate in candidates if candidate.name != name)
        raise UnsupportedError(
            f"storage_path {name!r} does not work here: {error}; give 'auto', which takes what works of {others}"
        ) from error


def _tell(path: StoragePath, *, last_resort: bool) -> None:
    others = "".join(f"; {name!r} is not used: {reason}" for name, reason in path.refused.items())
    _log.info("storage path %r: %s%s", path.name, path.rates, others)
    if last_resort:
        _log.warning(
            "spill files go through the page cache, which is host memory that no budget counts; give storage on a file "
            "system with direct I/O"
        )
