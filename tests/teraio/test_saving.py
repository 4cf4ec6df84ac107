"""Checkpoints of what waits in lower tiers: memory grows by one tensor at most, and a broken save leaves the last one whole."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from examples.memory import resident_bytes, watched

from ..training import MIB, Training, begin, mean_square_step, pagers, unequal, weights_of_1_mib

WEIGHT = 8 * MIB
NOISE = 4 * MIB
"""What a save takes beside tensors: names, a zip's directory, buffers of files."""
TIERS = {"on drives": {}, "in both tiers": {"host_budget": 64 * MIB}}


class Wide(nn.Module):
    """12 weights of 8 MiB; the last is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in [(1024, 2048), (2048, 1024)] * 6)
        self.tied = nn.Linear(1024, 2048, bias=False)
        self.tied.weight = self.layers[0].weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.tied(x)  # type: ignore[no-any-return]


def rows(steps: int) -> Iterator[Tensor]:
    return (torch.randn(4, 1024) for _ in range(steps))


def training_in(folder: Path, how: str) -> Training:
    """Two steps with momentum: 192 MiB of weights and states under a budget of 64 MiB."""
    return begin(
        Wide,
        lambda module: [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)],
        {"memory_budget": 64 * MIB, "storage": folder, **TIERS[how]},
    )


def anonymous() -> int:
    """Bytes of the resident set that no file stands behind."""
    return resident_bytes()["RssAnon"]


@contextmanager
def growing_by_one_tensor() -> Iterator[None]:
    """Main memory that is not a file's grows by one tensor at most within the block, at any time."""
    with watched(anonymous, every_seconds=0.0005) as held:
        yield
    assert held.highest - held.before <= WEIGHT + NOISE


def by_torch_save(training: Training, folder: Path) -> None:
    torch.save(training.module.state_dict(), folder / "model.pt")
    torch.save(training.optimizers[0].state_dict(), folder / "optimizer.pt")


def by_distributed_checkpoint(training: Training, folder: Path) -> None:
    states = training.optimizers[0].state_dict()["state"]
    dcp.save({"model": training.module.state_dict(), "states": states}, checkpoint_id=folder / "all", no_dist=True)


def by_safetensors(training: Training, folder: Path) -> None:
    from safetensors.torch import save_model

    save_model(training.module, str(folder / "model.safetensors"))


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own
@pytest.mark.parametrize(
    ("save", "how"),
    [(by_torch_save, "in both tiers"), (by_distributed_checkpoint, "on drives"), (by_safetensors, "in both tiers")],
)
def test_main_memory_grows_by_one_tensor_at_most(save: Callable[[Training, Path], None], how: str, tmp_path: Path) -> None:
    spill, folder = tmp_path / "spill", tmp_path / "saved"
    spill.mkdir()
    folder.mkdir()
    training = training_in(spill, how)
    training.run(rows(2), functools.partial(mean_square_step, training))
    (pager,) = pagers()
    assert pager.closing.away_bytes() >= 96 * MIB
    with growing_by_one_tensor():
        save(training, folder)
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    expected = {by_torch_save: 192, by_distributed_checkpoint: 200, by_safetensors: 96}  # 200: it writes one for each name
    assert written // MIB == expected[save], "tied weights are written once"


def test_a_checkpoint_is_loaded_where_its_tensors_wait(tmp_path: Path) -> None:
    training = training_in(tmp_path, "on drives")
    training.run(rows(2), functools.partial(mean_square_step, training))
    torch.save(training.module.state_dict(), tmp_path / "model.pt")
    expected = {name: value.clone() for name, value in training.module.state_dict().items()}
    training.run(rows(1), functools.partial(mean_square_step, training))
    loaded = torch.load(tmp_path / "model.pt", mmap=True)
    with growing_by_one_tensor():
        training.module.load_state_dict(loaded)
    training.model(next(rows(1)))  # what was loaded is what stages read
    assert not unequal(list(training.module.state_dict().values()), list(expected.values()))


# -- saves that break


def save_whole(state: Any, path: Path, opened: Callable[[Path], BinaryIO] = lambda path: path.open("wb")) -> None:
    """Write beside the last checkpoint, and take its place when all of it is on the drive."""
    beside = path.with_name(path.name + ".new")
    with opened(beside) as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


class Dying:
    """A file that kills the process when so many bytes were written."""

    def __init__(self, path: Path, after_bytes: int) -> None:
        self._file = path.open("wb")
        self._left = after_bytes

    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Dying:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def step_and_state(folder: Path) -> tuple[Training, Callable[[], dict[str, Any]]]:
    training = weights_of_1_mib({"memory_budget": 16 * MIB, "storage": folder}, momentum=0.9)
    return training, lambda: {"model": training.module.state_dict(), "optimizer": training.optimizers[0].state_dict()}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_while_saving_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    training, state = step_and_state(tmp_path)
    batches = itertools.cycle([torch.ones(16, 512)])
    training.run(itertools.islice(batches, 2), functools.partial(mean_square_step, training))
    path = tmp_path / "last.pt"
    save_whole(state(), path)
    expected = [weight.detach().clone() for weight in training.module.parameters()]
    training.run(itertools.islice(batches, 1), functools.partial(mean_square_step, training))
    child = os.fork()
    if child == 0:  # pragma: no cover
        save_whole(state(), path, lambda beside: Dying(beside, 20 * MIB))  # type: ignore[arg-type, return-value]
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert 0 < (tmp_path / "last.pt.new").stat().st_size < path.stat().st_size
    loaded = torch.load(path)
    assert not unequal(list(loaded["model"].values()), expected)


def test_training_goes_on_after_a_drive_was_full(tmp_path: Path) -> None:
    found = []
    for fails in (False, True):
        training, state = step_and_state(tmp_path)
        torch.manual_seed(1)
        for _ in range(3):
            training.run([torch.randn(16, 512)], functools.partial(mean_square_step, training))
            if fails:
                with pytest.raises(OSError, match="No space left on device"):
                    save_whole(state(), tmp_path / "last.pt", lambda beside: open("/dev/full", "wb", buffering=0))
                with pytest.raises(RuntimeError, match="inline_container"):  # PyTorch's own words for the same
                    torch.save(state(), "/dev/full")
        found.append(list(training.finish().values()))
    assert not unequal(*found)
    assert not (tmp_path / "last.pt").exists()
