"""The plan: what was decided for one trace and one set of budgets. Schema, validation and file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from math import prod
from typing import Annotated, Literal, Self

from pydantic import FailFast, model_validator

from planner.errors import PlanError
from planner.schema.json_file import faults, read_model, write_atomic
from planner.schema.lengths import Sizes, dominates, told
from planner.schema.models import Bytes, FrozenModel, GrownModel, Id, Ids, Seconds, check_ids
from planner.schema.trace import Count, Tier, Trace

WaitingTier = Literal["host", "storage"]


class Budgets(FrozenModel):
    """Bytes of each tier that teraio may use. They are hard limits.

    None means that teraio sets no limit. A tier without a link to and from it in the trace's hardware cannot be used, whatever
    its budget.
    """

    device_bytes: Bytes
    host_bytes: Bytes | None = None
    storage_bytes: Bytes | None = None


class Offload(FrozenModel):
    """Copy out: queued when stage `start` has ended; predicted to have ended before stage `free_after` + 1 starts."""

    start: Id
    free_after: Id


class Prefetch(FrozenModel):
    """Copy in: queued when stage `start` is reached (the one before has ended); needed by stage `ready_by`."""

    start: Id
    ready_by: Id


class Move(FrozenModel):
    """The decision for one inactive period: the block leaves after stage `after`, and is back for `before` or dead by then.

    Stages are numbered as in `planner.recomputed(trace, plan.recompute)`: a re-run is a stage. Blocks are those of the trace.

    Stage numbers continue over the iteration's end: a number ≥ the number of stages is in the next iteration. `offload` is None
    where a valid copy is already in `tier`: the block is dropped when stage `after` has ended. `prefetch` is None for a block
    that does not come back. Either an update on the host consumes it, and `before` is that update's stage. Or it has been used
    for the last time, and it dies when stage `before` - 1 has ended.
    """

    block: Id
    after: Id
    before: Id
    tier: WaitingTier
    offload: Offload | None
    prefetch: Prefetch | None

    @property
    def leaves(self) -> int:
        """The stage after which the block leaves, or its copy out is queued."""
        return self.after if self.offload is None else self.offload.start

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        places = () if self.prefetch is None else (self.prefetch.start, self.prefetch.ready_by)
        order = [self.after, self.leaves, *(place - 1 for place in places), self.before - 1]
        if order != sorted(order):
            between = "prefetch.start ≤ ready_by ≤ " if places else ""
            found = ", ".join(map(str, (self.after, self.leaves, *places, self.before)))
            raise ValueError(f"move of block {self.block}: need after ≤ offload.start < {between}before, found {found}")
        return self


class Update(FrozenModel):
    """Where the update of one optimizer subgroup runs. A subgroup without an entry updates on the device.

    If it runs on the host, the subgroup's movable blocks have their place in the host tier for good: states stay there,
    gradients are copied out, and parameters come back. See [Note: updates on the host] in `planner.problem.host_updates`.
    """

    subgroup: Id
    where: Literal["device", "host"]


class Recompute(GrownModel):
    """Recompute group `group` of the trace runs again just before stage `at` of the trace, which is a backward stage.

    With equal `at`, the groups run in the order of the plan. Each is a stage of its own, and `Move` counts it as one.
    skipped: the stage is there, and what it reads, but takes no time and makes nothing: its blocks have stayed.
    """

    added_later = ("skipped",)

    group: Id
    at: Id
    skipped: bool = False


class Placement(FrozenModel):
    """The tier of a persistent block when the iteration begins."""

    block: Id
    tier: Tier


class SolverReport(FrozenModel):
    """What the solver said about the coarse model. For the exact plan, see Predicted.

    `status`: "time limit" says that planning ended by it, with the best plan so far. `bound_seconds` and `gap` = (objective −
    bound) / objective are None where the solver gave no bound.
    """

    name: str = "none"
    status: Literal["optimal", "feasible", "failed", "not needed", "time limit"] = "not needed"
    objective_seconds: Seconds | None = None
    bound_seconds: float | None = None
    gap: float | None = None
    build_seconds: Seconds = 0.0
    solve_seconds: Seconds = 0.0


class Predicted(GrownModel):
    """What the plan does in one iteration of the steady state, according to the simulator.

    `ideal_seconds`: without waiting and without re-runs; these take `recompute_seconds`.
    """

    added_later = ("recompute_seconds",)

    iteration_seconds: Seconds
    ideal_seconds: Seconds
    lower_bound_seconds: Seconds
    stall_seconds: Seconds
    peak_bytes: dict[str, Bytes]
    moved_bytes: dict[str, Bytes]
    storage_written_bytes: Bytes
    recompute_seconds: Seconds = 0.0


class Shorter(GrownModel):
    """The plan for inputs that are no larger than `sizes`: without the moves `left_out` and the re-runs `skipped`.

    sizes: as in `Lengths`. left_out, skipped: numbers in `moves` and `recompute`, for whose blocks there is room. moves: these in
    place of the plan's, where there are some. predicted: at these sizes; its lower bound is not computed.
    """

    added_later = ("moves",)

    sizes: Sizes
    left_out: Ids = ()
    skipped: Ids = ()
    moves: Annotated[tuple[Move, ...], FailFast()] = ()
    predicted: Predicted


class Plan(GrownModel):
    """The decisions for one trace.

    `moves` are in queue order: of the moves that start at the same stage, a link serves the first one first. The `updates` on
    the host are in queue order too. subgroup_bytes: from the trace; training with this plan must cut optimizers into subgroups
    of that size. shorter: what is followed for shorter inputs, the longest first, where the trace says how sizes depend on the
    length. Blocks that are away when the iteration ends are so in all of them: each finds blocks where any of these expects them.
    """

    added_later = ("subgroup_bytes", "shorter")

    format: Literal["teraio.plan"] = "teraio.plan"
    version: Literal[1] = 1
    trace_fingerprint: str
    policy: str
    budgets: Budgets
    solver: SolverReport = SolverReport()
    moves: Annotated[tuple[Move, ...], FailFast()] = ()
    initial: Annotated[tuple[Placement, ...], FailFast()] = ()
    updates: Annotated[tuple[Update, ...], FailFast()] = ()
    recompute: Annotated[tuple[Recompute, ...], FailFast()] = ()
    predicted: Predicted | None = None
    subgroup_bytes: Count | None = None
    shorter: Annotated[tuple[Shorter, ...], FailFast()] = ()

    @model_validator(mode="after")
    def _shorter_in_order(self) -> Self:
        sizes = [each.sizes for each in self.shorter]
        if sizes != sorted(set(sizes), reverse=True):
            raise ValueError(f"shorter: sizes must descend without repetition, found {sizes[:20]}")
        if len({len(each) for each in sizes}) > 1:
            raise ValueError(f"shorter: some have a size more than others, found {sizes[:20]}")
        for each in self.shorter:
            check_ids(f"the plan for {told(each.sizes)}", each.left_out, len(self.moves), "move")
            check_ids(f"the plan for {told(each.sizes)}", each.skipped, len(self.recompute), "re-run")
        return self

    @property
    def on_host(self) -> list[int]:
        """The subgroups (ids) that update on the host, in queue order."""
        return [update.subgroup for update in self.updates if update.where == "host"]

    @property
    def replayed(self) -> Predicted:
        """What is predicted, of a plan that was replayed, as every plan is that the planner makes."""
        assert self.predicted is not None
        return self.predicted

    def shorter_for(self, sizes: Sequence[int]) -> Shorter | None:
        """Return the smallest plan for inputs of these sizes; None where all of this one is followed."""
        fitting = [each for each in self.shorter if len(each.sizes) == len(sizes) and dominates(each.sizes, sizes)]
        return min(fitting, key=lambda each: prod(each.sizes), default=None)

    def thinned(self, left_out: Collection[int], skipped: Collection[int], trace: Trace) -> Plan:
        """Return the plan without these moves, and with these re-runs skipped, by number, for a trace with other sizes."""
        moves = tuple(move for number, move in enumerate(self.moves) if number not in left_out)
        recompute = tuple(
            each.model_copy(update={"skipped": each.skipped or number in skipped}) for number, each in enumerate(self.recompute)
        )
        changed = {"trace_fingerprint": trace.fingerprint, "moves": moves, "recompute": recompute, "shorter": ()}
        return self.model_copy(update=changed)

    def followed(self, shorter: Shorter | None, trace: Trace) -> Plan:
        """Return what is followed where `shorter` is, or all of it for None, for a trace with other sizes."""
        if shorter is None:
            return self.thinned((), (), trace)
        thinned = self.thinned(shorter.left_out, shorter.skipped, trace)
        return thinned.model_copy(update={"moves": shorter.moves or thinned.moves})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises PlanError with the file, the place in it and what is wrong."""
        return read_model(path, cls, PlanError)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file. A reader sees the whole old file or the whole new one. Raises OSError."""
        write_atomic(path, self.text())

    def fault(self) -> str | None:
        """Return what no plan file may hold: a number beyond the limits, with its place. None if a reader takes the plan."""
        # The rest is ids and names.
        computed = self.model_dump(mode="json", include={"budgets", "solver", "predicted", "shorter"})
        return next(faults(computed), None)

    def text(self) -> str:
        """Return the content of the plan file."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"
