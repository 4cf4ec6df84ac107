"""Builds a trace from recorded iterations. Reads no clock.

[Note: Disturbed iterations]
Another program on the same machine makes some stages of some iterations slower, and none faster. So a stage's time is the median
of those measurements that are near the fastest one: as precise as a median, but it stays right if most iterations were disturbed.
The time of user code is the median of all, since user code does not do the same in each iteration.

A fastest measurement that no other one confirms may itself be disturbed. If too much of the time is in such stages, more
iterations are profiled. A disturbance that lasts through all of them shows only later, see [Note: Planning again] in
`teraio.following.replanning`.

From profiles at several lengths of inputs follows how sizes and times depend on the length. Where the number of inputs varies, as
in the last batch of a data set, it counts as well: see `planner.schema.terms`. Sizes are sums of at most three of these terms,
and exact where one goes through all profiles. Times are fitted, stage by stage, by what is constant, what grows with the inputs
(what is done for each token) and what grows with the square of the length (attention); none of it is negative.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations, pairwise, permutations
from math import prod

import numpy as np
import numpy.typing as npt

import planner
from planner.schema import Lengths, Polynomial, terms
from runtime.device import MIN_MOVED_BYTES
from runtime.execution import SizedGraph, StageRun
from runtime.paging import Block
from teraio.profiling.iteration import Iteration, undisturbed

# The name of the block that stands for all that stays on the device without being a block.
FIXED_NAME = "small optimizer states"
_UNSURE = 0.1  # share of the time that may be in stages with a single undisturbed measurement
_ENOUGH_TO_JUDGE = 3  # with fewer iterations, whoever has asked for so few gets what they say


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A trace, the iteration that it describes, and the trace ids of its blocks.

    samples: the profiles of inputs of several lengths that its trace is from, see `with_lengths`; this one last.
    """

    trace: planner.Trace
    iteration: Iteration
    ids: dict[Block, int]
    samples: tuple[Profile, ...] = ()

    @property
    def made_bytes(self) -> int:
        """`Iteration.made_bytes` of an iteration with the sizes of the trace, which may be others than those of `iteration`."""
        return sum(self.trace.blocks[self.ids[block]].size_bytes for block in self.iteration.made() if block in self.ids)


def build_profile(
    iterations: Sequence[Iteration],
    *,
    name: str,
    created_by: str,
    hardware: planner.Hardware,
    fixed_bytes: int,
    survivors: set[tuple[int, int]],
    no_reruns: str = "",
) -> Profile:
    """Return the trace of the last of `iterations`. Times are those of undisturbed stages, see [Note: Disturbed
    iterations]; the signatures must be equal.

    survivors: (region, ordinal) of the made blocks that outlive the iteration.
    fixed_bytes: what stays on the device without being a block, such as small optimizer states. It becomes one block that does
    not move. no_reruns: why no stage may run again; "" if some may.
    """
    last = iterations[-1]
    stages = last.stages
    times = _stage_seconds(iterations)
    runs = zip(*(iteration.stages for iteration in iterations), strict=True)
    collectives = [statistics.median(stage.collective_seconds for stage in of_one) for of_one in runs]
    uses = _Uses.of(last)
    blocks = [_block(last, uses, block, number, survivors) for block, number in uses.ids.items()]
    if fixed_bytes:
        blocks.append(_fixed_block(len(blocks), fixed_bytes, [s.phase for s in stages]))
    groups, not_recomputed = _recompute_groups(stages, times, blocks, uses.ids, against=no_reruns)
    trace = planner.Trace(
        name=name,
        created_by=created_by,
        hardware=hardware,
        stages=tuple(
            planner.Stage(
                id=position,
                name=s.name,
                phase=s.phase,
                duration_seconds=seconds,
                workspace_bytes=s.workspace_bytes,
                collective_seconds=min(inside, seconds),
            )
            for position, (s, seconds, inside) in enumerate(zip(stages, times, collectives, strict=True))
        ),
        blocks=tuple(blocks),
        subgroups=_subgroups(stages, times, uses.ids),
        recompute=groups,
        not_recomputed=not_recomputed,
    )
    return Profile(trace=trace, iteration=last, ids=uses.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uses:
    """Where an iteration uses its blocks.

    ids: trace ids, in the order of first use. reads, writes: positions, ascending. made: (region, ordinal) of the blocks that
    it creates.
    """

    ids: dict[Block, int]
    reads: dict[Block, list[int]]
    writes: dict[Block, list[int]]
    made: dict[Block, tuple[int, int]]

    @classmethod
    def of(cls, iteration: Iteration) -> _Uses:
        ids: dict[Block, int] = {}
        reads: dict[Block, list[int]] = {}
        writes: dict[Block, list[int]] = {}
        for position, stage in enumerate(iteration.stages):
            # In other iterations, an update reads the state that it makes, or replaces by a new tensor, in this one.
            states = [block for block in stage.made if block.kind == "optimizer_state"]
            for uses, used in ((reads, (*stage.read, *states)), (writes, (*stage.made, *stage.written))):
                for block in dict.fromkeys(used):
                    ids.setdefault(block, len(ids))
                    uses.setdefault(block, []).append(position)
        for region, following in pairwise(iteration.regions):
            outputs = [block for block in region.made if block.user_visible and block.kind == "activation"]  # of a model
            for block in dict.fromkeys((*outputs, *region.read_next)):  # user code, or autograd, reads it next
                reads.setdefault(block, []).append(following.first)
        made = {block: (i, n) for i, region in enumerate(iteration.regions) for n, block in enumerate(region.made)}
        return cls(ids=ids, reads=reads, writes=writes, made=made)


def _block(iteration: Iteration, uses: _Uses, block: Block, number: int, survivors: set[tuple[int, int]]) -> planner.Block:
    reads, writes = uses.reads.get(block, []), uses.writes.get(block, [])
    first, last = min((*reads, *writes)), max((*reads, *writes))
    kept = block.kind == "optimizer_state"
    made = uses.made.get(block)
    external = not kept and made is None and block.born == iteration.number  # created by user code
    persistent = kept or (made in survivors if made is not None else not external)
    created = [max(region.first for region in iteration.regions if region.first <= first)] if external else []
    outlives = block.kind == "gradient" and not persistent and block in iteration.held
    end = len(iteration.stages) - 1
    return planner.Block(
        id=number,
        name=block.name,
        kind=block.kind,
        size_bytes=block.size_bytes,
        persistent=persistent,
        reads=tuple(sorted(reads)),
        writes=tuple(sorted({*writes, *created})),
        movable=block.span is not None,
        dies_after=end if outlives and last < end else None,
    )


def _subgroups(stages: Sequence[StageRun], times: Sequence[float], ids: dict[Block, int]) -> tuple[planner.Subgroup, ...]:
    """Return one subgroup for each stage that updates parameters."""
    updating = [(place, stage, time) for place, (stage, time) in enumerate(zip(stages, times, strict=True)) if stage.elements]
    return tuple(
        planner.Subgroup(
            id=number,
            stage=place,
            blocks=tuple(sorted({ids[block] for block in (*stage.read, *stage.made)})),
            elements=stage.elements,
            device_seconds=seconds,
            host_seconds=stage.host_seconds,
        )
        for number, (place, stage, seconds) in enumerate(updating)
    )


def _fixed_block(number: int, size_bytes: int, phases: Sequence[str]) -> planner.Block:
    steps = tuple(i for i, phase in enumerate(phases) if phase == "optimizer") or (len(phases) - 1,)
    return planner.Block(
        id=number,
        name=FIXED_NAME,
        kind="optimizer_state",
        size_bytes=size_bytes,
        persistent=True,
        reads=steps,
        writes=steps,
        movable=False,
    )


# -- stages that can run again


def _recompute_groups(
    stages: Sequence[StageRun],
    times: Sequence[float],
    blocks: Sequence[planner.Block],
    ids: Mapping[Block, int],
    *,
    against: str = "",
) -> tuple[tuple[planner.RecomputeGroup, ...], tuple[planner.NotRecomputed, ...]]:
    """Return the groups, and the stages that make something for the backward pass but cannot run again, with the reason.

    times: seconds of each stage. blocks: of the trace. ids: their trace ids. against: a reason that holds for all of them.
    """
    used: list[list[planner.Block]] = [[] for _ in stages]
    for block in blocks:
        for use in block.uses:
            used[use].append(block)
    groups: list[planner.RecomputeGroup] = []
    others: list[planner.NotRecomputed] = []
    for position, stage in enumerate(stages):
        if stage.phase != "forward":
            continue
        wanted = [ids[b] for b in stage.made if _for_backward(b, blocks[ids[b]], position, stages)]
        if wanted and (reason := against or stage.never_again or _kept_result(stage, blocks, ids)):
            others.append(planner.NotRecomputed(stage=position, reason=reason))
        elif wanted:
            unwanted = sum(block.size_bytes for block in stage.made if ids[block] not in wanted)
            before = {block.id for block in used[position] if block.persistent or block.uses[0] < position}
            groups.append(
                planner.RecomputeGroup(
                    id=len(groups),
                    stage=position,
                    blocks=tuple(sorted(wanted)),
                    reads=tuple(sorted(before)),
                    duration_seconds=times[position],
                    workspace_bytes=stage.workspace_bytes + unwanted,
                )
            )
    return tuple(groups), tuple(others)


def _kept_result(stage: StageRun, blocks: Sequence[planner.Block], ids: Mapping[Block, int]) -> str:
    """Return which result of the stage outlives the iteration, as a reason; "" if none does. To a trace, the stage changes it."""
    kept = (block.name for block in stage.made if blocks[ids[block]].persistent)
    return next((f"it makes {name}, which your code keeps beyond the end of the iteration" for name in kept), "")


def _for_backward(made: Block, block: planner.Block, made_in: int, stages: Sequence[StageRun]) -> bool:
    if made.span is None or made.user_visible or made.kind != "activation":
        return False
    if block.persistent or block.dies_after is not None or block.uses[0] != made_in:
        return False
    return any(stages[use].phase == "backward" for use in block.uses)


# -- times, see [Note: Disturbed iterations]


def _stage_seconds(iterations: Sequence[Iteration]) -> list[float]:
    """Return the seconds of each stage while nothing disturbs it, by position. The iterations must have equal signatures."""
    return [statistics.median(times if phase == "user" else undisturbed(times)) for phase, times in _measurements(iterations)]


def times_agree(iterations: Sequence[Iteration]) -> bool:
    """Return whether at least two of the iterations agree about most of the time that compiled stages and updates take."""
    if len(iterations) < _ENOUGH_TO_JUDGE:
        return True
    stages = [times for phase, times in _measurements(iterations) if phase != "user"]
    typical = [statistics.median(times) for times in stages]
    unsure = sum(seconds for seconds, times in zip(typical, stages, strict=True) if len(undisturbed(times)) < 2)
    return unsure <= _UNSURE * sum(typical)


def _measurements(iterations: Sequence[Iteration]) -> list[tuple[str, list[float]]]:
    """Return the phase of each stage with its seconds in each iteration, by position. Without those in which the allocator had to
    take memory away, if there are others."""
    runs = zip(*(iteration.stages for iteration in iterations), strict=True)
    return [(stages[0].phase, [s.seconds for s in stages if not s.retried] or [s.seconds for s in stages]) for stages in runs]


# -- lengths

Sizes = tuple[int, ...]  # the length, and the number of inputs where that varies
_Numbers = npt.NDArray[np.float64]
_MOST_TERMS = 3  # of a polynomial: with more, few profiles tell little
_LARGEST_DENOMINATOR = 10**6  # of what is exact
_SAME = 0.25  # of a byte


def with_lengths(samples: Sequence[Profile], told: Sequence[int] = ()) -> Profile:
    """Return the last profile, the one with the largest inputs, with a trace that says what the others tell of shorter inputs.

    In the trace all inputs are of the greatest sizes, also where each microbatch of an iteration has some of its own. It stays as
    it is where profiles do not tell enough: where a single length is known, where more sizes of a graph vary than length and
    number, or where shorter inputs use other blocks. told: the lengths of all inputs in each profile, where they are known.
    """
    last, shape = samples[-1], _shape(samples[-1].trace)
    places = _places([sample.iteration for sample in samples])

    def sizes_in(number: int) -> list[Sizes | None]:
        sizes = _sizes_of(samples[number].iteration, places)
        return [each and (told[number],) for each in sizes] if told else sizes

    found = [(each.trace, sizes_in(number)) for number, each in enumerate(samples) if _shape(each.trace) == shape]
    known = {sizes for _, by_stage in found for sizes in by_stage if sizes is not None}
    first = first_sized(last.iteration)
    if first is None or first.graph not in places or len(known) < 2:
        return replace(last, samples=tuple(samples))

    def fitted(
        stages: Sequence[int], value: Callable[[planner.Trace, int], float], *, exact: bool = False
    ) -> tuple[Polynomial, ...]:
        """stages: for each quantity the one whose sizes it depends on."""
        alike: dict[tuple[Sizes | None, ...], list[int]] = {}  # quantities, by the sizes in each profile
        for number, stage in enumerate(stages):
            alike.setdefault(tuple(by_stage[stage] for _, by_stage in found), []).append(number)
        polynomials = []
        for row, numbers in alike.items():
            points = [sizes for sizes in row if sizes is not None]
            traces = [trace for (trace, _), sizes in zip(found, row, strict=True) if sizes is not None]
            values = [[value(trace, number) for trace in traces] for number in numbers]
            vary = [number for number, each in enumerate(values) if len(set(points)) > 1 and len(set(each)) > 1]
            for number, factors in zip(vary, _fitted(points, [values[number] for number in vary], exact=exact), strict=True):
                polynomials.append(Polynomial(id=numbers[number], coefficients=factors))
        return tuple(sorted(polynomials, key=lambda each: each.id))

    trace, stages, highest = last.trace, range(len(last.trace.stages)), max(known, key=lambda sizes: (prod(sizes), sizes))
    lengths = Lengths(
        lowest=tuple(min(*each, most) for *each, most in zip(*known, highest, strict=True)),
        highest=highest,
        places=places[first.graph],
        movable_bytes=MIN_MOVED_BYTES,
        block_bytes=fitted([block.uses[0] for block in trace.blocks], lambda t, i: t.blocks[i].size_bytes, exact=True),
        workspace_bytes=fitted(stages, lambda t, i: t.stages[i].workspace_bytes, exact=True),
        stage_seconds=fitted(stages, lambda t, i: t.stages[i].duration_seconds),
    )
    trace = _raised(trace.model_copy(update={"lengths": lengths}), sizes_in(-1))
    return replace(last, trace=trace, samples=tuple(samples))


def first_sized(iteration: Iteration) -> SizedGraph | None:
    """Return the first of the graphs that an iteration ran with inputs of varying sizes; None if there is none."""
    return next(_sized(iteration), None)


def _sized(iteration: Iteration) -> Iterator[SizedGraph]:
    return (region.identity for region in iteration.regions if isinstance(region.identity, SizedGraph))


def _places(iterations: Sequence[Iteration]) -> dict[Hashable, tuple[int, ...]]:
    """Return for each graph where among its sizes the length is and, if a second one varies by itself, the number of inputs.

    These say what all others are, such as strides. Empty where no two do, and where those of graphs differ. The length is the one
    with more values.
    """
    sizes: dict[Hashable, set[Sizes]] = {}
    for each in chain.from_iterable(map(_sized, iterations)):
        sizes.setdefault(each.graph, set()).add(each.sizes)
    places: dict[Hashable, tuple[int, ...]] = {}
    known: set[Sizes] = set()
    for graph, found in sizes.items():
        if len(found) < 2:
            continue
        columns = np.array(sorted(found), dtype=float).T
        choices = chain.from_iterable(permutations(range(len(columns)), count) for count in (1, 2))
        chosen = next((each for each in choices if _say_all(columns, each, found, known)), None)
        if chosen is None:
            return {}
        places[graph], known = chosen, _at(found, chosen)
    return places


def _at(found: set[Sizes], places: tuple[int, ...]) -> set[Sizes]:
    return {tuple(sizes[place] for place in places) for sizes in found}


def _say_all(columns: _Numbers, places: tuple[int, ...], found: set[Sizes], known: set[Sizes]) -> bool:
    """Return whether the sizes in these places say what all others are. known: what they are to be, if anything is known."""
    here = _at(found, places)
    values = [len({sizes[number] for sizes in here}) for number in range(len(places))]
    if len(here) < len(found) or min(values) < 2 or values != sorted(values, reverse=True) or (known and here != known):
        return False
    lines = np.vstack([np.ones(len(found)), columns[list(places)]]).T
    factors = np.linalg.lstsq(lines, columns.T)[0]
    return bool(np.abs(lines @ factors - columns.T).max() < _SAME)


def _sizes_of(iteration: Iteration, places: Mapping[Hashable, tuple[int, ...]]) -> list[Sizes | None]:
    """Return for each stage the sizes of what its region takes; None where nothing that varies."""
    found: list[Sizes | None] = []
    for region in iteration.regions:
        sized = region.identity if isinstance(region.identity, SizedGraph) and region.identity.graph in places else None
        sizes = None if sized is None else tuple(sized.sizes[place] for place in places[sized.graph])
        # Updates within a backward pass do not depend on it.
        found += [None if stage.phase == "optimizer" else sizes for stage in region.stages]
    return found


def _shape(trace: planner.Trace) -> object:
    """Return what traces have in common that differ in sizes and times only."""
    return [stage.name for stage in trace.stages], [(block.name, block.uses) for block in trace.blocks]


def _raised(trace: planner.Trace, recorded: Sequence[Sizes | None]) -> planner.Trace:
    """Return a trace that knows lengths with all inputs of the greatest sizes. recorded: those that its stages had."""
    lengths, stages = trace.lengths, list(trace.stages)
    if lengths is None or {*recorded} <= {None, lengths.highest}:
        return trace
    for each in lengths.stage_seconds:
        if recorded[each.id] != lengths.highest:
            stages[each.id] = stages[each.id].model_copy(update={"duration_seconds": each.at(lengths.highest)})
    groups = [each.model_copy(update={"duration_seconds": stages[each.stage].duration_seconds}) for each in trace.recompute]
    raised = trace.model_copy(update={"stages": tuple(stages), "recompute": tuple(groups)}).resized(lengths.highest)
    return raised.model_copy(update={"lengths": lengths, "work": trace.work})


def _fitted(points: Sequence[Sizes], values: Sequence[Sequence[float]], *, exact: bool) -> list[tuple[float, ...]]:
    """Return for each quantity the coefficients of its polynomial, from its values at all points.

    They are those, none of them negative, with the smallest sum of squared errors. exact: of the polynomial with the fewest terms
    that goes through all points; if none does, of one that lies below none of them.
    """
    at, wanted = np.array([terms(sizes) for sizes in points]), np.array(values, dtype=float).T
    if not len(values):
        return []
    scale = at.max(axis=0)
    found, least = np.zeros((at.shape[1], len(values))), np.full(len(values), np.inf)
    most = min(_MOST_TERMS, len(set(points)))
    for chosen in chain.from_iterable(combinations(range(at.shape[1]), count) for count in range(1, most + 1)):
        some = list(chosen)
        factors, _, rank, _ = np.linalg.lstsq(at[:, some] / scale[some], wanted)
        missed = at[:, some] / scale[some] @ factors - wanted
        error = (missed**2).sum(axis=0)
        hit = np.abs(missed).max(axis=0) < _SAME if exact else np.zeros(len(values), dtype=bool)
        error[hit] = 0.0
        better = (rank == len(some)) & (hit | (factors >= 0).all(axis=0)) & (error < least)
        least[better] = error[better]
        found[:, better] = 0.0
        found[np.ix_(some, better)] = factors[:, better] / scale[some, None]
    if exact:
        found = np.vectorize(lambda factor: float(Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)))(found)
        found[0] += np.maximum((wanted - at @ found).max(axis=0), 0.0) * (least > 0)
    return [tuple(map(float, factors)) for factors in found.T]
