"""What the executor runs: a compiled graph as a flat list of stages over numbered slots. And whom it tells of what it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from runtime.device import Mark
from runtime.paging import Block

Phase = Literal["forward", "backward", "optimizer", "user"]
Kind = Literal["parameter", "gradient", "optimizer_state", "activation", "buffer"]

# Boxed call: takes a list of values and empties it, so that values are freed as soon as they are not needed any more.
StageFunction = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a graph.

    name: unique in its graph; from the modules that it came from (`forward/layers.3.attn`).
    inputs, outputs: slots that it reads and fills. frees: slots whose last use in the graph is this stage.
    next_uses: for each slot of `inputs`, then of `outputs`, the number of the next stage that reads it; -1 if none does.
    input_bytes: memory of all inputs, estimated. output_bytes: new memory that the outputs take.
    workspace_bytes: peak beyond inputs and outputs, estimated.
    waiting_bytes: what was made before it, is needed after it and is too small to move, without results of the graph, estimated.
    mutates: slots among `inputs` that the stage writes in place, such as batch norm's running statistics.
    has_collectives: whether it begins collectives, or waits for some.
    repeatable: whether it may simply run once more where it ran out of memory: it writes nothing in place and draws no numbers.
    never_again: of a forward stage: why it must not run again in the backward pass, in plain words; "" if it may.
    has_class_loss: whether it computes a loss over classes, such as the words of a vocabulary, or its gradient.
    code: equal for stages with the same code and sizes: they take as long, and need the same workspace. Compiled code lives as
    long as its compiler.
    """

    name: str
    phase: Phase
    run: StageFunction
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    next_uses: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    workspace_bytes: int
    waiting_bytes: int = 0
    mutates: tuple[int, ...] = ()
    has_collectives: bool = False
    repeatable: bool = False
    never_again: str = ""
    has_class_loss: bool = False
    code: Hashable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", (id(self.run), self.input_bytes, self.output_bytes))

    @property
    def need_bytes(self) -> int:
        """What it needs on the device at once, estimated."""
        return self.input_bytes + self.output_bytes + self.workspace_bytes + self.waiting_bytes


@dataclass(frozen=True, slots=True)
class Constant:
    """A graph output that is not in a slot: None or a number."""

    value: Any


class Resize(Protocol):
    """Gives a program with symbolic sizes the byte counts of certain sizes."""

    def __call__(self, program: Program, arguments: Sequence[Any]) -> Program:
        """Return `program` for the arguments of a call."""

    def at(self, program: Program, sizes: Mapping[Any, int]) -> Program:
        """Return `program` for sizes by symbol; for the largest that are known, to which it was cut, where one is missing."""

    def bound(self, most_bytes: int) -> None:
        """Have PyTorch compile it anew, cut for them, when sizes come with which one of its stages would need more."""


class SizedGraph(NamedTuple):
    """Identity of a graph that was resized. Its stages, and the blocks that they make, are the same ones at all sizes."""

    graph: Hashable
    sizes: tuple[int, ...]


def graph_of(identity: Hashable) -> Hashable:
    """Return the part of an identity that does not depend on sizes."""
    return identity.graph if isinstance(identity, SizedGraph) else identity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A compiled forward or backward graph.

    identity: distinguishes graphs within a process, in order of compilation; `SizedGraph` after `resize`.
    slot_names, slot_kinds: one for each slot. The graph's inputs are in the first `input_count` slots.
    results: for each output of the graph a slot, or a constant.
    user_results: positions in `results` that user code can reach at once (model outputs, gradients).
    kept_bytes: memory of all results, which outlives the run, estimated.
    small_bytes: memory of inputs and results that are too small to move; of a backward graph without those of its forward graph.
    small_parameter_bytes: the part of them that are the parameters of a forward graph.
    is_inference: whether it is a forward graph without a backward graph.
    resize: for graphs with symbolic sizes, see `Resize`. sizes: the values that it was resized for, by symbol.
    """

    identity: Hashable
    name: str
    phase: Phase
    stages: tuple[Stage, ...]
    input_count: int
    slot_names: tuple[str, ...]
    slot_kinds: tuple[Kind, ...]
    results: tuple[int | Constant, ...]
    user_results: tuple[int, ...]
    kept_bytes: int
    small_bytes: int
    small_parameter_bytes: int = 0
    is_inference: bool = False
    resize: Resize | None = None
    sizes: Mapping[Any, int] = field(default_factory=dict)

    @property
    def slot_count(self) -> int:
        return len(self.slot_names)


# Prefetched blocks that were waited for, by trace id, each with the seconds from the start of the wait to its arrival.
LateBlocks = tuple[tuple[int, float], ...]


@dataclass(slots=True, kw_only=True)
class StageRun:
    """One run of a stage under the pager, and the record of it.

    read: blocks that it read. made: blocks that it created. written: blocks that it changed. never_again: see `Stage`.
    elements: number of parameter elements that it updates. host_seconds: duration of the same update on the host's processor:
    measured if it ran there (`on_host`), otherwise estimated; None if it cannot run there.
    collective_seconds: the part of its time in collectives, waiting for other ranks as well; 0 where that cannot be told, as on
    a GPU. code: see `Stage.code`; None if nothing is known to be alike.

    Filled in by the observer:
    seconds: its duration without waiting for copies; 0 until that is known. late: the prefetched blocks that it had to wait for.
    retried: the allocator had to take memory away in it or before it, so that its time tells little; False once it is corrected.
    """

    name: str
    phase: str
    workspace_bytes: int = 0
    read: Sequence[Block] = ()
    made: Sequence[Block] = ()
    written: Sequence[Block] = ()
    never_again: str = ""
    elements: int = 0
    host_seconds: float | None = None
    on_host: bool = False
    collective_seconds: float = 0.0
    code: Hashable = None
    seconds: float = 0.0
    late: LateBlocks = ()
    retried: bool = False


@dataclass(slots=True, kw_only=True)
class StageRerun:
    """One more run of a forward stage, in the backward pass. made_bytes: what it recomputed. seconds, late: as in `StageRun`.

    position: its number in the plan, filled in by the observer; None if the plan does not have it.
    """

    name: str
    made_bytes: int
    position: int | None = None
    seconds: float = 0.0
    late: LateBlocks = ()


class Observer(Protocol):
    """Records the timeline of an iteration. Only the training thread calls it, between stages."""

    def region_begins(self, identity: Hashable, stage_count: int, *, is_inference: bool = False) -> None:
        """A program or an optimizer step begins, with `stage_count` stages. identity: of the program or the optimizer.

        is_inference: no backward pass will follow.
        """

    def mark(self) -> Mark:
        """Return the present point of the device's work, for the begin or the end of a stage, or of a re-run.

        Where no times are wanted, it is one that is at hand.
        """

    def kept_stages(self) -> Collection[int]:
        """Return the numbers of the stages of the region that began last that a plan runs again."""

    def reruns_due(self) -> Iterable[tuple[Sequence[Block], Sequence[Block]]]:
        """Yield for each re-run that has its place before the next stage: the blocks that it makes anew, and what to prefetch.

        What comes after a re-run begins when the next one is asked for.
        """

    def stage_ran_again(self, rerun: StageRerun, begin: Mark, end: Mark) -> None:
        """A stage has run again, as the plan says or because a block was needed. begin, end: as in `stage_ended`."""

    def stage_reached(self) -> Sequence[Block]:
        """The next stage is about to get its memory. Returns what to prefetch from now on, in order."""

    def stage_ended(self, run: StageRun, begin: Mark, end: Mark, next_uses: Callable[[], Mapping[Block, int]] = dict) -> None:
        """A stage has run. What it held may move again.

        begin, end: on the device; the time between them contains no waiting for copies.
        next_uses: returns after how many stages the same region uses a block again; only blocks that it does use again. To be
        called before this returns.
        """

    def region_ended(self) -> None:
        """The region is about to return to user code, or has failed."""


class InterleavedStages(Protocol):
    """Runs stages of its own between those of a program, such as updates of parameters during the backward pass."""

    @property
    def stage_count(self) -> int:
        """Number of stages that it will run; the observer counts them as the program's."""

    def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
        """Stage `number` of the program has ended. read: the blocks that it read. No block is held now.

        It may take values that no later stage reads out of `slots`. The program returns None for those that are results.
        """

    def region_done(self, results: Sequence[Any]) -> None:
        """The program has ended and is about to return `results`. Not called if it failed."""
