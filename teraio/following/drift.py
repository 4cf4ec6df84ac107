"""Compares measured iterations with a plan's predictions, and makes a trace of what was measured. Pure: reads no clock.

Decides nothing: `replanning` asks for the drift and for the trace.

[Note: What is compared]
iteration: seconds of an iteration, with those of the replayed plan.
stages: seconds of an iteration without waiting for copies, with the sum of the trace's stages and of the plan's re-runs. The
    measured time includes the time between stages (on an asynchronous device, that time counts as waiting). A trace made from
    measurements spreads it over its stages.
links: seconds per byte for which a link is busy, with those in the replay, where links that share a rate slow each other
    down, too. One number cannot tell latency from rate, so both are scaled for a slower link. A shared rate is scaled by the
    average slowdown of its links. If they slow each other down in the replay and carried more together than the scaled
    rate, the new shared rate is what they carried.
All are medians over the latest iterations, so a few outliers change nothing.

Iterations whose inputs are shorter than those that the plan is for wait less, which says nothing of the plan. Their stages and
links are compared, each stage with its time at these sizes. That is a fit: so only what is plainly off counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import planner

DRIFT_LIMIT = 0.1  # planning starts again if the relative drift is larger
_PLAINLY_OFF = 0.3  # stages and links are plainly off beyond this relative drift
_ALIKE = 1.1  # iterations are alike if the longest takes no more than so many times the shortest
_CONTENDED = 1.05  # a link counts as slowed down by others if it takes longer than alone by this factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One planned iteration as it was measured. Stages by position; bytes and seconds by link, in this iteration only.

    waited_seconds: time in which nothing ran because blocks or room were missing; not part of `stage_seconds`.
    host_seconds: by stage, of the updates that ran on the host's processor. rerun_seconds: of all stages that ran again.
    collective_seconds: by position, the part of `stage_seconds` in collectives; empty if there are none.
    """

    iteration_seconds: float
    waited_seconds: float
    stage_seconds: tuple[float, ...]
    moved_bytes: dict[str, int]
    busy_seconds: dict[str, float]
    host_seconds: dict[int, float] = field(default_factory=dict)
    rerun_seconds: float = 0.0
    collective_seconds: tuple[float, ...] = ()

    @property
    def working_seconds(self) -> float:
        """Seconds of the iteration without waiting."""
        return self.iteration_seconds - self.waited_seconds

    def at_whole_length(self, shares: Sequence[float], expected: Expectation) -> Observation:
        """Return the iteration as it would have been with inputs of the sizes that the plan is for, as far as it can be told.

        shares: of the time at these sizes, what each stage should have taken. The waiting becomes that of the plan.
        """
        stages = [seconds / share for seconds, share in zip(self.stage_seconds, shares, strict=True)]
        longer = sum(stages) / sum(self.stage_seconds) if sum(self.stage_seconds) else 1.0
        between = self.working_seconds - self.rerun_seconds - sum(self.stage_seconds)
        again, waited = self.rerun_seconds * longer, sum(expected.stall_seconds)
        return replace(
            self,
            iteration_seconds=sum(stages) + again + between + waited,
            waited_seconds=waited,
            stage_seconds=tuple(stages),
            rerun_seconds=again,
            collective_seconds=tuple(s / share for s, share in zip(self.collective_seconds, shares, strict=False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a plan promises for one iteration of the steady state.

    ideal_seconds: sum of the stages on the device. stall_seconds: waiting, by stage. contended: links that other links slow down,
    because they share a rate.
    """

    iteration_seconds: float
    ideal_seconds: float
    stall_seconds: tuple[float, ...]
    link_seconds_per_byte: dict[str, float]
    contended: frozenset[str] = frozenset()

    @classmethod
    def of(cls, trace: planner.Trace, timeline: planner.Timeline) -> Expectation:
        """Return what the replay of a plan on `trace` promises."""
        busy_seconds: dict[str, float] = {}
        alone_seconds: dict[str, float] = {}
        links = {link.name: link for link in trace.hardware.links}
        for transfer in timeline.transfers:
            name, size = transfer.link, trace.blocks[transfer.block].size_bytes
            seconds = transfer.end_seconds - transfer.start_seconds
            busy_seconds[name] = busy_seconds.get(name, 0.0) + seconds
            alone_seconds[name] = alone_seconds.get(name, 0.0) + links[name].seconds(size)
        return cls(
            iteration_seconds=timeline.iteration_seconds,
            ideal_seconds=sum(stage.end_seconds - stage.start_seconds for stage in timeline.stages),
            stall_seconds=tuple(stage.stall_seconds for stage in timeline.stages),
            link_seconds_per_byte={link: busy_seconds[link] / size for link, size in timeline.moved_bytes.items() if size},
            contended=frozenset(n for n, alone in alone_seconds.items() if busy_seconds[n] > _CONTENDED * alone),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Measured value over predicted value, less 1; see [Note: What is compared]. links: those that moved something."""

    iteration: float
    stages: float
    links: dict[str, float]

    @property
    def found(self) -> bool:
        """Whether one of the values is beyond DRIFT_LIMIT, up or down."""
        return any(abs(value) > DRIFT_LIMIT for value in (self.iteration, self.stages, *self.links.values()))

    @property
    def plain(self) -> bool:
        """Whether stages or a link are plainly off, up or down."""
        return any(abs(value) > _PLAINLY_OFF for value in (self.stages, *self.links.values()))

    def __str__(self) -> str:
        named = {"iteration": self.iteration, "stages": self.stages, **self.links}
        return ", ".join(f"{name} {value:+.0%}" for name, value in named.items())


def drift_of(expected: Expectation, observations: Sequence[Observation]) -> Drift:
    """Return the drift of the medians of `observations`, which must not be empty."""
    slowdowns = _link_slowdowns(expected, observations)
    return Drift(
        iteration=_relative(statistics.median(o.iteration_seconds for o in observations), expected.iteration_seconds),
        stages=_relative(statistics.median(o.working_seconds for o in observations), expected.ideal_seconds),
        links={link: slowdown - 1.0 for link, slowdown in slowdowns.items()},
    )


def iterations_drift(expected: Expectation, seconds: Collection[float]) -> bool:
    """Return whether whole iterations of these `seconds` have drifted by themselves."""
    return abs(_relative(statistics.median(seconds), expected.iteration_seconds)) > DRIFT_LIMIT


def stages_plainly_off(expected: Expectation, observations: Sequence[Observation]) -> bool:
    """Return whether iterations are alike, and each of their stages' sums is far from what the plan promises."""
    # The time between stages counts neither for nor against: a plan may promise it or not, see [Note: What is compared].
    stages = [sum(o.stage_seconds) + o.rerun_seconds for o in observations]
    working = [o.working_seconds for o in observations]
    alike, ideal = max(working) <= _ALIKE * min(working), expected.ideal_seconds
    # Those that are all plainly faster need not be alike: what disturbs iterations does not make them fast.
    return (alike and min(stages) > (1 + _PLAINLY_OFF) * ideal > 0) or max(working) < (1 - _PLAINLY_OFF) * ideal


def remeasured(trace: planner.Trace, expected: Expectation, observations: Sequence[Observation]) -> planner.Trace:
    """Return the trace with measured stage times and link rates. All else stays as it is.

    expected: what the plan that was followed on `trace` promised. A link that moved nothing keeps its rate.
    """
    measured = [statistics.median(times) for times in zip(*(o.stage_seconds for o in observations), strict=True)]
    inside = [statistics.median(times) for times in zip(*(o.collective_seconds for o in observations), strict=True)]
    # By iteration: a pause of the process in a stage, each time in another one, would be time between stages otherwise.
    between = statistics.median(o.working_seconds - o.rerun_seconds - sum(o.stage_seconds) for o in observations)
    between = max(between, 0.0) / len(measured)
    on_host = _host_seconds(observations)
    # In iterations without an update on the host, if there are any.
    on_device = ([o.stage_seconds[stage] for o in observations if stage not in o.host_seconds] for stage in range(len(measured)))
    seconds = [statistics.median(times or [whole]) + between for times, whole in zip(on_device, measured, strict=True)]
    for stage in on_host:  # the time that the device would take was not measured
        seconds[stage] = trace.stages[stage].duration_seconds
    scale = [_ratio(now, stage.duration_seconds) for now, stage in zip(seconds, trace.stages, strict=True)]
    return trace.rebuilt(
        hardware=_remeasured_hardware(trace.hardware, expected, observations),
        stages=tuple(
            stage.model_copy(update={"duration_seconds": now, "collective_seconds": min(part, now)})
            for stage, now, part in zip(trace.stages, seconds, inside or [0.0] * len(seconds), strict=True)
        ),
        subgroups=tuple(
            s.model_copy(
                update={"device_seconds": s.device_seconds * scale[s.stage], "host_seconds": on_host.get(s.stage, s.host_seconds)}
            )
            for s in trace.subgroups
        ),
        recompute=tuple(r.model_copy(update={"duration_seconds": r.duration_seconds * scale[r.stage]}) for r in trace.recompute),
    )


def _host_seconds(observations: Sequence[Observation]) -> dict[int, float]:
    """Return the median seconds of updates that ran on the host in most iterations, by stage."""
    stages = {stage for o in observations for stage in o.host_seconds}
    times = {stage: [o.host_seconds[stage] for o in observations if stage in o.host_seconds] for stage in stages}
    return {stage: statistics.median(each) for stage, each in times.items() if 2 * len(each) > len(observations)}


def _remeasured_hardware(
    hardware: planner.Hardware, expected: Expectation, observations: Sequence[Observation]
) -> planner.Hardware:
    slowdowns = _link_slowdowns(expected, observations)
    links = tuple(
        link.model_copy(
            update={
                "bytes_per_second": link.bytes_per_second / slowdowns.get(link.name, 1.0),
                "latency_seconds": link.latency_seconds * slowdowns.get(link.name, 1.0),
            }
        )
        for link in hardware.links
    )
    shared = tuple(
        rate.model_copy(update={"bytes_per_second": _shared_rate(rate, slowdowns, expected, observations)})
        for rate in hardware.shared
    )
    return hardware.model_copy(update={"links": links, "shared": shared})


def _shared_rate(
    shared: planner.SharedRate, slowdowns: dict[str, float], expected: Expectation, observations: Sequence[Observation]
) -> float:
    links = [link for link in shared.links if link in slowdowns]
    predicted = expected.link_seconds_per_byte
    weights = [predicted[n] * statistics.median(o.moved_bytes.get(n, 0) for o in observations) for n in links]
    if not links or not sum(weights):
        return shared.bytes_per_second
    slowdown = sum(slowdowns[n] * weight for n, weight in zip(links, weights, strict=True)) / sum(weights)
    # If links slow each other down in the replay and carried more together than the scaled rate, they show the rate themselves.
    carried = sum(1.0 / (slowdowns[n] * predicted[n]) for n in links)
    scaled = shared.bytes_per_second / slowdown
    return max(scaled, carried) if expected.contended.intersection(links) else scaled


def _link_slowdowns(expected: Expectation, observations: Sequence[Observation]) -> dict[str, float]:
    """Return measured seconds per byte over predicted ones, by link. Only for links that moved something in most iterations."""
    # One number cannot tell latency from rate, so both are scaled by it.
    found: dict[str, float] = {}
    for link, predicted in expected.link_seconds_per_byte.items():
        ratios = [
            o.busy_seconds[link] / o.moved_bytes[link] / predicted
            for o in observations
            if predicted and o.moved_bytes.get(link, 0) and o.busy_seconds.get(link, 0.0)
        ]
        if 2 * len(ratios) > len(observations):
            found[link] = statistics.median(ratios)
    return found


def _relative(measured: float, predicted: float) -> float:
    return _ratio(measured, predicted) - 1.0


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted else 1.0
