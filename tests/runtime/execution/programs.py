"""Programs of hand-made stages over small tensors, and an observer that notes what it is told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.device import CpuDevice, Mark, WallMark
from runtime.execution import Constant, Kind, Program, Stage, StageRerun, StageRun, WorkspaceMeter, run_managed
from runtime.paging import Block

from ..memory_mover import UNIT, Bench

WIDTH = 2 * UNIT
"""Bytes of each tensor."""
MIB = 1 << 20


@dataclass
class Recorder:
    """An observer that notes what it is told. fetch: what it asks for, by the number of the stage. kept, due: see `Observer`."""

    regions: list[tuple[Hashable, int]] = field(default_factory=list)
    stages: list[StageRun] = field(default_factory=list)
    next_uses: list[dict[str, int]] = field(default_factory=list)
    fetch: dict[int, list[Block]] = field(default_factory=dict)
    reached: int = 0
    again: list[StageRerun] = field(default_factory=list)
    kept: Collection[int] = ()
    due: dict[int, list[Block]] = field(default_factory=dict)
    ended: int = 0

    def region_begins(self, identity: Hashable, stage_count: int, *, is_inference: bool = False) -> None:
        self.regions.append((identity, stage_count))

    def mark(self) -> WallMark:
        return CpuDevice().mark()

    def kept_stages(self) -> Collection[int]:
        return self.kept

    def reruns_due(self) -> Iterator[tuple[Sequence[Block], Sequence[Block]]]:
        for block in self.due.pop(self.reached, []):
            yield [block], []

    def stage_ran_again(self, rerun: StageRerun, begin: Mark, end: Mark) -> None:
        self.again.append(rerun)

    def stage_reached(self) -> Sequence[Block]:
        self.reached += 1
        return self.fetch.get(self.reached - 1, ())

    def stage_ended(self, run: StageRun, begin: Mark, end: Mark, next_uses: Callable[[], Mapping[Block, int]] = dict) -> None:
        run.seconds = end.seconds_since(begin)
        self.stages.append(run)
        self.next_uses.append({block.name: after for block, after in next_uses().items()})

    def region_ended(self) -> None:
        self.ended += 1


def filled(value: float) -> torch.Tensor:
    return torch.full((WIDTH // 4,), float(value))


def stage(
    name: str,
    run: Callable[..., tuple[Any, ...]],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    *,
    frees: tuple[int, ...] = (),
    next_uses: tuple[int, ...] = (),
    mutates: tuple[int, ...] = (),
) -> Stage:
    def boxed(values: list[Any]) -> Sequence[Any]:
        arguments = list(values)
        values.clear()
        return run(*arguments)

    return Stage(
        name=name,
        phase="forward",
        run=boxed,
        inputs=inputs,
        outputs=outputs,
        frees=frees,
        next_uses=next_uses or (-1,) * (len(inputs) + len(outputs)),
        input_bytes=len(inputs) * WIDTH,
        output_bytes=len(outputs) * WIDTH,
        workspace_bytes=0,
        mutates=mutates,
    )


def program(*stages: Stage, inputs: int, results: tuple[int | Constant, ...], kinds: Sequence[Kind] = ()) -> Program:
    slots = 1 + max(slot for s in stages for slot in (*s.inputs, *s.outputs))
    return Program(
        identity="p",
        name="p",
        phase="forward",
        stages=stages,
        input_count=inputs,
        slot_names=tuple(f"slot{number}" for number in range(slots)),
        slot_kinds=tuple([*kinds, *["activation"] * (slots - len(kinds))]),
        results=results,
        user_results=(0,),
        kept_bytes=0,
        small_bytes=0,
    )


def chain() -> Program:
    """0 -> 2 = 0 + 1 -> 3 = 2 * 2 -> 4 = 3 - 0; results 4, None and 2."""
    return program(
        stage("add", lambda a, b: (a + b,), (0, 1), (2,), frees=(1,), next_uses=(2, -1, 1)),
        stage("double", lambda a: (a * 2,), (2,), (3,), next_uses=(-1, 2)),
        stage("subtract", lambda a, b: (a - b,), (3, 0), (4,), frees=(3, 0)),
        inputs=2,
        results=(4, Constant(None), 2),
    )


def managed(plan: Program, arguments: list[Any], bench: Bench, recorder: Recorder | None = None) -> list[Any]:
    return run_managed(plan, arguments, bench.pager, recorder or Recorder(), WorkspaceMeter(None))
