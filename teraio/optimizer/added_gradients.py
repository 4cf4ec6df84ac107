"""Adds gradients to those of earlier passes as soon as they are made, so that they are never all there at once.

[Note: Gradients that add up]
With several backward passes before a step, a backward graph returns all gradients, and then autograd adds each to `.grad`. Here,
each is added by a stage that runs soon after the one that makes it, and the graph returns None in its place. So memory holds few
of them at a time, and a trace says where those of earlier passes are needed. The sums are autograd's, bit for bit: the same
operation adds the same two tensors.

Autograd first sums up what contributes in one pass, so it is left to autograd where the graph may not be the only one. Of the
first pass, autograd puts the result of a graph that is alone into `.grad` as it is: the same memory, which nobody has written
since. Passes after it add to that here, as long as nobody else writes to it and one forward pass has used the parameter since the
last backward pass. If one of them has another contribution, of user code, its sum is rounded in another order.

[Note: What autograd reads]
Autograd takes a gradient as it is, without reading it, if it is the only one of its parameter, `.grad` is None, nobody has a
hook there, and it has the parameter's strides. All others it copies, adds up or gives to other code. On a GPU nothing stands in
for what is on a drive. So those are on the device when their graph has ended, and traces say that they are read then. Results
are told apart by their shapes: if one of several parameters of a shape is read, all are. What code that is not compiled adds to
a gradient is not known beforehand.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from planner.errors import BudgetError
from runtime.execution import InterleavedStages, Program, graph_of
from runtime.paging import Block, Pager
from teraio.distributed import rank_count
from teraio.following import IterationObserver
from teraio.optimizer.facts import bytes_of
from teraio.optimizer.final_gradients import Leaf, TensorView, has_hooks, leaves, pass_problem, view_of

# A stage adds at least so much, or one of so many parts, where so much is made before the graph ends: small gradients wait for
# others, since stages make plans harder.
_LEAST_BYTES = 4 << 20
_PARTS = 32  # of all that the graph adds
_PARTS_OF_A_STAGE = 16  # of what its largest stage reads and makes


class _Sum(NamedTuple):
    """What a graph alone has put into `.grad`: the number of its result, and the version of the tensor since then."""

    result: int
    version: int


class _Addition(NamedTuple):
    """A gradient to add: the `.grad` so far, the number of the result and its slot, and the stage after which it is added."""

    total: Tensor
    result: int
    slot: int
    after: int


class AddedGradients:
    """Decides for every run of a graph which gradients are added in it, and which by autograd."""

    def __init__(self, pager: Pager, observer: IterationObserver) -> None:
        self.pager = pager
        self.observer = observer
        # By graph, and by the memory of `.grad`: of the last pass. The same graph has the same results for all sizes.
        self._sums: dict[Hashable, dict[TensorView, _Sum]] = defaultdict(dict)
        self._forwards: Any = WeakTensorKeyDictionary()  # graphs that used the parameter since its last backward pass
        # Whether passes have added up so far. Only then is anything noted, but where autograd would need all of them at once.
        self._needed = pager.drives_are_out_of_reach

    def interleaved(self, program: Program, arguments: Sequence[Any]) -> InterleavedStages | None:
        """Return what takes part in a run of `program` that is about to begin; None if there is nothing to add or to learn."""
        if program.phase == "forward":
            self._note_use(program, arguments)
            return None
        found = list(leaves().values())
        if not found or rank_count() > 1:
            return None
        more = [leaf for leaf in found if leaf.parameter.grad is not None]
        self._needed = self._needed or bool(more)
        if not self._needed:
            return None
        adding = None
        if pass_problem(found) is None:
            sums = self._sums[graph_of(program.identity)]
            adding = _GraphAdditions(self, program, sums, self._additions(program, sums, more) if more else [])
        for leaf in found:
            self._forwards.pop(leaf.parameter, None)
        return adding

    def memory(self, tensor: Tensor) -> TensorView | None:
        """Return which memory a gradient shows, and how; None if no stage adds to it."""
        if tensor.layout is not torch.strided or tensor.requires_grad or is_traceable_wrapper_subclass(tensor):
            return None
        view = view_of(self.pager, tensor)  # by its block: the address of a storage may be another one's by now
        return None if view[0] is None else view

    def _note_use(self, program: Program, arguments: Sequence[Any]) -> None:
        again = torch._C._current_graph_task_id() >= 0  # computed again inside a backward pass
        for value in arguments if self._needed and not program.is_inference and not again else ():
            if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                self._forwards[value] = self._forwards.get(value, 0) + 1

    def _additions(self, program: Program, sums: dict[TensorView, _Sum], more: Sequence[Leaf]) -> list[_Addition]:
        """What this run adds, in the order in which it is made."""
        last_use: dict[int, int] = {}
        for number, stage in enumerate(program.stages):
            last_use.update(dict.fromkeys((*stage.inputs, *stage.outputs), number))
        found, results = [], []
        for parameter in (leaf.parameter for leaf in more):
            total = parameter.grad
            memory = None if total is None else self.memory(total)
            known = None if memory is None else sums.get(memory)
            if total is None or memory is None or known is None or known.version != total._version:
                continue
            results.append(known.result)
            if self._forwards.get(parameter) != 1:  # several passes may add at once, and the next run is one of them
                del sums[memory]
            elif not has_hooks(parameter):
                slot = program.results[known.result]
                if isinstance(slot, int) and slot >= program.input_count and program.results.count(slot) == 1:
                    found.append(_Addition(total, known.result, slot, last_use[slot]))
        if sorted(set(results)) != results:  # results are in the order of parameters: user code has exchanged gradients
            return []
        return sorted(found, key=lambda each: each.after)


def _cut(program: Program, additions: Sequence[_Addition]) -> dict[int, list[_Addition]]:
    """What is added after each stage (by number)."""
    largest = max((stage.input_bytes + stage.output_bytes for stage in program.stages), default=0)
    whole = sum(bytes_of(each.total) for each in additions)
    least_bytes = max(_LEAST_BYTES, whole // _PARTS, largest // _PARTS_OF_A_STAGE)
    found: dict[int, list[_Addition]] = {}
    gathered: list[_Addition] = []
    for after, group in groupby(additions, lambda each: each.after):
        gathered += group
        if sum(bytes_of(each.total) for each in gathered) >= least_bytes or after == additions[-1].after:
            found[after], gathered = gathered, []
    return found


class _GraphAdditions:
    """Takes part in one run of a graph: adds gradients, and notes what the graph has put into `.grad` alone."""

    def __init__(self, by: AddedGradients, program: Program, sums: dict[TensorView, _Sum], additions: list[_Addition]) -> None:
        self._by, self._program, self._sums = by, program, sums
        self._due = _cut(program, additions)
        self._added: list[_Addition] = []
        self.stage_count = len(self._due)

    def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
        """Add the gradients that are due, and take them out of `slots`. Waits for those of earlier passes."""
        due = self._due.pop(number, ())
        if not due:
            return
        pager, name = self._by.pager, f"{self._program.stages[number].name}.add"
        totals = _known(pager.known_block(each.total) for each in due)
        made = _known(pager.known_block(slots[each.slot]) for each in due)

        def add() -> Sequence[Block]:
            with torch.no_grad():
                for each in due:
                    each.total.add_(slots[each.slot])
                    slots[each.slot] = None
            return ()

        read = tuple(dict.fromkeys((*totals, *made)))
        try:
            self._by.observer.run_stage(name, add, phase="backward", read=read, written=totals, freed=made)
        except BudgetError:
            return  # autograd adds them, when the graph has ended
        self._added += due

    def region_done(self, results: Sequence[Any]) -> None:
        self._sums.clear()
        found = [(each.result, each.total) for each in self._added]
        found += [(number, value) for number, value in enumerate(results) if isinstance(value, Tensor)]
        memories = [self._by.memory(tensor) for _, tensor in found]
        often = Counter(memories)
        for (number, tensor), memory in zip(found, memories, strict=True):
            if memory is not None and often[memory] == 1:  # else it is of several parameters
                self._sums[memory] = _Sum(number, tensor._version)


class AutogradReads:
    """Has what autograd reads when a backward graph has ended on the device then, see [Note: What autograd reads]."""

    stage_count = 0

    def __init__(self, pager: Pager, observer: IterationObserver) -> None:
        self._pager = pager
        self._observer = observer
        self._task = -1  # the backward pass that runs
        self._given: set[int] = set()  # ids of the parameters that its graphs have given gradients
        self._returned: list[tuple[torch.Size, Block]] = []  # by its graphs
        self._before: list[tuple[Tensor, int | None]] = []  # leaves of the graph that runs, and the version of each `.grad`

    def interleaved(self, program: Program, arguments: Sequence[Any]) -> InterleavedStages | None:
        """Return what takes part in a run of `program` that is about to begin; None in a forward pass."""
        if program.phase == "forward":
            return None
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._given, self._returned = task, set(), []
        found = [leaf.parameter for leaf in leaves().values()]
        self._before = [(each, None if each.grad is None else each.grad._version) for each in found]
        return self

    def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
        """Nothing runs between stages."""

    def region_done(self, results: Sequence[Any]) -> None:
        totals: list[Tensor] = []
        strides: dict[torch.Size, set[tuple[int, ...] | None]] = defaultdict(set)  # None: read, whatever its strides are
        one_rank = rank_count() == 1
        for parameter, version in self._before:
            total = parameter.grad
            alone = total is None and id(parameter) not in self._given and not has_hooks(parameter) and one_rank
            strides[parameter.shape].add(parameter.stride() if alone else None)
            if total is not None and total._version == version:  # else it was added in the graph
                totals.append(total)
        made = [value for value in results if isinstance(value, Tensor)]
        known = list(zip(made, self._pager.known_blocks(made), strict=True))
        read = (block for value, block in known if strides.get(value.shape) != {value.stride()})
        earlier = [block for shape, block in self._returned if None in strides.get(shape, ()) and not block.dead]
        blocks = _known((*self._pager.known_blocks(totals), *read, *earlier))
        self._given |= {id(parameter) for parameter, _ in self._before}
        self._returned += [(value.shape, block) for value, block in known if block is not None]
        self._before = []
        self._observer.recorder.region.read_next = blocks
        self._pager.bring_in_reach(blocks, "what autograd adds up or copies")


def _known(blocks: Iterable[Block | None]) -> tuple[Block, ...]:
    return tuple(dict.fromkeys(block for block in blocks if block is not None))
