"""What the simulator replays: a plan laid out by stage, checked against the trace; links with queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from planner.errors import InfeasiblePlanError, PlanError
from planner.plan import Move, Plan
from planner.trace import Block, Link, Trace

__all__ = ["Channel", "Job", "Program", "compile_program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What happens at each stage. All lists but `initial` and `persistent_places` (by block) are by stage."""

    inputs: list[list[int]]
    born: list[list[int]]
    dying: list[list[int]]
    written: list[list[int]]
    need_bytes: list[int]
    drops: list[list[int]]
    offloads: list[list[int]]
    prefetches: list[list[int]]
    initial: list[str]
    persistent_places: list[set[str]]
    frozen: frozenset[int]


@dataclass(slots=True)
class Job:
    """One queued transfer."""

    move: int
    block: int
    size: int
    inward: bool
    tier: str
    queued: float


@dataclass(slots=True)
class Channel:
    """A link and its queue."""

    link: Link
    queue: deque[Job] = field(default_factory=deque)
    active: Job | None = None
    began: float = 0.0


def compile_program(trace: Trace, plan: Plan) -> Program:
    """Lay the plan out by stage.

    Raises PlanError (made for another trace) or InfeasiblePlanError (a move does not fit the trace).
    """
    if plan.trace_fingerprint != trace.fingerprint:
        raise PlanError(
            f"the plan was made for trace {plan.trace_fingerprint}, but this one is {trace.fingerprint}: "
            "plan again"
        )
    count = len(trace.stages)
    program = Program(
        inputs=[[] for _ in range(count)],
        born=[[] for _ in range(count)],
        dying=[[] for _ in range(count)],
        written=[[] for _ in range(count)],
        need_bytes=[stage.workspace_bytes for stage in trace.stages],
        drops=[[] for _ in range(count)],
        offloads=[[] for _ in range(count)],
        prefetches=[[] for _ in range(count)],
        initial=["device"] * len(trace.blocks),
        persistent_places=[set() for _ in trace.blocks],
        frozen=frozenset(block.id for block in trace.blocks if block.persistent and not block.writes),
    )
    for block in trace.blocks:
        _lay_out_block(program, block)
    seen: set[tuple[int, int]] = set()
    for index, move in enumerate(plan.moves):
        _check_move(trace, move, seen)
        _lay_out_move(program, index, move, count, trace.blocks[move.block].persistent)
    _check_initial(trace, plan, program)
    return program


def _lay_out_block(program: Program, block: Block) -> None:
    for stage in block.uses:
        if not block.persistent and stage == block.uses[0]:
            program.born[stage].append(block.id)
            program.need_bytes[stage] += block.size_bytes
        else:
            program.inputs[stage].append(block.id)
    for stage in block.writes:
        program.written[stage].append(block.id)
    if not block.persistent:
        program.dying[block.uses[-1]].append(block.id)


def _lay_out_move(program: Program, index: int, move: Move, count: int, persistent: bool) -> None:
    leaves = move.after if move.offload is None else move.offload.start
    by_stage = program.drops if move.offload is None else program.offloads
    by_stage[leaves % count].append(index)
    program.prefetches[move.prefetch.start % count].append(index)
    if persistent:
        program.persistent_places[move.block].add(move.tier)
    if leaves < count <= move.prefetch.start:
        program.initial[move.block] = move.tier


def _gaps(block: Block, count: int) -> Iterator[tuple[int, int]]:
    yield from zip(block.uses, block.uses[1:], strict=False)
    if block.persistent:
        yield block.uses[-1], block.uses[0] + count


def _check_move(trace: Trace, move: Move, seen: set[tuple[int, int]]) -> None:
    if move.block >= len(trace.blocks):
        raise InfeasiblePlanError(
            f"a move names block {move.block}; the trace has {len(trace.blocks)} blocks"
        )
    block = trace.blocks[move.block]
    what = f"block {block.name!r} is moved"
    if not block.movable:
        raise InfeasiblePlanError(f"{what} although it is not movable", block=block.name)
    if (move.after, move.before) not in set(_gaps(block, len(trace.stages))):
        raise InfeasiblePlanError(
            f"{what} between stages {move.after} and {move.before}, which are not consecutive uses of it; "
            f"its uses are {list(block.uses)}",
            block=block.name,
        )
    if (move.block, move.after) in seen:
        raise InfeasiblePlanError(f"{what} twice after stage {move.after}", block=block.name)
    seen.add((move.block, move.after))
    for pair in (("device", move.tier), (move.tier, "device")):
        if trace.hardware.link(*pair) is None:
            raise InfeasiblePlanError(
                f"{what} to the {move.tier} tier, but there is no link {pair[0]}->{pair[1]}",
                block=block.name,
            )


def _check_initial(trace: Trace, plan: Plan, program: Program) -> None:
    """The iteration is cyclic: what the moves leave behind must be what the plan begins with."""
    given: dict[int, str] = {}
    for placement in plan.initial:
        if placement.block >= len(trace.blocks):
            raise InfeasiblePlanError(
                f"initial names block {placement.block}; the trace has {len(trace.blocks)} blocks"
            )
        given[placement.block] = placement.tier
    for block in trace.blocks:
        found = given.get(block.id, "device")
        wanted = program.initial[block.id] if block.persistent else "device"
        if found != wanted:
            raise InfeasiblePlanError(
                f"block {block.name!r} waits in the {found} tier when the iteration begins, but the moves "
                f"leave it in {wanted}: the plan is not cyclic",
                stage=trace.stages[0].name,
                block=block.name,
            )
