"""Runs programs: without management, or stage by stage under the pager, while an observer records the timeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from runtime.device import Mark
from runtime.execution.one_stage import CollectiveClock, WorkspaceMeter, run_with_room
from runtime.execution.program import Constant, InterleavedStages, Observer, Program, Stage, StageRun
from runtime.execution.rerun import Rerun, Reruns, why_no_reruns
from runtime.paging import DROPPED, UNNAMED, Block, Pager
from runtime.system import annotate

_NOTHING = nullcontext()


def run_plain(program: Program, arguments: list[Any]) -> list[Any]:
    """Run a program without management. Empties `arguments` (boxed call). Returns the results."""
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
    interleaved: Sequence[InterleavedStages] = (),
) -> list[Any]:
    """Run a program under the pager's budget. Empties `arguments` (boxed call). Returns the results.

    Waits for copies where a stage needs a block that is not on the device. Raises BudgetError if a stage does not fit,
    StorageError if a copy fails; then no block stays held, and all blocks keep their contents.
    """
    with pager.region():
        return _ManagedRun(program, pager, observer, meter).run(arguments, interleaved)


class _ManagedRun:
    """One run of a program under the pager. slots: its values. blocks: for each slot the block of its tensor, if it has one."""

    def __init__(self, program: Program, pager: Pager, observer: Observer, meter: WorkspaceMeter) -> None:
        self._program = program
        self._pager = pager
        self._observer = observer
        self._meter = meter
        self._slots: list[Any] = []
        self._blocks: list[Block | None] = [None] * program.slot_count
        self._again = Reruns(pager, observer, meter)
        self._kept: Collection[int] = ()
        self._no_reruns = ""
        self._reruns: list[Rerun] = []
        self._inputs: frozenset[Block] = frozenset()

    def run(self, arguments: list[Any], interleaved: Sequence[InterleavedStages]) -> list[Any]:
        """See `run_managed`."""
        program, stages = self._program, self._program.stages
        try:
            self._slots = _slots(program, arguments)
            for index, known in enumerate(self._pager.known_blocks(self._slots[: program.input_count])):
                # Blocks that user code can reach were compared with their storages when the region began.
                sure = known is not None and known.name is not UNNAMED and (known.user_visible or program.phase == "backward")
                self._blocks[index] = known if sure else self._input_block(index)
            more = sum(each.stage_count for each in interleaved)
            self._observer.region_begins(program.identity, len(stages) + more, is_inference=program.is_inference)
            self._no_reruns = why_no_reruns(program)
            if not self._no_reruns:
                self._kept = self._observer.kept_stages()
            self._inputs = frozenset([block for block in self._blocks if block is not None])
            self._hold_reruns()
            for number, stage in enumerate(stages):
                read = self._run_stage(number, stage)
                for each in interleaved:
                    each.after_stage(number, read, self._slots)
            self._let_go_of_saved()
            results = _results(program, self._slots)
            self._pager.show_to_user(self._shown(results))
            for each in interleaved:
                each.region_done(results)
            return results
        finally:
            self._observer.region_ended()
            if program.phase == "backward":
                for rerun in self._reruns:
                    rerun.release()
            self._slots.clear()

    def _run_stage(self, number: int, stage: Stage) -> Sequence[Block]:
        """Run stage `number`. Returns the blocks that it read."""
        pager, blocks = self._pager, self._blocks
        for due, fetch in self._observer.reruns_due():
            self._again.run_due(due, then_fetch=fetch)
        workspace_bytes = self._meter.workspace_bytes(stage)
        read = tuple(dict.fromkeys([b for i in stage.inputs if (b := blocks[i]) is not None]))
        if DROPPED in [block.state for block in read]:
            self._again.make_anew(read)
        # A stage that fails may have written them.
        written = [b for i in stage.mutates if (b := blocks[i]) is not None] if stage.mutates else ()
        last_used: Sequence[Block] = ()
        new_bytes, once = stage.output_bytes + workspace_bytes, not stage.repeatable
        pager.acquire(read, new_bytes, stage.name, then_fetch=self._observer.stage_reached(), in_one_piece=once)
        try:
            rerun = self._rerun(stage) if number in self._kept else None
            clock = CollectiveClock() if stage.has_collectives and not pager.device.asynchronous else None
            begin, end = self._run_with_room(stage, read, new_bytes, clock)
            for i in stage.outputs:
                blocks[i] = self._block(i, user_visible=False)
            if rerun is not None:
                rerun.has_run([blocks[i] for i in stage.outputs])
                pager.set_source(rerun.made, rerun)
            if stage.frees:
                last_used = list(dict.fromkeys([b for i in stage.frees if (b := blocks[i]) is not None]))
        finally:
            pager.retire(read, written, last_used=last_used)
        made = [b for i in stage.outputs if (b := blocks[i]) is not None and b not in read]
        self._observer.stage_ended(
            StageRun(
                name=stage.name,
                phase=stage.phase,
                begin=begin,
                end=end,
                workspace_bytes=workspace_bytes,
                read=read,
                made=tuple(dict.fromkeys(made)),
                written=written,
                next_uses=partial(_next_uses, stage, number, blocks),
                never_again=stage.never_again or self._no_reruns,
                collective_seconds=clock.seconds if clock is not None else 0.0,
                code=None if stage.has_collectives else stage.code,  # in those a stage also waits for other ranks
            )
        )
        for i in stage.frees:
            blocks[i] = None
        return read

    def _run_with_room(
        self, stage: Stage, read: Sequence[Block], new_bytes: int, clock: CollectiveClock | None
    ) -> tuple[Mark, Mark]:
        """Run a stage that holds what it needs. Return when it began and ended."""
        pager, slots = self._pager, self._slots
        # On an asynchronous device the allocator may find no memory in one piece, and the stage is tried again.
        again = stage.repeatable and pager.device.asynchronous
        kept = [(i, slots[i]) for i in stage.inputs] if again else ()

        def attempt() -> tuple[Mark, Mark]:
            for i, value in kept:
                slots[i] = value
            with self._meter.watching(stage), clock or _NOTHING:
                begin = self._observer.mark()
                _run_stage(stage, slots)
                return begin, self._observer.mark()

        return run_with_room(attempt, pager, read, new_bytes, stage.name, again=again)

    # -- stages that may run again, see [Note: Running again]

    def _rerun(self, stage: Stage) -> Rerun:
        names = [self._program.slot_names[i] for i in stage.inputs]
        rerun = Rerun(stage, names, [self._slots[i] for i in stage.inputs], [self._blocks[i] for i in stage.inputs])
        self._reruns.append(rerun)
        return rerun

    def _let_go_of_saved(self) -> None:
        # What PyTorch saves of the forward graph, which is about to return, must not live longer because of re-runs.
        if not self._reruns or self._program.phase != "forward":
            return
        results = (self._blocks[r] for r in self._program.results if isinstance(r, int))
        saved = {block for block in results if block is not None} - self._inputs
        for rerun in self._reruns:
            rerun.let_go_of(saved)

    def _hold_reruns(self) -> None:
        """The backward graph begins: keep what stages need that may run again, until it has ended."""
        if self._program.phase == "backward":
            sources = [source for block in self._inputs if (source := block.source) is not None]
            self._reruns = list(dict.fromkeys(source for source in sources if isinstance(source, Rerun)))
            for rerun in self._reruns:
                rerun.hold()

    def _input_block(self, index: int) -> Block | None:
        """Return the block of an input that may be a new one. User code may hold it."""
        value = self._slots[index]
        if not isinstance(value, torch.Tensor):
            return None
        if self._program.slot_kinds[index] != "activation":
            self._pager.make_movable(value)
        return self._block(index, user_visible=True)

    def _block(self, index: int, *, user_visible: bool) -> Block | None:
        value = self._slots[index]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        name, kind = self._program.slot_names[index], self._program.slot_kinds[index]
        return self._pager.block_of(value, name=name, kind=kind, user_visible=user_visible)

    def _shown(self, results: list[Any]) -> list[Block]:
        """Return the blocks of those results that user code can reach at once."""
        found = self._pager.known_blocks([results[index] for index in self._program.user_results])
        return [block for block in found if block is not None]


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


def _next_uses(stage: Stage, number: int, blocks: list[Block | None]) -> dict[Block, int]:
    """Return after how many stages the region uses each block again. Aliases of one storage are one block."""
    soonest: dict[Block, int] = {}
    for slot, following in zip((*stage.inputs, *stage.outputs), stage.next_uses, strict=True):
        if following >= 0 and (block := blocks[slot]) is not None:
            until = following - number
            soonest[block] = min(soonest[block], until) if block in soonest else until
    return soonest


def _results(program: Program, slots: list[Any]) -> list[Any]:
    results = [r.value if isinstance(r, Constant) else slots[r] for r in program.results]
    slots.clear()
    return results
