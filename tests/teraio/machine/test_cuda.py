"""A GPU's machine, mover and life cycle in main memory: all but the calls to the driver."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import teraio
from runtime.cuda import CudaStreams, measure_host_links
from runtime.device import OUTWARD, DeviceMemoryError
from runtime.execution import executor
from runtime.storage import HostStore
from runtime.transfer import Engine
from teraio.registry import REGISTRY
from teraio.stages import CutPolicy
from teraio.training_run import RunParts

from ...gpu.training import (
    STEPS,
    Case,
    Odd,
    Perceptron,
    ReadBetween,
    Run,
    Scale,
    Table,
    check_equal,
    check_within,
    one_adam,
    one_adam_over_masters,
    table_bytes,
    table_states_stay_away,
    train,
)
from ...training import pagers
from ..fake_cuda import CPU, MIB, TOTAL_BYTES, FakeCuda, open_machine

pytestmark = pytest.mark.usefixtures("one_compute_thread")
"""Several threads would add up the gradient of an embedding in varying order."""
SCALE = Scale(rows=512, width=256, layers=3, heads=4, sequence=64)
FEW_ROWS = replace(SCALE, rows=64)
"""For products in bfloat16, which many processors do by the slow way."""


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Scaled down with the models: what is measured, and how long a stage is."""
    monkeypatch.setattr(Engine, "measure", functools.partialmethod(Engine.measure, MIB))
    policy = CutPolicy(shortest_seconds=1e-6, max_stages=96)
    monkeypatch.setattr(REGISTRY, "parts", RunParts(cut_policy=policy))
    return FakeCuda(monkeypatch)


@functools.cache  # ignores that every test has a new double of the driver: without a budget nothing moves
def reference(case: Case, scale: Scale = SCALE) -> tuple[Run, int]:
    """A run without a budget, and its peak in bytes. It is trained once in this process, and nobody may change it."""
    run = train(case, {}, device=CPU, scale=scale)
    assert run.progress[-1].phase == "fits"
    return run, run.progress[-1].device_peak_bytes


PLAIN = Case(name="plain", model=Perceptron)
ACCUMULATED = Case(name="accumulated and clipped", model=Perceptron, accumulate=2, clip=True)
SCALED = Case(name="scaled and clipped", model=Perceptron, accumulate=2, clip=True, scaled=True)
ADAM = Case(name="adam", model=Perceptron, optimizers=one_adam)
MASTERS = Case(name="adam over masters, bf16", model=Perceptron, optimizers=one_adam_over_masters, dtype=torch.bfloat16)
ODD = Case(name="odd weights, evaluated", model=Odd, evaluate=True)


@pytest.mark.parametrize(
    ("case", "tiers", "share"),
    [
        (ACCUMULATED, "host+storage", 0.85),
        (SCALED, "storage", 0.5),
        (ODD, "storage", 0.85),
        (MASTERS, "host", 0.8),
    ],
)
def test_the_same_bits_within_the_budget(tmp_path: Path, cuda: FakeCuda, case: Case, tiers: str, share: float) -> None:
    scale = FEW_ROWS if case in (SCALED, MASTERS) else SCALE
    wanted, peak = reference(case, scale)
    budget = int(share * peak)
    options: dict[str, Any] = {"memory_budget": budget, "solver_time_limit": 5}
    if "host" in tiers:
        options["host_budget"] = 4 * peak
    if "storage" in tiers:
        options["storage"] = tmp_path
    found = train(case, options, device=CPU, scale=scale)
    check_equal(found, wanted)
    check_within(found, budget)
    if "host" in tiers:
        assert found.progress[-1].moved_bytes["device->host"] > 0
    assert REGISTRY.runs() == ()
    assert set(cuda.limits[1::2]) == {(budget - MIB) / TOTAL_BYTES}, "in regions"
    assert set(cuda.limits[::2]) == {1.0}, "user code, and the end, may take more"
    grown, usual = (f"expandable_segments:{grow},large_segment_size_mb:{size}" for grow, size in ((True, 16), (False, 20)))
    assert cuda.settings == [grown, usual, ""], "as they were, in the end"


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_what_is_read_between_graphs_does_not_wait_on_a_drive(tmp_path: Path) -> None:
    case = Case(name="read between graphs", model=ReadBetween)
    wanted, peak = reference(case)
    budget = int(0.6 * peak)
    found = train(case, {"memory_budget": budget, "solver_time_limit": 5, "storage": tmp_path}, device=CPU, scale=SCALE)
    check_equal(found, wanted)
    check_within(found, budget)
    assert found.progress[-1].moved_bytes["device->storage"] > 0


@pytest.mark.parametrize(("tiers", "fused"), [("host", False), ("storage", True)])
def test_an_embedding_by_slices(tmp_path: Path, tiers: str, fused: bool) -> None:
    """Its update does not fit: the states pass through the GPU. Bytes on their way to drives are checked."""

    def adam(module: torch.nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)]

    case = Case(name="table", model=Table, optimizers=adam)
    scale = Scale(rows=64, width=192, layers=1, heads=4, sequence=64)
    wanted, peak = reference(case, scale)
    budget = table_bytes(scale) * 39 // 10
    assert budget < peak
    options: dict[str, Any] = {"memory_budget": budget, "solver_time_limit": 5}
    options |= {"host_budget": 2 * peak} if tiers == "host" else {"storage": tmp_path, "checksums": True, "debug": True}
    found = train(case, options, device=CPU, scale=scale, between=table_states_stay_away)
    check_equal(found, wanted)
    check_within(found, budget)


def test_updates_inside_the_backward_pass(tmp_path: Path, cuda: FakeCuda) -> None:
    """On a device that works by itself, an iteration's times are known one later: the plan must not be for those before."""
    steps = STEPS + 3
    wanted = train(ADAM, {}, device=CPU, scale=SCALE, steps=steps)
    peak = wanted.progress[-1].device_peak_bytes
    gradients: list[int] = []
    options = {"memory_budget": int(0.65 * peak), "solver_time_limit": 5, "overlap_step": True, "storage": tmp_path}
    found = train(
        ADAM,
        options,
        device=CPU,
        scale=SCALE,
        steps=steps,
        backward_done=lambda module: gradients.append(sum(p.grad is not None for p in module.parameters())),
    )
    check_equal(found, wanted)
    check_within(found, int(0.65 * peak))
    assert min(gradients[:3]) > 0 and set(gradients[3:]) == {0}
    assert {status.deviations for status in found.progress} == {0}


def test_what_cannot_be_pinned_is_out_of_reach_of_kernels(cuda: FakeCuda) -> None:
    """A kernel that reads main memory which is not pinned ends the process: user code must get an error instead."""
    cuda.pins = False
    seen = []

    def between(step: int, module: torch.nn.Module) -> None:
        (pager,) = pagers()
        for parameter in module.parameters():
            block = pager.known_block(parameter)
            if block is not None and block.tier == "host" and block.state.name == "OFFLOADED":
                with pytest.raises(RuntimeError, match="is not in memory: teraio has moved it to host"):
                    parameter.detach().sum()
                with teraio.on_device([parameter]):
                    parameter.detach().sum()
                seen.append(block)
        if step == 1:
            parked = teraio.park()
            assert parked.left_bytes > 0 and "parameter" not in parked.staying_bytes

    wanted, peak = reference(PLAIN)
    found = train(PLAIN, {"memory_budget": int(0.7 * peak), "host_budget": 4 * peak}, device=CPU, scale=SCALE, between=between)
    check_equal(found, wanted)
    assert seen


def test_memory_that_is_not_in_one_piece_costs_time_only(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Now and then a stage, or a block that comes back, finds no memory until everything else has left and is given back."""
    wanted, peak = reference(ADAM)
    draw = random.Random(0)
    crumbled, sure = [False, 0, 0], [0]
    run, allocate = executor._run_stage, CudaStreams.allocate

    def run_stage(stage: Any, slots: list[Any]) -> None:
        run(stage, slots)
        if stage.repeatable and sure[0] < 0 and not crumbled[0] and draw.random() < 0.2:
            crumbled[0], crumbled[1] = True, crumbled[1] + 1
            raise torch.OutOfMemoryError("at the end of a stage")

    def allocated(streams: CudaStreams, size_bytes: int) -> torch.UntypedStorage:
        sure[0] -= 1
        if not crumbled[0] and sure[0] < 0 and draw.random() < 0.05:
            crumbled[0], crumbled[2] = True, crumbled[2] + 1
        if crumbled[0]:
            cuda.retries += 1
            raise DeviceMemoryError("no memory in one piece")
        return allocate(streams, size_bytes)

    def give_back(streams: CudaStreams) -> None:
        crumbled[0], sure[0] = False, 10  # what the stage at hand needs is there then

    def between(step: int, module: torch.nn.Module) -> None:
        if step == STEPS - 1:  # what comes back at the end has one more try in all
            sure[0] = 1 << 30

    monkeypatch.setattr(executor, "_run_stage", run_stage)
    monkeypatch.setattr(CudaStreams, "allocate", allocated)
    monkeypatch.setattr(CudaStreams, "give_back_memory", give_back)
    budget = int(0.85 * peak)
    options = {"memory_budget": budget, "host_budget": 4 * peak, "solver_time_limit": 5}
    found = train(ADAM, options, device=CPU, scale=SCALE, between=between)
    check_equal(found, wanted)
    assert found.progress[-1].device_peak_bytes <= budget
    assert min(crumbled[1:]) > 1, crumbled


def test_a_stage_that_finds_no_memory_twice_asks_for_a_larger_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    run = executor._run_stage

    def run_stage(stage: Any, slots: list[Any]) -> None:
        if stage.phase == "backward":
            raise torch.OutOfMemoryError
        run(stage, slots)

    _, peak = reference(PLAIN)
    budget = int(0.85 * peak)
    monkeypatch.setattr(executor, "_run_stage", run_stage)
    with pytest.raises(teraio.BudgetError, match="stage 'backward/.* needs") as caught:
        train(PLAIN, {"memory_budget": budget, "host_budget": 4 * peak}, device=CPU, scale=SCALE)
    teraio.reset()
    assert caught.value.smallest_bytes > budget


def test_the_first_error_names_a_budget_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts what the allocator of a GPU needs beside all blocks, although no region has run yet."""
    _, peak = reference(PLAIN)
    parts = replace(REGISTRY.parts, open_machine=functools.partial(open_machine, spare_bytes=64 * MIB))
    monkeypatch.setattr(REGISTRY, "parts", parts)
    with pytest.raises(teraio.BudgetError) as caught:
        train(PLAIN, {"memory_budget": MIB, "host_budget": 4 * peak}, device=CPU, scale=SCALE)
    found = train(PLAIN, {"memory_budget": caught.value.smallest_bytes, "host_budget": 4 * peak}, device=CPU, scale=SCALE)
    assert found.progress[-1].device_peak_bytes <= caught.value.smallest_bytes


def test_what_stages_had_in_a_stream_of_their_own_is_given_back_where_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []
    monkeypatch.setattr(CudaStreams, "give_back_memory", lambda streams: phases.extend(s.phase for s in teraio.status()))
    found = train(PLAIN, {}, device=CPU, scale=SCALE)
    assert found.progress[-1].phase == "fits" and phases == ["profile"], "once, when the profile has ended"


def test_a_copy_that_the_driver_refuses_names_the_memory_that_it_was_for(cuda: FakeCuda) -> None:
    streams = CudaStreams(CPU)
    source, target = (torch.full((64,), value, dtype=torch.uint8) for value in (7, 0))
    copy = functools.partial(streams.copy, OUTWARD, target=target.data_ptr(), source=source.data_ptr(), size_bytes=64)
    cuda.refusals = [201]
    copy()
    assert target.equal(source), "a thread that has used no GPU yet does so first"
    cuda.refusals = [700]
    with pytest.raises(
        RuntimeError, match=r"CUDA error 700 \(MADE_UP\) in a copy of 64 bytes from 0x\w+ \(unknown to the driver"
    ):
        copy()


def test_links_are_measured_with_what_there_is_and_what_the_user_records_is_left_alone(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, store = CudaStreams(CPU), HostStore(4 * MIB)
    assert all(way.bytes_per_second > 0 for way in measure_host_links(streams, store, 16 * MIB))

    def full(*_: object, **__: object) -> torch.UntypedStorage:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(DeviceMemoryError, match="has no 1,048,576 bytes in one piece"):
        patch.setattr(torch, "UntypedStorage", full)
        measure_host_links(streams, store, 2 * MIB)
    assert store.used_bytes == 0
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    assert not streams.pieces.begin_recording()
