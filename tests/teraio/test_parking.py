"""`teraio.park`: between two regions the device is empty, and training goes on with the same bits and by the same plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import teraio
from runtime.cpu import CpuMemory
from runtime.paging import State
from runtime.paging.stage_memory import HELD, NO_ROOM, TOO_SMALL

from ..training import MIB, Training, pagers, random_rows, unequal, weights_of_1_mib
from .virtual import BLOCK_BYTES, IN, STAGES, VirtualTraining

pytestmark = pytest.mark.usefixtures("finely_cut", "quick_links")

BUDGETS = {"fits": 200 * MIB, "on drives": 5 * MIB, "in both tiers": 5 * MIB}


def training_in(folder: Path, how: str) -> Training:
    """Six weights of 1 MiB with momentum."""
    host = {"host_budget": 3 * MIB} if how == "in both tiers" else {}
    return weights_of_1_mib(
        {"memory_budget": BUDGETS[how], "storage": folder, "solver_time_limit": 3, **host}, count=6, momentum=0.9
    )


def park() -> teraio.Parked:
    """Park, and check that nothing is left but small tensors."""
    parked = teraio.park()
    (pager,) = pagers()
    here = [block for block in pager.blocks if block.state is not State.OFFLOADED]
    assert all(block.size_bytes < MIB for block in here)
    assert parked.staying_bytes.get(TOO_SMALL, 0) == sum(block.size_bytes for block in here) == pager.account.used_bytes
    assert not {HELD, NO_ROOM} & parked.staying_bytes.keys() and CpuMemory().kept_bytes == 0
    return parked


def parking_step(training: Training, batch: Tensor, index: int) -> None:
    """Like `mean_square_step`, but parked at each place between regions in some step, and in the last one at all of them."""
    places = {2: "before", 3: "forward", 4: "backward", 7: "before", 8: "forward", 9: "backward"}

    def maybe(place: str) -> None:
        if index > 9 or places.get(index) == place:
            park()

    maybe("before")
    loss = training.model(batch).square().mean()
    maybe("forward")
    loss.backward()
    maybe("backward")
    training.update()


def trained(folder: Path, how: str, step: Callable[[Training, Tensor, int], None]) -> tuple[str, list[Tensor]]:
    """The phase at the end, and the weights."""
    training = training_in(folder, how)
    torch.manual_seed(1)
    training.run(random_rows(12), functools.partial(step, training), planned=True)
    return training.progress[-1][0].phase, list(training.finish().values())


@pytest.fixture(scope="module")
def never_parked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, ...]:
    """The weights of a training without plan and parking: nobody changes them."""
    phase, weights = trained(tmp_path_factory.mktemp("never parked"), "fits", Training.mean_square_step)
    assert phase == "fits"
    return tuple(weights)


@pytest.mark.parametrize("how", BUDGETS)
def test_bits_are_those_of_a_training_that_never_parks(tmp_path: Path, how: str, never_parked: tuple[Tensor, ...]) -> None:
    phase, found = trained(tmp_path, how, parking_step)
    assert phase == ("fits" if how == "fits" else "planned")
    assert not unequal(found, never_parked)


def test_training_goes_on_by_the_same_plan_also_after_evaluations(tmp_path: Path) -> None:
    training = training_in(tmp_path, "on drives")
    training.run(random_rows(8), planned=True)
    before = training.progress[-1][0]
    assert before.phase == "planned"
    for passes in range(3):
        with park() as parked:
            assert parked.left_bytes > 0
        with torch.no_grad():
            for _ in range(passes):
                training.model(torch.ones(16, 512))
        training.run(random_rows(2))
    after = training.progress[-1][0]
    assert (after.phase, after.replans) == ("planned", before.replans)
    assert after.predicted_iteration_seconds == before.predicted_iteration_seconds
    assert after.device_peak_bytes <= BUDGETS["on drives"]


def test_what_user_code_holds_stays_and_is_named(tmp_path: Path) -> None:
    training = training_in(tmp_path, "on drives")
    training.run(random_rows(1))
    own = torch.zeros(3 * MIB, dtype=torch.uint8)
    with teraio.on_device([training.module[0].weight]):  # type: ignore[index]
        parked = teraio.park()
    assert parked.staying_bytes[HELD] == MIB
    assert sum(parked.staying_bytes.values()) >= MIB + own.nbytes
    assert "your code" in " ".join(parked.staying_bytes)


def test_without_a_lower_tier_everything_stays() -> None:
    training = weights_of_1_mib({}, count=8)
    training.run(random_rows(1))
    parked = teraio.park()
    assert parked.left_bytes == 0 and parked.staying_bytes[NO_ROOM] >= 8 * MIB


# -- in virtual time


def virtual(monkeypatch: pytest.MonkeyPatch) -> tuple[VirtualTraining, float]:
    """All but two weights stay on the device under a plan. Returns the seconds of an iteration, too."""
    training = VirtualTraining(monkeypatch)
    training.iteration()
    return training, training.iteration().seconds


def test_waking_takes_no_longer_than_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    training, usual = virtual(monkeypatch)
    training.observer.recorder.parked()
    left = training.pager.parking.park()
    assert left == STAGES * BLOCK_BYTES and training.pager.account.used_bytes == 0
    training.mover.pass_seconds(1000.0)
    woken = training.iteration()
    assert woken.seconds <= usual + STAGES * training.mover.seconds[IN]
    assert woken.seconds < usual + 2 * training.mover.seconds[IN], "copies run beside stages, in the order of their uses"
    assert woken.woken and woken.stages[0].seconds == 0.0, "the time away counts nowhere"
    assert not training.iteration().woken
