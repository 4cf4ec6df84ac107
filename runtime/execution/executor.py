"""Runs programs: straight through, or stage by stage under the pager while an observer keeps the timeline."""

from __future__ import annotations

from typing import Any

import torch

from runtime.execution.observer import InterleavedStages, Observer, StageRun
from runtime.execution.program import Constant, Program, Stage
from runtime.execution.workspace import WorkspaceMeter
from runtime.paging import Block, Pager
from runtime.system import annotate


def run_plain(program: Program, arguments: list[Any]) -> list[Any]:
    """Run a program without any management. Takes over `arguments` (boxed call)."""
    slots = _slots(program, arguments)
    for stage in program.stages:
        _run_stage(stage, slots)
    return _results(program, slots)


def run_managed(
    program: Program,
    arguments: list[Any],
    pager: Pager,
    observer: Observer,
    meter: WorkspaceMeter,
    interleaved: InterleavedStages | None = None,
) -> list[Any]:
    """Run a program under the pager's budget. Takes over `arguments`; blocks while inputs are fetched.

    Raises BudgetError and StorageError; then nothing stays held, and all blocks keep their contents.
    """
    with pager.device.region():
        return _run_region(program, arguments, pager, observer, meter, interleaved)


def _run_region(
    program: Program,
    arguments: list[Any],
    pager: Pager,
    observer: Observer,
    meter: WorkspaceMeter,
    interleaved: InterleavedStages | None,
) -> list[Any]:
    pager.enter_region()
    slots = _slots(program, arguments)
    try:
        blocks: list[Block | None] = [None] * program.slot_count
        for index in range(program.input_count):
            if program.slot_kinds[index] != "activation":
                pager.make_movable(slots[index])
            blocks[index] = _input_block(program, slots, index, pager)
        observer.region_begins(
            program.identity, len(program.stages) + (interleaved.stage_count if interleaved is not None else 0)
        )
        for number, stage in enumerate(program.stages):
            read = _run_stage_managed(program, number, stage, slots, blocks, pager, observer, meter)
            if interleaved is not None:
                interleaved.after_stage(number, read, slots)
        results = _results(program, slots)
        for index in program.user_results:
            if isinstance(results[index], torch.Tensor) and (block := pager.known_block(results[index])) is not None:
                block.user_visible = True
        if interleaved is not None:
            interleaved.region_done(results)
        return results
    finally:
        observer.region_ended()
        slots.clear()
        pager.leave_region()


def _slots(program: Program, arguments: list[Any]) -> list[Any]:
    slots = arguments + [None] * (program.slot_count - program.input_count)
    arguments.clear()
    return slots


def _run_stage(stage: Stage, slots: list[Any]) -> None:
    values = [slots[i] for i in stage.inputs]
    for i in stage.frees:
        slots[i] = None
    with annotate("stage", stage.name):
        made = stage.run(values)
    for i, value in zip(stage.outputs, made, strict=True):
        slots[i] = value


def _run_stage_managed(
    program: Program,
    number: int,
    stage: Stage,
    slots: list[Any],
    blocks: list[Block | None],
    pager: Pager,
    observer: Observer,
    meter: WorkspaceMeter,
) -> list[Block]:
    """Gives the blocks that the stage read."""
    workspace_bytes = meter.workspace_bytes(stage)
    read = list(dict.fromkeys(b for i in stage.inputs if (b := blocks[i]) is not None))
    pager.acquire(read, stage.output_bytes + workspace_bytes, stage.name, then_fetch=observer.stage_reached())
    written = [b for i in stage.mutates if (b := blocks[i]) is not None]  # also by a stage that fails half-way
    last_used: list[Block] = []
    try:
        with meter.watching(stage):
            begin = pager.device.mark()
            _run_stage(stage, slots)
            end = pager.device.mark()
        for i in stage.outputs:
            blocks[i] = _block(program, slots, i, pager, user_visible=False)
        last_used = list(dict.fromkeys(b for i in stage.frees if (b := blocks[i]) is not None))
    finally:
        pager.retire(read, written, last_used=last_used)
    made = [b for i in stage.outputs if (b := blocks[i]) is not None and b not in read]
    observer.stage_ended(
        StageRun(
            name=stage.name,
            phase=stage.phase,
            begin=begin,
            end=end,
            workspace_bytes=workspace_bytes,
            read=read,
            made=list(dict.fromkeys(made)),
            written=written,
            next_uses=_next_uses(stage, number, blocks),
        )
    )
    for i in stage.frees:
        blocks[i] = None
    return read


def _next_uses(stage: Stage, number: int, blocks: list[Block | None]) -> dict[Block, int]:
    """After how many stages the region uses a block again; aliases of one storage are one block."""
    soonest: dict[Block, int] = {}
    for slot, following in zip((*stage.inputs, *stage.outputs), stage.next_uses, strict=True):
        block = blocks[slot]
        if block is not None and following >= 0:
            soonest[block] = min(soonest.get(block, following - number), following - number)
    return soonest


def _input_block(program: Program, slots: list[Any], index: int, pager: Pager) -> Block | None:
    """What a graph is given, user code may hold as well; but for what a forward graph has saved for its backward graph."""
    value = slots[index]
    known = pager.known_block(value) if isinstance(value, torch.Tensor) else None
    if known is not None and program.phase == "backward":
        return known
    return _block(program, slots, index, pager, user_visible=True)


def _block(program: Program, slots: list[Any], index: int, pager: Pager, *, user_visible: bool) -> Block | None:
    value = slots[index]
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return pager.block_of(value, name=program.slot_names[index], kind=program.slot_kinds[index], user_visible=user_visible)


def _results(program: Program, slots: list[Any]) -> list[Any]:
    results = [r.value if isinstance(r, Constant) else slots[r] for r in program.results]
    slots.clear()
    return results
