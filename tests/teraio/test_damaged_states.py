"""Bytes change on the drive while all kinds of blocks move: with checksums none of them is ever used."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio
from runtime.paging import Block, State

from ..thoroughness import by_profile
from ..training import Training, begin, blocks, random_rows, unequal

PAGE = 4096
STEPS = 6
SEEDS = range(by_profile(ci=1, long=10))


def start(options: Mapping[str, Any]) -> Training:
    return begin(
        lambda: nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)]),
        lambda module: [torch.optim.AdamW(module.parameters(), lr=0.01)],
        options,
    )


def all_values(training: Training) -> list[Tensor]:
    (optimizer,) = training.optimizers
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [value.detach().clone() for value in (*training.module.parameters(), *states)]


def train(training: Training, moment: Callable[[int, str], None] = lambda step, when: None) -> list[Tensor]:
    """Return parameters and states at the end. moment: called after each forward pass and each update, while blocks are away."""

    def step(batch: Tensor, index: int) -> None:
        loss = training.model(batch).square().mean()
        moment(index, "after forward")
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        moment(index, "after step")

    training.run(random_rows(STEPS), step)
    teraio.reset()
    return all_values(training)


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return train(start({}))


# -- damages: each changes the bytes of a block on the drive; `before` is the whole file one step ago

Content = bytearray


def flip_a_bit(block: Content, before: Content, draw: random.Random) -> None:
    block[draw.randrange(len(block))] ^= 1 << draw.randrange(8)


def tear_the_last_write(block: Content, before: Content, draw: random.Random) -> None:
    place = draw.randrange(1, len(block) // PAGE) * PAGE
    block[place:] = before[place:]


def lose_the_last_write(block: Content, before: Content, draw: random.Random) -> None:
    block[:] = before


def overwrite_pages(block: Content, before: Content, draw: random.Random) -> None:
    place = draw.randrange(len(block) // PAGE) * PAGE
    block[place : place + 2 * PAGE] = draw.randbytes(len(block[place : place + 2 * PAGE]))


Damage = Callable[[Content, Content, random.Random], None]
DAMAGES: list[Damage] = [flip_a_bit, tear_the_last_write, lose_the_last_write, overwrite_pages]


def damage_a_block(damage: Damage, file: Path, before: bytes, draw: random.Random) -> Block | None:
    """Damage a block that waits on the drive and that user code can reach. None: the damage would change no byte of any."""
    content = file.read_bytes()
    away = [b for b in blocks() if b.user_visible and b.state is State.OFFLOADED]
    for block in draw.sample(away, len(away)):
        assert block.slot is not None
        (extent,) = block.slot.extents
        begin, end = extent.offset_bytes, extent.offset_bytes + extent.length_bytes
        found, then = bytearray(content[begin:end]), bytearray(before[begin:end].ljust(end - begin, b"\0"))
        damage(found, then, draw)
        if found != content[begin:end]:
            with open(file, "r+b") as out:
                out.seek(begin)
                out.write(found)
            return block
    return None


@pytest.mark.parametrize("option", ["checksums", "debug"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damaged_byte_is_used(damage: Damage, seed: int, option: str, expected: list[Tensor], tmp_path: Path) -> None:
    draw = random.Random(seed)
    when = draw.randrange(2, STEPS - 1), draw.choice(["after forward", "after step"])
    training = start({"memory_budget": "14MiB", "storage": tmp_path, "unlink_spill_files": False, option: True})
    damaged: list[Block] = []
    before: list[bytes] = []

    def moment(*now: object) -> None:
        (file,) = tmp_path.glob("*/*.spill")
        if now == when:
            block = damage_a_block(damage, file, before[-2], draw)
            damaged.extend([block] if block is not None else [])
        elif not damaged:
            before.append(file.read_bytes())

    try:
        found = train(training, moment)
    except teraio.ChecksumError as error:
        assert damaged and error.block == damaged[0].name
        held = damaged[0].storage()
        assert held is not None
        with pytest.raises(RuntimeError, match="was damaged on its way"):
            bytes(held)
        with contextlib.suppress(teraio.StorageError):
            teraio.reset()
    else:
        assert damaged and not unequal(found, expected), f"{damaged} was damaged and used"
