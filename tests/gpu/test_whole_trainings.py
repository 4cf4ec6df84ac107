"""Trainings as users run them: updates on the host, checkpoints of blocks on drives, drives that fail, and interrupts.

The model is mostly weights and states, so that a processor computes it in no time and all of it moves.
"""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
import teraio
from teraio.optimizer.host import HostUpdate

from ..teraio.parity.test_faults import fail_on
from ..teraio.parity.test_host_updates import TOLERANCE, far
from ..training import Training, begin, unequal

DEVICE = torch.device("cuda", 0)
WIDTH, LAYERS, ROWS = 1024, 16, 64
WEIGHTS_BYTES = 4 * WIDTH * WIDTH * LAYERS
"""64 MiB; with gradients and two states 256 MiB."""
BUDGET = 3 * WEIGHTS_BYTES
UNTIL_PLANNED = 8
pytestmark = pytest.mark.usefixtures("planning_in_process")


@pytest.fixture
def may_update_on_the_host() -> Iterator[None]:
    """Where all bits must be the same, teraio updates on the device."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    return nn.Sequential(*layers).to(DEVICE, dtype)


def adam(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=1e-3)]


def adam_over_masters(module: nn.Module) -> list[torch.optim.Optimizer]:
    (optimizer,) = adam(module)
    teraio.manage_optimizer(optimizer, master_weights=True)
    return [optimizer]


def start(options: dict[str, Any] | None, make_optimizers: Any = adam, dtype: torch.dtype = torch.float32) -> Training:
    given = None if options is None else {"profile_iterations": 1, "solver_time_limit": 5, **options}
    return begin(lambda: model(dtype), make_optimizers, given)


def step(training: Training, number: int) -> None:
    dtype = next(training.module.parameters()).dtype
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).to(DEVICE, dtype)
    (training.model(rows) - 0.1).square().mean().backward()
    training.update()


def train(training: Training, first: int, last: int) -> Training:
    training.run(range(first, last), lambda number, _: step(training, number), planned=True)
    return training


def values(training: Training) -> list[Tensor]:
    """Parameters and optimizer states, in main memory."""
    (optimizer,) = training.optimizers
    parameters = list(training.module.parameters())
    states = [v for p in parameters for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    found = []
    for tensor in (*parameters, *states):  # one by one: together they exceed the budget
        with teraio.on_device([tensor]):
            found.append(tensor.detach().cpu().clone())  # counters are in main memory already, and go on
    return found


def apart(found: list[Tensor], wanted: list[Tensor], tolerance: float = TOLERANCE) -> list[int]:
    """Positions of tensors that differ by more than rounding: eager code without teraio rounds differently."""
    return [n for n, pair in enumerate(zip(found, wanted, strict=True)) if not far(*(t.float() for t in pair)) <= tolerance]


# -- updates on the host


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each update on the host was for."""
    made: list[int] = []
    run = HostUpdate.run

    def counting(self: HostUpdate, *arguments: Any) -> float | None:
        seconds = run(self, *arguments)
        if seconds is not None:
            made.append(len(self.members))
        return seconds

    monkeypatch.setattr(HostUpdate, "run", counting)
    return made


@pytest.mark.usefixtures("may_update_on_the_host")
@pytest.mark.parametrize(
    ("make_optimizers", "dtype"), [(adam, torch.float32), (adam_over_masters, torch.bfloat16)], ids=["fp32", "bf16 with masters"]
)
def test_updates_on_the_host_agree_to_rounding(
    tmp_path: Path, updates: list[int], make_optimizers: Any, dtype: torch.dtype
) -> None:
    """The plan updates all that it can on the host: gradients go there, parameters come back."""
    tiers = {"memory_budget": BUDGET, "host_budget": 8 * WEIGHTS_BYTES}
    trace, plan = tmp_path / "trace.json", tmp_path / "plan.json"
    train(start({**tiers, "trace_out": trace}, make_optimizers, dtype), 0, 5)
    budgets = planner.Budgets(device_bytes=tiers["memory_budget"], host_bytes=tiers["host_budget"])
    planner.plan(planner.Trace.load(trace), budgets, policy="host-updates", time_limit_seconds=5).save(plan)
    teraio.reset()
    updates.clear()
    training = train(start({**tiers, "plan": plan}, make_optimizers, dtype), 0, 12)
    assert training.progress[-1][0].phase == "planned" and len(updates) > LAYERS
    teraio.reset()
    found, wanted = values(training), values(train(start(None, make_optimizers, dtype), 0, 12))
    # Gradients in bf16 differ by 2**-7 after some steps, as parameters do; second moments are of their squares: by twice that.
    assert not apart(found, wanted, TOLERANCE if dtype == torch.float32 else 2**-6)


# -- checkpoints, and drives that fail


def test_a_checkpoint_of_blocks_on_a_drive_is_that_of_a_training_without_teraio(tmp_path: Path) -> None:
    training = train(start({"memory_budget": BUDGET, "storage": tmp_path}), 0, UNTIL_PLANNED)
    assert training.states_moved, "states wait on the drive"
    saved = values(training)
    teraio.reset()
    assert not unequal(values(training), saved)
    assert not unequal(saved, values(train(start(None), 0, UNTIL_PLANNED)))


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_drive_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    options = {"memory_budget": BUDGET, "storage": tmp_path, "storage_path": "staged"}
    training = train(start(options), 0, UNTIL_PLANNED)
    works_again: Callable[[], None] = fail_on(monkeypatch, call, tmp_path, errno.EIO)
    with pytest.raises(teraio.StorageIOError, match="Input/output error"):
        step(training, UNTIL_PLANNED)
    works_again()
    with contextlib.suppress(teraio.StorageIOError):  # of other copies that failed meanwhile
        values(training)
    training.optimizers[0].zero_grad()
    saved = values(training)
    step(training, UNTIL_PLANNED + 1)
    found = values(training)
    teraio.reset()
    assert not unequal(values(training), found)
    assert not unequal(found, values(train(resumed(saved), UNTIL_PLANNED + 1, UNTIL_PLANNED + 2)))


def test_training_goes_on_after_interrupts_at_random_times(tmp_path: Path) -> None:
    """What an interrupt leaves can be read, and the next iteration goes on from it. Streams may be copying at that time."""
    training = train(start({"memory_budget": BUDGET, "storage": tmp_path}), 0, UNTIL_PLANNED)
    chance = random.Random(0)
    interrupted: list[tuple[int, list[Tensor], list[Tensor]]] = []
    seconds = 0.0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for number in range(UNTIL_PLANNED, UNTIL_PLANNED + 8):
            began = time.monotonic()
            if seconds:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.1, 0.9) * seconds)
            try:
                step(training, number)
                seconds = time.monotonic() - began
            except KeyboardInterrupt:
                training.optimizers[0].zero_grad()
                left = values(training)
                step(training, number)
                interrupted.append((number, left, values(training)))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(interrupted) > 2
    teraio.reset()
    del training  # what trains beside it would count against the budget
    for number, left, found in interrupted:
        assert not unequal(found, values(train(resumed(left), number, number + 1)))


def resumed(saved: list[Tensor]) -> Training:
    """A training without teraio that goes on from there; what runs under teraio stays."""
    module = model()
    (optimizer,) = optimizers = adam(module)
    parameters = list(module.parameters())
    states = saved[len(parameters) :]
    with torch.no_grad():
        for number, (parameter, value) in enumerate(zip(parameters, saved, strict=False)):
            parameter.copy_(value)
            if states:
                step_, average, squares = states[3 * number : 3 * number + 3]
                moved = {"exp_avg": average.to(DEVICE), "exp_avg_sq": squares.to(DEVICE)}
                optimizer.state[parameter] = {"step": step_.clone(), **moved}
    return Training(module=module, model=module, optimizers=optimizers)
