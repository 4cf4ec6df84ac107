"""The trace: what was measured in one iteration. Schema, validation and file; explained in `traces/README.md`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from functools import cached_property
from math import prod
from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, ValidationError, model_validator

from planner.errors import OptionsError, TraceError
from planner.schema.json_file import read_model, write_atomic
from planner.schema.lengths import Lengths, dominates, told
from planner.schema.models import (
    Bytes,
    FrozenModel,
    GrownModel,
    Id,
    Ids,
    Seconds,
    check_consecutive,
    check_ids,
    describe,
    printable,
)

Tier = Literal["device", "host", "storage"]
# What a stage belongs to. "recompute": a re-run of a plan, see `planner.recomputed`; never in a file.
Phase = Literal["forward", "backward", "optimizer", "user", "recompute"]
BlockKind = Literal["parameter", "gradient", "optimizer_state", "activation", "buffer"]
Rate = Annotated[float, Field(ge=1e-60)]
Count = Annotated[int, Field(gt=0)]


class Link(GrownModel):
    """One direction between two tiers; `from` and `to` in the file. It carries one block at a time, in queue order.

    path: how the bytes get there where there are several ways ("posix", "kvikio"); for people. alone_bytes_per_second: the rate
    while the other ranks of the machine were idle, where `bytes_per_second` was measured while all were busy. Both are left out
    of the file and of the fingerprint where they are not given.
    """

    added_later = ("path", "alone_bytes_per_second")

    from_tier: Tier = Field(validation_alias="from", serialization_alias="from")
    to_tier: Tier = Field(validation_alias="to", serialization_alias="to")
    bytes_per_second: Rate
    latency_seconds: Seconds = 0.0
    path: str = ""
    alone_bytes_per_second: Rate | None = None

    @property
    def name(self) -> str:
        """`"device->storage"` and the like; a key of `moved_bytes`."""
        return f"{self.from_tier}->{self.to_tier}"

    def seconds(self, size_bytes: int) -> float:
        """Return the time that a block of `size_bytes` occupies the link."""
        return self.latency_seconds + size_bytes / self.bytes_per_second

    @model_validator(mode="after")
    def _two_tiers(self) -> Self:
        if self.from_tier == self.to_tier:
            raise ValueError(f"a link joins two different tiers, found {self.name}")
        return self


class SharedRate(FrozenModel):
    """The rate that several links reach together, where they share a bus or a drive.

    While more than one of `links` (names such as "device->storage") is busy, the rate is divided max-min fairly.
    """

    name: str
    links: Annotated[tuple[str, ...], FailFast()] = Field(min_length=2)
    bytes_per_second: Rate


class Hardware(FrozenModel):
    """Capacities and measured rates of the machine that the trace was taken on."""

    name: str
    device_memory_bytes: Bytes
    host_memory_bytes: Bytes = 0
    storage_bytes: Bytes = 0
    links: Annotated[tuple[Link, ...], FailFast()] = ()
    shared: Annotated[tuple[SharedRate, ...], FailFast()] = ()
    host_update_elements_per_second: Rate | None = None

    @model_validator(mode="after")
    def _links_once(self) -> Self:
        names = [link.name for link in self.links]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"links must be given once each, found twice: {', '.join(twice)}; leave one of each")
        for shared in self.shared:
            unknown = sorted(set(shared.links) - set(names))
            if unknown:
                raise ValueError(
                    f"shared rate {shared.name!r} names links that do not exist: {', '.join(unknown)}; give names of links"
                )
            if len(set(shared.links)) != len(shared.links):
                raise ValueError(f"shared rate {shared.name!r} names a link twice: {', '.join(shared.links)}")
        return self

    def link(self, from_tier: Tier, to_tier: Tier) -> Link | None:
        """Return the link of that direction; None where the machine has none."""
        return next((each for each in self.links if each.from_tier == from_tier and each.to_tier == to_tier), None)


class Stage(GrownModel):
    """One planned unit of execution. `workspace_bytes`: peak memory inside the stage beyond its inputs and outputs.

    `collective_seconds`: the part of its duration in collectives, waiting for other ranks as well. Left out of the file and of
    the fingerprint where it is 0: there are none, or it cannot be told, as on a GPU.
    """

    added_later = ("collective_seconds",)

    id: Id
    name: str
    phase: Phase
    duration_seconds: Seconds
    workspace_bytes: Bytes = 0
    collective_seconds: Seconds = 0.0

    @model_validator(mode="after")
    def _part_of_the_duration(self) -> Self:
        if self.collective_seconds > self.duration_seconds:
            raise ValueError(
                f"stage {self.id} lasts {self.duration_seconds} s, but spends {self.collective_seconds} s in collectives"
            )
        return self


class Block(GrownModel):
    """One managed storage. `reads` and `writes` are stage ids, ascending and without repetition.

    A non-persistent block exists from its first use to its last. If `dies_after` is given, it exists until the end of that later
    stage; otherwise the field is left out of the file and of the fingerprint. A block with `movable` false counts as resident
    while it exists.
    """

    added_later = ("dies_after",)

    id: Id
    name: str
    kind: BlockKind
    size_bytes: Bytes
    persistent: bool
    reads: Ids
    writes: Ids
    movable: bool = True
    dies_after: Id | None = None

    @cached_property
    def uses(self) -> tuple[int, ...]:
        """Stages that read or write the block, ascending."""
        return tuple(sorted({*self.reads, *self.writes}))

    @property
    def user_visible(self) -> bool:
        """Whether user code between compiled regions can reach it, see [Note: user code] in `planner.problem.host_updates`."""
        return self.kind in ("parameter", "gradient", "optimizer_state")

    @property
    def last_stage(self) -> int:
        """The last stage of the iteration in which the block exists. Only for a block that is not persistent."""
        return self.uses[-1] if self.dies_after is None else self.dies_after

    @model_validator(mode="after")
    def _uses_ordered(self) -> Self:
        for label, stages in (("reads", self.reads), ("writes", self.writes)):
            if list(stages) != sorted(set(stages)):
                raise ValueError(f"block {self.id} {label} must ascend without repetition, found {list(stages)}")
        if not self.reads and not self.writes:
            raise ValueError(f"block {self.id} has no use: leave out what no stage reads or writes")
        if self.dies_after is not None and (self.persistent or self.dies_after <= self.uses[-1]):
            raise ValueError(
                f"block {self.id} dies after stage {self.dies_after}; only one that is not persistent can outlive its last use, "
                f"which is in stage {self.uses[-1]}"
            )
        return self


class Subgroup(FrozenModel):
    """One optimizer subgroup: its update runs in `stage` and uses `blocks`.

    `device_seconds`: its share of the stage's duration. `host_seconds`: duration of the update on the host's processor; None
    where it cannot run there.
    """

    id: Id
    stage: Id
    blocks: Ids
    elements: Annotated[int, Field(ge=0)]
    device_seconds: Seconds
    host_seconds: Seconds | None = None


class RecomputeGroup(FrozenModel):
    """What running the forward stage `stage` again makes: `blocks`, from `reads`, in `duration_seconds`.

    `blocks`: movable blocks that begin to exist in the stage and that user code cannot reach. `reads`: all other blocks that the
    stage reads; also those that die in the forward pass. `workspace_bytes`: the peak of a re-run beyond `reads` and `blocks`: the
    stage's own workspace, and outputs that are not in `blocks`.
    """

    id: Id
    stage: Id
    blocks: Annotated[tuple[Id, ...], FailFast()] = Field(min_length=1)
    reads: Ids
    duration_seconds: Seconds
    workspace_bytes: Bytes = 0


class NotRecomputed(FrozenModel):
    """A forward stage that cannot be run again, and why. For people; plans do not depend on it."""

    stage: Id
    reason: str


class Tiled(FrozenModel):
    """What runs in tiles of its rows in a graph: `what`, in so many `tiles`. For people; plans do not depend on it.

    whole_bytes: what the largest of its stages would need with all rows at once, by estimate. again_seconds: of an iteration:
    what is computed once more since it is not saved.
    """

    what: str
    tiles: Count
    whole_bytes: Bytes
    again_seconds: Seconds


def short_fingerprint(fingerprint: str) -> str:
    """Return the first eight digits, which tell traces apart."""
    return printable(fingerprint.removeprefix("sha256:")[:8])


class Work(FrozenModel):
    """What an iteration gets done, so that its time tells rates. For people; plans do not depend on it. None: not known.

    tokens, samples: of its batches. flops: floating-point operations of the model: matmuls, convolutions and attention, without
    what runs again in the backward pass, so that their share of the peak is MFU and not HFU. peak_flops_per_second: of the
    machine, in the precisions of these operations.
    """

    tokens: Count | None = None
    samples: Count | None = None
    flops: Rate | None = None
    peak_flops_per_second: Rate | None = None

    def times(self, factor: int) -> Self:
        """Return the work of an iteration with `factor` times the batches."""
        grown = {name: value * factor for name in ("tokens", "samples", "flops") if (value := getattr(self, name)) is not None}
        return self.model_copy(update=grown)

    def at(self, share: float) -> Self:
        """Return the work with this share of the inputs. Of the operations it is not known: attention makes them grow
        faster than the length."""
        changed = {name: max(round(value * share), 1) for name in ("tokens", "samples") if (value := getattr(self, name))}
        return self.model_copy(update={**changed, "flops": None, "peak_flops_per_second": None})


class Trace(GrownModel):
    """One iteration as measured: stages in order, blocks with their uses, links.

    The constructor checks that ids are consecutive from 0 and that every id that is referred to exists. It raises pydantic's
    ValidationError; `Trace.load` raises TraceError for the same faults and for all faults of the file. subgroup_bytes: the size
    by which the optimizer was cut into subgroups, see [Note: The size of subgroups]. Left out of the file where it is not known.
    `recompute`: at most one group for each stage. lengths: sizes and times with shorter inputs; None where inputs do not vary.
    """

    added_later = ("subgroup_bytes", "not_recomputed", "work", "lengths", "tiled")

    format: Literal["teraio.trace"] = "teraio.trace"
    version: Literal[1] = 1
    name: str
    created_by: str = ""
    hardware: Hardware
    stages: Annotated[tuple[Stage, ...], FailFast()] = Field(min_length=1)
    blocks: Annotated[tuple[Block, ...], FailFast()] = ()
    subgroups: Annotated[tuple[Subgroup, ...], FailFast()] = ()
    recompute: Annotated[tuple[RecomputeGroup, ...], FailFast()] = ()
    subgroup_bytes: Count | None = None
    not_recomputed: Annotated[tuple[NotRecomputed, ...], FailFast()] = ()
    work: Work | None = None
    lengths: Lengths | None = None
    tiled: Annotated[tuple[Tiled, ...], FailFast()] = ()
    stored_fingerprint: str | None = Field(
        default=None, validation_alias="fingerprint", serialization_alias="fingerprint", exclude=True
    )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that plans depend on: not of name, creator and the fields that were added later."""
        content = self.model_dump(mode="json", by_alias=True, exclude={"name", "created_by", *self.added_later})
        if not self.hardware.shared:
            del content["hardware"]["shared"]  # added later: older traces keep their fingerprints
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def ideal_seconds(self) -> float:
        """Time of an iteration that never waits: the sum of the stage durations."""
        return sum(stage.duration_seconds for stage in self.stages)

    @model_validator(mode="after")
    def _references_exist(self) -> Self:
        check_consecutive("stages", [stage.id for stage in self.stages])
        check_consecutive("blocks", [block.id for block in self.blocks])
        check_consecutive("subgroups", [subgroup.id for subgroup in self.subgroups])
        stages, blocks = len(self.stages), len(self.blocks)
        for block in self.blocks:
            if block.uses[-1] >= stages:
                raise ValueError(f"block {block.id} is used by stage {block.uses[-1]}; the last stage is {stages - 1}")
            if block.last_stage >= stages:
                raise ValueError(f"block {block.id} dies after stage {block.last_stage}; the last stage is {stages - 1}")
        taken: dict[int, float] = {}
        for subgroup in self.subgroups:
            check_ids(f"subgroup {subgroup.id}", (subgroup.stage,), stages, "stage")
            check_ids(f"subgroup {subgroup.id}", subgroup.blocks, blocks, "block")
            taken[subgroup.stage] = taken.get(subgroup.stage, 0.0) + subgroup.device_seconds
            if taken[subgroup.stage] > self.stages[subgroup.stage].duration_seconds * (1 + 1e-9):
                raise ValueError(
                    f"subgroups up to {subgroup.id} take {taken[subgroup.stage]} s of stage {subgroup.stage}, which lasts "
                    f"{self.stages[subgroup.stage].duration_seconds} s"
                )
        for entry in self.not_recomputed:
            check_ids("not_recomputed", (entry.stage,), stages, "stage")
        for stage in self.stages:
            if stage.phase == "recompute":
                raise ValueError(f"stage {stage.id} has the phase 'recompute', which only re-runs of a plan have: use another")
        self._check_groups()
        if self.lengths is not None:
            for what, named, count in (
                ("block_bytes", self.lengths.block_bytes, blocks),
                ("workspace_bytes", self.lengths.workspace_bytes, stages),
                ("stage_seconds", self.lengths.stage_seconds, stages),
            ):
                check_ids(f"lengths.{what}", tuple(each.id for each in named), count, "id")
        return self

    def _check_groups(self) -> None:
        check_consecutive("recompute groups", [group.id for group in self.recompute])
        touched: list[list[Block]] = [[] for _ in self.stages]
        for block in self.blocks if self.recompute else ():
            for stage in block.uses:
                touched[stage].append(block)
        seen: set[int] = set()
        for group in self.recompute:
            check_ids(f"recompute group {group.id}", (group.stage,), len(self.stages), "stage")
            check_ids(f"recompute group {group.id}", (*group.blocks, *group.reads), len(self.blocks), "block")
            if group.stage in seen:
                raise ValueError(f"recompute group {group.id} runs stage {group.stage} again as another does; leave one")
            seen.add(group.stage)
            _check_group(group, self.stages[group.stage], touched[group.stage])

    def at(self, *sizes: int) -> Trace:
        """Return the same iteration with inputs of other sizes: its stages, blocks and uses, with the bytes and times there.

        sizes: the length; where the number of inputs varies too, that as well (by default the highest).
        Raises OptionsError if the trace does not say how it depends on them, or not for these.
        """
        known = self.lengths
        if known is None:
            raise OptionsError(
                f"trace {printable(self.name)}: found length {told(sizes)}, but the trace is of one length; capture it with "
                "--lengths"
            )
        wanted = (*sizes, *known.highest[len(sizes) :])
        if not sizes or len(wanted) != len(known.highest):
            raise OptionsError(
                f"trace {printable(self.name)}: found {len(sizes)} sizes of inputs ({told(sizes)}), wanted {len(known.highest)}: "
                "the length, and the number of inputs where that varies"
            )
        if not (dominates(known.highest, wanted) and dominates(wanted, known.lowest)):
            raise OptionsError(
                f"trace {printable(self.name)}: found length {told(sizes)}, wanted one from {told(known.lowest)} to "
                f"{told(known.highest)}, for which sizes are known; make a trace of a larger range"
            )
        return self if wanted == known.highest else self.resized(wanted)

    def resized(self, wanted: tuple[int, ...]) -> Trace:
        """Return what `at` does, whatever the range, and by the polynomials also for the highest sizes."""
        known = self.lengths or Lengths(lowest=wanted, highest=wanted)
        sizes = {each.id: each.bytes_at(wanted) for each in known.block_bytes}
        workspaces = {each.id: each.bytes_at(wanted) for each in known.workspace_bytes}
        shares = known.stage_shares(wanted)
        remade = {block for group in self.recompute for block in group.blocks}
        shrunk: dict[int, int] = {}  # by stage, of what counts as workspace where it runs again
        for stage in self.stages if self.recompute else ():
            shrunk[stage.id] = stage.workspace_bytes - workspaces.get(stage.id, stage.workspace_bytes)
        for block in self.blocks if self.recompute else ():
            if block.id in sizes and block.id not in remade and not block.persistent:
                shrunk[block.uses[0]] += block.size_bytes - sizes[block.id]

        def of_stage(stage: Stage) -> Stage:
            share = shares.get(stage.id, 1.0)
            seconds, inside = stage.duration_seconds * share, stage.collective_seconds * share
            changed = {"duration_seconds": seconds, "collective_seconds": min(inside, seconds)}
            return stage.model_copy(update={**changed, "workspace_bytes": workspaces.get(stage.id, stage.workspace_bytes)})

        def of_block(block: Block) -> Block:
            size = sizes[block.id]
            movable = block.movable and (size >= known.movable_bytes or block.id in remade)
            return block.model_copy(update={"size_bytes": size, "movable": movable})

        def of_group(group: RecomputeGroup) -> RecomputeGroup:
            seconds = group.duration_seconds * shares.get(group.stage, 1.0)
            workspace = max(group.workspace_bytes - shrunk[group.stage], 0)
            return group.model_copy(update={"duration_seconds": seconds, "workspace_bytes": workspace})

        return self.model_copy(
            update={
                "stages": tuple(map(of_stage, self.stages)),
                "blocks": tuple(of_block(block) if block.id in sizes else block for block in self.blocks),
                "recompute": tuple(map(of_group, self.recompute)),
                "work": None if self.work is None else self.work.at(prod(wanted) / prod(known.highest)),
                "lengths": None,
                "tiled": (),
            }
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace file. Raises TraceError with the file, the place in it and what is wrong."""
        trace = read_model(path, cls, TraceError)
        if trace.stored_fingerprint not in (None, "", trace.fingerprint):
            raise TraceError(
                f"{path}: the content does not match its fingerprint {trace.stored_fingerprint}; it was "
                "changed after it was written: if you meant the change, remove the field 'fingerprint'"
            )
        return trace.model_copy(update={"stored_fingerprint": None})

    def rebuilt(self, **changed: object) -> Trace:
        """Return the trace with some fields replaced, checked anew. Raises TraceError as `build` does."""
        fields = {name: getattr(self, name) for name in Trace.model_fields}
        return Trace.build(**{**fields, "stored_fingerprint": None, **changed})

    @classmethod
    def build(cls, **fields: object) -> Trace:
        """Build a trace like the constructor. Raises TraceError with the first problems in one line."""
        try:
            return cls.model_validate(fields)
        except ValidationError as problem:
            raise TraceError(f"the trace contradicts itself: {describe(problem)}") from problem

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace file. A reader sees the whole old file or the whole new one. Raises OSError."""
        write_atomic(path, self.text())

    def text(self) -> str:
        """Return the content of the trace file."""
        content = self.model_dump(mode="json", by_alias=True)
        content["fingerprint"] = self.fingerprint
        return json.dumps(content, indent=1) + "\n"


def _check_group(group: RecomputeGroup, stage: Stage, used: Iterable[Block]) -> None:
    """Raise ValueError if running `stage` again does not make the group's blocks. `used`: all blocks that the stage uses."""
    what = f"recompute group {group.id}"
    if stage.phase != "forward":
        raise ValueError(f"{what} runs stage {stage.id} again, which is of phase {stage.phase!r}; only forward stages can be")
    born: dict[int, Block] = {}
    before: dict[int, Block] = {}
    for block in used:
        (before if block.persistent or block.uses[0] < stage.id else born)[block.id] = block
    for block in before.values():
        if stage.id in block.writes:
            raise ValueError(f"{what}: stage {stage.id} changes block {block.id}, which exists before it; leave the group out")
    for number in group.blocks:
        made = born.get(number)
        if made is None or stage.id not in made.writes or not made.movable or made.user_visible:
            raise ValueError(
                f"{what} cannot make block {number}: that takes a movable activation or buffer that stage {stage.id} writes first"
            )
    if set(group.reads) != before.keys():
        raise ValueError(
            f"{what} reads the blocks {sorted(group.reads)[:20]}, its stage {sorted(before)[:20]}: name exactly these"
        )
    for label, ids in (("blocks", group.blocks), ("reads", group.reads)):
        if len(set(ids)) != len(ids):
            raise ValueError(f"{what} names a block twice in {label}: {list(ids)[:20]}")
