"""What each rank may use of memory and drives; the machine that is opened for it; what of a GPU's budget is left to gaps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from planner import OptionsError, StorageError, StorageFullError, UnsupportedError
from runtime.system import HostLimit
from runtime.transfer import Engine, LinkRates
from teraio.machine import Machine, ResolvedBudgets, Shared, budgets, open_machine
from teraio.machine.budgets import SeenByRank
from teraio.options import Options, Share, parse_options

from ..virtual import link_rates

DRIVE = (Path("/drive"),)


def seen(count: int, **fields: object) -> dict[int, SeenByRank]:
    known = {"drives": (1,), "free": 1000, "available": 1000, "resident": 100} | fields
    return dict.fromkeys(range(count), SeenByRank(**known))  # type: ignore[arg-type]


def on_gpus(count: int, **fields: object) -> dict[int, SeenByRank]:
    return seen(count, **{"gpu": 800, "gpu_free": 700} | fields)


OTHER_DRIVES = {0: on_gpus(1, available=1)[0], 1: on_gpus(1, available=1, drives=(2,), free=800)[0]}
HALF_GIVEN = {0: seen(1, storage_budget=300)[0], 1: seen(1)[0], 2: on_gpus(1)[0]}
BOTH = Options(storage=DRIVE, storage_budget=600, host_budget=400)
AT_OTHER_MOMENTS = {0: seen(1)[0], 1: seen(1, free=900)[0]}


@pytest.mark.parametrize(
    ("options", "rank", "by_rank", "device", "host", "storage"),
    [
        # on the CPU, the default is a share of what is available; a share that is given is of that and of what ranks have
        (Options(storage=DRIVE), 0, seen(2), 450, None, 500),
        (Options(storage=DRIVE, memory_budget=Share(0.5)), 1, seen(2), 300, None, 500),
        # one process alone has all of it
        (Options(storage=DRIVE), 0, seen(1), 900, None, None),
        (Options(storage=DRIVE, memory_budget=Share(0.5)), 0, seen(1), 550, None, None),
        (Options(host_budget=300), 0, seen(1), 600, 300, None),
        (Options(), 0, seen(1), None, None, None),
        # the memory of a GPU is not divided
        (Options(storage=DRIVE), 1, on_gpus(2), 630, None, 500),
        (Options(storage=DRIVE, memory_budget=77), 1, on_gpus(2), 77, None, 500),
        (Options(), 0, on_gpus(1), None, None, None),
        # a host tier that nobody asked for is a share on GPUs
        (Options(memory_budget=100), 0, on_gpus(4), 100, 125, None),
        # drives are divided among those that use them, in equal shares: plans are for budgets, and equal ranks follow one plan
        (Options(storage=DRIVE), 1, OTHER_DRIVES, 630, None, None),
        (Options(storage=DRIVE), 2, HALF_GIVEN, 630, None, 350),
        *((Options(storage=DRIVE), rank, AT_OTHER_MOMENTS, 450, None, 450) for rank in (0, 1)),
        # what is given
        (BOTH, 0, on_gpus(1, storage_budget=600, host_budget=400), 630, 400, 600),
    ],
)
def test_budgets_of_a_rank(
    options: Options, rank: int, by_rank: dict[int, SeenByRank], device: int | None, host: int | None, storage: int | None
) -> None:
    assert budgets.resolve_budgets(options, rank, by_rank) == ResolvedBudgets(device=device, host=host, storage=storage)


@pytest.mark.parametrize(
    ("options", "by_rank", "message"),
    [
        (Options(memory_budget=100), seen(4), "there is no lower tier"),
        (
            BOTH,
            on_gpus(2, storage_budget=600),
            "option storage_budget: 2 ranks of this machine ask for 1,200 bytes .* 1,000 are free",
        ),
        (
            BOTH,
            on_gpus(3, host_budget=400),
            "option host_budget: 3 ranks of this machine ask for 1,200 bytes together, but 1,000",
        ),
        (
            Options(storage=DRIVE, host_budget=460),
            seen(2, host_budget=460),
            "460 bytes leave nothing of the 450 bytes of main memory that this process may take",
        ),
    ],
)
def test_budgets_that_do_not_fit_together(options: Options, by_rank: dict[int, SeenByRank], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        budgets.resolve_budgets(options, 0, by_rank)


def test_memory_budgets_on_cpu_that_do_not_fit_together_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """1000 bytes are available, and each rank has 100 already."""
    options = Options(storage=DRIVE, memory_budget=600)
    for rank in range(2):
        assert budgets.resolve_budgets(options, rank, seen(2, memory_budget=600)).device == 600
    assert not caplog.records
    budgets.resolve_budgets(options, 1, seen(2, memory_budget=601))
    budgets.resolve_budgets(options, 0, on_gpus(2, memory_budget=601))
    assert not caplog.records, "rank 0 tells, and on a GPU they are budgets of other memory"
    budgets.resolve_budgets(options, 0, seen(2, memory_budget=601))
    assert "1,202 bytes of main memory together, but have 1,200" in caplog.text


# -- the machine: what the trace says of it follows from what was measured, and from the way that was taken

CPU = torch.device("cpu")


@dataclass
class Measured:
    """What engines measure, and how often they did."""

    rates: LinkRates = field(default_factory=lambda: link_rates(1e9, 3e9, latency=1e-4))
    times: int = 0


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    found = Measured()

    def measure(engine: Engine) -> LinkRates:
        found.times += 1
        return found.rates

    monkeypatch.setattr(Engine, "measure", measure)
    yield found


@contextmanager
def opened(shared: Shared | None = None, **options: object) -> Iterator[Machine]:
    machine = open_machine(parse_options({"memory_budget": "1GiB", **options}), CPU, shared)
    try:
        yield machine
    finally:
        machine.close()


@pytest.mark.parametrize(
    ("duplex_write", "duplex_read", "together"), [(0.5e9, 2e9, 2.5e9), (1e9, 2.7e9, 3.7e9), (0.95e9, 2.95e9, None)]
)
def test_drives_that_slow_each_other_down_share_a_rate(
    tmp_path: Path, measured: Measured, duplex_write: float, duplex_read: float, together: float | None
) -> None:
    measured.rates = link_rates(1e9, 3e9, latency=1e-4, duplex=(duplex_write, duplex_read))
    with opened(storage=tmp_path) as machine:
        hardware = machine.hardware()
    assert {link.name: link.bytes_per_second for link in hardware.links} == {"device->storage": 1e9, "storage->device": 3e9}
    if together is None:
        assert hardware.shared == ()
    else:
        (shared,) = hardware.shared
        assert shared.bytes_per_second == together
        assert set(shared.links) == {"device->storage", "storage->device"}


def test_a_host_tier_has_links_and_a_capacity_of_its_own(tmp_path: Path) -> None:
    """What it holds needs no room on the drives."""
    options = {"host_budget": "64MiB", "storage_budget": "32MiB"}
    with opened(storage=tmp_path, **options) as machine:
        hardware = machine.hardware()
        assert machine.host_bytes == hardware.host_memory_bytes == 64 << 20
        assert [link.name for link in hardware.links] == ["device->host", "host->device", "device->storage", "storage->device"]
        assert machine.moved_bytes() == dict.fromkeys((link.name for link in hardware.links), 0)
        machine.ensure_room(96 << 20)
        with pytest.raises(StorageFullError, match="storage_budget"):
            machine.ensure_room(97 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_host_tier_alone_refuses_more_than_it_holds() -> None:
    with opened(host_budget="64MiB") as machine:
        machine.ensure_room(64 << 20)
        with pytest.raises(StorageFullError, match="the host_budget allows 67,108,864; raise host_budget, or give storage"):
            machine.ensure_room(65 << 20)


@pytest.mark.parametrize(("option", "path"), [("auto", "posix"), ("posix", "posix"), ("buffered", "buffered")])
def test_the_trace_says_which_way_was_taken(tmp_path: Path, option: str, path: str) -> None:
    with opened(storage=tmp_path, storage_path=option) as machine:
        assert [link.path for link in machine.hardware().links] == [path, path]
    assert list(tmp_path.iterdir()) == []


WAY = "storage_path '{}' does not work here: .*; give 'auto', which takes what works of 'posix'"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host_budget": "900TiB"}, StorageFullError, "host_budget"),
        ({"storage_path": "kvikio"}, UnsupportedError, WAY.format("kvikio")),
        ({"storage_path": "staged"}, UnsupportedError, WAY.format("staged")),
        ({"storage": None}, OptionsError, "there is no lower tier, .* give storage .*, host_budget"),
    ],
)
def test_what_this_machine_has_not_is_refused_and_nothing_stays(
    tmp_path: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), opened(**{"storage": tmp_path, **options}):  # type: ignore[arg-type]
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_pytorch_calls_cuda_and_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(UnsupportedError, match="does not know devices of type 'rocm'; train on cpu or cuda, an NVIDIA GPU"):
        open_machine(parse_options({}), torch.device("cuda"))


def test_other_devices_and_directories_that_are_gone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="devices of type 'meta'; train on cpu or cuda"):
        open_machine(parse_options({}), torch.device("meta"))
    options = parse_options({"storage": tmp_path, "memory_budget": "1GiB"})
    tmp_path.rmdir()
    with pytest.raises(StorageError, match="does not exist; create it"):
        open_machine(options, CPU)


def test_links_are_measured_once_for_the_same_drives_and_options(tmp_path: Path, measured: Measured) -> None:
    folders, shared = [tmp_path / name for name in "ab"], Shared()
    for folder in folders:
        folder.mkdir()
    cases: list[tuple[dict[str, object], int]] = [({"storage": folder}, 1) for folder in folders]
    cases += [({"storage": folders[0], "checksums": True}, 2), ({"storage": folders[0], "storage_path": "buffered"}, 3)]
    cases += [({"host_budget": "64MiB"}, 4)] * 2
    for options, times in cases:
        with opened(shared, **options):
            assert measured.times == times
    assert shared.host == measured.rates


def test_a_share_is_of_what_the_process_has_and_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = psutil.Process().memory_info().rss
    limits = [HostLimit(what="", available_bytes=available, remedy="") for available in (1 << 40, 2 << 30)]
    monkeypatch.setattr(budgets, "host_limits", lambda: limits)

    def device_bytes(memory_budget: str | None) -> int:
        with opened(storage=tmp_path, memory_budget=memory_budget) as machine:
            return machine.budgets.device or 0

    whole, half = device_bytes("100%"), device_bytes("50%")
    assert (2 << 30) + held / 2 < whole and 0.4 < half / whole < 0.6
    assert device_bytes(None) == int((2 << 30) * 0.9)
