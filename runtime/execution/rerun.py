"""Runs forward stages again in the backward pass, to make anew what was dropped instead of kept.

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
from dataclasses import dataclass
from typing import Any

import torch

from planner.errors import StorageError, UnsupportedError
from runtime.device import Mark
from runtime.execution.one_stage import WorkspaceMeter, run_with_room
from runtime.execution.program import Observer, Program, Stage, StageRerun
from runtime.paging import Block, Pager, State
from runtime.system import annotate


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

    def spend(self) -> None:
        """It has run again: keep nothing of it."""
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
                self._spend(block.source)

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
        self._spend(rerun)
        self._observer.stage_ran_again(StageRerun(name=stage.name, begin=begin, end=end, made=tuple(fresh)))

    def _spend(self, rerun: Rerun) -> None:
        self._pager.set_source(rerun.made, None)
        rerun.spend()


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
    storage = saved.block.storage()
    if storage is None:
        raise StorageError(f"{saved.block} is needed again, but is gone; this is a bug in teraio, please report it")
    empty = torch.empty(0, dtype=saved.dtype, device=saved.device)
    return empty.set_(storage, saved.offset, saved.shape, saved.stride)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def why_no_reruns(program: Program) -> str:
    """Return why no stage of a program may run again, in plain words; "" if some may."""
    if program.phase != "forward" or program.is_inference:
        return "it is no stage of a forward pass"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors may read what it makes"
    return ""
