"""Finds the ways in which blocks can go between a device and the drives here, and takes the fastest.

[Note: Which way is taken]
A way is tried by really writing, reading back and comparing, through memory of the device; what does not work is left
out, with the reason in the log. Among those that work the fastest is taken: the harmonic mean of both directions' rates
while both are busy, which is the rate at which blocks can go out and come back. The page cache is a last resort, taken
only where the file system has no direct I/O: what it holds is host memory that no budget counts, and a measurement
would see its speed until it is full. It is no way around a drive that fails.
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

OpenEngine = Callable[[Store], Engine]
"""Makes the engine of a store; the memory that it is given is the device's, for measuring too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way that may work.

    name: its value of the option storage_path. open: makes its store; raises UnsupportedError where this way cannot
    exist, StorageError where it failed. last_resort: see [Note: Which way is taken].
    """

    name: str
    open: Callable[[], Store]
    last_resort: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePath:
    """A way that works, opened: whoever has it closes the engine, then the store. rates: as measured by the engine.

    refused: why others do not work, by name.
    """

    name: str
    store: Store
    engine: Engine
    rates: LinkRates
    refused: Mapping[str, str]

    def close(self) -> None:
        """Close engine and store. Blocks. Raises StorageError where a drive does not answer any more."""
        with ExitStack() as last:
            last.callback(self.store.close)
            last.callback(self.engine.close)


def cpu_candidates(directories: Sequence[Path], *, budget_bytes: int | None) -> tuple[Candidate, ...]:
    """Between main memory and spill files in `directories`: direct I/O ("posix"), else the page cache ("buffered")."""

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

    return Candidate(name="posix", open=posix), Candidate(name="buffered", open=buffered, last_resort=True)


def choose_path(candidates: Sequence[Candidate], *, open_engine: OpenEngine, forced: str | None = None) -> StoragePath:
    """Try and measure all candidates, and open the best, see [Note: Which way is taken]; or just the one named `forced`.

    Blocks for some seconds, and takes memory and room in the directories meanwhile (see `Engine.measure`). Tells once
    in the log. Raises UnsupportedError where the forced one does not work but others do, with the reason and what does;
    StorageFullError where there is no room; where nothing works, what stopped the first, or all reasons.
    """
    refused: dict[str, TeraioError] = {}
    if forced is not None:
        path = _forced(candidates, forced, open_engine)
    else:
        working = _working(candidates, open_engine, refused)
        if not working:
            raise _nothing_works(refused)
        path = max(working, key=_mean_rate)
        for other in working:
            if other is not path:
                other.close()
    path = replace(path, refused={name: str(error) for name, error in refused.items()})
    _tell(path, last_resort=any(candidate.last_resort for candidate in candidates if candidate.name == path.name))
    return path


def open_path(candidates: Sequence[Candidate], name: str, rates: LinkRates, *, open_engine: OpenEngine) -> StoragePath:
    """The way called `name`, which was chosen and measured before in this process. Raises as its `open` does."""
    (candidate,) = (candidate for candidate in candidates if candidate.name == name)
    with ExitStack() as undo:
        store = candidate.open()
        undo.callback(store.close)
        engine = open_engine(store)
        undo.pop_all()
    return StoragePath(name=name, store=store, engine=engine, rates=rates, refused={})


def _try(candidate: Candidate, open_engine: OpenEngine) -> StoragePath:
    with ExitStack() as undo:
        store = candidate.open()
        undo.callback(store.close)
        engine = open_engine(store)
        undo.callback(engine.close)
        engine.verify()
        rates = engine.measure()
        undo.pop_all()
    return StoragePath(name=candidate.name, store=store, engine=engine, rates=rates, refused={})


def _working(candidates: Iterable[Candidate], open_engine: OpenEngine, refused: dict[str, TeraioError]) -> list[StoragePath]:
    """All that work; a last resort is only tried where the others cannot exist. Notes in `refused` why not."""
    working: list[StoragePath] = []
    with ExitStack() as undo:
        for candidate in sorted(candidates, key=lambda candidate: candidate.last_resort):
            failed = any(isinstance(error, StorageError) for error in refused.values())
            if candidate.last_resort and (working or failed):
                continue
            try:
                working.append(_try(candidate, open_engine))
                undo.callback(working[-1].close)
            except StorageFullError:
                raise  # the same for all
            except (UnsupportedError, StorageError) as error:
                refused[candidate.name] = error
        undo.pop_all()
    return working


def _forced(candidates: Sequence[Candidate], name: str, open_engine: OpenEngine) -> StoragePath:
    refused: dict[str, TeraioError] = {}
    named = [candidate for candidate in candidates if candidate.name == name]
    try:
        if not named:
            raise UnsupportedError("it is no way between this device and drives")
        return _try(named[0], open_engine)
    except StorageFullError:
        raise
    except (UnsupportedError, StorageError) as error:
        refused[name] = error
    others = [candidate for candidate in candidates if candidate.name != name]
    working = _working(others, open_engine, refused)
    for path in working:
        path.close()
    if not working:
        raise _nothing_works(refused)
    works = ", ".join(repr(path.name) for path in working)
    raise UnsupportedError(
        f"storage_path {name!r} does not work here: {refused[name]}. What works: {works}; give that, or 'auto'"
    ) from refused[name]


def _nothing_works(refused: Mapping[str, TeraioError]) -> TeraioError:
    texts = dict.fromkeys(map(str, refused.values()))
    if len(texts) == 1:
        return next(iter(refused.values()))
    return StorageError("blocks cannot get to storage: " + "; ".join(f"{name}: {error}" for name, error in refused.items()))


def _mean_rate(path: StoragePath) -> float:
    return harmonic_mean([path.rates.duplex_write_bytes_per_second, path.rates.duplex_read_bytes_per_second])


def _tell(path: StoragePath, *, last_resort: bool) -> None:
    rates = path.rates
    _log.info(
        "storage path %r: writes %.2f GB/s, reads %.2f GB/s, both at once %.2f and %.2f%s",
        path.name,
        rates.write_bytes_per_second / 1e9,
        rates.read_bytes_per_second / 1e9,
        rates.duplex_write_bytes_per_second / 1e9,
        rates.duplex_read_bytes_per_second / 1e9,
        "".join(f"; {name!r} is out: {reason}" for name, reason in path.refused.items()),
    )
    if last_resort:
        _log.warning(
            "spill files go through the page cache, which is host memory that no budget counts; give storage on a file "
            "system with direct I/O"
        )
