"""The processors near a device, read from a sysfs that the tests make, and threads that run on them."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.system.numa import node_of, on_processors, pci_address, processors_near, processors_of

GPU = "0000:3b:00.0"


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    for node, processors in enumerate(("0-3,8-11", "4-7,12,14")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    (tmp_path / "sys/devices/system/node/possible").write_text("0-1\n")
    attach(tmp_path, "1")
    return tmp_path


def attach(root: Path, node: str) -> None:
    device = root / "sys/bus/pci/devices" / GPU
    device.mkdir(parents=True, exist_ok=True)
    (device / "numa_node").write_text(node + "\n")


def test_the_name_of_a_device() -> None:
    assert pci_address(0, 0x3B, 0) == GPU
    assert pci_address(0x10000, 0xFF, 0x1F) == "10000:ff:1f.0"


def test_processors_of_a_node(two_nodes: Path) -> None:
    assert processors_of(0, two_nodes) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert processors_of(1, two_nodes) == {4, 5, 6, 7, 12, 14}
    assert processors_of(2, two_nodes) == frozenset()


def test_processors_near_a_device(two_nodes: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert node_of(GPU.upper(), two_nodes) == 1
    with caplog.at_level(logging.INFO, "runtime.system.numa"):
        assert processors_near(GPU, two_nodes) == {4, 5, 6, 7, 12, 14}
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("no node", "the system does not know the device's node"),
        ("no device", "the system does not know the device's node"),
        ("no processors", "node 1 has no processors"),
        ("one node", "the machine has one node of memory"),
    ],
)
def test_why_it_makes_no_difference_is_logged(
    two_nodes: Path, caplog: pytest.LogCaptureFixture, change: str, reason: str
) -> None:
    nodes = two_nodes / "sys/devices/system/node"
    if change == "no node":
        attach(two_nodes, "-1")
    elif change == "no device":
        (two_nodes / "sys/bus/pci/devices" / GPU / "numa_node").unlink()
    elif change == "no processors":
        (nodes / "node1/cpulist").write_text("\n")
    else:
        (nodes / "node1/cpulist").unlink()
        (nodes / "node1").rmdir()
    with caplog.at_level(logging.INFO, "runtime.system.numa"):
        assert processors_near(GPU, two_nodes) is None
    assert [record.getMessage() for record in caplog.records] == [f"host memory is not placed near device {GPU}: {reason}"]


def test_a_thread_runs_on_the_processors_and_only_it() -> None:
    allowed = os.sched_getaffinity(0)
    chosen = frozenset({max(allowed)})

    def look() -> tuple[set[int], set[int]]:
        with on_processors(chosen | {1023}):
            inside = os.sched_getaffinity(0)
        return inside, os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(look)
        assert os.sched_getaffinity(0) == allowed
        assert future.result() == (chosen, allowed)
    with pytest.raises(KeyError), on_processors(chosen):
        raise KeyError
    assert os.sched_getaffinity(0) == allowed


def test_processors_that_are_not_allowed_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    allowed = os.sched_getaffinity(0)
    with caplog.at_level(logging.INFO, "runtime.system.numa"):
        with on_processors(None):
            assert os.sched_getaffinity(0) == allowed
        assert not caplog.records
        with on_processors(frozenset({1022, 1023})):
            assert os.sched_getaffinity(0) == allowed
    assert "may not run on [1022, 1023]" in caplog.text
