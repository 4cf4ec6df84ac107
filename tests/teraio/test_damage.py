"""Bytes change on the way: with the options checksums or debug none of them is ever used, and otherwise nothing changes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio
from planner import ChecksumError
from runtime.paging import Block, State
from runtime.storage import Chunk, HostStore, PosixStore, Slot
from teraio.machine import machine

from ..thoroughness import by_profile
from ..training import Training, begin, blocks, random_rows, spill_files, unequal, weights_of_1_mib

# -- activations, which only teraio knows of


def train_activations(
    options: Mapping[str, Any], *, tier: str | None = None, meanwhile: Callable[[], None] = lambda: None
) -> list[float]:
    """Return the losses. tier: where blocks must come from. meanwhile: called between forward and backward.

    Activations of 4 MiB each are between small weights.
    """
    training = begin(
        lambda: nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.Tanh()))),
        lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)],
        {"tiles": "off", **options},
    )
    losses: list[float] = []

    def step(batch: Tensor, index: int) -> None:
        loss = training.model(batch).square().mean()
        meanwhile()
        loss.backward()
        training.update()
        losses.append(loss.item())

    training.run(itertools.repeat(torch.randn(16384, 64), 2), step)
    training.finish()
    if tier is not None:
        (status,) = training.progress[-1]
        assert status.moved_bytes[f"{tier}->device"] > 8 << 20
    return losses


@pytest.fixture(scope="module")
def undamaged() -> list[float]:
    return train_activations({})


def flip_a_bit_of_every_page(folder: Path) -> None:
    for path in spill_files(folder):
        content = bytearray(path.read_bytes())
        for place in range(3, len(content), 4096):  # signs of numbers
            content[place] ^= 0x80
        with open(path, "r+b") as file:
            file.write(content)


def test_a_damaged_spill_file_stops_training_with_checksums_and_nobody_hears_of_it_without(
    undamaged: list[float], tmp_path: Path
) -> None:
    options = {"memory_budget": "30MiB", "storage": tmp_path}
    with pytest.raises(ChecksumError, match="came back different") as raised:
        train_activations({**options, "checksums": True}, meanwhile=lambda: flip_a_bit_of_every_page(tmp_path))
    assert raised.value.path.startswith(str(tmp_path))
    found = train_activations(options, tier="storage", meanwhile=lambda: flip_a_bit_of_every_page(tmp_path))
    assert found != undamaged


def test_a_warning_says_what_cannot_be_checked(
    undamaged: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "system_tells", lambda: False)
    options = {"memory_budget": "30MiB", "storage": tmp_path, "checksums": True}
    assert train_activations(options, tier="storage") == undamaged
    assert "no byte of parameters, gradients and optimizer states is checked" in caplog.text


@pytest.mark.parametrize(("tier", "store"), [("host", HostStore), ("storage", PosixStore)])
def test_in_debug_mode_a_damaged_byte_stops_training_and_without_damage_nothing_changes(
    tier: str, store: Any, undamaged: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of each piece of a block; measurements get through, else the tier would not be used at all."""
    options = {"memory_budget": "36MiB", "debug": True} | ({"host_budget": "64MiB"} if tier == "host" else {"storage": tmp_path})
    assert train_activations(options, tier=tier) == undamaged
    read_chunk = store.read_chunk

    def read_and_damage(self: Any, slot: Slot, piece: Chunk, address: int) -> None:
        read_chunk(self, slot, piece, address)
        if "measurement" not in slot.name:
            ctypes.c_ubyte.from_address(address + piece.slot_offset_bytes).value ^= 1

    monkeypatch.setattr(store, "read_chunk", read_and_damage)
    with pytest.raises(ChecksumError, match=rf"block '.+' in .+ \({tier} tier\) from offset \d+ on came back different"):
        train_activations(options)


# -- parameters and states on the drive

PAGE = 4096
STEPS = 6


start_adamw = functools.partial(weights_of_1_mib, count=8, kind=torch.optim.AdamW, lr=0.01)


def train(training: Training, moment: Callable[[int, str], None] = lambda step, when: None) -> list[Tensor]:
    """Return parameters and states at the end. moment: called after each forward pass and each update, while blocks are away."""

    def step(batch: Tensor, index: int) -> None:
        loss = training.model(batch).square().mean()
        moment(index, "after forward")
        loss.backward()
        training.update()
        moment(index, "after step")

    training.run(random_rows(STEPS), step)
    teraio.reset()
    (optimizer,) = training.optimizers
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [value.detach().clone() for value in (*training.module.parameters(), *states)]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return train(start_adamw({}))


# damages: each changes the bytes of a block; `before` is the whole file one step ago

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


OPTIONS = ("checksums", "debug")
CASES = [*zip(DAMAGES, itertools.cycle(OPTIONS), itertools.repeat(0), strict=False)]


@pytest.mark.parametrize(
    ("damage", "option", "seed"), by_profile(ci=CASES, long=[*itertools.product(DAMAGES, OPTIONS, range(10))])
)
def test_no_damaged_byte_is_used(damage: Damage, seed: int, option: str, expected: list[Tensor], tmp_path: Path) -> None:
    draw = random.Random(seed)
    when = draw.randrange(2, STEPS - 1), draw.choice(["after forward", "after step"])
    training = start_adamw({"memory_budget": "14MiB", "storage": tmp_path, option: True})
    damaged: list[Block] = []
    before: list[bytes] = []

    def moment(*now: object) -> None:
        (file,) = spill_files(tmp_path)
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
