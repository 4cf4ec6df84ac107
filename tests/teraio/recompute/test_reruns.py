"""Forward stages run again by random plans: the same bits as without a budget, within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...thoroughness import every_other
from ...training import Training
from .training import Program, follow, profiled, program

ROWS, WIDTH, HIDDEN = 128, 64, 4096


class Layer(nn.Module):
    """Residual layer with two weights of 1 MiB; its activations take 2 MiB each."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), drop

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.dropout(torch.tanh(self.up(x)), self.drop))


class Model(nn.Module):
    """Token features through layers and a norm: indices [rows] to logits [rows, 4096]."""

    def __init__(self, layers: int = 3, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(HIDDEN, WIDTH)
        self.layers = nn.Sequential(*[Layer(drop) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(indices))))


def batch(number: int, rows: int = ROWS) -> Tensor:
    return torch.randint(0, HIDDEN, (rows,), generator=torch.Generator().manual_seed(number))


def loss_of(training: Training, indices: Tensor) -> Tensor:
    loss: Tensor = functional.cross_entropy(training.model(indices), indices.flip(0))
    return loss


def one_pass(training: Training, number: int, values: list[Tensor]) -> None:
    loss = loss_of(training, batch(number))
    loss.backward()
    values.append(loss.detach().clone())


def accumulating(training: Training, number: int, values: list[Tensor]) -> None:
    """Two forward passes, then their backward passes the other way round."""
    losses = [loss_of(training, batch(2 * number + turn)) for turn in range(2)]
    for loss in reversed(losses):
        loss.backward()
    values += [loss.detach().clone() for loss in losses]


def twice_through_one_graph(training: Training, number: int, values: list[Tensor]) -> None:
    loss = loss_of(training, batch(number))
    loss.backward(retain_graph=True)
    loss.backward()
    values.append(loss.detach().clone())


def in_bfloat16(training: Training, number: int, values: list[Tensor]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(training, batch(number, 4 * ROWS))
    loss.backward()
    values.append(loss.detach().clone())


def changing_lengths(training: Training, number: int, values: list[Tensor]) -> None:
    for rows in (ROWS, ROWS + 24):
        loss = loss_of(training, batch(number, rows))
        loss.backward()
        values.append(loss.detach().clone())


class Tied(nn.Module):
    """The embedding's weights are those of the head; one layer is used twice, and a view of its result is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.last = nn.Embedding(HIDDEN, WIDTH), Layer(), Layer()
        self.head = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.layer(self.layer(self.embed(indices)))
        wide = torch.tanh(self.last.up(x)).view(-1, 2, HIDDEN // 2).transpose(1, 2)
        return self.head(x + torch.sigmoid(wide).transpose(1, 2).reshape(-1, HIDDEN)[:, :WIDTH])


class Pictures(nn.Module):
    """Convolutions with batch norm: indices [rows] to logits. Activations take most of its memory, so that they have to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(HIDDEN // 64, 3 * 256)
        self.first, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.third, self.norm3 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.last, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, HIDDEN)

    def forward(self, indices: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(self.embed(indices // 64).view(-1, 3, 16, 16))))
        x = torch.relu(self.norm3(self.third(torch.tanh(self.norm2(self.second(x))))))
        return self.head(torch.relu(self.last(x)).mean(dim=(2, 3)))


PLAIN = program(Model, one_pass)
PROGRAMS: dict[str, Program] = {
    "accumulating": program(Model, accumulating),
    "changing lengths": program(Model, changing_lengths, dynamic=True),
    "tied weights and views": program(Tied, one_pass),
    "autocast": program(Model, in_bfloat16),
    "batch norm": program(Pictures, one_pass),
    "retain_graph": program(Model, twice_through_one_graph),
}


@pytest.mark.parametrize(("tier", "seed", "share"), every_other(("storage", 1, 0.6), ("storage", 0, 1.0), ("host", 2, 1.0)))
def test_random_plans(tmp_path: Path, tier: str, seed: int, share: float) -> None:
    known = profiled(PLAIN, tmp_path, tier=tier)
    assert len(known.trace.recompute) >= 3
    follow(PLAIN, known, tmp_path, seed, tier=tier, share=share, debug=seed == 1)


@pytest.mark.parametrize("name", every_other(*PROGRAMS))
def test_programs(tmp_path: Path, name: str) -> None:
    known = profiled(PROGRAMS[name], tmp_path)
    follow(PROGRAMS[name], known, tmp_path, seed=3)


def test_dropout_of_eager_stages_is_not_run_again(tmp_path: Path) -> None:
    trace = profiled(program(lambda: Model(drop=0.2), one_pass), tmp_path).trace
    reasons = {entry.reason for entry in trace.not_recomputed}
    assert reasons == {"it draws random numbers (native_dropout)"}


def test_dropout_of_inductor(tmp_path: Path) -> None:
    """Its seeds are kept, so that the stages that drop run again too."""
    trained = program(lambda: Model(layers=2, drop=0.2), one_pass, {"codegen": "inductor"})
    known = profiled(trained, tmp_path)
    assert len(known.trace.recompute) >= 2
    follow(trained, known, tmp_path, seed=4)
