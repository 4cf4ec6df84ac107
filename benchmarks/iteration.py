"""A training iteration without a machine: stages with their arithmetic and traffic, blocks with their uses.

`Recorder` collects it in the order of execution. `Work.trace` adds the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from benchmarks.machines import Machine
from planner.schema import Block, BlockKind, Phase, RecomputeGroup, Stage, Subgroup, Trace

ELEMENT_BYTES = 4
MATRIX_WORKSPACE_BYTES = 32 << 20
"""Workspace of cuBLAS on Hopper in PyTorch, where `CUBLAS_WORKSPACE_CONFIG` is ":4096:8"."""
MIN_MOVABLE_BYTES = 1 << 20
"""Smaller blocks stay on the device: the weights of norms with their gradients and states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One stage without a machine. `traffic_bytes`: bytes that it reads and writes in device memory."""

    name: str
    phase: Phase
    flops: float
    traffic_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer subgroup: its stage, the blocks that it uses, and the number of its parameter elements."""

    stage: int
    blocks: tuple[int, ...]
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One training iteration without a machine. `parameters`: number of parameter elements."""

    name: str
    parameters: int
    stages: tuple[StageWork, ...]
    blocks: tuple[Block, ...]
    updates: tuple[Update, ...]

    def trace(self, machine: Machine) -> Trace:
        """The trace on `machine`: a stage lasts as long as the slower of its arithmetic and its memory traffic.

        seconds = max(FLOPs / `machine.flops_per_second`, bytes / `machine.device_bytes_per_second`), both attained rates.
        A subgroup's device update is its stage; its host update is elements / `host_update_elements_per_second`. Every forward
        stage that makes a block for a backward stage is a recompute group; a re-run takes as long as the stage.
        """
        seconds = [
            max(stage.flops / machine.flops_per_second, stage.traffic_bytes / machine.device_bytes_per_second)
            for stage in self.stages
        ]
        return Trace.build(
            name=f"{self.name}, {machine.name}",
            created_by="benchmarks",
            hardware=machine.hardware(),
            stages=tuple(
                Stage(
                    id=index,
                    name=f"{stage.phase}/{stage.name}",
                    phase=stage.phase,
                    duration_seconds=seconds[index],
                    workspace_bytes=stage.workspace_bytes,
                )
                for index, stage in enumerate(self.stages)
            ),
            blocks=self.blocks,
            subgroups=tuple(
                Subgroup(
                    id=index,
                    stage=update.stage,
                    blocks=update.blocks,
                    elements=update.elements,
                    device_seconds=seconds[update.stage],
                    host_seconds=update.elements / machine.host_update_elements_per_second,
                )
                for index, update in enumerate(self.updates)
            ),
            recompute=tuple(self._groups(seconds)),
        )

    def _groups(self, seconds: Sequence[float]) -> Iterator[RecomputeGroup]:
        used: list[list[Block]] = [[] for _ in self.stages]
        for block in self.blocks:
            for stage in block.uses:
                used[stage].append(block)
        count = 0
        for number, work in enumerate(self.stages):
            made = [block for block in used[number] if not block.persistent and block.uses[0] == number]
            again = [block for block in made if block.movable and self.stages[block.uses[-1]].phase == "backward"]
            if work.phase != "forward" or not again:
                continue
            outputs = sum(block.size_bytes for block in made) - sum(block.size_bytes for block in again)
            yield RecomputeGroup(
                id=count,
                stage=number,
                blocks=tuple(block.id for block in again),
                reads=tuple(block.id for block in used[number] if block not in made),
                duration_seconds=seconds[number],
                workspace_bytes=work.workspace_bytes + outputs,
            )
            count += 1


@dataclass(slots=True, eq=False)
class Draft:
    """A block while its uses are being collected."""

    index: int
    name: str
    kind: BlockKind
    size_bytes: int
    persistent: bool = False
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)

    def block(self) -> Block:
        """Return the block with the uses collected so far."""
        return Block(
            id=self.index,
            name=self.name,
            kind=self.kind,
            size_bytes=self.size_bytes,
            persistent=self.persistent,
            reads=tuple(self.reads),
            writes=tuple(self.writes),
            movable=self.size_bytes >= MIN_MOVABLE_BYTES,
        )


@dataclass(slots=True, eq=False)
class Matrix:
    """A parameter with its gradient and AdamW's two moments. Gradients live from the backward pass to the update."""

    elements: int
    weight: Draft
    gradient: Draft
    moments: tuple[Draft, Draft]


class Recorder:
    """Collects the stages of one iteration over `tokens` tokens, and the blocks that they use, in the order of the calls.

    All elements have `element_bytes`.
    """

    def __init__(self, tokens: int, *, element_bytes: int = ELEMENT_BYTES) -> None:
        self.tokens, self.element_bytes = tokens, element_bytes
        self._stages: list[StageWork] = []
        self._drafts: list[Draft] = []
        self._matrices: list[Matrix] = []
        self._updates: list[Update] = []

    def work(self, name: str) -> Work:
        """Return what has been recorded."""
        return Work(
            name=name,
            parameters=sum(matrix.elements for matrix in self._matrices),
            stages=tuple(self._stages),
            blocks=tuple(draft.block() for draft in self._drafts),
            updates=tuple(self._updates),
        )

    def optimizer(self, name: str, matrices: Iterable[Matrix]) -> None:
        """Add a stage that updates a subgroup by fused AdamW: no workspace; it reads 4 elements per parameter and writes 3."""
        updated = tuple(matrices)
        changed = [block for matrix in updated for block in (matrix.weight, *matrix.moments)]
        gradients = [matrix.gradient for matrix in updated]
        blocks = tuple(sorted(draft.index for draft in (*changed, *gradients)))
        elements = sum(matrix.elements for matrix in updated)
        self._updates.append(Update(stage=len(self._stages), blocks=blocks, elements=elements))
        self.stage(name, "optimizer", (*changed, *gradients), changed)

    def matrix_stage(
        self,
        name: str,
        reads: Sequence[Draft],
        writes: Sequence[Draft],
        *,
        backward: bool = False,
        workspace_elements: int = 0,
    ) -> None:
        """Add a stage that multiplies all tokens by each matrix that it reads, or computes both products of the backward pass.

        2 FLOPs per token and element forward, 4 backward. workspace_elements: per token, in addition to that of the library.
        """
        elements = sum(draft.size_bytes // self.element_bytes for draft in reads if draft.kind == "parameter")
        self.stage(
            name,
            "backward" if backward else "forward",
            reads,
            writes,
            flops=(4.0 if backward else 2.0) * self.tokens * elements,
            workspace_bytes=MATRIX_WORKSPACE_BYTES + workspace_elements * self.tokens * self.element_bytes,
        )

    def stage(
        self,
        name: str,
        phase: Phase,
        reads: Sequence[Draft],
        writes: Sequence[Draft],
        *,
        flops: float = 0.0,
        workspace_bytes: int = 0,
        traffic_bytes: int | None = None,
    ) -> None:
        """Add the next stage. traffic_bytes: None if it reads and writes each of its blocks once."""
        stage = len(self._stages)
        for draft in reads:
            draft.reads.append(stage)
        for draft in writes:
            draft.writes.append(stage)
        if traffic_bytes is None:
            traffic_bytes = sum(draft.size_bytes for draft in (*reads, *writes))
        self._stages.append(
            StageWork(name=name, phase=phase, flops=flops, traffic_bytes=traffic_bytes, workspace_bytes=workspace_bytes)
        )

    def matrix(self, name: str, *shape: int) -> Matrix:
        """Add a parameter of `shape` with its gradient and moments."""
        size = prod(shape) * self.element_bytes
        matrix = Matrix(
            elements=prod(shape),
            weight=self.block(name, "parameter", size, persistent=True),
            gradient=self.block(f"{name}.grad", "gradient", size),
            moments=(
                self.block(f"{name}.exp_avg", "optimizer_state", size, persistent=True),
                self.block(f"{name}.exp_avg_sq", "optimizer_state", size, persistent=True),
            ),
        )
        self._matrices.append(matrix)
        return matrix

    def block(self, name: str, kind: BlockKind, size_bytes: int, *, persistent: bool = False) -> Draft:
        """Add a block without uses."""
        draft = Draft(index=len(self._drafts), name=name, kind=kind, size_bytes=size_bytes, persistent=persistent)
        self._drafts.append(draft)
        return draft
