"""What a replay carries out: trace and plan laid out by stage, and the plan checked against the trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from planner.errors import InfeasiblePlanError
from planner.problem import device_iteration, gradients, host_start, host_updatable, parameters, user_stages
from planner.schema import Block, Move, Plan, Subgroup, Trace, WaitingTier

NOWHERE: frozenset[WaitingTier] = frozenset()  # no tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What each stage of `trace`, the device's part of the iteration, uses, makes, writes and ends, and the bytes that it needs.

    `read_only`: persistent blocks that nothing writes. `user_stages`: stages of user code. `visible`: blocks that user code can
    reach; empty if there are no such stages.
    """

    trace: Trace
    inputs: list[list[int]]
    born: list[list[int]]
    dying: list[list[int]]
    written: list[list[int]]
    need_bytes: list[int]
    read_only: frozenset[int]
    user_stages: frozenset[int]
    visible: frozenset[int]


def _laid_out(source: Trace, on_host: frozenset[int]) -> Layout:
    """Return the layout of what is left for the device when the subgroups `on_host` (ids) update on the host."""
    trace, user = device_iteration(source, on_host), frozenset(user_stages(source))
    consumed = {block.id for number in on_host for block in gradients(source, source.subgroups[number])}
    layout = Layout(
        trace=trace,
        inputs=_by_stage(trace),
        born=_by_stage(trace),
        dying=_by_stage(trace),
        written=_by_stage(trace),
        need_bytes=[stage.workspace_bytes for stage in trace.stages],
        read_only=frozenset(block.id for block in source.blocks if block.persistent and not block.writes),
        user_stages=user,
        visible=frozenset(block.id for block in source.blocks if user and block.user_visible),
    )
    for block in trace.blocks:
        for stage in block.uses:
            if not block.persistent and stage == block.uses[0]:
                layout.born[stage].append(block.id)
                layout.need_bytes[stage] += block.size_bytes
            else:
                layout.inputs[stage].append(block.id)
        for stage in block.writes:
            layout.written[stage].append(block.id)
        if not block.persistent and block.id not in consumed:  # an update on the host ends those
            layout.dying[block.last_stage].append(block.id)
    return layout


def _by_stage(trace: Trace) -> list[list[int]]:
    return [[] for _ in trace.stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayProgram:
    """What the plan asks for at each stage of the device's part of the iteration; the rest is in its `layout`.

    All lists are by stage, except `initial` and `persistent_places`, which are by block. `updates`: subgroups whose update on
    the host may begin when the stage is reached. `gradients`, `parameters`: by subgroup, the blocks that its update waits for
    and the blocks that wait for it. `awaiting`: moves whose copy in waits for an update.
    """

    layout: Layout
    drops: list[list[int]]
    offloads: list[list[int]]
    prefetches: list[list[int]]
    initial: list[str]
    persistent_places: list[frozenset[WaitingTier]]
    updates: list[list[int]]
    gradients: dict[int, frozenset[int]] = field(default_factory=dict)
    parameters: dict[int, frozenset[int]] = field(default_factory=dict)
    awaiting: set[int] = field(default_factory=set)


def compile_program(trace: Trace, plan: Plan) -> ReplayProgram:
    """Lay the plan out by stage.

    Re-runs must have been spelled out. Raises InfeasiblePlanError where a move or an update does not fit the trace.
    """
    on_host = _on_host(trace, plan)
    source, numbers = trace, frozenset(subgroup.id for subgroup in on_host)
    layout = source.once((_laid_out, numbers), lambda: _laid_out(source, numbers))
    trace = layout.trace
    count = len(trace.stages)
    program = ReplayProgram(
        layout=layout,
        drops=_by_stage(trace),
        offloads=_by_stage(trace),
        prefetches=_by_stage(trace),
        initial=["device"] * len(trace.blocks),
        persistent_places=[NOWHERE] * len(trace.blocks),
        updates=_by_stage(trace),
    )
    consumed = {block.id: subgroup.stage for subgroup in on_host for block in gradients(source, subgroup)}
    seen: set[tuple[int, int]] = set()
    moves_of: dict[int, list[tuple[int, Move]]] = {}
    for index, move in enumerate(plan.moves):
        _check_move(trace, move, seen, consumed)
        _lay_out_move(program, index, move, count, trace.blocks[move.block].persistent)
        moves_of.setdefault(move.block, []).append((index, move))
    for subgroup in on_host:
        _lay_out_update(program, source, subgroup, moves_of)
    _check_initial(trace, plan, program)
    return program


def _on_host(trace: Trace, plan: Plan) -> list[Subgroup]:
    """Subgroups that the plan updates on the host, in its order."""
    updatable = {subgroup.id for subgroup in host_updatable(trace)}
    seen: set[int] = set()
    for number in (update.subgroup for update in plan.updates):
        if number >= len(trace.subgroups):
            raise InfeasiblePlanError(f"updates name subgroup {number}; the trace has {len(trace.subgroups)} subgroups")
        if number in seen:
            raise InfeasiblePlanError(f"updates name subgroup {number} twice")
        seen.add(number)
    found = [trace.subgroups[number] for number in plan.on_host]
    for subgroup in found:
        if subgroup.id not in updatable:
            raise InfeasiblePlanError(
                f"subgroup {subgroup.id} cannot update on the host: that takes host_seconds, links both ways, a stage that "
                "is not user code, blocks that no other subgroup has and no other stage writes, and movable parameters that "
                "are used before it",
                stage=trace.stages[subgroup.stage].name,
            )
    return found


def _lay_out_update(
    program: ReplayProgram, source: Trace, subgroup: Subgroup, moves_of: dict[int, list[tuple[int, Move]]]
) -> None:
    """Add one update on the host. moves_of: the plan's moves with their positions, by block."""
    program.updates[host_start(source, subgroup)].append(subgroup.id)
    program.gradients[subgroup.id] = frozenset(block.id for block in gradients(source, subgroup))
    program.parameters[subgroup.id] = frozenset(block.id for block in parameters(source, subgroup))
    count = len(source.stages)
    for number in subgroup.blocks:
        if source.blocks[number].movable and source.blocks[number].size_bytes:
            program.persistent_places[number] |= {"host"}
    for number in sorted(program.gradients[subgroup.id] | program.parameters[subgroup.id]):
        moves = moves_of.get(number, [])
        around = {
            index
            for index, move in moves
            if move.tier == "host"
            and move.offload is None
            and any(move.after < stage < move.before for stage in (subgroup.stage, subgroup.stage + count))
        }
        leaves = any(move.prefetch is None for _, move in moves)
        if not (leaves if number in program.gradients[subgroup.id] else around):
            raise InfeasiblePlanError(
                f"subgroup {subgroup.id} updates on the host, but no move takes its block "
                f"{source.blocks[number].name!r} there (parameters are dropped: without an offload)",
                stage=source.stages[subgroup.stage].name,
                block=source.blocks[number].name,
            )
        if number in program.parameters[subgroup.id]:
            program.awaiting.update(around)


def _lay_out_move(program: ReplayProgram, index: int, move: Move, count: int, persistent: bool) -> None:
    leaves = move.leaves
    by_stage = program.drops if move.offload is None else program.offloads
    by_stage[leaves % count].append(index)
    if move.prefetch is None:
        return
    program.prefetches[move.prefetch.start % count].append(index)
    if persistent:
        program.persistent_places[move.block] |= {move.tier}
    if leaves < count <= move.prefetch.start:
        program.initial[move.block] = move.tier


def _is_last(move: Move, block: Block) -> bool:
    """Whether the block leaves between its last use and its death."""
    if block.dies_after is None or (move.after, move.before) != (block.uses[-1], block.dies_after + 1):
        return False
    return move.offload is None or move.offload.start < block.dies_after


def _check_move(trace: Trace, move: Move, seen: set[tuple[int, int]], consumed: dict[int, int]) -> None:
    """Raise InfeasiblePlanError if the move does not fit the trace.

    consumed: by gradient of an update on the host, the stage of that update in the trace.
    """
    if move.block >= len(trace.blocks):
        raise InfeasiblePlanError(f"a move names block {move.block}; the trace has {len(trace.blocks)} blocks")
    block = trace.blocks[move.block]
    what = f"block {block.name!r} is moved"
    uses = (*block.uses, block.uses[0] + len(trace.stages)) if block.persistent else block.uses
    if not block.movable:
        raise InfeasiblePlanError(f"{what} although it is not movable", block=block.name)
    if move.prefetch is None:
        used_up = consumed.get(block.id) == move.before and block.uses[-1] == move.after and move.tier == "host"
        if not (used_up and move.offload is not None) and not _is_last(move, block):
            raise InfeasiblePlanError(
                f"{what} after stage {move.after} and not prefetched: blocks may leave for good between their last use and "
                "their death, and gradients of updates on the host, by a copy to the host tier, between their last use "
                "before the update and its stage",
                block=block.name,
            )
    elif (move.after, move.before) not in pairwise(uses):
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
                f"{what} to the {move.tier} tier, but there is no link {pair[0]}->{pair[1]}", block=block.name
            )


def _check_initial(trace: Trace, plan: Plan, program: ReplayProgram) -> None:
    """Check that the iteration is cyclic: the plan must begin with what its moves leave behind."""
    given: dict[int, str] = {}
    for placement in plan.initial:
        if placement.block >= len(trace.blocks):
            raise InfeasiblePlanError(f"initial names block {placement.block}; the trace has {len(trace.blocks)} blocks")
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
