"""The host only queues work: in the steady state it never waits, and the GPU's clock measures times."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner import Trace
from runtime.cuda import CudaStreams, measure_host_links
from runtime.execution import executor
from runtime.storage import HostStore
from runtime.system import CudaPinner

from ..training import pagers
from .training import GPU_SCALE, MIB, STEPS, Case, Perceptron, Run, train, unlimited

DEVICE = torch.device("cuda", 0)
CASE = Case(name="perceptron", model=Perceptron)


@pytest.fixture
def budgets() -> dict[str, int]:
    """Options for the host tier alone: a third of the model's memory must leave the device."""
    peak = unlimited(CASE).peak_bytes
    return {"memory_budget": int(0.67 * peak), "host_budget": 2 * peak}


class SyncChecked:
    """For `between`: from step `first` on, PyTorch raises where it would wait for the GPU.

    waited_seconds: how long the training thread has waited since then for copies or room.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.waited_seconds = 0.0

    def __call__(self, step: int, module: nn.Module) -> None:
        if step + 1 == self.first:
            torch.cuda.synchronize(DEVICE)
            torch.cuda.set_sync_debug_mode("error")
            self._before = self._waited()
        if step + 1 == STEPS:
            torch.cuda.set_sync_debug_mode("default")
            self.waited_seconds = self._waited() - self._before
            torch.cuda.synchronize(DEVICE)  # the host runs ahead: what has moved is known when the GPU has done it
            (pager,) = pagers()
            pager.forget_dead()

    def _waited(self) -> float:
        (pager,) = pagers()
        return pager.account.waited_seconds


@pytest.fixture
def sync_debug_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("sync_debug_mode")
def test_the_host_waits_for_nothing_when_a_plan_moves_blocks_to_the_host_tier(budgets: dict[str, int]) -> None:
    checked = SyncChecked(STEPS - 3)
    batches = [torch.randint(0, GPU_SCALE.width, (GPU_SCALE.rows,), device=DEVICE) for _ in range(STEPS)]
    there = [[batch] for batch in batches]  # others are copied to the device, which waits
    run = train(CASE, {**budgets, "replan": False}, device=DEVICE, make_batches=lambda *_: there, between=checked)
    assert run.progress[checked.first].phase == run.progress[-1].phase == "planned"
    assert run.progress[-1].moved_bytes["host->device"] > run.progress[checked.first].moved_bytes["host->device"]
    assert checked.waited_seconds == 0, "the pager must not have waited for copies or memory either"


def watched(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], watch: Any) -> Run:
    """Train, and call `watch(stage, run)` for each stage, which calls `run()`."""
    plain = executor._run_stage
    monkeypatch.setattr(executor, "_run_stage", lambda stage, slots: watch(stage, lambda: plain(stage, slots)))
    return train(CASE, options, device=DEVICE)


def test_stage_times_are_those_of_a_clock_that_waits(
    budgets: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: dict[str, list[float]] = defaultdict(list)

    def watch(stage: Any, run: Any) -> None:
        stream = torch.cuda.current_stream(DEVICE)  # not the device: its copies go on, and the stage's first event has passed
        stream.synchronize()
        began = time.perf_counter()
        run()
        stream.synchronize()
        measured[stage.name].append(time.perf_counter() - began)

    path = tmp_path / "trace.json"
    watched(monkeypatch, {**budgets, "trace_out": path}, watch)
    by_event = {stage.name: stage.duration_seconds for stage in Trace.load(path).stages if stage.name in measured}
    assert len(by_event) > 20
    by_clock = sum(statistics.median(measured[name]) for name in by_event)
    assert 0.5 * by_clock < sum(by_event.values()) < 1.5 * by_clock


def test_the_trace_and_the_status_tell_the_ways_and_their_rates(budgets: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    folder = tmp_path / "spill"
    folder.mkdir()
    run = train(CASE, {**budgets, "storage": folder, "trace_out": path}, device=DEVICE)
    hardware = Trace.load(path).hardware
    links = {link.name: link for link in hardware.links}
    assert set(links) == set(run.progress[-1].moved_bytes)
    for name in ("device->host", "host->device"):
        assert links[name].path == "copies by the GPU, pinned memory"
        assert 1e9 < links[name].bytes_per_second < 1e12 and 0 < links[name].latency_seconds < 0.1
    for name in ("device->storage", "storage->device"):
        assert links[name].path in ("staged", "kvikio")
        assert links[name].bytes_per_second > 1e7
    assert {"bus, outward", "bus, inward"} <= {rate.name for rate in hardware.shared}
    assert run.progress[-1].trace_path == str(path)
    assert hardware.name == torch.cuda.get_device_name(DEVICE)


def test_host_links_are_measured_also_where_the_model_leaves_little_room() -> None:
    streams = CudaStreams(DEVICE)
    store = HostStore(64 * MIB, pinner=CudaPinner(DEVICE))
    before = torch.cuda.get_per_process_memory_fraction(DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + 24 * MIB) / total, DEVICE)
        rates = measure_host_links(streams, store, 256 << 20)
    finally:
        torch.cuda.set_per_process_memory_fraction(before, DEVICE)
        store.close()
    assert rates.write.bytes_per_second > 1e9 and rates.read.bytes_per_second > 1e9
    both = sum(each.duplex_bytes_per_second for each in rates)
    assert 0.8 * rates.write.bytes_per_second < both
