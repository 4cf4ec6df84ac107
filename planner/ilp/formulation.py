"""Build the integer program over coarse time, one function for each constraint family; more of them are in `planner.ilp.model`.

Symbols: segments k with duration τ_k; classes c of blocks with periods p = (a, b) in segments; tiers t.

* y_{p,t} ∈ {0, 1}: the class waits in t during p. d_{p,t} ∈ [0, y]: the share that finds a valid copy there.
* O_{p,t,k}, I_{p,t,k} ∈ [0, 1]: the shares copied out and in by the end of segment k; both ascend.
* δ_k ≥ 0: the stall before segment k. e_k ≥ 0: bytes that leave during that stall. v_k ≥ 0: bytes that the coarse model cannot
  place in segment k. They cost as much as moves on demand, and the exact stage places them.
* h_g ∈ {0, 1}: whether an optimizer subgroup updates on the host; see `planner.lp.host_update_rows`.
* r_c ∈ [0, 1]: the share of the recompute groups of class c that run again; see `planner.ilp.model`.

The memory of a segment is that of its peak stage: a block is absent there if its period contains that stage. What has left by
the end of a segment makes room from the next one on. The solver's bound is a bound on this model only.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from planner.ilp.classes import BlockClass, ClassPeriod, SegmentGrid, classes_of, group_classes, segments_of
from planner.ilp.model import (
    CoarseModel,
    PeriodVariables,
    add_capacity,
    add_link_time,
    add_rerun_memory,
    add_rerun_reads,
    add_time,
    add_updates,
    add_user_code,
    reruns_in,
)
from planner.lp import Program, Terms, TimeRows, add_host_update, host_update_classes, scaled, steps
from planner.problem import TIE_WEIGHT, Problem, RerunPlaces, Route, in_units, made_by, outward_weight
from planner.schema import Subgroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """How fine a program is: the most segments, the number of them that a copy may choose from, and about how many classes of
    blocks may exist at once. If there are more blocks than that, some are put together: large programs stay solvable.
    """

    max_segments: int
    window: int
    classes_at_peak: int = 300


def coarse_program(
    problem: Problem,
    resolution: Resolution,
    subgroups: Sequence[Subgroup],
    *,
    write_weight: float,
    apart: bool = False,
    decided: bool = False,
    places: RerunPlaces | None = None,
    reserve_bytes: int = 0,
) -> CoarseModel:
    """Build a program. subgroups: those that may update on the host, or (decided) that do. places: groups that may run again.

    apart: keep like subgroups apart; otherwise they are one class, whose h is any share.
    reserve_bytes: of the budget, which stay free for what the model divides and the exact stage cannot.
    """
    began, program = time.perf_counter(), Program()
    segments = segments_of(problem, resolution.max_segments)
    grid, scaled = SegmentGrid(segments), in_units(problem)
    reruns = [] if places is None else group_classes(scaled, places, grid)
    model = CoarseModel(
        problem=scaled,
        program=program,
        asked=(resolution, tuple(each.id for each in subgroups), write_weight, apart, decided, places is None, reserve_bytes),
        segments=tuple(replace(segment, seconds=segment.seconds / scaled.unit_seconds) for segment in segments),
        stall=[program.variable(inf) for _ in segments],
        leaving=[program.variable(inf) for _ in segments],
        unplaced=[program.variable(inf) for _ in segments],
        time=TimeRows(scaled, len(segments)),
        visible=TimeRows(scaled, len(segments)),
        reruns=reruns,
        again=[program.variable() for _ in reruns],
    )
    at_peak = resolution.classes_at_peak
    largest = max(problem.budgets.device_bytes * 3 // at_peak, max(problem.live_bytes) // at_peak, 1)
    rerun_of = made_by(problem.source, [each.groups for each in reruns])
    updates = host_update_classes(scaled, grid, subgroups, apart=apart, window=resolution.window)
    owners = [update.subgroups for update in updates]
    for block_class in classes_of(problem, grid, owners, largest_bytes=largest, rerun_of=rerun_of):
        for period in block_class.periods:
            for route in scaled.routes:
                model.periods.append(_variables(program, block_class, period, route, resolution.window))
    for windows in updates:
        model.updates.append(add_host_update(program, windows, scaled.route("host"), count=len(segments), whole=True))
        program.lower[model.updates[-1].chosen] = float(decided)
    _add_objective(model, write_weight)
    _add_one_tier_each(model)
    _add_copy_order(model)
    _add_valid_copies(model)
    _add_memory(model, reserve_bytes)
    add_time(model)
    for route in scaled.routes:
        add_link_time(model, route)
        add_user_code(model, route)
        add_capacity(model, route)
    for number in range(len(scaled.shared)):
        model.add_time_limit(f"shared {number}")
    add_updates(model)
    add_rerun_reads(model)
    model.build_seconds = time.perf_counter() - began
    return model


def _variables(program: Program, block_class: BlockClass, period: ClassPeriod, route: Route, window: int) -> PeriodVariables:
    span = range(period.begin + 1, period.end)
    # Copies out happen in the first few segments of a period, copies in in the last few: more choice only makes it larger.
    first_in = len(span) if period.final else max(len(span) - window, 0)
    clean_possible = period.rank > 0 or block_class.read_only
    out = [program.variable() for _ in ([] if block_class.read_only else span[:window])]
    return PeriodVariables(
        block_class=block_class,
        period=period,
        route=route,
        chosen=program.variable(whole=True),
        found=program.variable() if clean_possible else None,
        out=[] if block_class.read_only else out + out[-1:] * (len(span) - len(out)),
        into=[None] * first_in + [program.variable() for _ in span[first_in:]],
    )


def _add_objective(model: CoarseModel, write_weight: float) -> None:
    """min Σ τ_k − Σ h_g · device_seconds + Σ δ_k + λ_t · seconds out + ε/10 · seconds in + Σ v_k · (1/rate_out + 1/rate_in)
    + Σ d_c r_c · (1 + ε).

    λ_t is the weight of writes for storage. For the host tier, which does not wear out, it is ε, which only breaks ties: of equal
    plans, the one that copies less and runs less again wins.
    """
    problem, ideal = model.problem, model.program.variable()
    model.program.lower[ideal] = 1.0
    terms: Terms = [(ideal, sum(segment.seconds for segment in model.segments))]
    terms += [(stall, 1.0) for stall in model.stall]
    route = problem.routes[0]
    per_byte = 1 / route.outward.bytes_per_second + 1 / route.inward.bytes_per_second
    terms += [(variable, per_byte * problem.byte_scale) for variable in model.unplaced]
    for entry in model.periods:
        terms.append((entry.chosen, TIE_WEIGHT / 10 * entry.in_seconds))
        if entry.out:
            terms.append((entry.out[-1], outward_weight(entry.route.tier, write_weight) * entry.out_seconds))
    terms += [(share, each.seconds * (1 + TIE_WEIGHT)) for each, share in zip(model.reruns, model.again, strict=True)]
    for update in model.updates:
        terms.append((update.chosen, -update.windows.device_seconds))
        for route in problem.routes:
            for link, weight in ((route.outward, TIE_WEIGHT), (route.inward, TIE_WEIGHT / 10)):
                terms += [(v, c * weight) for row in update.busy[link.name].values() for v, c in row]
    model.program.minimise(terms)


def _add_one_tier_each(model: CoarseModel) -> None:
    """Σ_t y_{p,t} ≤ 1; if p is the period in which c runs again, Σ_t y_{p,t} + r_c ≤ 1."""
    for entries in model.by_period():
        terms = [(model.again[number], 1.0) for number in reruns_in(model, entries[0])]
        terms += [(entry.chosen, 1.0) for entry in entries]
        if len(terms) > 1:
            model.program.at_most(terms, 1)


def _add_copy_order(model: CoarseModel) -> None:
    """O_k ≥ O_{k−1}, I_k ≥ I_{k−1}, O_{b−1} + d = y, I_k ≤ O_{k−1} + d (read_only: d = y), I_b = y (0 if p is final)."""
    for entry in model.periods:
        program, found = model.program, entry.found
        program.ascend(entry.out)
        program.ascend(entry.into)
        valid: Terms = [(entry.chosen, -1.0)]
        if entry.out:
            valid.append((entry.out[-1], 1.0))
        if found is not None:
            valid.append((found, 1.0))
        program.equal(valid, 0)
        for position, into in enumerate(entry.into):
            if into is None:
                continue
            if entry.out and position > 0 and entry.out[position - 1] == entry.out[-1]:
                # The copy out is done by then: I_{b−1} ≤ y says the same.
                if position == len(entry.into) - 1:
                    program.at_most([(into, 1.0), (entry.chosen, -1.0)], 0)
                continue
            terms: Terms = [(into, 1.0)]
            if entry.out and position > 0:
                terms.append((entry.out[position - 1], -1.0))
            if found is not None:
                terms.append((found, -1.0))
            program.at_most(terms, 0)


def _add_valid_copies(model: CoarseModel) -> None:
    """d_p ≤ Σ O_{p',end} over the earlier periods p' of the same class, epoch and tier; in the host tier, plus h_g."""
    families: dict[tuple[object, ...], list[PeriodVariables]] = defaultdict(list)
    for entry in model.periods:
        if not entry.block_class.read_only:
            key = (entry.block_class.blocks, entry.period.epoch, entry.route.tier)
            families[key].append(entry)
    for family in families.values():
        family.sort(key=lambda entry: entry.period.rank)
        for position, entry in enumerate(family):
            if entry.found is not None:
                terms: Terms = [(entry.found, 1.0)] + [(p.out[-1], -1.0) for p in family[:position]]
                if entry.route.tier == "host" and entry.block_class.update is not None:
                    terms.append((model.updates[entry.block_class.update].chosen, -1.0))
                model.program.at_most(terms, 0)


def _add_memory(model: CoarseModel, reserve_bytes: int) -> None:
    """live_k − Σ size · (O_{k−1} + d − I_k) ≤ budget − reserve + e_k + v_k; live_k: the live bytes at the segment's peak.

    Re-runs: see `planner.ilp.model.add_rerun_memory`. And e_k ≤ rate · δ_k, e_k ≤ Σ size · ΔO_k.
    """
    problem, count, scale = model.problem, len(model.segments), model.problem.byte_scale
    rows: list[Terms] = [[(model.leaving[k], -1.0), (model.unplaced[k], -1.0)] for k in range(count)]
    for entry in model.periods:
        share = entry.block_class.size_bytes / scale
        for position in range(len(entry.into)):
            row = rows[(entry.period.begin + 1 + position) % count]
            row += [(variable, -factor * share) for variable, factor in entry.absent(position)]
    for update in model.updates:
        for k, terms in update.absent.items():
            rows[k] += [(variable, -size / scale) for variable, size in terms]
    add_rerun_memory(model, rows)
    budget = problem.budgets.device_bytes - reserve_bytes
    model.program.levels(rows, [(budget - problem.live_bytes[segment.peak]) / scale for segment in model.segments])
    leaving: list[Terms] = [[(model.leaving[k], scale)] for k in range(count)]
    for entry in model.periods:
        for position, step in steps(entry.out):
            row = leaving[(entry.period.begin + 1 + position) % count]
            row += scaled(step, -float(entry.block_class.size_bytes))
    for update in model.updates:
        for k, terms in update.left.items():
            leaving[k] += [(variable, -size) for variable, size in terms]
    rate = sum(route.outward.bytes_per_second for route in problem.routes)
    for k in range(count):
        # The bytes that leave during a stall are among those that leave in the segment, and the links limit them.
        model.program.at_most([(v, c / scale) for v, c in leaving[k]], 0)
        model.program.at_most([(model.leaving[k], 1.0), (model.stall[k], -rate / scale)], 0)
