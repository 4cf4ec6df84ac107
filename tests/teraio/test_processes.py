"""Training in a process that ends in some way, or has few resources: nothing is left behind, and the next one starts."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

from ..runtime.processes import Forking, Process
from ..thoroughness import by_profile

TRAIN = """
import sys, torch, teraio
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(24)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = dict(memory_budget="16MiB", storage=sys.argv[1], codegen="eager")
compiled = torch.compile(model, backend="teraio", options=options)

def step():
    compiled(torch.randn(16, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
print("trains", flush=True)
"""
FOR_EVER = TRAIN + "while True: step()"
BLOCKED = (
    TRAIN
    + """
import ctypes
library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
print("blocked", flush=True)
library.pthread_mutex_lock(mutex)  # waits for ever in C, as in a collective whose other ranks are gone, and keeps the interpreter
"""
)
FITS_NOWHERE = """
import os, signal, sys, torch, teraio
begin, end = (int(each) for each in sys.argv[2:])
options = dict(memory_budget="24MiB", storage=sys.argv[1], codegen="eager", plan_cache="read-write")
os.chdir(sys.argv[1])

class Drive:
    def __init__(self, file, holds_bytes):
        self.file, self.holds_bytes, self.flush = file, holds_bytes, file.flush

    def write(self, content):
        if self.file.tell() > self.holds_bytes:
            print("half", flush=True)
            signal.pause()
        return self.file.write(content)

with teraio.under_budget(**options) as tiers:
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)])
    tiers.load(model, "model.safetensors")
    if begin:
        model.load_state_dict(torch.load("last.pt", mmap=True))
teraio.compile(model, **options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(begin, end):
    model(torch.randn(16, 1024, generator=torch.Generator().manual_seed(number))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    (status,) = teraio.status()
    print(number, status.phase, status.device_peak_bytes <= 24 << 20, flush=True)
    teraio.wait_for_plan()
    with open("next.pt", "wb") as file:
        torch.save(model.state_dict(), Drive(file, 16 << 20 if status.phase == "planned" and not begin else 1 << 40))
    os.replace("next.pt", "last.pt")
"""
UNTIL_PLANNING = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))"
    + TRAIN
    + """
while teraio.status()[0].phase != "planning":
    step()
assert teraio.status()[0].moved_bytes["storage->device"] > 0
import psutil
while not (planners := psutil.Process().children()):
    pass
print(planners[0].pid, flush=True)
"""
)

Start = Callable[..., Process]


@pytest.fixture
def start(forking: Forking, tmp_path: Path) -> Start:
    """Starts a process that runs `code`, with the test's folder as its first argument."""

    def begin(code: str, *arguments: str) -> Process:
        return forking.start(code, tmp_path, *arguments, XDG_CACHE_HOME=str(tmp_path / "cache"))

    return begin


def wait_until_it_trains(process: Process) -> None:
    line = process.stdout.readline()
    assert line == "trains\n", process.errors.read_text()


def ends_within(process: Process, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while (running := psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE) and time.monotonic() < until:
        time.sleep(0.02)
    return not running


def test_a_training_that_is_killed_or_interrupted_leaves_no_file(start: Start, tmp_path: Path) -> None:
    """At a random time; and Ctrl-C is one that nobody catches."""
    chance = random.Random(0)
    for _ in range(by_profile(ci=1, long=10)):
        process = start(FOR_EVER)
        wait_until_it_trains(process)
        time.sleep(chance.uniform(0, 0.3))
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and not list(tmp_path.iterdir())
    process = start(FOR_EVER)
    wait_until_it_trains(process)
    for _ in range(3):  # again where PyTorch has swallowed it
        process.signal(signal.SIGINT)
        if ends_within(process, 60):
            break
    assert process.wait() in (1, -signal.SIGINT) and process.errors.read_text().rstrip().endswith("KeyboardInterrupt")
    assert not list(tmp_path.iterdir())


def test_a_kill_amid_a_save_of_a_model_that_fits_nowhere_leaves_the_last_checkpoint(start: Start, tmp_path: Path) -> None:
    """And the next process goes on from there, by the same plan from its first step on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)])
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    process = start(FITS_NOWHERE, "0", "50")
    lines = list(itertools.takewhile(lambda line: line != "half\n", process.stdout))
    process.signal(signal.SIGKILL)
    process.wait()
    killed = len(lines) - 1
    assert lines[-1] == f"{killed} planned True\n" and (tmp_path / "next.pt").exists()
    process = start(FITS_NOWHERE, str(killed), str(killed + 2))
    output, status = process.stdout.read(), process.wait()
    assert (status, output) == (0, f"{killed} planned True\n{killed + 1} planned True\n"), process.errors.read_text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(killed + 2):
        model(torch.randn(16, 1024, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = torch.load(tmp_path / "last.pt")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_sigterm_leaves_no_file_and_does_not_wait_for_c_code(start: Start, tmp_path: Path) -> None:
    process = start(BLOCKED)
    wait_until_it_trains(process)
    assert process.stdout.readline() == "blocked\n"
    process.signal(signal.SIGTERM)
    assert ends_within(process, 20) and process.wait() == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_the_interpreter_ends_while_a_plan_is_made(start: Start, tmp_path: Path) -> None:
    """And it has few descriptors, and may lock no memory."""
    process = start(UNTIL_PLANNING)
    output, status = process.stdout.read(), process.wait()
    errors = process.errors.read_text()
    assert status == 0 and "Traceback" not in errors, errors
    planner = int(output.splitlines()[-1])
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(planner).wait(timeout=300)
    assert not list(tmp_path.iterdir())
