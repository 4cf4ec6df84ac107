"""How sizes and times of an iteration depend on the length of its inputs, from profiles at several lengths.

Where their number varies too, as in the last batch of a data set, it counts as well: see `planner.schema.terms`. Sizes are sums
of at most three of these terms, and exact where one goes through all profiles. Times are fitted, stage by stage, by what is
constant, what grows with the inputs (what is done for each token) and what grows with the square of the length (attention); none
of it is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, combinations, permutations
from math import prod

import numpy as np
import numpy.typing as npt

import planner
from planner.schema import Lengths, Polynomial, terms
from runtime.device import MIN_MOVED_BYTES
from runtime.execution import SizedGraph
from teraio.profiling.iteration import Iteration
from teraio.profiling.profiler import Profile

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
