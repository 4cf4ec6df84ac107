"""How large the parts are that optimizers are cut into: the planner's choice from what was measured here.

The links are measured when their tiers are opened. What a part costs however small it is, Python, the launch of the update's
kernels and the pager's looking through all blocks, is measured by a few tiny ones, when the first optimizer is cut that more
than one part can be made of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from planner import Hardware, Station, stations_of_step, subgroup_bytes
from planner.schema import WaitingTier
from planner.subgroup_size import UNMEASURED_BYTES, largest_subgroup_bytes
from runtime.device import MIN_MOVED_BYTES, Mark
from runtime.paging import Pager
from teraio.optimizer.capabilities import is_elementwise
from teraio.optimizer.masters import scaling_put_aside, update_replicas
from teraio.optimizer.replica import by_group, scratch_replica

logger = logging.getLogger("teraio")

MIN_SUBGROUP_BYTES = 4 * MIN_MOVED_BYTES
"""Of the smallest parameter that moves, with its gradient and the two states of Adam: cutting finer moves nothing earlier."""
_RUNS = 9
_SHAPE = (2, 2)
"""Of the parameter that is updated to measure; Muon takes matrices only."""


class SubgroupSizes:
    """Chooses the size once, for all optimizers of a runtime: it stays the same in all iterations, as a plan needs it.

    hardware: gives the measured links. given_bytes: the size to use, chosen before; a plan was made for it. measure: of a
    part's fixed cost, `part_seconds` unless a test knows better. used_bytes: the size, None before it is chosen.
    """

    def __init__(
        self,
        hardware: Callable[[], Hardware] | None = None,
        *,
        given_bytes: int | None = None,
        measure: Callable[[Optimizer, Pager], float] | None = None,
    ) -> None:
        self.used_bytes = given_bytes
        self._hardware = hardware
        self._measure = measure or part_seconds

    def choose(
        self, optimizer: Optimizer, sizes: Sequence[int], room_bytes: int | None, pager: Pager, *, others_bytes: int = 0
    ) -> int:
        """Bytes of parameters, gradients and states to update together, at most.

        sizes: of the optimizer's parameters, each with gradient and states. others_bytes: the same of all that other optimizers
        update. room_bytes: of the budget, for what can leave; None where nothing limits it. For a region. Blocks the first time,
        while some tiny updates run and the device gets to them.
        """
        if self.used_bytes is None and sum(sizes) > MIN_SUBGROUP_BYTES and len(sizes) > 1:
            self.used_bytes = self._best(optimizer, sum(sizes) + others_bytes, room_bytes, pager)
        return self.used_bytes or MIN_SUBGROUP_BYTES  # if there is none: one part, which decides nothing for other optimizers

    def _best(self, optimizer: Optimizer, total_bytes: int, room_bytes: int | None, pager: Pager) -> int:
        """By [Note: The size of subgroups]; where nothing limits the room or no link is known, as large as is sensible."""
        if room_bytes is None:
            return UNMEASURED_BYTES
        hardware = self._hardware() if self._hardware is not None else None
        tier = _tier(hardware, total_bytes) if hardware is not None else None
        stations: tuple[Station, ...] = ()
        if hardware is not None and tier is not None:
            stations = stations_of_step(hardware, tier, update_seconds=self._measure(optimizer, pager))
        best = subgroup_bytes(
            stations,
            total_bytes=total_bytes,
            smallest_bytes=MIN_SUBGROUP_BYTES,
            largest_bytes=largest_subgroup_bytes(room_bytes),
        )
        logger.info("optimizers are cut into subgroups of about %s bytes, from %s", f"{best:,}", stations or "no measured rates")
        return best


def _tier(hardware: Hardware, total_bytes: int) -> WaitingTier | None:
    """Where the step's states wait, or most of them: in main memory if there is room for all; None if they cannot leave."""
    tiers: list[WaitingTier] = ["host", "storage"] if hardware.host_memory_bytes >= total_bytes else ["storage", "host"]
    return next((tier for tier in tiers if hardware.link(tier, "device") is not None), None)


def part_seconds(optimizer: Optimizer, pager: Pager) -> float:
    """What one part of the optimizer's step costs however small it is: the least of some over a tiny parameter.

    With what the pager does around it where there is no room to spare, in which it looks for dead blocks first. On a device that
    works on its own: of asking for it and of doing it what takes longer. Blocks until the device has done what it was asked for
    before, and these. Changes nothing of the optimizer.
    """
    owned = [(number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
    group, parameter = max(owned, key=lambda pair: pair[1].numel())
    replica = scratch_replica(optimizer, parameter, _SHAPE, states=is_elementwise(optimizer))
    groups = by_group(optimizer, [(group, replica)])
    with scaling_put_aside(optimizer):
        update_replicas(optimizer, groups)  # the first one takes longer
        pager.device.mark().wait()
        marks: list[Mark] = [pager.device.mark()]
        for _ in range(_RUNS):
            pager.forget_dead()
            pager.acquire((), 0, "a tiny update")
            try:
                update_replicas(optimizer, groups)
            finally:
                pager.retire((), ())
            marks.append(pager.device.mark())
    return min(end.seconds_since(begin) for begin, end in zip(marks, marks[1:], strict=False))
