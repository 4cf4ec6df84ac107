"""Faults in the middle of a training: it goes on with the right numbers, or ends with one error that says what happened.

`docs/faults.md` lists all faults and where each is tested.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import teraio
from runtime.storage import file_space

from ...training import MIB, Training, begin, compiled, forget, spill_files, unequal

pytestmark = pytest.mark.usefixtures("fine_and_quick")

LAYERS = 6
BUDGET = 7 * MIB


def make_model(layers: int = LAYERS) -> nn.Module:
    return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(layers)])


def make_optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)]


def start(options: Mapping[str, Any]) -> Training:
    return begin(make_model, make_optimizers, options)


def start_plain() -> Training:
    """The same without teraio; what runs under teraio goes on."""
    torch.manual_seed(0)
    model = make_model()
    return Training(module=model, model=model, optimizers=make_optimizers(model))


def batch(number: int) -> Tensor:
    return torch.randn(16, 512, generator=torch.Generator().manual_seed(number))


def train(training: Training, first: int, last: int) -> None:
    for number in range(first, last):
        training.mean_square_step(batch(number))


def values(training: Training) -> list[Tensor]:
    """Copies of parameters and momentum, as a checkpoint has them."""
    states = training.optimizers[0].state_dict()["state"]
    momentum = [states[number]["momentum_buffer"].clone() for number in states]
    return [*(value.clone() for value in training.module.state_dict().values()), *momentum]


def plain(steps: int) -> list[Tensor]:
    """What `steps` steps without teraio come to."""
    training = start_plain()
    train(training, 0, steps)
    return values(training)


def goes_on(training: Training, steps: int) -> None:
    """Check that `steps` steps have the right result, before and after the end of teraio's part, and that nothing is left."""
    found = values(training)
    threads = threading.active_count()
    training.progress.append(teraio.status())
    training.finish()
    assert threading.active_count() <= threads
    expected = plain(steps)
    assert not unequal(found, expected) and not unequal(values(training), expected)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"memory_budget": BUDGET, "storage": tmp_path}


# -- drives


def fail_on(monkeypatch: pytest.MonkeyPatch, call: str, folder: Path, code: int = errno.EIO) -> Callable[[], None]:
    """Make a system call fail for the files below a folder from now on. Returns what ends that."""
    real = getattr(os, call)

    def failing(file: int | str | os.PathLike[str], *arguments: Any, **named: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        if path.startswith(str(folder)):
            raise OSError(code, os.strerror(code), path)
        return real(file, *arguments, **named)

    monkeypatch.setattr(os, call, failing)
    return lambda: monkeypatch.setattr(os, call, real)


def test_a_drive_that_is_full_before_training(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_space.SpillFile, "available_bytes", property(lambda file: 2 * MIB))
    training = begin(lambda: make_model(2 * LAYERS), make_optimizers, options)  # weights alone need twice the room
    with pytest.raises(teraio.StorageFullError, match="has 2,097,152 bytes free; free some"):
        train(training, 0, 1)
    assert not list(tmp_path.iterdir())


def test_a_drive_that_fills_up_while_training(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = start(options)
    train(training, 0, 1)
    reserved = sum(file.stat().st_size for file in spill_files(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", _no_space)
    train(training, 1, 4)
    assert sum(file.stat().st_size for file in spill_files(tmp_path)) == reserved
    goes_on(training, 4)


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_one_of_two_drives_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Nothing is lost: what could not be read is still in its file."""
    folders = [tmp_path / "good", tmp_path / "bad"]
    for folder in folders:
        folder.mkdir()
    training = start({"memory_budget": BUDGET, "storage": folders})
    train(training, 0, 2)
    works_again = fail_on(monkeypatch, call, folders[1])
    with pytest.raises(teraio.StorageIOError, match="Input/output error") as raised:
        train(training, 2, 3)
    assert str(folders[1]) in str(raised.value)
    works_again()
    checkpoint = values(training)
    training.optimizers[0].zero_grad()
    train(training, 3, 5)
    last = values(training)
    training.progress.append(teraio.status())
    training.finish()
    assert not any(list(folder.iterdir()) for folder in folders)
    assert not unequal(last, from_checkpoint(checkpoint, 3, 5))


def from_checkpoint(checkpoint: list[Tensor], first: int, last: int) -> list[Tensor]:
    """Train on without teraio."""
    training = start_plain()
    with torch.no_grad():
        for parameter, value, momentum in zip(training.module.parameters(), checkpoint, checkpoint[LAYERS:], strict=False):
            parameter.copy_(value)
            training.optimizers[0].state[parameter]["momentum_buffer"] = momentum.clone()
    train(training, first, last)
    return values(training)


def test_a_drive_that_stays_broken_loses_no_checkpoint(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = start(options)
    train(training, 0, 2)
    before = values(training)
    fail_on(monkeypatch, "preadv", tmp_path)
    with pytest.raises(teraio.StorageIOError):
        training.model(batch(2))
    assert not unequal(values(training), before)
    with pytest.raises(teraio.StorageIOError):
        teraio.reset()
    assert not unequal(values(training), before)
    assert not list(tmp_path.iterdir())
    teraio.reset()


WRITES = ("pwritev", "posix_fallocate", "ftruncate")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EDQUOT])
def test_a_directory_that_takes_no_more_writes(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """It turns read-only, as after an error of the file system; or a quota is used up where each write takes new room."""
    training = start(options)
    train(training, 0, 2)
    refused = WRITES if code == errno.EROFS else WRITES[:2]
    work_again = [fail_on(monkeypatch, call, tmp_path, code) for call in refused]
    with pytest.raises(teraio.StorageIOError, match=f"cannot write block .*{os.strerror(code)}") as raised:
        train(training, 2, 3)
    assert str(tmp_path) in str(raised.value)
    checkpoint = values(training)
    teraio.reset()
    assert not unequal(values(training), checkpoint)
    assert not list(tmp_path.iterdir())
    for work in work_again:
        work()
    training.optimizers[0].zero_grad()
    training.model = compiled(training.module, options)
    train(training, 3, 5)
    assert not unequal(values(training), from_checkpoint(checkpoint, 3, 5))


def test_a_directory_that_is_a_link_and_one_that_vanishes(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    for vanishes in (False, True):
        training = start({**options, "storage": tmp_path / "link"})
        train(training, 0, 2)
        assert spill_files(tmp_path / "drive")
        if vanishes:
            shutil.rmtree(tmp_path / "drive")
        train(training, 2, 4)
        goes_on(training, 4)
        assert vanishes or not list((tmp_path / "drive").iterdir()) and (tmp_path / "link").is_symlink()


# -- the user's code; see also loops.py


class Fault(Exception):
    """Raised by the tests; nothing else raises it."""


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_step_hook_that_raises(options: dict[str, Any], when: str) -> None:
    """In a loop that catches it, and goes on."""

    def run(training: Training) -> None:
        def hook(*_: object) -> None:
            raise Fault

        for number in range(4):
            optimizer = training.optimizers[0]
            handle = getattr(optimizer, f"register_step_{when}_hook")(hook) if number == 2 else None
            with pytest.raises(Fault) if handle is not None else contextlib.nullcontext():
                training.mean_square_step(batch(number))
            if handle is not None:
                handle.remove()
                optimizer.zero_grad()

    run(training := start(options))
    run(expected := start_plain())
    found = values(training)
    training.finish()
    assert not unequal(found, values(expected)) and not unequal(values(training), values(expected))


# -- plans


def test_a_plan_for_another_training(options: dict[str, Any], tmp_path: Path) -> None:
    forget()
    path = tmp_path / "other.plan.json"
    other = begin(lambda: make_model(4), make_optimizers, {**options, "memory_budget": 6 * MIB, "plan_out": path})
    train(other, 0, 8)
    other.finish()
    training = start({**options, "plan": path})
    with pytest.raises(teraio.PlanError) as raised:
        train(training, 0, 8)
    assert str(path) in str(raised.value)
    train(training, 8, 10)


# -- processes, threads and runs


def test_training_in_a_thread(options: dict[str, Any]) -> None:
    training = start(options)
    thread = threading.Thread(target=train, args=[training, 0, 8])
    thread.start()
    thread.join()
    assert teraio.status()[0].phase == "planned"
    goes_on(training, 8)


def test_forked_children(options: dict[str, Any], tmp_path: Path) -> None:
    """Workers of a data loader, while blocks are away; and one that trains, which is told that it cannot."""
    training = start(options)
    train(training, 0, 2)
    data = TensorDataset(torch.stack([batch(number) for number in range(2, 6)]))
    for (rows,) in DataLoader(data, batch_size=None, num_workers=2):
        assert spill_files(tmp_path)
        training.mean_square_step(rows)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            train(training, 6, 7)
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        assert "cannot move in a forked child" in told.read()
    os.waitpid(child, 0)
    train(training, 6, 8)
    goes_on(training, 8)
