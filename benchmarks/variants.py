"""Variants of a trace with other rates or stage times, and the budgets for which traces are planned."""

import random
from collections.abc import Sequence

from planner import Budgets, Link, Trace, floor
from planner.problem import live_bytes
from planner.schema import WaitingTier

SHARES = (0.9, 0.7, 0.5, 0.3)
OVER_FLOOR = 1.05


def budgets_for(trace: Trace, device_bytes: float) -> Budgets:
    """Return budgets of `device_bytes` and all host memory of the trace's machine."""
    host = trace.hardware.host_memory_bytes
    return Budgets(device_bytes=int(device_bytes), host_bytes=host or None)


def peak_bytes(trace: Trace) -> int:
    """Return the most bytes on the device at a stage, if no block ever leaves."""
    return max(live_bytes(trace))


def device_budgets(trace: Trace) -> dict[str, int]:
    """Return device budgets by name: SHARES of the peak, and 5 % over the floor. Budgets below the floor are left out."""
    peak, least = peak_bytes(trace), floor(trace)[0]
    named = {f"{share:.0%}": int(peak * share) for share in SHARES} | {"floor + 5 %": int(least * OVER_FLOOR)}
    return {name: size for name, size in named.items() if size >= least}


def with_rates(trace: Trace, factor: float) -> Trace:
    """Return the trace with `factor` times the rates of links and shared rates. Latencies stay."""
    links, shared = (
        tuple(each.model_copy(update={"bytes_per_second": each.bytes_per_second * factor}) for each in rates)
        for rates in (trace.hardware.links, trace.hardware.shared)
    )
    return trace.rebuilt(hardware=trace.hardware.model_copy(update={"links": links, "shared": shared}))


def with_one_tier(trace: Trace, tier: WaitingTier, bytes_per_second: float) -> Trace:
    """Return the trace with one lower tier, whose links both ways have that rate; latencies are 10 µs."""
    links = tuple(
        Link(from_tier=one, to_tier=other, bytes_per_second=bytes_per_second, latency_seconds=10e-6)
        for one, other in (("device", tier), (tier, "device"))
    )
    return trace.rebuilt(hardware=trace.hardware.model_copy(update={"links": links, "shared": ()}))


def with_device_updates(trace: Trace) -> Trace:
    """Return the trace with all updates on the device."""
    subgroups = tuple(subgroup.model_copy(update={"host_seconds": None}) for subgroup in trace.subgroups)
    return trace.rebuilt(subgroups=subgroups)


def with_errors(trace: Trace, *, seed: int, largest: float) -> Trace:
    """Return the trace with each stage time multiplied by 1 + an error, drawn uniformly from ±`largest`."""
    draw = random.Random(seed)
    return with_times(trace, [1.0 + draw.uniform(-largest, largest) for _ in trace.stages])


def with_times(trace: Trace, factors: Sequence[float]) -> Trace:
    """Return the trace with each stage time multiplied by its factor. This includes device updates and recomputation."""
    return trace.rebuilt(
        stages=tuple(
            stage.model_copy(update={"duration_seconds": stage.duration_seconds * factors[stage.id]}) for stage in trace.stages
        ),
        subgroups=tuple(
            subgroup.model_copy(update={"device_seconds": subgroup.device_seconds * factors[subgroup.stage]})
            for subgroup in trace.subgroups
        ),
        recompute=tuple(
            group.model_copy(update={"duration_seconds": group.duration_seconds * factors[group.stage]})
            for group in trace.recompute
        ),
    )
