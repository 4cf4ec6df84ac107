"""What links that share rates can carry together, for linear programs; and what ranks that share links have each.

[Note: links that share rates] Links that are busy at the same time get max-min fair rates. So a slow drive beside host memory
takes its fair share of the bus as long as it copies: with 50 GB/s to the host, 24 to the drive and 55 together, both are busy at
31 + 24, and the host cannot have 50 beside the 5 that are left. At any instant, the rates are those of some set of busy links
(zero for the others). So the mean rates over any stretch of time lie in the convex hull of the rates of all sets. Its facets are
the rows: for each pair of links, Σ seconds_per_byte · bytes ≤ seconds. They imply the rate that a pair shares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

from planner.schema import Budgets, Hardware, Link, Trace

_SAME = 1e-9


# Seconds per byte of some links, by name: in any stretch of time, Σ seconds per byte · bytes is at most its length.
SharedLimit = dict[str, float]


def shared_limits(hardware: Hardware, used: Sequence[Link]) -> tuple[SharedLimit, ...]:
    """Return what the links that are `used` can carry together, beyond the limits of each; see [Note: links that share rates]."""
    names = [link.name for link in used]
    groups = [
        (shared.bytes_per_second, [n for n, name in enumerate(names) if name in shared.links]) for shared in hardware.shared
    ]
    groups = [(rate, members) for rate, members in groups if len(members) > 1]
    found: list[SharedLimit] = [{names[number]: 1 / rate for number in members} for rate, members in groups if len(members) > 2]
    pairs = sorted({pair for _, members in groups for pair in combinations(members, 2)})
    rates = _rates_of_all_sets([link.bytes_per_second for link in used], groups) if pairs else []
    for one, other in pairs:
        for first, second in _facets({(each[one], each[other]) for each in rates}):
            found.append({names[one]: first, names[other]: second})
    return tuple(found)


def _rates_of_all_sets(limits: Sequence[float], groups: Sequence[tuple[float, Sequence[int]]]) -> list[list[float]]:
    found = []
    for size in range(1, len(limits) + 1):
        for busy in combinations(range(len(limits)), size):
            inner = [(rate, [position for position, n in enumerate(busy) if n in members]) for rate, members in groups]
            shares = dict(zip(busy, max_min_rates([limits[number] for number in busy], inner), strict=True))
            found.append([shares.get(number, 0.0) for number in range(len(limits))])
    return found


def _facets(points: set[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield (a, b), both positive, so that a · x + b · y ≤ 1 for all points, with equality for two of them."""
    for (x, y), (u, v) in combinations(sorted(points), 2):  # x ≤ u
        if x == u or y <= v:
            continue
        area = y * u - x * v
        a, b = (y - v) / area, (u - x) / area
        if all(a * p + b * q <= 1 + _SAME for p, q in points):
            # A further point on the same facet yields the facet too, with one of the two.
            if not any((x, y) < (p, q) < (u, v) and a * p + b * q > 1 - _SAME for p, q in points):
                yield a, b


def max_min_rates(limits: Sequence[float], groups: Sequence[tuple[float, Sequence[int]]]) -> list[float]:
    """Return max-min fair rates: all rise together, until each reaches its own limit or one of its groups reaches its limit.

    groups: the rate that some links share, and the positions of these links in `limits`.

    Source: D. Bertsekas, R. Gallager, Data Networks (1992), section 6.5.2.
    """
    rates = [0.0] * len(limits)
    rising = set(range(len(limits)))
    while rising:
        step = min(limits[number] - rates[number] for number in rising)
        for limit, members in groups:
            sharing = len(rising.intersection(members))
            if sharing:
                step = min(step, (limit - sum(rates[number] for number in members)) / sharing)
        for number in rising:
            rates[number] += max(step, 0.0)
        stopped = {number for number in rising if rates[number] >= limits[number] * (1 - 1e-12)}
        for limit, members in groups:
            if sum(rates[number] for number in members) >= limit * (1 - 1e-12):
                stopped |= rising.intersection(members)
        rising -= stopped
    return rates


def of_equal_ranks(trace: Trace, budgets: Budgets, *, ranks: int, links: Collection[str] = ()) -> tuple[Trace, Budgets]:
    """Return the trace and budgets to plan one of `ranks` equal ranks of a machine with.

    budgets: of the machine for host and storage, of one rank for the device. Host and storage are divided by the ranks. links:
    names of the links (such as "device->storage") behind which all ranks have the same drives or memory. Equal ranks with one
    plan copy at the same times, so each has a share of 1 / ranks of these links, and of the rates that only these links share.

    Rates that were measured while all ranks copied are such shares already: a link with `alone_bytes_per_second` keeps its rate.
    """

    def share(link: Link) -> Link:
        if link.name not in links or link.alone_bytes_per_second is not None:
            return link
        return link.model_copy(update={"bytes_per_second": link.bytes_per_second / ranks})

    divided = tuple(share(link) for link in trace.hardware.links)
    kept = {link.name for link, mine in zip(trace.hardware.links, divided, strict=True) if link is mine}
    shared = tuple(
        rate if kept.intersection(rate.links) else rate.model_copy(update={"bytes_per_second": rate.bytes_per_second / ranks})
        for rate in trace.hardware.shared
    )
    tiers = {name: getattr(budgets, name) for name in ("host_bytes", "storage_bytes")}
    return (
        trace.rebuilt(hardware=trace.hardware.model_copy(update={"links": divided, "shared": shared})),
        budgets.model_copy(update={name: size and size // ranks for name, size in tiers.items()}),
    )
