"""The life of a model that fits nowhere: what its process holds at each step, and copies beside plain ones on the same drive."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import teraio
from benchmarks.results import Figure
from benchmarks.turns import Scale, spread, waited_seconds
from examples.gpt import GPT, GPTConfig
from examples.text import batches, standard_library_text
from examples.train_larger import CONFIG
from examples.worker import ROOT, WorkerFailed

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]

MEMORY_BYTES, HOST_BYTES = 64 << 20, 24 << 20
"""The budgets, of a model of 118 MB of weights in 6 layers."""
OVERHEAD_MIB = 112
"""What the process may hold at each step beside the budgets, whatever the model's size: with layers of width 64, PyTorch's own
compilation takes 57 MiB, teraio's another 20; then buffers of threads, and a saver's tensor."""
READ = "storage->device"


def measure(scale: Scale) -> Measured:
    """Let a model live in a process of its own, then measure copies and waking in this one."""
    config = replace(CONFIG, layers=scale.layers)
    figures = list(_held(config, scale.output))
    samples: dict[str, list[float]] = {}
    with TemporaryDirectory(dir=scale.output) as folder:
        taken = _Model(config, Path(folder))
        samples |= taken.copies(scale.rounds)
        samples["wake"] = list(taken.waking(scale.rounds))
        for name in ("save", "load", "load and read", "overwrite"):
            rates = [copy / own for own, copy in zip(samples[name], samples["copy"], strict=True)]
            figures.append(
                Figure(name=f"{name}, rate / plain copy", value=median(rates), unit="", aim=">= 0.8", note=spread(rates))
            )
        note = spread(samples["wake"])
        figures.append(
            Figure(name="waking, seconds / of its copies", value=median(samples["wake"]), unit="", aim="<= 1", note=note)
        )
    return tuple(figures), samples


def _held(config: GPTConfig, output: Path) -> Iterator[Figure]:
    """Run the example, and yield what it held over the budgets, by step."""
    file = output / "larger.json"
    sizes = {"layers": config.layers, "memory-budget": MEMORY_BYTES >> 20, "host-budget": HOST_BYTES >> 20}
    given = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "examples.train_larger", *given, "--storage", str(output), "--figures", str(file)]
    log = output / "larger.log"
    with log.open("w") as written:
        if subprocess.run(command, cwd=ROOT, stdout=written, stderr=written, check=False).returncode:
            raise WorkerFailed(log)
    life = json.loads(file.read_text())
    for step in life["steps"]:
        over = max(step["held_bytes"] - life["before_bytes"] - MEMORY_BYTES - HOST_BYTES, 0) / (1 << 20)
        note = f"{step['seconds']:.2f} s"
        yield Figure(name=f"held over the budgets: {step['name']}", value=over, unit="MiB", aim=f"<= {OVERHEAD_MIB}", note=note)


class _Model:
    """A model that trains by a plan, with files in `folder`."""

    def __init__(self, config: GPTConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._options: dict[str, Any] = {"memory_budget": MEMORY_BYTES, "storage": folder, "codegen": "eager"}
        self._batches = batches(standard_library_text(1 << 20), batch=2, context=config.context, seed=1)
        with teraio.under_budget(**self._options):
            self._model = GPT(config)
        self._file = folder / "model.safetensors"
        save_file(self._model.state_dict(), self._file)

    def copies(self, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of saving, of loading, alone and with each weight read, of overwriting weights, and of a plain copy.

        They take turns. Each begins with nothing in the system's cache, and ends when all is on the drive.
        """
        moves = {
            "save": self._save,
            "load": lambda: self._load(read=False),
            "load and read": lambda: self._load(read=True),
            "overwrite": self._overwrite,
            "copy": self._copy,
        }
        return _turns(moves, rounds, before=self._empty_caches)

    def _save(self) -> None:
        torch.save(self._model.state_dict(), self._folder / "model.pt")
        _to_drive(self._folder / "model.pt")

    def _load(self, *, read: bool) -> None:
        with torch.device("meta"):
            model = GPT(self._config)
        with teraio.under_budget(**self._options) as tiers:
            tiers.load(model, self._file)
            for parameter in model.parameters() if read else ():
                parameter.detach()[..., :1].sum()  # the whole block comes in

    def _overwrite(self) -> None:
        with teraio.under_budget(**self._options) as tiers:
            tiers.load(self._model, self._file)
        teraio.park()

    def _copy(self) -> None:
        shutil.copyfile(self._file, self._folder / "copy")
        _to_drive(self._folder / "copy")

    def _empty_caches(self) -> None:
        teraio.park()
        _to_drive(self._file)
        for each in Path("/proc/self/fd").iterdir():
            if os.path.realpath(each).startswith(str(self._folder.resolve())):
                os.posix_fadvise(int(each.name), 0, 0, os.POSIX_FADV_DONTNEED)

    def waking(self, rounds: int) -> Iterator[float]:
        """Yield for each round how much longer the step after parking waits for copies than others, over the time of its copies.

        That time is what left the device, at the rate at which the other steps read.
        """
        step = _training(self._model, self._options, self._batches)
        for _ in range(8):
            step()
        for _ in range(rounds):
            before = teraio.status()[0]
            others = [step() for _ in range(4)]
            after = teraio.status()[0]
            rate = (after.moved_bytes[READ] - before.moved_bytes[READ]) / (after.busy_seconds[READ] - before.busy_seconds[READ])
            left_bytes = teraio.park().left_bytes
            yield (step() - median(others)) / (left_bytes / rate)


def _training(model: torch.nn.Module, options: dict[str, Any], taken: Iterator[Any]) -> Callable[[], float]:
    """Compile the model and return a function that takes a step and returns the seconds that it waited for copies."""
    teraio.compile(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> float:
        before = waited_seconds()
        model(*next(taken)).backward()
        optimizer.step()
        optimizer.zero_grad()
        waited = waited_seconds() - before
        teraio.wait_for_plan()
        return waited

    return step


def _turns(moves: dict[str, Callable[[], None]], rounds: int, *, before: Callable[[], None]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in moves}
    for _ in range(rounds):
        for name, move in moves.items():
            before()
            began = time.perf_counter()
            move()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def _to_drive(path: Path) -> None:
    """Wait until a file is on its drive, and take it out of the system's cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
