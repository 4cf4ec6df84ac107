"""How sizes and times of an iteration depend on the length of its inputs, from profiles at several lengths.

Sizes are polynomials of the length up to its square, and exact where one goes through all profiles. Times are fitted, stage by
stage, by a constant, a part that grows with the length (what is done for each token) and one that grows with its square
(attention); none of them is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, combinations

import planner
from planner.schema import Lengths, Polynomial
from runtime.device import MIN_MOVED_BYTES
from runtime.execution import SizedGraph
from teraio.profiling.iteration import Iteration
from teraio.profiling.profiler import Profile

_Points = Sequence[tuple[int, float]]  # lengths, and what was found there
_POWERS = (0, 1, 2)
_TICKS = 10**12  # a second in whole numbers, so that sums are exact


def with_lengths(samples: Sequence[Profile], told: Sequence[int] = ()) -> Profile:
    """Return the last profile, the one with the largest inputs, with a trace that says what the others tell of shorter inputs.

    In the trace all inputs are of the greatest length, also where each microbatch of an iteration has one of its own. It stays as
    it is where profiles do not tell enough: where a single length is known, where the sizes of a graph vary in more than one
    way, or where shorter inputs use other blocks. told: the lengths of all inputs in each profile, where they are known.
    """
    last, shape = samples[-1], _shape(samples[-1].trace)
    places = _places([sample.iteration for sample in samples])

    def lengths_in(number: int) -> list[int | None]:
        lengths = _lengths_of(samples[number].iteration, places)
        return [length and told[number] for length in lengths] if told else lengths

    found = [(each.trace, lengths_in(number)) for number, each in enumerate(samples) if _shape(each.trace) == shape]
    known = {length for _, lengths in found for length in lengths if length is not None}
    first = first_sized(last.iteration)
    if first is None or first.graph not in places or len(known) < 2:
        return replace(last, samples=tuple(samples))

    def fitted(
        stages: Sequence[int], value: Callable[[planner.Trace, int], float], fit: Callable[[_Points], list[float]]
    ) -> tuple[Polynomial, ...]:
        polynomials = []
        for number, stage in enumerate(stages):
            points = [(length, value(trace, number)) for trace, lengths in found if (length := lengths[stage]) is not None]
            if len({length for length, _ in points}) > 1 and len({value for _, value in points}) > 1:
                polynomials.append(Polynomial(id=number, coefficients=tuple(fit(points))))
        return tuple(polynomials)

    trace, stages = last.trace, range(len(last.trace.stages))
    lengths = Lengths(
        lowest=min(known),
        highest=max(known),
        place=places[first.graph],
        movable_bytes=MIN_MOVED_BYTES,
        block_bytes=fitted([block.uses[0] for block in trace.blocks], lambda t, i: t.blocks[i].size_bytes, _exact),
        workspace_bytes=fitted(stages, lambda t, i: t.stages[i].workspace_bytes, _exact),
        stage_seconds=fitted(stages, lambda t, i: t.stages[i].duration_seconds, _non_negative),
    )
    trace = _raised(trace.model_copy(update={"lengths": lengths}), lengths_in(-1))
    return replace(last, trace=trace, samples=tuple(samples))


def first_sized(iteration: Iteration) -> SizedGraph | None:
    """Return the first of the graphs that an iteration ran with inputs of varying sizes; None if there is none."""
    return next(_sized(iteration), None)


def _sized(iteration: Iteration) -> Iterator[SizedGraph]:
    return (region.identity for region in iteration.regions if isinstance(region.identity, SizedGraph))


def _places(iterations: Sequence[Iteration]) -> dict[Hashable, int]:
    """Return for each graph which of its sizes is the length: one that varies, and says what all others are, such as strides.

    Empty where none does, as where the batch varies beside the length, and where the lengths of graphs differ.
    """
    sizes: dict[Hashable, set[tuple[int, ...]]] = {}
    for each in chain.from_iterable(map(_sized, iterations)):
        sizes.setdefault(each.graph, set()).add(each.sizes)
    places: dict[Hashable, int] = {}
    lengths: set[int] = set()
    for graph, found in sizes.items():
        if len(found) < 2:
            continue
        columns = list(zip(*found, strict=True))
        wanted = [each for each in columns if not lengths or set(each) == lengths]
        length = next((each for each in wanted if all(_is_line(each, other) for other in columns)), None)
        if length is None:
            return {}
        places[graph], lengths = columns.index(length), set(length)
    return places


def _is_line(lengths: Sequence[int], values: Sequence[int]) -> bool:
    """Return whether values lie on a line over the lengths, as what is constant does; False where lengths are not different."""
    along, up = lengths[1] - lengths[0], values[1] - values[0]
    lies = ((value - values[0]) * along == (length - lengths[0]) * up for length, value in zip(lengths, values, strict=True))
    return len(set(lengths)) == len(lengths) and all(lies)


def _lengths_of(iteration: Iteration, places: Mapping[Hashable, int]) -> list[int | None]:
    """Return for each stage the length of what its region takes; None where nothing that varies."""
    found: list[int | None] = []
    for region in iteration.regions:
        sized = region.identity if isinstance(region.identity, SizedGraph) and region.identity.graph in places else None
        length = None if sized is None else sized.sizes[places[sized.graph]]
        # Updates within a backward pass do not depend on it.
        found += [None if stage.phase == "optimizer" else length for stage in region.stages]
    return found


def _shape(trace: planner.Trace) -> object:
    """Return what traces have in common that differ in sizes and times only."""
    return [stage.name for stage in trace.stages], [(block.name, block.uses) for block in trace.blocks]


def _raised(trace: planner.Trace, recorded: Sequence[int | None]) -> planner.Trace:
    """Return a trace that knows lengths with all inputs of the greatest. recorded: the lengths that its stages had."""
    lengths, stages = trace.lengths, list(trace.stages)
    if lengths is None or {*recorded} <= {None, lengths.highest}:
        return trace
    for each in lengths.stage_seconds:
        if recorded[each.id] != lengths.highest:
            stages[each.id] = stages[each.id].model_copy(update={"duration_seconds": each.at(lengths.highest)})
    groups = [each.model_copy(update={"duration_seconds": stages[each.stage].duration_seconds}) for each in trace.recompute]
    raised = trace.model_copy(update={"stages": tuple(stages), "recompute": tuple(groups)}).resized(lengths.highest)
    return raised.model_copy(update={"lengths": lengths, "work": trace.work})


# -- polynomials


def _exact(points: _Points) -> list[float]:
    """Return the coefficients of the polynomial through all points; if there is none, of one that lies below none of them."""
    sizes = [(length, Fraction(size)) for length, size in points]
    found, missed = [Fraction(0)], [Fraction(0)]
    for count in _POWERS[2:] + (len(_POWERS),):
        if count <= len({length for length, _ in points}):
            found = _least_squares(sizes, _POWERS[:count])
            missed = [size - _value(found, _POWERS, length) for length, size in sizes]
        if not any(missed):
            break
    return [float(found[0] + max(missed)), *map(float, found[1:])]


def _non_negative(points: _Points) -> list[float]:
    """Return the coefficients, none of them negative, of the polynomial with the smallest sum of squared errors."""
    times = [(length, Fraction(round(seconds * _TICKS), _TICKS)) for length, seconds in points]
    best, least = [0.0] * len(_POWERS), None
    for powers in chain.from_iterable(combinations(_POWERS, count) for count in range(1, len(_POWERS) + 1)):
        if len(powers) > len({length for length, _ in points}):
            break
        found = _least_squares(times, powers)
        error = sum((seconds - _value(found, powers, length)) ** 2 for length, seconds in times)
        if min(found) >= 0 and (least is None or error < least):
            least = error
            best = [float(found[powers.index(power)]) if power in powers else 0.0 for power in _POWERS]
    return best


def _value(coefficients: Sequence[Fraction], powers: Sequence[int], length: int) -> Fraction:
    return sum((c * length**power for c, power in zip(coefficients, powers, strict=False)), start=Fraction(0))


def _least_squares(points: Sequence[tuple[int, Fraction]], powers: Sequence[int]) -> list[Fraction]:
    """Return the coefficients of these powers with the smallest sum of squared errors. Needs as many different lengths."""
    rows = [
        [*(Fraction(sum(x ** (p + q) for x, _ in points)) for q in powers), sum((y * x**p for x, y in points), start=Fraction(0))]
        for p in powers
    ]
    for column, above in enumerate(rows):  # no pivot is 0: the matrix is positive definite
        for number, row in enumerate(rows):
            if row is not above:
                share = row[column] / above[column]
                rows[number] = [value - share * other for value, other in zip(row, above, strict=True)]
    return [row[-1] / row[number] for number, row in enumerate(rows)]
