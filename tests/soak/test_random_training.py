"""A long training: budgets change and everything that loops do happens at random. Its unmanaged twin has the same bits."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import teraio

from ..thoroughness import by_profile
from ..training import MIB, unequal
from .twins import Holdings, Model, Twin

ITERATIONS = by_profile(ci=60, long=2000)
ACTIONS = {"iterate": 100, "evaluate": 8, "save": 4, "resume": 2, "budget": 4, "by hand": 4, "optimizer": 1, "reset": 1}
"""By name, how often each is done."""

pytestmark = pytest.mark.usefixtures("fine_and_quick", "eager_dropout")


class Soak:
    """The pair of twins, and what was done to them so far."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.folder = folder
        torch.manual_seed(seed)
        module = Model()
        self.plain = Twin(module=copy.deepcopy(module))
        self.managed = Twin(module=module)
        self.usual_passes = 1
        self.done: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()
        self.moved_bytes = 0

    def both(self, action: Callable[[Twin], list[Tensor]], name: str) -> None:
        """Do it to both twins, and compare what it returns."""
        found, expected = action(self.managed), action(self.plain)
        assert not unequal(found, expected), f"{name}, after {dict(self.done)}"
        self.done[name] += 1

    def act(self) -> None:
        """Do one thing that is drawn."""
        (name,) = self.chance.choices(list(ACTIONS), list(ACTIONS.values()))
        seed = self.chance.randrange(1 << 30)
        if name == "iterate":
            self.iterate(seed)
        elif name == "evaluate":
            passes = self.chance.randint(1, 12)
            self.both(lambda twin: twin.evaluate(seed, passes=passes), name)
        elif name == "save":
            self.both(Twin.save, name)
        elif name == "resume":
            self.both(Twin.resume, name)
        elif name == "by hand":
            self.both(lambda twin: twin.update_by_hand(seed), name)
        elif name == "optimizer":
            kind, settings = self.chance.choice(OPTIMIZERS)
            self.both(lambda twin: twin.new_optimizer(kind, **settings), name)
            self.both(Twin.save, "save")
        else:
            self.change_budget(reset=name == "reset")

    def iterate(self, seed: int) -> None:
        choice = self.chance.random()
        settings: dict[str, Any] = dict(
            passes=self.chance.randint(1, 3) if choice < 0.1 else self.usual_passes, closure=choice < 0.05, clip=choice > 0.95
        )
        self.both(lambda twin: twin.iterate(seed, **settings), "iterate")
        self.done["closure"] += settings["closure"]
        self.done["accumulate"] += settings["passes"] > 1
        for status in teraio.status():
            self.phases[status.phase] += 1

    def change_budget(self, *, reset: bool) -> None:
        """Compile again with options that are drawn: in place, or as another object. reset: forget all runs first."""
        self.count_moved()
        if reset:
            teraio.reset()
            torch._dynamo.reset()
        options: dict[str, Any] = {"memory_budget": self.chance.randint(14, 40) * MIB, "codegen": "eager"}
        options["host_updates"] = False  # they may round otherwise
        tier = self.chance.choice(("storage", "storage", "host", "both"))
        if tier != "host":
            options["storage"] = str(self.folder)
        if tier != "storage":
            options["host_budget"] = self.chance.randint(24, 64) * MIB
        if self.chance.random() < 0.5 or reset:
            self.managed.model = teraio.compile(self.managed.module, **options)
        else:
            torch._dynamo.reset()
            self.managed.model = torch.compile(self.managed.module, backend="teraio", options=options)
        self.usual_passes = self.chance.choice((1, 1, 2))
        self.done["reset" if reset else "budget"] += 1

    def count_moved(self) -> None:
        self.moved_bytes += sum(sum(status.moved_bytes.values()) for status in teraio.status())


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, dict(lr=1e-3)),
    (torch.optim.Adam, dict(lr=1e-3, amsgrad=True)),
    (torch.optim.SGD, dict(lr=0.05, momentum=0.9)),
]


def test_random_training(tmp_path: Path, report: Callable[..., None]) -> None:
    soak = Soak(tmp_path, seed=by_profile(ci=1, long=2))
    soak.both(Twin.save, "save")
    soak.change_budget(reset=True)
    after: list[Holdings] = []
    while soak.done["iterate"] < ITERATIONS:
        soak.act()
        if soak.done["iterate"] == ITERATIONS // 4 * (len(after) + 1):
            after.append(Holdings.now(tmp_path))
    soak.both(Twin.save, "save")
    soak.count_moved()
    teraio.reset()
    soak.both(Twin.save, "save")
    after.append(Holdings.now(tmp_path))

    report(done=dict(soak.done), phases=dict(soak.phases), moved=f"{soak.moved_bytes / MIB:,.0f} MiB")
    report(**{f"after_quarter_{number}": holdings for number, holdings in enumerate(after[:-1], 1)}, at_the_end=after[-1])
    assert soak.phases["planned"] > 0 and soak.moved_bytes > 0
    assert after[-1].disk_bytes == 0 == after[-1].children
