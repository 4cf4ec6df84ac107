"""Signals at every line of teraio's own code in a small training, and what must be true after each."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import teraio
from runtime.paging import Pager, State

from ...line_tracing import Place, tracing
from ...training import MIB, Training, begin, mean_square_step, pagers, require, unequal

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
        mean_square_step(self._training, batch)
        mean_square_step(self._shadow, batch)
        wrong = unequal(_tensors(self._training), _tensors(self._shadow))
        require(not wrong, f"tensors {wrong} differ from those of the training without teraio")

    def interrupted_step(self, step: Callable[[Callable[[], None]], bool]) -> bool:
        """Call `step(run)`, which interrupts `run()`, an iteration. Drop its gradients, then check all values and all blocks.

        Returns what `step` does. A value must be what it was before the iteration, or what it is after it.
        """
        batch = torch.randn(16, 512, generator=self._rows)
        before = [tensor.clone() for tensor in _tensors(self._shadow)]
        mean_square_step(self._shadow, batch)
        with no_hang():
            hit = step(lambda: mean_square_step(self._training, batch))
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
