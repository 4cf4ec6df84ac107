"""Ctrl-C and errors at every line of teraio's own code: then training goes on in the same process, with the right numbers."""

from __future__ import annotations

import faulthandler
import linecache
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio
from runtime.paging import Pager, State
from teraio.optimizer.subgroup_steps import GradientVersions

from ...line_tracing import ROOT, Place, can_run_out_of_memory, places_in, tracing
from ...thoroughness import by_profile, every_other
from ...training import MIB, Training, begin, forget, pagers, require, unequal

pytestmark = pytest.mark.usefixtures("fine_and_quick", "few_slices")
WATCHED = (
    "runtime/",
    "teraio/optimizer/",
    "teraio/profiling/",
    "teraio/training_run.py",
    "teraio/phases.py",
    "teraio/registry.py",
)
"""The files whose lines are interrupted."""
HANG_SECONDS = 120
"""After so long the process writes the stacks of all threads and ends."""


def acting_at(
    place: Place, run: Callable[[], None], act: Callable[[], None], watched: Sequence[str] = WATCHED, **of: Any
) -> None:
    """Run `run()`; when it gets to `place`, call `act()`, once. of: `tracing`."""
    acted = False

    def at_line(here: Place) -> None:
        nonlocal acted
        if here == place and not acted:
            acted = True
            act()

    with tracing(watched, at_line, **of):
        run()


def interrupted_at(place: Place, run: Callable[[], None]) -> bool:
    """Run `run()`; when it gets to `place`, send SIGINT to this process, once. Return whether that ended it."""
    try:
        acting_at(place, run, lambda: signal.raise_signal(signal.SIGINT))
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def no_hang() -> Iterator[None]:
    """End the process if the block takes far too long: a thread that waits for ever cannot be interrupted otherwise."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class ShadowedTraining:
    """A small training under a budget, and a shadow: the same training without teraio. Call `finish` at the end.

    options: of teraio. With states and gradients all parameters take 32 MiB. Two of them are updated by slices.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._rows = torch.Generator().manual_seed(0)
        self._training = begin(self._model, self._optimizers, options)
        plain = self._model()
        plain.load_state_dict(self._training.module.state_dict())
        self._shadow = Training(module=plain, model=plain, optimizers=self._optimizers(plain))

    def _model(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(*sizes, bias=False) for sizes in ((512, 1024), (1024, 512), *[(512, 512)] * 4)])

    def _optimizers(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(module.parameters(), lr=1e-3)]

    def step(self) -> None:
        """One iteration. Raises AssertionError if a value differs from the shadow's."""
        batch = torch.randn(16, 512, generator=self._rows)
        self._training.mean_square_step(batch)
        self._shadow.mean_square_step(batch)
        wrong = unequal(_tensors(self._training), _tensors(self._shadow))
        require(not wrong, f"tensors {wrong} differ from those of the training without teraio")

    def interrupted_step(self, step: Callable[[Callable[[], None]], bool]) -> bool:
        """Call `step(run)`, which interrupts `run()`, an iteration. Drop its gradients, then check all values and all blocks.

        Returns what `step` does. A value must be what it was before the iteration, or what it is after it.
        """
        batch = torch.randn(16, 512, generator=self._rows)
        before = [tensor.clone() for tensor in _tensors(self._shadow)]
        self._shadow.mean_square_step(batch)
        with no_hang():
            hit = step(lambda: self._training.mean_square_step(batch))
            self._training.optimizers[0].zero_grad()
            found, after = _tensors(self._training), _tensors(self._shadow)
            require(len(found) == len(after), f"{len(found)} parameters and states, {len(after)} expected")
            for number, (b, a, now) in enumerate(zip(before, after, found, strict=True)):
                require(bool(((now == b) | (now == a)).all()), f"tensor {number} is neither as before nor as after the step")
                a.copy_(now)
            self.step()
        for pager in pagers():
            settle(pager)
            check_account(pager)
        return hit

    def interrupt_at(self, places: Iterable[Place], how: Callable[[Place, Callable[[], None]], bool]) -> None:
        """Call `interrupted_step` for each of the places. Raises AssertionError if none was hit: some lines run at times only."""
        hits = 0
        for place in places:
            try:
                hits += self.interrupted_step(partial(how, place))
            except Exception as error:
                raise AssertionError(f"after an interrupt at {place}: {error!r}") from error
        require(hits > 0, "no place was hit")

    def end_iteration(self) -> None:
        """Step, after an error in a backward pass that may have updated some parameters."""
        self._training.optimizers[0].step()

    def finish(self) -> None:
        """End teraio's part. Raises AssertionError if that changed a value or left a file."""
        with no_hang():
            self._training.progress.append(teraio.status())
            self._training.finish()
            wrong = unequal(_tensors(self._training), _tensors(self._shadow))
        require(not wrong, f"teraio.reset() changed tensors {wrong}")
        left = list(Path(self._options["storage"]).iterdir())
        require(not left, f"teraio.reset() left {left}")


def small(folder: Path, **options: Any) -> dict[str, Any]:
    """Options under which the training of `ShadowedTraining` has to move, from its first iteration on."""
    return {"memory_budget": 11 * MIB, "storage": folder, "host_updates": False, **options}


def _tensors(training: Training) -> list[Tensor]:
    """Parameters and optimizer states. Raises AssertionError unless the optimizer has all parameters."""
    parameters = list(training.module.parameters())
    (optimizer,) = training.optimizers
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    require(len(owned) == len(parameters), f"the optimizer has {len(owned)} parameters, not {len(parameters)}")
    states = (v for p in parameters for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor))
    return [tensor.detach() for tensor in (*parameters, *states)]


def settle(pager: Pager) -> None:
    """Wait until no block that user code can reach is being copied."""
    pager.enter_region()
    pager.leave_region()


def check_account(pager: Pager) -> None:
    """Raise AssertionError if a block is held, bytes are reserved or a slot is lost between two regions."""
    account, blocks = pager.account, pager.blocks
    with pager.condition:
        held = [b for b in blocks if b.pins or b.state is State.UPDATING]
        require(not held and not pager.account.reserved_for_host, f"held for ever: {held}")
        require(not account.reserved_bytes, f"{account.reserved_bytes} bytes are reserved")
        leaving = [b for b in blocks if b.state is State.OFFLOADING]
        coming = [b for b in blocks if b.state is State.PREFETCHING]
        here = [*leaving, *coming, *(b for b in blocks if b.state is State.ON_DEVICE)]
        counted = account.used_bytes, account.offloading_bytes, account.prefetching_blocks
        expected = _bytes(here), _bytes(leaving), len(coming)
        require(counted == expected, f"the account says {counted} (used, leaving, coming), the blocks {expected}")
        require(account.peak_bytes <= (account.budget_bytes or 0), f"the peak of {account.peak_bytes} bytes is over the budget")
        for tier in pager._mover.tiers:
            used = sum(b.slot.size_bytes for b in blocks if b.slot is not None and b.tier == tier.name)
            require(used == tier.store.used_bytes, f"{tier.name}: blocks have {used} bytes of {tier.store.used_bytes} in use")


def _bytes(blocks: list[Any]) -> int:
    return sum(block.size_bytes for block in blocks)


# -- the tests

TIERS = {"storage": {}, "host": {"host_budget": 8 * MIB}}
UNTIL_PLANNED = 6
"""Iterations until a plan is followed."""


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """The handler of SIGINT as in any program."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    handler = signal.signal(signal.SIGINT, before)
    assert handler is signal.default_int_handler  # teraio gave it back


PARTS = by_profile(ci=1, long=8)
"""So many tests share the lines: each is far from the time limit then."""


def _sample(places: list[Place], count: int, part: int) -> list[Place]:
    """Return `count` of the places in the profile "ci"; all of this part, which is one of `PARTS`, in the profile "long"."""
    return by_profile(ci=random.Random(0).sample(places, min(count, len(places))), long=places[part::PARTS])


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("tier", every_other(*TIERS))
def test_training_goes_on_after_ctrl_c_at_any_line_of_an_iteration(tmp_path: Path, tier: str, part: int) -> None:
    training = ShadowedTraining(small(tmp_path, **TIERS[tier]))
    for _ in range(UNTIL_PLANNED):
        training.step()
    assert teraio.status()[0].phase == "planned"
    places: dict[Place, None] = {}
    training.interrupted_step(lambda run: bool(places.update(places_in(WATCHED, run))))
    assert len(places) > 1000
    training.interrupt_at(_sample(list(places), 8, part), interrupted_at)
    training.finish()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("tier", every_other(*reversed(TIERS)))
def test_training_goes_on_after_ctrl_c_at_any_line_of_the_start(tmp_path: Path, tier: str, part: int) -> None:
    """Compiling, opening the tiers, the first iterations and the end."""
    options = small(tmp_path, **TIERS[tier])

    def train() -> None:
        training = ShadowedTraining(options)
        training.step()
        training.finish()

    with no_hang():
        places = list(places_in(WATCHED, train))
        for place in _sample(places, 1, part):
            interrupted_at(place, train)
            forget()
            assert not list(tmp_path.iterdir()), place
            train()


class Timeout(Exception):
    """Raised by the handler of a test's timer."""


def test_a_timer_that_raises_at_random_times(tmp_path: Path) -> None:
    """As people limit the time of a cell or a request. It spares what is not teraio's."""
    training = ShadowedTraining(small(tmp_path, **TIERS["host"]))
    for _ in range(UNTIL_PLANNED):
        training.step()
    chance, watched = random.Random(0), tuple(str(ROOT / name) for name in WATCHED)

    def ring(number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(watched):
            frame = frame.f_back
        if frame is not None:
            raise Timeout

    def timed(run: Callable[[], None]) -> bool:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.2), 0.02)
        try:
            run()
        except Timeout:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False

    before = signal.signal(signal.SIGALRM, ring)
    try:
        hits = sum(training.interrupted_step(timed) for _ in range(by_profile(ci=4, long=200)))
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits
    training.finish()


def test_the_optimizer_keeps_its_parameters_if_its_own_call_is_interrupted(tmp_path: Path) -> None:
    """teraio's hook has updated all parameters, and leaves nothing to do for the call of PyTorch."""
    training = ShadowedTraining(small(tmp_path))
    training.step()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is step.__code__ and not any(p.requires_grad for p in frame.f_locals["self"].param_groups[0]["params"]):
            signal.raise_signal(signal.SIGINT)

    def interrupted(run: Callable[[], None]) -> bool:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    step = torch.optim.Adam.step.__wrapped__  # type: ignore[attr-defined]
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    assert training.interrupted_step(interrupted)
    training.finish()


def test_an_error_of_teraio_s_own_code_after_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as memory that runs out: nothing stays held, and training goes on."""
    training = ShadowedTraining(small(tmp_path))
    training.step()

    def fail(*_: object) -> None:
        raise MemoryError

    def failing(run: Callable[[], None]) -> bool:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(GradientVersions, "unchanged", fail)
            run()
        return True

    assert training.interrupted_step(failing)
    training.finish()


# -- memory that runs out at lines of the updates inside the backward pass: nothing is half updated

INSIDE = (
    "teraio/optimizer/overlapped_steps.py",
    "teraio/optimizer/final_gradients.py",
    "teraio/following/observer.py",  # `run_stage` only
)
ENDINGS = {
    "for member in again:",
    "member.parameter.grad = slots[member.final.slot] = None",
    "self._pager.retire(read, written, last_used=freed)",
}
"""Lines that make no object, and the call that gives everything back: nothing else can be done if it cannot even begin."""
UNTIL_UPDATED_INSIDE = 5
"""Iterations until parameters are updated inside the backward pass."""


def _to_try(code: CodeType, line: int) -> bool:
    if code.co_filename.endswith("observer.py") and code.co_name != "run_stage":
        return False
    return can_run_out_of_memory(code, line) and linecache.getline(code.co_filename, line).strip() not in ENDINGS


def test_training_goes_on_after_memory_ran_out_in_the_backward_pass(tmp_path: Path) -> None:
    """An iteration whose step has not ended is ended by one."""
    training = ShadowedTraining(small(tmp_path, overlap_step=True, memory_budget=16 * MIB))
    for _ in range(UNTIL_UPDATED_INSIDE):
        training.step()
    places: dict[Place, None] = {}
    with no_hang():
        training.interrupted_step(lambda run: bool(places.update(places_in(INSIDE, run, only=_to_try))))
    lines = [linecache.getline(str(ROOT / place.file), place.line) for place in places]
    assert any("run_step(" in line for line in lines) and len(places) > 40

    def run_out() -> None:
        raise MemoryError

    def failing(place: Place, run: Callable[[], None]) -> bool:
        try:
            acting_at(place, run, run_out, INSIDE, only=_to_try)
        except MemoryError as error:
            if "_after" not in {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}:
                training.end_iteration()
            return True
        return False

    training.interrupt_at(by_profile(ci=random.Random(0).sample(list(places), 12), long=list(places)), failing)
    training.finish()
