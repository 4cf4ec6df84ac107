"""The critical path on traces with a known optimum, and the check that it never has a gap."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from planner import Budgets, Plan, Trace, plan, simulate
from planner.simulator import STAGES, PathSegment, critical_path, seconds_by_resource

from ..strategies import problems
from ..traces import IN, OUT, block, by_hand, hand, move, staged, trace, updating


def path_of(made: Trace, moved: Plan) -> tuple[PathSegment, ...]:
    """Return the critical path. Check that it fills the iteration without a gap, and that its segments are in the replay."""
    timeline = simulate(made, moved)
    path = critical_path(made, moved, timeline)
    now = 0.0
    for segment in path:
        assert segment.start_seconds == pytest.approx(now, rel=1e-9, abs=1e-9 * timeline.iteration_seconds)
        now = segment.end_seconds
    assert now == pytest.approx(timeline.iteration_seconds, rel=1e-9)
    seconds = list(seconds_by_resource(path).values())
    assert sum(seconds) == pytest.approx(timeline.iteration_seconds, rel=1e-9) and seconds == sorted(seconds, reverse=True)
    times = {(STAGES, n): (s.start_seconds, s.end_seconds) for n, s in enumerate(timeline.stages)}
    times |= {(t.link, t.move): (t.start_seconds, t.end_seconds) for t in timeline.transfers}
    times |= {("host updates", u.subgroup): (u.start_seconds, u.end_seconds) for u in timeline.updates}
    for segment in path:
        began, ended = times[segment.resource, segment.index]
        assert (segment.start_seconds, segment.end_seconds) == (max(began, 0.0), ended)
    assert (path[-1].resource, path[-1].index) == (STAGES, len(made.stages) - 1)
    return path


@pytest.mark.parametrize(
    ("name", "budget", "wanted"),
    [
        ("chain", 20, [(STAGES, n) for n in range(6)]),
        (
            "chain",
            10,
            [(STAGES, 0), (OUT, 0), (STAGES, 1), (OUT, 1), (STAGES, 2), (STAGES, 3), (IN, 1), (STAGES, 4), (IN, 0), (STAGES, 5)],
        ),
        ("clean_and_dirty", 20, [(IN, 1), (STAGES, 0), (STAGES, 1), (STAGES, 2), (STAGES, 3)]),
        ("copy_stays_valid", 15, [(STAGES, 0), (OUT, 0), (STAGES, 1), (IN, 0), (STAGES, 2), (STAGES, 3), (IN, 0), (STAGES, 4)]),
        ("user_code", 20, [(STAGES, n) for n in range(6)]),
        ("swap", 30, [(OUT, 1), (IN, 0), (STAGES, 0), (OUT, 0), (IN, 1), (STAGES, 1)]),
    ],
)
def test_on_the_hand_made_traces(name: str, budget: int, wanted: list[tuple[str, int]]) -> None:
    """Copies are named by their block. In 'swap' a copy in waits for the copy out that makes room for it."""
    made = hand(name)
    path = path_of(made, plan(made, Budgets(device_bytes=budget), lower_bound=False))
    assert [(p.resource, p.index if p.block is None else p.block) for p in path] == wanted


def timed(path: tuple[PathSegment, ...]) -> list[tuple[str, int, float]]:
    return [(p.resource, p.index, p.seconds) for p in path]


def test_a_copy_from_the_iteration_before_is_cut_at_the_begin() -> None:
    """A parameter goes out after the last stage and comes back for the first one: 4 s in between, none of it hidden."""
    made = trace(staged("fff"), [block(20, [1], [0], persistent=True), block(10, [2], [2])])
    path = path_of(made, by_hand(made, 20, [move(0, 1, 3, 3)], away={0: "storage"}))
    assert [(p.resource, p.start_seconds, p.end_seconds) for p in path] == [
        (IN, 0.0, 2.0),
        (STAGES, 2.0, 3.0),
        (STAGES, 3.0, 4.0),
        (OUT, 4.0, 6.0),
        (STAGES, 6.0, 7.0),
    ]


def test_a_copy_that_began_in_the_iteration_before() -> None:
    """A clean weight of 3 s is asked for when the last stage is reached, 1 s before the iteration ends."""
    made = trace(staged("ffff"), [block(30, [], [0], persistent=True)])
    found = by_hand(made, 30, [move(0, 0, 4, 3, out=False)])
    assert simulate(made, found).transfers[0].start_seconds == -1.0
    path = path_of(made, found)
    assert timed(path) == [(IN, 0, 2.0), *((STAGES, number, 1.0) for number in range(4))]
    assert [p.start_seconds for p in path] == [0.0, 2.0, 3.0, 4.0, 5.0]


def test_the_host_updates_while_the_device_waits() -> None:
    """The gradient goes out (1 s), the host updates (3 s), the weight comes back (1 s), and only then stage 0 can run."""
    assert timed(path_of(*updating("fbo"))) == [
        ("device->host", 0, 1.0),
        ("host updates", 0, 3.0),
        ("host->device", 1, 1.0),
        (STAGES, 0, 1.0),
        (STAGES, 1, 1.0),
        (STAGES, 2, 0.0),
    ]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_there_is_never_a_gap(problem: tuple[Trace, Budgets]) -> None:
    for policy in ("belady", "teraio", "g10"):
        path_of(problem[0], plan(*problem, policy=policy, lower_bound=False))
