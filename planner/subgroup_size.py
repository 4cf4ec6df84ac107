"""The size of an optimizer's subgroups: how many bytes of parameters, gradients and states to update at a time.

[Note: The size of subgroups] In an optimizer step over S bytes, one subgroup after another comes in, is updated and leaves: a
pipeline of three stations. For a subgroup of s bytes, station k takes t_k = a_k + s / r_k: a fixed cost, and a rate. As in every
flow shop with equal jobs, S / s subgroups take

    T(s) = (S / s) · max_k t_k  +  Σ_k t_k - max_k t_k

since the slowest station is idle only while the first subgroup comes to it and while the last one leaves. Small subgroups pay
the fixed costs often; large ones take long to come and to leave. While station b is the slowest, T is smallest at

    s = √(S · a_b / Σ_{k ≠ b} 1 / r_k)

Another station becomes the slowest where two t_k are equal. So the best size is one of these few sizes, or a limit. The formula
assumes that all of S moves, which is so where activations have filled the device before the step. If less moves, the best size
is smaller.

Three subgroups must be on the device at once: one comes in, one is updated, one leaves. More would not make the pipeline faster,
since Σ t_k ≤ 3 · max_k t_k. But no state can stay in the room that they take, and the update's temporaries and what follows the
step need room too. So the three together get less than half of the room: a subgroup gets at most one `_SUBGROUPS_PER_ROOM`-th of
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.schema import Hardware, Link, WaitingTier

# Largest size of a subgroup where nothing was measured. It is of the right order for 100 GB over a link of 50 GB/s.
UNMEASURED_BYTES = 256 << 20
_SUBGROUPS_PER_ROOM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """A station that each subgroup passes through.

    It takes `fixed_seconds`, whatever the size, plus the bytes at `bytes_per_second`.
    """

    fixed_seconds: float
    bytes_per_second: float

    def seconds(self, size_bytes: float) -> float:
        """Return the time that one subgroup of `size_bytes` takes."""
        return self.fixed_seconds + size_bytes / self.bytes_per_second


def stations_of_step(hardware: Hardware, tier: WaitingTier, *, update_seconds: float) -> tuple[Station, ...]:
    """Return the stations of a step: the way in from `tier`, the update, the way out.

    Empty where the hardware has no links both ways. update_seconds: fixed cost of updating one subgroup. The update's rate is
    taken to be that of the slower link: whatever it really is, the step then takes at most about a tenth longer than with the
    best size. Links that share a rate get equal shares of it. A latency counts once for each subgroup: the copies of its blocks
    follow one another, and their number does not depend on how they are grouped.
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
    """Return T of [Note: The size of subgroups]: the time of a step over `total_bytes` in subgroups of `size_bytes`."""
    times = [station.seconds(size_bytes) for station in stations]
    slowest = max(times)
    return max(total_bytes / size_bytes, 1.0) * slowest + sum(times) - slowest


def subgroup_bytes(stations: Sequence[Station], *, total_bytes: int, smallest_bytes: int, largest_bytes: int) -> int:
    """Return the size between the limits with the least `step_seconds`; `smallest_bytes` if `largest_bytes` is not more.

    Without stations, nothing was measured. Then return the largest size, but at most UNMEASURED_BYTES.
    """
    if not stations:
        return min(max(largest_bytes, smallest_bytes), max(UNMEASURED_BYTES, smallest_bytes))
    limit = max(min(largest_bytes, total_bytes), smallest_bytes)
    sizes = (size for size in _turning_points(stations, total_bytes) if smallest_bytes < size < limit)
    return int(min((smallest_bytes, *sizes, limit), key=lambda s: step_seconds(stations, total_bytes=total_bytes, size_bytes=s)))


def largest_subgroup_bytes(room_bytes: int) -> int:
    """Return the largest subgroup for a room of `room_bytes`: the pipeline flows, and most of the room is left for blocks that
    stay.
    """
    return max(room_bytes, 0) // _SUBGROUPS_PER_ROOM


def _turning_points(stations: Sequence[Station], total_bytes: float) -> Iterator[float]:
    """The sizes where T can be smallest: its minima while one station is the slowest, and the sizes at which two take equally
    long.
    """
    pace = [1 / station.bytes_per_second for station in stations]
    for number, station in enumerate(stations):
        others = sum(pace) - pace[number]
        if others > 0:
            yield math.sqrt(total_bytes * station.fixed_seconds / others)
    for (one, slow), (other, fast) in combinations(zip(stations, pace, strict=True), 2):
        if slow != fast:
            yield (other.fixed_seconds - one.fixed_seconds) / (slow - fast)
