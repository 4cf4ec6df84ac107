"""Runs programs: without management, or stage by stage under the pager, while an observer records the timeline.

[Note: Running again]
A plan names the stages of a forward graph that run again. Each of them gets a `Rerun` when it runs, which is the `source` of the
blocks that it makes: only those can be dropped (`Pager.drop`). It keeps the stage's inputs:
* what PyTorch has saved for the backward pass, without keeping it alive: else it would never die;
* everything else strongly: inputs of the graph, small values such as seeds, results of stages that nobody saves. They are blocks
  as all others, and may wait in a lower tier.
While a backward graph runs, whose call gives up its arguments one by one, the inputs of stages that may still run again are held.

A stage that runs again gets its inputs on the device as any stage does. Inputs that were dropped are recomputed first. What it
makes is not copied: the storages that autograd holds get the memory of the new ones. So one run brings back all blocks of a stage
that were dropped; then nothing of it is kept any more, and they are not dropped again.
An input that was changed in place since the forward pass is an error. A failure on the way leaves everything as it was before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from planner.errors import StorageError, UnsupportedError
from runtime.device import Mark
from runtime.execution.one_stage import CollectiveClock, WorkspaceMeter, run_with_room
from runtime.execution.program import Constant, InterleavedStages, Observer, Program, Stage, StageRerun, StageRun
from runtime.paging import DROPPED, UNNAMED, Block, Pager, State, storage_of
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
            at_once = self._pager.known_blocks([results[index] for index in program.user_results])
            shown = [block for block in at_once if block is not None]
            self._pager.show_to_user(shown)
            if program.phase == "forward":
                self._pager.bring_in_reach([block for block in shown if block.kind == "activation"], "what the model returns")
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
                workspace_bytes=workspace_bytes,
                read=read,
                made=tuple(dict.fromkeys(made)),
                written=written,
                never_again=stage.never_again or self._no_reruns,
                collective_seconds=clock.seconds if clock is not None else 0.0,
                code=None if stage.has_collectives else stage.code,  # in those a stage also waits for other ranks
            ),
            begin,
            end,
            partial(_next_uses, stage, number, blocks),
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


# -- stages that run again


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor in a storage that is not kept alive."""

    block: Block
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Rerun:
    """A forward stage as it ran once, and what it needs to run again, see [Note: Running again].

    values, blocks: its inputs, and the block of each that has one. names: of the inputs, for messages.
    made: the blocks that it made and that can be dropped, with the position of each among its outputs.
    """

    def __init__(self, stage: Stage, names: Sequence[str], values: Sequence[Any], blocks: Sequence[Block | None]) -> None:
        self.stage = stage
        self.made: dict[Block, int] = {}
        self._names = names
        self._inputs: list[Any] = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
        self._versions = [_version(value) for value in self._inputs]
        self._updates = [block.updates if block is not None else 0 for block in blocks]
        self._blocks = blocks
        self._held: list[torch.UntypedStorage] = []

    @property
    def read(self) -> list[Block]:
        """The blocks of its inputs, each once."""
        return list(dict.fromkeys(block for block in self._blocks if block is not None))

    def has_run(self, outputs: Sequence[Block | None]) -> None:
        """The stage has run for the first time. outputs: the block of each output that has one."""
        for position, block in enumerate(outputs):
            if block is not None and block.span is not None and block not in self._blocks:
                self.made.setdefault(block, position)

    def let_go_of(self, saved: Collection[Block]) -> None:
        """Keep inputs in these blocks without keeping them alive: PyTorch holds them for as long as they are needed."""
        for position, (value, block) in enumerate(zip(self._inputs, self._blocks, strict=True)):
            if block is not None and block in saved and not value.is_conj() and not value.is_neg():
                place = (value.size(), value.stride(), value.storage_offset())
                self._inputs[position] = _Saved(block, value.dtype, value.device, *place)

    def hold(self) -> None:
        """Keep all inputs alive until `release`."""
        storages = (each.block.storage() for each in self._inputs if isinstance(each, _Saved))
        self._held = [storage for storage in storages if storage is not None]

    def release(self) -> None:
        """Undo `hold`."""
        self._held = []

    def spend(self, pager: Pager) -> None:
        """It has run again: keep nothing of it, and recompute nothing any more."""
        pager.set_source(self.made, None)
        self._inputs, self._blocks, self._held = [], [], []

    def check(self) -> None:
        """Raise UnsupportedError if an input is not what it was."""
        for number, (value, block) in enumerate(zip(self._inputs, self._blocks, strict=True)):
            stage, name = self.stage.name, self._names[number]
            if isinstance(value, _Saved):
                if value.block.dead:
                    raise UnsupportedError(f"{stage} cannot run again: its input {name} is gone; set the option recompute='off'")
                continue
            updates = block.updates if block is not None else 0
            if _version(value) != self._versions[number] or updates != self._updates[number]:
                raise UnsupportedError(
                    f"{stage} cannot run again: its input {name} was changed in place after the forward pass; change it after "
                    "backward, or set the option recompute='off'"
                )

    def values(self) -> list[Any]:
        """Return the inputs, which must be on the device."""
        return [_restored(value) if isinstance(value, _Saved) else value for value in self._inputs]


class Reruns:
    """Runs stages again under a pager. observer: is told of each run."""

    def __init__(self, pager: Pager, observer: Observer, meter: WorkspaceMeter) -> None:
        self._pager = pager
        self._observer = observer
        self._meter = meter

    def make_anew(self, blocks: Sequence[Block], *, then_fetch: Sequence[Block] = ()) -> None:
        """Bring back those of `blocks` that were dropped. then_fetch: see `Pager.acquire`.

        Raises UnsupportedError if an input is not what it was, BudgetError, StorageError; then they stay dropped.
        """
        while (block := next((each for each in blocks if each.state is State.DROPPED), None)) is not None:
            self._run(_source(block), then_fetch)
            then_fetch = ()
        for block in then_fetch:
            self._pager.prefetch(block)

    def run_due(self, blocks: Sequence[Block], *, then_fetch: Sequence[Block]) -> None:
        """Bring back `blocks` where the plan says so. It does so once: what their stage needs is not kept any longer."""
        self.make_anew(blocks, then_fetch=then_fetch)
        for block in blocks:
            if isinstance(block.source, Rerun):
                block.source.spend(self._pager)

    def _run(self, rerun: Rerun, then_fetch: Sequence[Block]) -> None:
        rerun.check()
        read = rerun.read
        self.make_anew(read)
        pager, stage = self._pager, rerun.stage
        workspace_bytes = self._meter.workspace_bytes(stage)
        new_bytes, name = stage.output_bytes + workspace_bytes, f"recompute/{stage.name}"

        def attempt() -> tuple[Mark, Sequence[Any], Mark]:
            with self._meter.watching(stage), torch.no_grad(), torch._C._DisableAutocast():
                begin = self._observer.mark()
                with annotate("stage", name):
                    made = stage.run(rerun.values())
                return begin, made, self._observer.mark()

        pager.acquire(read, new_bytes, name, then_fetch=then_fetch)
        try:
            begin, made, end = run_with_room(attempt, pager, read, new_bytes, name, again=True)
            fresh = _storages(made, {b: position for b, position in rerun.made.items() if b.state is State.DROPPED})
            del made
            pager.renew(fresh)
        finally:
            pager.retire(read, [])
        rerun.spend(pager)
        made_bytes = sum(block.size_bytes for block in fresh)
        self._observer.stage_ran_again(StageRerun(name=stage.name, made_bytes=made_bytes), begin, end)


def _storages(made: Sequence[Any], wanted: Mapping[Block, int]) -> dict[Block, torch.UntypedStorage]:
    storages = {block: made[position].untyped_storage() for block, position in wanted.items()}
    for block, storage in storages.items():
        if storage.nbytes() != block.size_bytes:
            raise StorageError(f"{block} was recomputed with {storage.nbytes()} bytes; this is a bug in teraio, please report it")
    return storages


def _source(block: Block) -> Rerun:
    if not isinstance(block.source, Rerun):
        raise StorageError(f"{block} was dropped, but nothing makes it anew; this is a bug in teraio, please report it")
    return block.source


def _restored(saved: _Saved) -> torch.Tensor:
    empty = torch.empty(0, dtype=saved.dtype, device=saved.device)
    return empty.set_(storage_of(saved.block), saved.offset, saved.shape, saved.stride)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def why_no_reruns(program: Program) -> str:
    """Return why no stage of a program may run again, in plain words; "" if some may."""
    if program.phase != "forward" or program.is_inference:
        return "it is no stage of a forward pass"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors may read what it makes"
    return ""
