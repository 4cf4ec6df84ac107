"""The smallest device budget under which every stage of an iteration can run."""

from __future__ import annotations

from planner.problem.lifetimes import live_bytes, stage_floors
from planner.problem.recompute import recomputed
from planner.problem.rerun_places import RerunPlaces
from planner.problem.rerun_sets import simple_sets
from planner.schema import Tier, Trace

__all__ = ["floor"]


def floor(trace: Trace) -> tuple[int, int]:
    """Return the smallest device budget under which every stage can run, in bytes, and the stage of the trace that sets it.

    All updates run on the device. If no lower tier has links in both directions, nothing can leave. Then recomputation lowers the
    floor: it is the least of `simple_sets` of groups that run again. (With a lower tier it cannot: all that a stage does not use
    can wait there.)
    """
    hardware = trace.hardware
    tiers: tuple[Tier, ...] = ("host", "storage")
    if any(hardware.link("device", tier) and hardware.link(tier, "device") for tier in tiers):
        return _worst(stage_floors(trace))
    least, worst = _worst(live_bytes(trace))
    places = RerunPlaces(trace)
    for groups in simple_sets(trace, places.usable):
        chosen = places.of(groups)
        size, stage = _worst(live_bytes(recomputed(trace, chosen)))
        if size < least:
            least, worst = size, min(stage - sum(each.at + n < stage for n, each in enumerate(chosen)), len(trace.stages) - 1)
    return least, worst


def _worst(sizes: list[int]) -> tuple[int, int]:
    worst = max(range(len(sizes)), key=sizes.__getitem__)
    return sizes[worst], worst
