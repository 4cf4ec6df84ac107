"""Checkpoints of what waits in lower tiers: memory grows by one tensor at most, and a broken save leaves the last one whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from examples.memory import resident_bytes, watched

from ..training import MIB, Training, begin, pagers, unequal

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
    training.run(rows(2))
    (pager,) = pagers()
    assert pager.closing.away_bytes() >= 96 * MIB
    with growing_by_one_tensor():
        save(training, folder)
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    expected = {by_torch_save: 192, by_distributed_checkpoint: 200, by_safetensors: 96}  # 200: it writes one for each name
    assert written // MIB == expected[save], "tied weights are written once"


def test_a_checkpoint_is_loaded_where_its_tensors_wait(tmp_path: Path) -> None:
    training = training_in(tmp_path, "on drives")
    training.run(rows(2))
    torch.save(training.module.state_dict(), tmp_path / "model.pt")
    expected = {name: value.clone() for name, value in training.module.state_dict().items()}
    training.run(rows(1))
    loaded = torch.load(tmp_path / "model.pt", mmap=True)
    with growing_by_one_tensor():
        training.module.load_state_dict(loaded)
    training.model(next(rows(1)))  # what was loaded is what stages read
    assert not unequal(list(training.module.state_dict().values()), list(expected.values()))
