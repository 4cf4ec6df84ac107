"""What the trace says of the machine follows from what was measured, and from the way that was taken."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from planner import OptionsError, StorageError, StorageFullError, UnsupportedError
from runtime.system import HostLimit
from runtime.transfer import Engine, LinkRates
from teraio.machine import Machine, Shared, open_machine
from teraio.options import parse_options

CPU = torch.device("cpu")


def rates(duplex_write: float, duplex_read: float) -> LinkRates:
    return LinkRates(
        write_bytes_per_second=1e9,
        read_bytes_per_second=3e9,
        write_latency_seconds=1e-4,
        read_latency_seconds=1e-4,
        duplex_write_bytes_per_second=duplex_write,
        duplex_read_bytes_per_second=duplex_read,
    )


@dataclass
class Measured:
    """What engines measure, and how often they did."""

    rates: LinkRates = field(default_factory=lambda: rates(1e9, 3e9))
    times: int = 0


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    found = Measured()

    def measure(engine: Engine) -> LinkRates:
        found.times += 1
        return found.rates

    monkeypatch.setattr(Engine, "measure", measure)
    yield found


def machine(folder: Path, shared: Shared | None = None, **options: object) -> Machine:
    return open_machine(parse_options({"storage": folder, "memory_budget": "1GiB", **options}), CPU, shared)


@pytest.mark.parametrize(
    ("duplex_write", "duplex_read", "together"), [(0.5e9, 2e9, 2.5e9), (1e9, 2.7e9, 3.7e9), (0.95e9, 2.95e9, None)]
)
def test_drives_that_slow_each_other_down_share_a_rate(
    tmp_path: Path, measured: Measured, duplex_write: float, duplex_read: float, together: float | None
) -> None:
    measured.rates = rates(duplex_write, duplex_read)
    opened = machine(tmp_path)
    try:
        hardware = opened.hardware()
    finally:
        opened.close()
    assert {link.name: link.bytes_per_second for link in hardware.links} == {"device->storage": 1e9, "storage->device": 3e9}
    if together is None:
        assert hardware.shared == ()
    else:
        (shared,) = hardware.shared
        assert shared.bytes_per_second == together
        assert set(shared.links) == {"device->storage", "storage->device"}


def test_a_host_tier_has_links_and_a_capacity_of_its_own(tmp_path: Path) -> None:
    opened = machine(tmp_path, host_budget="64MiB", unlink_spill_files=False)
    try:
        hardware = opened.hardware()
        assert opened.host_bytes == hardware.host_memory_bytes == 64 << 20
        assert [link.name for link in hardware.links] == ["device->host", "host->device", "device->storage", "storage->device"]
        assert opened.moved_bytes() == dict.fromkeys((link.name for link in hardware.links), 0)
        assert [Path(folder).parent for folder in opened.spill_directories()] == [tmp_path]
    finally:
        opened.close()
    assert list(tmp_path.iterdir()) == []


def test_what_the_host_tier_holds_needs_no_room_on_the_drives(tmp_path: Path) -> None:
    opened = machine(tmp_path, host_budget="64MiB", storage_budget="32MiB")
    try:
        opened.ensure_room(96 << 20)
        with pytest.raises(StorageFullError, match="storage_budget"):
            opened.ensure_room(97 << 20)
    finally:
        opened.close()


def test_a_host_tier_alone_refuses_more_than_it_holds() -> None:
    opened = open_machine(parse_options({"host_budget": "64MiB", "memory_budget": "1GiB"}), CPU)
    try:
        opened.ensure_room(64 << 20)
        with pytest.raises(StorageFullError, match="the host_budget allows 67,108,864; raise host_budget, or give storage"):
            opened.ensure_room(65 << 20)
    finally:
        opened.close()


def test_more_host_memory_than_the_machine_has_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(StorageFullError, match="host_budget"):
        machine(tmp_path, host_budget="900TiB")
    assert list(tmp_path.iterdir()) == []


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="devices of type 'meta'; train on cpu or cuda"):
        open_machine(parse_options({}), torch.device("meta"))


@pytest.mark.parametrize(("option", "path"), [("auto", "posix"), ("posix", "posix"), ("buffered", "buffered")])
def test_the_trace_says_which_way_was_taken(tmp_path: Path, option: str, path: str) -> None:
    opened = machine(tmp_path, storage_path=option)
    assert [link.path for link in opened.hardware().links] == [path, path]
    opened.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["kvikio", "staged"])
def test_ways_of_gpus_are_refused_on_cpu(tmp_path: Path, option: str) -> None:
    with pytest.raises(UnsupportedError, match=f"storage_path '{option}' does not work here: .* What works: 'posix'; give"):
        machine(tmp_path, storage_path=option)
    assert list(tmp_path.iterdir()) == []


def test_links_are_measured_once_for_the_same_drives_and_options(tmp_path: Path, measured: Measured) -> None:
    folders, shared = [tmp_path / name for name in "ab"], Shared()
    for folder in folders:
        folder.mkdir()
        machine(folder, shared).close()
    assert measured.times == 1
    machine(folders[0], shared, checksums=True).close()
    assert measured.times == 2
    machine(folders[0], shared, storage_path="buffered").close()
    assert measured.times == 3


def test_the_host_tier_is_measured_once(measured: Measured) -> None:
    options, shared = parse_options({"host_budget": "64MiB", "memory_budget": "1GiB"}), Shared()
    for _ in range(2):
        open_machine(options, CPU, shared).close()
    assert measured.times == 1 and shared.host == measured.rates


def test_a_directory_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    options = parse_options({"storage": tmp_path, "memory_budget": "1GiB"})
    tmp_path.rmdir()
    with pytest.raises(StorageError, match="does not exist; create it"):
        open_machine(options, CPU)


def test_a_share_is_of_what_the_process_has_and_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = psutil.Process().memory_info().rss
    limits = [HostLimit(what="", available_bytes=available, remedy="") for available in (1 << 40, 2 << 30)]
    monkeypatch.setattr("teraio.machine.budgets.host_limits", lambda: limits)
    shares = [machine(tmp_path, memory_budget=text) for text in ("100%", "50%")]
    whole, half = (each.budgets.device or 0 for each in shares)
    assert (2 << 30) + held / 2 < whole and 0.4 < half / whole < 0.6
    rest = machine(tmp_path, memory_budget=None)
    assert rest.budgets.device == int((2 << 30) * 0.9)
    for each in (*shares, rest):
        each.close()


def test_a_budget_without_a_lower_tier_is_refused() -> None:
    with pytest.raises(OptionsError, match="there is no lower tier, .* give storage .*, host_budget"):
        open_machine(parse_options({"memory_budget": "1GiB"}), CPU)
