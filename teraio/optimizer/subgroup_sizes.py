"""How large the subgroups of optimizers are: chosen by the planner from what was measured on this machine.

Links are measured when their tiers are opened. The fixed cost of a subgroup consists of Python, the launch of the update's
kernels and the pager's search through all blocks. It is measured by a few tiny updates, when the first optimizer is cut that is
large enough for more than one subgroup.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from planner import Hardware, Station, stations_of_step, subgroup_bytes
from planner.schema import WaitingTier
from planner.subgroup_size import UNMEASURED_BYTES, largest_subgroup_bytes
from runtime.device import MIN_MOVED_BYTES, Mark
from runtime.paging import Pager
from teraio.optimizer.arithmetic import scaling_put_aside, scratch_replica, update_replicas
from teraio.optimizer.facts import OptimizerFacts, owned_parameters

logger = logging.getLogger("teraio")

MIN_SUBGROUP_BYTES = 4 * MIN_MOVED_BYTES
"""The smallest parameter that moves, with gradient and the two states of Adam. Smaller subgroups would move nothing earlier."""
_RUNS = 9
_SHAPE = (2, 2)
"""Shape of the parameter that is updated to measure. Muon takes matrices only."""


class SubgroupSizes:
    """Chooses the size once, for all optimizers of a run. It stays the same in all iterations, since a plan depends on it.

    hardware: returns the measured links. given_bytes: the size to use, since a given plan was made for it.
    min_bytes: the smallest size to choose. max_bytes: returns the largest size to choose, from the bytes of room.
    measure: returns the fixed cost of a subgroup, in seconds. used_bytes: the size; None before it is chosen.
    """

    def __init__(
        self,
        hardware: Callable[[], Hardware] | None = None,
        *,
        given_bytes: int | None = None,
        min_bytes: int = MIN_SUBGROUP_BYTES,
        max_bytes: Callable[[int], int] = largest_subgroup_bytes,
        measure: Callable[[OptimizerFacts, Pager], float] | None = None,
    ) -> None:
        self.used_bytes = given_bytes
        self._hardware = hardware
        self._min_bytes = min_bytes
        self._max_bytes = max_bytes
        self._measure = measure or subgroup_seconds

    @property
    def subgroup_bytes(self) -> int:
        """Bytes of parameters, gradients and states to update together at most."""
        # If none was chosen, all are one subgroup; that must not decide for optimizers that come later.
        return self.used_bytes or self._min_bytes

    def choose(
        self, facts: OptimizerFacts, sizes: Sequence[int], room_bytes: int | None, pager: Pager, *, others_bytes: int = 0
    ) -> int:
        """Choose the size if that is possible and has not been done yet. Return `subgroup_bytes`.

        sizes: bytes of each parameter of the optimizer, with gradient and states. others_bytes: the same for all parameters of
        other optimizers together. room_bytes: what the budget leaves for blocks that can leave; None without a budget. To be
        called in a region. Waits the first time, while some tiny updates run and the device gets to them.
        """
        if self.used_bytes is None and sum(sizes) > self._min_bytes and len(sizes) > 1:
            self.used_bytes = self._best(facts, sum(sizes) + others_bytes, room_bytes, pager)
        return self.subgroup_bytes

    def _best(self, facts: OptimizerFacts, total_bytes: int, room_bytes: int | None, pager: Pager) -> int:
        """Return the size by [Note: The size of subgroups]; a usual one without a budget, the largest without known links."""
        if room_bytes is None:
            return UNMEASURED_BYTES
        hardware = self._hardware() if self._hardware is not None else None
        tier = _tier(hardware, total_bytes) if hardware is not None else None
        stations: tuple[Station, ...] = ()
        if hardware is not None and tier is not None:
            stations = stations_of_step(hardware, tier, update_seconds=self._measure(facts, pager))
        best = subgroup_bytes(
            stations,
            total_bytes=total_bytes,
            smallest_bytes=self._min_bytes,
            largest_bytes=self._max_bytes(room_bytes),
        )
        basis = "chosen from measured rates" if stations else "a default, as no rate was measured"
        logger.info("optimizers are updated in subgroups of about %s bytes (%s)", f"{best:,}", basis)
        for name, station in zip(("the way in", "the update", "the way out"), stations, strict=False):
            logger.debug(
                "a subgroup takes for %s %.0f microseconds, and 1 second for every %s bytes",
                name,
                1e6 * station.fixed_seconds,
                f"{station.bytes_per_second:,.0f}",
            )
        return best


def _tier(hardware: Hardware, total_bytes: int) -> WaitingTier | None:
    """Return the tier where most states wait: the host tier if there is room for all of them; None if states cannot leave."""
    tiers: list[WaitingTier] = ["host", "storage"] if hardware.host_memory_bytes >= total_bytes else ["storage", "host"]
    return next((tier for tier in tiers if hardware.link(tier, "device") is not None), None)


def subgroup_seconds(facts: OptimizerFacts, pager: Pager) -> float:
    """Return the fixed cost of a subgroup of the optimizer: the shortest of some updates of a tiny parameter.

    Includes what the pager does around an update when memory is short, and so searches for dead blocks first. On an asynchronous
    device: the longer of launching the update and running it. Waits until the device has done all its work, these updates
    included. Does not change the optimizer.
    """
    largest = max(owned_parameters(facts.optimizer), key=lambda owned: owned.tensor.numel())
    replicas = [scratch_replica(facts, largest, _SHAPE)]
    with scaling_put_aside(facts.optimizer):
        update_replicas(facts, replicas)  # the first one takes longer
        pager.device.mark().wait()
        marks: list[Mark] = [pager.device.mark()]
        for _ in range(_RUNS):
            pager.forget_dead()
            pager.acquire((), 0, "a tiny update")
            try:
                update_replicas(facts, replicas)
            finally:
                pager.retire((), ())
            marks.append(pager.device.mark())
    return min(end.seconds_since(begin) for begin, end in zip(marks, marks[1:], strict=False))
