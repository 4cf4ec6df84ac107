"""Answers before a launch: does this training fit, how fast is it, what holds it up, what would change that. Needs no torch.

The training is planned as asked for, and with one thing changed at a time: more of a machine, another batch. The trace of a
step in several passes, whose gradients add up, is made from that of a step with fewer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import inf
from typing import Any, Literal, TypeVar

import planner
from planner.errors import BudgetError, OptionsError, TeraioError, UnsupportedError
from planner.problem import SolverSettings, live_bytes
from planner.schema import Block, Budgets, FrozenModel, Predicted, RecomputeGroup, Stage, Work, printable
from planner.simulator import STAGES, critical_path, seconds_by_resource

# no plan exists: it is proved, since one stage alone needs more. none was found: a plan may exist, but the planner has none.
Fit = Literal["yes", "no plan exists", "none was found"]
Unit = Literal["tokens", "samples"]
# layer by layer: each layer runs for all passes before the next one does, forward and backward. So its parameters come in once
# for all passes, and what is between two layers waits for all of them. A training loop has to do that: teraio keeps its order.
Order = Literal["pass by pass", "layer by layer"]


class Geometry(FrozenModel):
    """How a step is divided into passes: `microbatch` tokens, or samples, in each of `passes`. trace_name: of one pass."""

    trace_name: str
    microbatch: int
    passes: int
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question: `trace` planned under `budgets`. what: in words. drives: how many there are. work: samples of an iteration,
    relative to the case asked for.

    more: the machine has more than in the case asked for, and nothing else differs: a plan for that case is tried for this one.
    geometry: how the step is divided, where that is the question.
    """

    what: str
    trace: planner.Trace
    budgets: Budgets
    drives: int
    work: float = 1.0
    more: bool = False
    geometry: Geometry | None = None


_HARDLY = 0.01  # share of the iteration below which waiting is not worth a word


class Answer(FrozenModel):
    """One case. speed: samples in a second, relative to the training as asked for; None if either has no plan, and between
    geometries, whose steps are alike.

    work: of its iteration. floor_bytes: the smallest device budget; sliced_floor_bytes: the same where large parameters are
    updated in slices.
    predicted, holds_up: of the best plan; None and "" without one. holds_up: what its critical path spends the most time on,
    besides computing. written_bytes_per_day: to the drives, in training without a break.
    reason: why there is no plan. limited: the search for the plan ended at the limit of time.
    """

    what: str
    fit: Fit
    budgets: Budgets
    floor_bytes: int
    sliced_floor_bytes: int
    peak_bytes: int
    ideal_seconds: float
    work: Work | None = None
    predicted: Predicted | None = None
    speed: float | None = None
    holds_up: str = ""
    written_bytes_per_day: float = 0.0
    limited: bool = False
    reason: str = ""
    geometry: Geometry | None = None


class Advice(FrozenModel):
    """The training as asked for comes first; of geometries, the one with the shortest step."""

    trace_name: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adviser:
    """Plans each case, one after the other; waits for all of them.

    drives: how many drives the storage tier of the traces has. progress: is told what is being planned.
    made: is given each case with its plan.
    """

    settings: SolverSettings
    drives: int = 1
    progress: Callable[[str], None] = lambda text: None
    made: Callable[[Case, planner.Plan], None] = lambda case, plan: None

    def advise(self, trace: planner.Trace, budgets: Budgets) -> Advice:
        """Plan the training as it is asked for, and with each change that makes sense for it."""
        return Advice(trace_name=trace.name, answers=tuple(self._answers(cases(trace, budgets, drives=self.drives))))

    def divide(self, traces: Sequence[planner.Trace], budgets: Budgets, *, step: int, unit: Unit = "tokens") -> Advice:
        """Plan a step of so many tokens, or samples, in each way in which the traces can divide it. The shortest one comes first.

        traces: each of a pass, or of some passes, with an update. Of one with a range of sizes, the largest microbatch that
        divides the step is taken, then the largest of at most half of it, and so on. Raises OptionsError where no trace divides
        the step, and UnsupportedError as `with_passes` does.
        """
        answers = self._answers(geometries(traces, budgets, step=step, unit=unit, drives=self.drives))
        answers.sort(key=lambda each: (each.predicted.iteration_seconds if each.predicted else inf, each.floor_bytes))
        return Advice(trace_name=", ".join(dict.fromkeys(trace.name for trace in traces)), answers=tuple(answers))

    def _answers(self, asked_for: Iterable[Case]) -> list[Answer]:
        """Plan each case. The first one is what others are held against, but for geometries."""
        answers: list[Answer] = []
        asked: planner.Plan | None = None
        for case in asked_for:
            self.progress(f"planning: {case.what}")
            incumbents = (asked,) if case.more and asked is not None else ()
            plan, fit, reason = planned(case.trace, case.budgets, self.settings, incumbents=incumbents)
            if not answers and case.geometry is None:
                asked = plan
            if plan is not None:
                self.made(case, plan)
            answers.append(_answer(case, plan, fit, reason, asked))
        return answers


def _answer(case: Case, plan: planner.Plan | None, fit: Fit, reason: str, asked: planner.Plan | None) -> Answer:
    return Answer(
        what=case.what,
        fit=fit,
        budgets=case.budgets,
        floor_bytes=planner.floor(case.trace)[0],
        sliced_floor_bytes=planner.floor(case.trace, in_slices=True)[0],
        peak_bytes=max(live_bytes(case.trace)),
        ideal_seconds=case.trace.ideal_seconds,
        work=case.trace.work,
        reason=reason,
        geometry=case.geometry,
        **({} if plan is None else _figures(case, plan, asked)),
    )


def planned(
    trace: planner.Trace,
    budgets: Budgets,
    settings: SolverSettings,
    *,
    policy: str = "ilp",
    incumbents: Sequence[planner.Plan] = (),
) -> tuple[planner.Plan | None, Fit, str]:
    """Return the plan, whether there is one, and why there is none. Raises OptionsError for an unknown policy."""
    try:
        return planner.plan(trace, budgets, policy=policy, incumbents=incumbents, **asdict(settings)), "yes", ""
    except BudgetError as error:
        return None, "no plan exists", str(error)
    except planner.OptionsError:
        raise
    except TeraioError as error:
        return None, "none was found", str(error)


def _figures(case: Case, plan: planner.Plan, asked: planner.Plan | None) -> dict[str, Any]:
    seconds = plan.replayed.iteration_seconds
    path = critical_path(case.trace, plan, planner.simulate(case.trace, plan))
    per_second = plan.replayed.storage_written_bytes / seconds if seconds else 0.0
    return {
        "predicted": plan.predicted,
        "speed": case.work * asked.replayed.iteration_seconds / seconds if asked is not None and seconds else None,
        "holds_up": what_holds_up(seconds_by_resource(path)),
        "written_bytes_per_day": per_second * 86_400,
        "limited": plan.solver.status == "time limit",
    }


def what_holds_up(path: Mapping[str, float]) -> str:
    """Return what the critical path, in seconds by resource, spends the most time on besides stages; "" if hardly any."""
    total = sum(path.values())
    others = {resource: seconds for resource, seconds in path.items() if resource != STAGES}
    worst = max(others, key=lambda resource: others[resource], default="")
    return worst if worst and others[worst] > _HARDLY * total else ""


_Model = TypeVar("_Model", bound=FrozenModel)
_MORE = 1.25


def cases(trace: planner.Trace, budgets: Budgets, *, drives: int) -> Iterator[Case]:
    """Yield the training as it is, then each change that makes sense for it. drives: number of drives of the storage tier."""
    asked = Case(what="as asked", trace=trace, budgets=budgets, drives=drives)
    yield asked

    def more_of(what: str, **sizes: int | None) -> Case:
        return replace(asked, what=what, budgets=budgets.model_copy(update=sizes), more=True)

    yield more_of(f"{_MORE - 1:.0%} more device memory", device_bytes=int(budgets.device_bytes * _MORE))
    links = {link.name for link in trace.hardware.links}
    if "device->storage" in links:
        share = (drives + 1) / drives
        storage = None if budgets.storage_bytes is None else int(budgets.storage_bytes * share)
        one_more = more_of("one more drive", storage_bytes=storage)
        yield replace(one_more, trace=with_storage_rate(trace, share), drives=drives + 1)
    if "device->host" in links and budgets.host_bytes:
        yield more_of("twice the host memory", host_bytes=2 * budgets.host_bytes)
    if trace.recompute:
        yield replace(asked, what="without recomputation", trace=trace.rebuilt(recompute=()))
    yield replace(asked, what="twice the batch", trace=with_batch(trace, 2), work=2.0)
    with suppress(UnsupportedError):
        yield replace(asked, what="twice the accumulation", trace=with_passes(trace, 2), work=2.0)


def geometries(traces: Sequence[planner.Trace], budgets: Budgets, *, step: int, unit: Unit, drives: int) -> Iterator[Case]:
    """Yield each way to divide the step, see `Adviser.divide`; nothing is planned. Raises OptionsError, UnsupportedError."""
    found: dict[int, planner.Trace] = {}  # by microbatch; of like ones, the trace that is given first
    for trace in traces:
        for each in _microbatches(trace, step, unit):
            found.setdefault(_done(each, unit), each)
    if not found:
        known = ", ".join(f"{_done(trace, unit):,} ({printable(trace.name)})" for trace in traces)
        raise OptionsError(
            f"a step of {step:,} {unit} is no multiple of what a trace has in an iteration: {known}; give a multiple, or a trace "
            "captured for a smaller microbatch"
        )
    for microbatch, trace in sorted(found.items(), reverse=True):
        passes = step // microbatch
        orders: tuple[Order, ...] = ("pass by pass", "layer by layer")
        for order in orders[: 1 if passes == 1 else 2]:
            try:
                divided = with_passes(trace, passes, order)
            except UnsupportedError:
                if order == "layer by layer":
                    continue  # layers cannot be told apart
                raise
            yield Case(
                what=f"{passes} x {microbatch:,} {unit}" + (f", {order}" if passes > 1 else ""),
                trace=divided,
                budgets=budgets,
                drives=drives,
                geometry=Geometry(trace_name=trace.name, microbatch=microbatch, passes=passes, order=order),
            )


def _microbatches(trace: planner.Trace, step: int, unit: Unit) -> Iterator[planner.Trace]:
    """Yield the trace at the sizes that divide the step, the largest first."""
    whole, lengths = _done(trace, unit), trace.lengths
    if lengths is None:
        if step % whole == 0:
            yield trace
        return
    *others, largest = lengths.highest
    most = largest
    for size in range(largest, lengths.lowest[-1] - 1, -1):
        done, rest = divmod(whole * size, largest)
        if size <= most and not rest and step % done == 0:
            most = size // 2
            yield trace.at(*others, size)


def _done(trace: planner.Trace, unit: Unit) -> int:
    """Return the tokens, or samples, of an iteration. Raises OptionsError if the trace does not say it."""
    done = None if trace.work is None else getattr(trace.work, unit)
    if done is None:
        raise OptionsError(
            f"trace {printable(trace.name)} does not say how many {unit} an iteration processes: capture it with --{unit}, or "
            f'add it to the file, such as "work": {{"{unit}": 8192}}'
        )
    return int(done)


def _times(model: _Model, factor: float, *names: str) -> _Model:
    """Return the model with `factor` times the values of these fields."""
    return model.model_copy(update={name: getattr(model, name) * factor for name in names})


def with_storage_rate(trace: planner.Trace, factor: float) -> planner.Trace:
    """Return the trace with `factor` times the drives' rates. What links share with the bus stays; what drives share grows."""
    links = tuple(_times(link, factor, "bytes_per_second") if "storage" in link.name else link for link in trace.hardware.links)
    shared = tuple(
        _times(rate, factor, "bytes_per_second") if all("storage" in name for name in rate.links) else rate
        for rate in trace.hardware.shared
    )
    return trace.rebuilt(hardware=trace.hardware.model_copy(update={"links": links, "shared": shared}))


def with_batch(trace: planner.Trace, factor: int) -> planner.Trace:
    """Return the trace of a batch `factor` times as large: activations, workspaces and times of all but the optimizer grow.

    Small batches use a GPU badly, so that the true times grow less.
    """
    phases = {stage.id: stage.phase for stage in trace.stages}
    grows = ("duration_seconds", "workspace_bytes")
    return trace.rebuilt(
        stages=tuple(stage if stage.phase == "optimizer" else _times(stage, factor, *grows) for stage in trace.stages),
        blocks=tuple(
            _times(block, factor, "size_bytes")
            if block.kind == "activation" and not block.persistent and phases[block.uses[0]] != "optimizer"
            else block
            for block in trace.blocks
        ),
        recompute=tuple(_times(group, factor, *grows) for group in trace.recompute),
        work=trace.work and trace.work.times(factor),
        tiled=(),
    )


# -- a step in several passes

_LAYER = re.compile(r"(?:[^.{,:]+\.)*?\d+(?=[.{,:]|$)")  # the first numbered module in the name of a stage


def with_passes(trace: planner.Trace, times: int, order: Order = "pass by pass") -> planner.Trace:
    """Return the trace of an iteration with all that is before its first update `times` times.

    The gradients of the first pass stay until the update, and each other pass adds to them: that takes as long as updates take
    for as many bytes. Raises UnsupportedError where parameters are updated between the stages of a pass, and where names of
    stages do not tell layers apart.
    """
    return _Passes(trace, times, order).trace()


class _Passes:
    def __init__(self, trace: planner.Trace, times: int, order: Order) -> None:
        self._trace, self._times = trace, times
        phases = [stage.phase for stage in trace.stages]
        self._end = phases.index("optimizer") if "optimizer" in phases else len(phases)  # of the passes
        if not self._end or {"forward", "backward"} & {*phases[self._end :]}:
            raise UnsupportedError(
                "gradients cannot add up: parameters are updated between the stages of a pass; trace it without overlap_step"
            )
        self._pieces = [(0, self._end)] if order == "pass by pass" else self._layers()

    def _layers(self) -> list[tuple[int, int]]:
        """The stages of each layer, forward and backward, and of what is between layers: begin and end."""

        def layer(stage: Stage) -> tuple[str, str]:
            found = _LAYER.match(stage.name.partition("/")[2])
            return stage.phase, found[0] if found else ""

        found = [(name, list(stages)) for (_, name), stages in groupby(self._trace.stages[: self._end], layer)]
        if len({name for name, _ in found} - {""}) < 2:
            raise UnsupportedError("the names of stages do not tell layers apart")
        return [(stages[0].id, stages[-1].id + 1) for _, stages in found]

    def trace(self) -> planner.Trace:
        trace, shift = self._trace, (self._times - 1) * self._end
        place = [[0] * self._end for _ in range(self._times)]  # of each stage, by pass
        for begin, end in self._pieces:
            for number in range(self._times):
                first = begin * self._times + number * (end - begin)
                place[number][begin:end] = range(first, first + end - begin)
        blocks: list[Block] = []
        known: list[dict[int, int]] = [{} for _ in range(self._times)]  # the ids of blocks, by pass

        def add(block: Block, passes: range) -> None:
            """The block that these passes have together. What is after all passes belongs to the last of them."""
            last = passes[-1] == self._times - 1

            def moved(uses: tuple[int, ...], among: range) -> set[int]:
                within = {place[number][use] for number in among for use in uses if use < self._end}
                return within | {use + shift for use in uses if last and use >= self._end}

            reads, writes, dies = moved(block.reads, passes), moved(block.writes, passes), block.dies_after
            if block.kind == "gradient" and not block.persistent:
                reads |= {use for use in moved(block.writes, passes[1:]) if use < self._end + shift}
            if dies is not None:
                (dies,) = moved((dies,), passes[-1:]) or {place[passes[-1]][-1]}
            update = {"reads": tuple(sorted(reads)), "writes": tuple(sorted(writes)), "id": len(blocks)}
            outlives = dies is not None and dies > max(reads | writes)
            blocks.append(block.model_copy(update={**update, "dies_after": dies if outlives else None}))
            for number in passes:
                known[number][block.id] = blocks[-1].id

        for block in trace.blocks:
            if block.persistent or block.uses[0] >= self._end or self._adds_up(block):
                add(block, range(self._times))
            else:
                for number in range(self._times):
                    add(block, range(number, number + 1))
        groups: list[RecomputeGroup] = []
        for group in trace.recompute:
            for number in range(self._times):
                made, reads = (tuple(sorted(known[number][each] for each in ids)) for ids in (group.blocks, group.reads))
                update = {"id": len(groups), "stage": place[number][group.stage], "blocks": made, "reads": reads}
                groups.append(group.model_copy(update=update))
        return trace.rebuilt(
            stages=self._stages(place),
            blocks=tuple(blocks),
            subgroups=tuple(
                each.model_copy(update={"stage": each.stage + shift, "blocks": tuple(known[-1][i] for i in each.blocks)})
                for each in trace.subgroups
            ),
            recompute=tuple(groups),
            not_recomputed=(),
            tiled=(),
            lengths=None,
            work=trace.work and trace.work.times(self._times),
        )

    def _adds_up(self, block: Block) -> bool:
        return block.kind == "gradient" and not block.persistent and block.last_stage >= self._end

    def _stages(self, place: list[list[int]]) -> tuple[Stage, ...]:
        adding: dict[int, float] = defaultdict(float)  # seconds, by stage
        rate = self._bytes_per_second()
        for block in self._trace.blocks if rate else ():
            made = [use for use in block.writes if use < self._end]
            if made and self._adds_up(block):
                adding[made[-1]] += 3 * block.size_bytes / rate  # two are read, one is written
        found: list[Stage] = []
        for number in range(self._times):
            for stage in self._trace.stages[: self._end]:
                seconds = stage.duration_seconds + (adding[stage.id] if number else 0.0)
                found.append(stage.model_copy(update={"id": place[number][stage.id], "duration_seconds": seconds}))
        found.sort(key=lambda stage: stage.id)
        rest = self._trace.stages[self._end :]
        return (*found, *(stage.model_copy(update={"id": len(found) + i}) for i, stage in enumerate(rest)))

    def _bytes_per_second(self) -> float:
        """What updates read and write in a second; 0 if that is not known."""
        updates = {stage.id: stage.duration_seconds for stage in self._trace.stages if stage.phase == "optimizer"}
        touched = sum(
            block.size_bytes * sum(use in updates for use in (*block.reads, *block.writes)) for block in self._trace.blocks
        )
        seconds = sum(updates.values())
        return touched / seconds if seconds else 0.0
