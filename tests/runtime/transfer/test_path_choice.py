"""Which storage path is chosen, which paths are refused and why, and that no path stays open."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner.errors import StorageError, StorageFullError, StorageIOError, UnsupportedError
from runtime.storage import PosixStore, Store
from runtime.transfer import Engine, LinkRates, OneWay, PathCandidate, StoragePath, choose_path, cpu_candidates, open_path

from ..memory import refuse_direct_io

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_stays_open(tmp_path: Path) -> Iterator[None]:
    threads = threading.active_count()
    yield
    assert threading.active_count() == threads
    assert not [entry.name for entry in tmp_path.rglob("teraio-*")]


def rates(write: float, read: float) -> LinkRates:
    return LinkRates(OneWay(2 * write, 1e-4, write), OneWay(2 * read, 1e-4, read))


class QuickEngine(Engine):
    """Measures with few bytes."""

    def measure(self, size_bytes: int = 2 * MIB) -> LinkRates:
        return super().measure(size_bytes)


class KnownRates(dict[str, LinkRates]):
    """The rates of each store, by the name of its directory, for engines that report them instead of measuring."""

    def open_engine(self, store: Store) -> Engine:
        known = self

        class KnownEngine(Engine):
            def measure(self, size_bytes: int = 0) -> LinkRates:
                slot = store.allocate(1, "measurement")
                store.release(slot)
                return known[slot.extents[0].path.parent.name]

        return KnownEngine(store)


MakeCandidate = Callable[..., PathCandidate]


@pytest.fixture
def make_candidate(tmp_path: Path) -> MakeCandidate:
    """Make candidates, each with a directory of its name. `open` raises `error`."""

    def make(name: str, *, error: Exception | None = None, last_resort: bool = False) -> PathCandidate:
        (tmp_path / name).mkdir()

        def open_() -> Store:
            if error is not None:
                raise error
            return PosixStore([tmp_path / name], budget_bytes=None)

        return PathCandidate(name=name, open=open_, last_resort=last_resort)

    return make


class DamagesOnRead(PosixStore):
    """Reports no error, but reads wrong bytes."""

    def read_chunk(self, *arguments: object) -> None:
        pass


def close(path: StoragePath) -> None:
    assert path.store.used_bytes == 0 and path.engine.write_link.moved_bytes == 0
    path.close()


def test_direct_io_is_taken_where_there_is_some(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "teraio"):
        path = choose_path(cpu_candidates([tmp_path], budget_bytes=None), open_engine=QuickEngine)
    assert (path.name, path.store.direct, dict(path.refused)) == ("posix", True, {})
    assert 1e5 < path.rates.read.duplex_bytes_per_second < 1e12
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "storage path 'posix': writes " in record.getMessage()
    close(path)


def test_the_page_cache_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_direct_io(monkeypatch)
    with caplog.at_level(logging.INFO, "teraio"):
        path = choose_path(cpu_candidates([tmp_path], budget_bytes=None), open_engine=QuickEngine)
    assert path.name == "buffered" and not path.store.direct
    assert f"not all file systems have direct I/O (storage: {tmp_path})" in path.refused["posix"]
    told, warned = caplog.records
    assert "'posix' is not used: not all file systems have direct I/O" in told.getMessage()
    assert warned.levelno == logging.WARNING and "no budget counts" in warned.getMessage()
    close(path)


def test_a_way_of_another_device_cannot_be_forced(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'kvikio' does not work here: there is no such path .*; give 'auto'"):
        choose_path(cpu_candidates([tmp_path], budget_bytes=None), open_engine=QuickEngine, forced="kvikio")


def test_the_best_harmonic_mean_wins(make_candidate: MakeCandidate) -> None:
    known = KnownRates(one_sided=rates(9e9, 1e9), balanced=rates(2e9, 3e9), slow=rates(1e9, 1e9))
    path = choose_path([make_candidate(name) for name in known], open_engine=known.open_engine)
    assert path.name == "balanced" and path.rates is known["balanced"]
    close(path)


def test_what_does_not_work_is_left_out_with_its_reason(make_candidate: MakeCandidate, tmp_path: Path) -> None:
    known = KnownRates(good=rates(1e9, 1e9))
    (tmp_path / "wrong").mkdir()
    candidates = [
        make_candidate("absent", error=UnsupportedError("install kvikio")),
        make_candidate("broken", error=StorageIOError(path="/dev/x", block="probe", errno=5)),
        PathCandidate(name="wrong", open=lambda: DamagesOnRead([tmp_path / "wrong"], budget_bytes=None)),
        make_candidate("good"),
        make_candidate("cache", last_resort=True),
    ]
    path = choose_path(candidates, open_engine=known.open_engine)
    assert path.name == "good" and list(path.refused) == ["absent", "broken", "wrong"]
    assert path.refused["absent"] == "install kvikio"
    assert "[errno 5]" in path.refused["broken"] and "came back different" in path.refused["wrong"]
    close(path)


def test_the_page_cache_is_no_way_around_a_drive_that_fails(make_candidate: MakeCandidate) -> None:
    broken = StorageIOError(path="/dev/x", block="probe", errno=5)
    candidates = [make_candidate("posix", error=broken), make_candidate("cache", last_resort=True)]
    for forced in (None, "posix"):
        with pytest.raises(StorageIOError) as raised:
            choose_path(candidates, open_engine=Engine, forced=forced)
        assert raised.value is broken


def test_where_nothing_works_all_reasons_are_told(make_candidate: MakeCandidate) -> None:
    candidates = [
        make_candidate("kvikio", error=UnsupportedError("install kvikio")),
        make_candidate("staged", error=StorageError("no pinned memory")),
    ]
    with pytest.raises(StorageError, match="blocks cannot get to storage") as raised:
        choose_path(candidates, open_engine=Engine)
    assert "kvikio: install kvikio" in str(raised.value) and "staged: no pinned memory" in str(raised.value)


def test_what_is_true_of_all_is_said_once(tmp_path: Path) -> None:
    candidates = cpu_candidates([tmp_path / "absent"], budget_bytes=None)
    for forced in (None, "posix", "buffered"):
        with pytest.raises(StorageError, match="^storage '.*absent' does not exist; create it"):
            choose_path(candidates, open_engine=Engine, forced=forced)


def test_too_little_room_is_no_reason_to_look_elsewhere(tmp_path: Path) -> None:
    candidates = cpu_candidates([tmp_path], budget_bytes=64 << 10)
    for forced in (None, "posix"):
        with pytest.raises(StorageFullError, match="storage_budget"):
            choose_path(candidates, open_engine=Engine, forced=forced)


def test_opening_what_is_known_measures_nothing(make_candidate: MakeCandidate, caplog: pytest.LogCaptureFixture) -> None:
    candidates = [make_candidate("one"), make_candidate("two")]
    with caplog.at_level(logging.INFO, "teraio"):
        path = open_path(candidates, "two", rates(1e9, 2e9), open_engine=KnownRates().open_engine)
    assert path.name == "two" and path.rates == rates(1e9, 2e9) and caplog.records == []
    path.close()
