"""The same trace with other rates or other stage times, and the budgets at which traces are planned."""

import random
from collections.abc import Sequence

from planner import Budgets, Trace, floor
from planner.problem import live_bytes

SHARES = (0.9, 0.7, 0.5, 0.3)
OVER_FLOOR = 1.05


def budgets_for(trace: Trace, device_bytes: float) -> Budgets:
    """`device_bytes`, and all the host memory that the trace's machine says it has."""
    host = trace.hardware.host_memory_bytes
    return Budgets(device_bytes=int(device_bytes), host_bytes=host or None)


def peak_bytes(trace: Trace) -> int:
    """Device bytes at the fullest stage if nothing ever leaves."""
    return max(live_bytes(trace))


def device_budgets(trace: Trace) -> dict[str, int]:
    """Device bytes by name: SHARES of the peak, and 5 % over the floor. Those below the floor are left out."""
    peak, least = peak_bytes(trace), floor(trace)[0]
    named = {f"{share:.0%}": int(peak * share) for share in SHARES} | {"floor + 5 %": int(least * OVER_FLOOR)}
    return {name: size for name, size in named.items() if size >= least}


def with_rates(trace: Trace, factor: float) -> Trace:
    """All links `factor` times as fast, and what they share; latencies as they were."""
    links, shared = (
        tuple(each.model_copy(update={"bytes_per_second": each.bytes_per_second * factor}) for each in rates)
        for rates in (trace.hardware.links, trace.hardware.shared)
    )
    return _rebuilt(trace, hardware=trace.hardware.model_copy(update={"links": links, "shared": shared}))


def with_device_updates(trace: Trace) -> Trace:
    """No subgroup can update on the host."""
    subgroups = tuple(subgroup.model_copy(update={"host_seconds": None}) for subgroup in trace.subgroups)
    return _rebuilt(trace, subgroups=subgroups)


def with_errors(trace: Trace, *, seed: int, largest: float) -> Trace:
    """Each stage's time multiplied by 1 + an error, drawn uniformly from ±`largest`; updates on the device likewise."""
    draw = random.Random(seed)
    return with_times(trace, [1.0 + draw.uniform(-largest, largest) for _ in trace.stages])


def with_times(trace: Trace, factors: Sequence[float]) -> Trace:
    """Each stage's time multiplied by its factor, also where it is an update on the device or runs again."""
    return _rebuilt(
        trace,
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


def _rebuilt(trace: Trace, **changed: object) -> Trace:
    """Built anew and not copied: a copy would keep the fingerprint that was computed for the old content."""
    return Trace.build(**{name: getattr(trace, name) for name in Trace.model_fields} | {"stored_fingerprint": None} | changed)
