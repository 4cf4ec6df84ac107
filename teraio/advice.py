"""Answers before a launch: does this training fit, how fast is it, what holds it up, what would change that. Needs no torch.

The training is planned as asked for, and with one thing changed at a time: more of a machine, another batch, smaller states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

import planner
from planner.errors import BudgetError, TeraioError
from planner.problem import SolverSettings, live_bytes
from planner.schema import Budgets, FrozenModel, Predicted, Work
from planner.simulator import STAGES, critical_path

# no plan exists: it is proved, since one stage alone needs more. none was found: a plan may exist, but the planner has none.
Fit = Literal["yes", "no plan exists", "none was found"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question: `trace` planned under `budgets`. what: in words. drives: how many there are. work: samples of an iteration,
    relative to the case asked for.

    more: the machine has more than in the case asked for, and nothing else differs: a plan for that case is tried for this one.
    """

    what: str
    trace: planner.Trace
    budgets: Budgets
    drives: int
    work: float = 1.0
    more: bool = False


Made = Callable[[Case, planner.Plan], None]

_HARDLY = 0.01  # share of the iteration below which waiting is not worth a word


class Answer(FrozenModel):
    """One case. speed: samples in a second, relative to the training as asked for; None if either has no plan.

    work: of its iteration.
    predicted, holds_up: of the best plan; None and "" without one. holds_up: what its critical path spends the most time on,
    besides computing. written_bytes_per_day: to the drives, in training without a break. lifetime_days: until the rated bytes
    of the drives are written; None if that was not asked for, or if nothing is written. reason: why there is no plan.
    """

    what: str
    fit: Fit
    budgets: Budgets
    floor_bytes: int
    peak_bytes: int
    ideal_seconds: float
    work: Work | None = None
    predicted: Predicted | None = None
    speed: float | None = None
    holds_up: str = ""
    written_bytes_per_day: float = 0.0
    lifetime_days: float | None = None
    reason: str = ""


class Advice(FrozenModel):
    """The training as asked for comes first."""

    trace_name: str
    answers: tuple[Answer, ...]


def advise(
    trace: planner.Trace,
    budgets: Budgets,
    *,
    drives: int = 1,
    rated_bytes: int | None = None,
    settings: SolverSettings,
    progress: Callable[[str], None] = lambda text: None,
    made: Made = lambda case, plan: None,
) -> Advice:
    """Plan each case, one after the other; waits for all of them.

    drives: how many drives the storage tier of the trace has. rated_bytes: that may be written to each of them in its life (TBW).
    progress: is told what is being planned. made: is given each case with its plan.
    """
    answers: list[Answer] = []
    asked: planner.Plan | None = None
    for case in cases(trace, budgets, drives=drives):
        progress(f"planning: {case.what}")
        incumbents = (asked,) if case.more and asked is not None else ()
        plan, fit, reason = planned(case.trace, case.budgets, settings, incumbents=incumbents)
        if not answers:
            asked = plan
        if plan is not None:
            made(case, plan)
        answers.append(
            Answer(
                what=case.what,
                fit=fit,
                budgets=case.budgets,
                floor_bytes=planner.floor(case.trace)[0],
                peak_bytes=max(live_bytes(case.trace)),
                ideal_seconds=case.trace.ideal_seconds,
                work=case.trace.work,
                reason=reason,
                **({} if plan is None else _figures(case, plan, asked, rated_bytes)),
            )
        )
    return Advice(trace_name=trace.name, answers=tuple(answers))


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


def _figures(case: Case, plan: planner.Plan, asked: planner.Plan | None, rated_bytes: int | None) -> dict[str, Any]:
    seconds = plan.replayed.iteration_seconds
    per_second = plan.replayed.storage_written_bytes / seconds if seconds else 0.0
    lifetime = rated_bytes * case.drives / per_second / 86_400 if rated_bytes and per_second else None
    return {
        "predicted": plan.predicted,
        "speed": case.work * asked.replayed.iteration_seconds / seconds if asked is not None and seconds else None,
        "holds_up": what_holds_up(critical_path(case.trace, plan, planner.simulate(case.trace, plan)).seconds()),
        "written_bytes_per_day": per_second * 86_400,
        "lifetime_days": lifetime,
    }


def what_holds_up(path: Mapping[str, float]) -> str:
    """Return what the critical path, in seconds by resource, spends the most time on besides stages; "" if hardly any."""
    total = sum(path.values())
    others = {resource: seconds for resource, seconds in path.items() if resource != STAGES}
    worst = max(others, key=lambda resource: others[resource], default="")
    return worst if worst and others[worst] > _HARDLY * total else ""


_Model = TypeVar("_Model", bound=FrozenModel)
_MORE = 1.25
_FP32_STATE_BYTES = 8  # bytes of AdamW's two states in fp32 for each element


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
    yield replace(asked, what="twice the accumulation", trace=with_accumulation(trace), work=2.0)
    if _has_fp32_states(trace):
        yield replace(asked, what="optimizer states in bf16", trace=with_state_bytes(trace, 0.5))


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


def with_state_bytes(trace: planner.Trace, factor: float) -> planner.Trace:
    """Return the trace with optimizer states of `factor` times the size."""
    blocks = tuple(
        block.model_copy(update={"size_bytes": int(block.size_bytes * factor)}) if block.kind == "optimizer_state" else block
        for block in trace.blocks
    )
    return trace.rebuilt(blocks=blocks)


def with_accumulation(trace: planner.Trace) -> planner.Trace:
    """Return the trace of an iteration with all passes before the first update twice.

    The gradients of the first pass stay until the update, and the second pass adds to them.
    """
    first_update = next((s.id for s in trace.stages if s.phase == "optimizer"), len(trace.stages))
    if first_update == 0:
        return trace
    shift = first_update
    stages = [*trace.stages[:first_update], *trace.stages[:first_update], *trace.stages[first_update:]]
    blocks: list[planner.Block] = []
    copies: dict[int, int] = {}
    for block in trace.blocks:
        once = not block.persistent and block.last_stage < first_update  # of one pass
        if once:
            blocks.append(block)
            copies[block.id] = len(copies)
            continue
        update: dict[str, object] = {
            name: tuple(
                sorted({u for use in getattr(block, name) for u in ((use, use + shift) if use < shift else (use + shift,))})
            )
            for name in ("reads", "writes")
        }
        if block.kind == "gradient" and not block.persistent:  # the second pass reads what the first one left
            update["reads"] = tuple(sorted({*update["reads"], *(w + shift for w in block.writes if w < shift)}))  # type: ignore[misc]
        if block.dies_after is not None:
            update["dies_after"] = block.dies_after + shift
        blocks.append(block.model_copy(update=update))
    count = len(blocks)
    for block in trace.blocks:
        if block.id in copies:
            moved = {name: tuple(use + shift for use in getattr(block, name)) for name in ("reads", "writes")}
            dies = None if block.dies_after is None else block.dies_after + shift
            blocks.append(block.model_copy(update={**moved, "id": count + copies[block.id], "dies_after": dies}))

    def second(number: int) -> int:
        return count + copies[number] if number in copies else number

    groups = [
        group.model_copy(
            update={
                "id": len(trace.recompute) + group.id,
                "stage": group.stage + shift,
                "blocks": tuple(sorted(map(second, group.blocks))),
                "reads": tuple(sorted(map(second, group.reads))),
            }
        )
        for group in trace.recompute
    ]
    return trace.rebuilt(
        stages=tuple(stage.model_copy(update={"id": number}) for number, stage in enumerate(stages)),
        blocks=tuple(blocks),
        subgroups=tuple(each.model_copy(update={"stage": each.stage + shift}) for each in trace.subgroups),
        recompute=(*trace.recompute, *groups),
        not_recomputed=(),
        tiled=(),
        work=trace.work and trace.work.times(2),
    )


def _has_fp32_states(trace: planner.Trace) -> bool:
    states = sum(block.size_bytes for block in trace.blocks if block.kind == "optimizer_state" and block.movable)
    elements = sum(subgroup.elements for subgroup in trace.subgroups)
    return elements > 0 and states >= _FP32_STATE_BYTES * elements * 0.9
