"""How many bytes of an optimizer's parameters, gradients and states to update at a time: a closed form over measured figures.

[Note: The size of subgroups]
Of a step over S bytes, one part after another comes in, is updated and leaves: a pipeline of three stations. For a part of s
bytes station k takes t_k = a_k + s / r_k, a fixed cost and a rate. As in every flow shop of equal jobs, S / s parts take

    T(s) = (S / s) · max_k t_k  +  Σ_k t_k - max_k t_k

since the slowest station is idle only while the first part comes to it and the last one leaves. Small parts pay fixed costs
often, large ones take long to come and to leave. Where station b is the slowest, T is least at

    s = √(S · a_b / Σ_{k ≠ b} 1 / r_k)

and another one becomes the slowest where two t_k are equal: the best size is one of these few, or a limit. All of S moves here,
as it does where activations have filled the room before the step; if less does, the best size is smaller.

Three parts must be in the room at once: one that comes, one that is updated, one that leaves. More would not make the pipeline
faster, as Σ t_k ≤ 3 · max_k t_k. But no state can stay in what they take, and there must be room for an update's temporaries and
for what comes after the step; so the three get less than half of it: a part at most one in `_SUBGROUPS_PER_ROOM` of the room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.schema import Hardware, Link, WaitingTier

__all__ = ["UNMEASURED_BYTES", "Station", "largest_subgroup_bytes", "stations_of_step", "step_seconds", "subgroup_bytes"]

UNMEASURED_BYTES = 256 << 20
"""Of a subgroup at most where no figures are known; of the right order for 100 GB over a link of 50 GB/s."""
_SUBGROUPS_PER_ROOM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """What each part passes through: for `fixed_seconds`, whatever its size, and at `bytes_per_second`."""

    fixed_seconds: float
    bytes_per_second: float

    def seconds(self, size_bytes: float) -> float:
        """For one part of `size_bytes`."""
        return self.fixed_seconds + size_bytes / self.bytes_per_second


def stations_of_step(hardware: Hardware, tier: WaitingTier, *, update_seconds: float) -> tuple[Station, ...]:
    """A part's way in from `tier`, its update, its way out; none where the hardware has no links to and from there.

    update_seconds: fixed cost of updating one part. The rate is taken for that of the slower link: whatever it really is, a step
    with the size chosen so takes about a tenth longer than with the best one, at most. Links that share a rate get equal shares.
    A latency counts once for a part: all its blocks follow one another, and there are as many of them however they are parted.
    """
    inward, outward = hardware.link(tier, "device"), hardware.link("device", tier)
    if inward is None or outward is None:
        return ()
    shared = [
        rate.bytes_per_second / len(rate.links) for rate in hardware.shared if {inward.name, outward.name} <= set(rate.links)
    ]

    def station(link: Link) -> Station:
        return Station(fixed_seconds=link.latency_seconds, bytes_per_second=min(link.bytes_per_second, *shared, math.inf))

    way_in, way_out = station(inward), station(outward)
    rate = min(way_in.bytes_per_second, way_out.bytes_per_second)
    return way_in, Station(fixed_seconds=update_seconds, bytes_per_second=rate), way_out


def step_seconds(stations: Sequence[Station], *, total_bytes: float, size_bytes: float) -> float:
    """T of [Note: The size of subgroups]: what a step over `total_bytes` takes in parts of `size_bytes`."""
    times = [station.seconds(size_bytes) for station in stations]
    slowest = max(times)
    return max(total_bytes / size_bytes, 1.0) * slowest + sum(times) - slowest


def subgroup_bytes(stations: Sequence[Station], *, total_bytes: int, smallest_bytes: int, largest_bytes: int) -> int:
    """The size between the limits with the least `step_seconds`; `smallest_bytes` if the largest is not more than that.

    Without stations, which says that nothing was measured, the largest one, but UNMEASURED_BYTES at most.
    """
    if not stations:
        return min(max(largest_bytes, smallest_bytes), max(UNMEASURED_BYTES, smallest_bytes))
    limit = max(min(largest_bytes, total_bytes), smallest_bytes)
    sizes = (size for size in _turning_points(stations, total_bytes) if smallest_bytes < size < limit)
    return int(min((smallest_bytes, *sizes, limit), key=lambda s: step_seconds(stations, total_bytes=total_bytes, size_bytes=s)))


def largest_subgroup_bytes(room_bytes: int) -> int:
    """That lets the pipeline flow in a room of `room_bytes`, and leaves the most of it for what stays."""
    return max(room_bytes, 0) // _SUBGROUPS_PER_ROOM


def _turning_points(stations: Sequence[Station], total_bytes: float) -> Iterator[float]:
    """Where T can be least: its minima while one station is the slowest, and sizes at which two take equally long."""
    pace = [1 / station.bytes_per_second for station in stations]
    for number, station in enumerate(stations):
        others = sum(pace) - pace[number]
        if others > 0:
            yield math.sqrt(total_bytes * station.fixed_seconds / others)
    for (one, slow), (other, fast) in combinations(zip(stations, pace, strict=True), 2):
        if slow != fast:
            yield (other.fixed_seconds - one.fixed_seconds) / (slow - fast)
