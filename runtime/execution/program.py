"""What the executor runs: a compiled graph as a flat list of stages over numbered slots. Data only, made once for each graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Phase = Literal["forward", "backward", "optimizer", "user"]
Kind = Literal["parameter", "gradient", "optimizer_state", "activation", "buffer"]

StageFunction = Callable[[list[Any]], Sequence[Any]]
"""Boxed call: takes a list of values and empties it, so that values are freed as soon as they are not needed any more."""


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
    reads_lasting: whether it reads only what is kept until the backward pass in any case, or is too small to move.
    has_collectives: whether it begins collectives, or waits for some.
    repeatable: whether it may simply run once more where it ran out of memory: it writes nothing in place and draws no numbers.
    never_again: of a forward stage: why it must not run again in the backward pass, in plain words; "" if it may.
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
    reads_lasting: bool = False
    has_collectives: bool = False
    repeatable: bool = False
    never_again: str = ""

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

    def alike(self, program: Program, other: Program) -> Program:
        """Return `program` for the sizes that `other` was resized for, its forward or backward graph."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A compiled forward or backward graph.

    identity: distinguishes graphs within a process, in order of compilation.
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
