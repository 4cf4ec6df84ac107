"""What the compiled graphs need at least: of the budget, and of the spill files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from planner.errors import BudgetError
from runtime.device import MIN_MOVED_BYTES
from runtime.execution import Program
from runtime.paging import Pager
from teraio.machine import Machine
from teraio.optimizer import USUAL_STATES, OptimizerFacts, optimizers_alive, owned_parameters
from teraio.phases import Findings
from teraio.stages import sizes_are_promised

logger = logging.getLogger("teraio")

_NOT_COUNTED = (
    "graphs that are compiled later, the optimizer's update, what operators take for themselves, and what your code keeps"
)
# Reserved in what an error asks for: matrix products and reductions take some KiB for themselves, a convolution not always as
# many, and optimizers count steps.
_SMALL_CHANGE_BYTES = 65_536
_LARGER = "inputs that are larger than those of this call, "


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What graphs need on the device at once.

    largest: up to three stages, by name, with the bytes that each needs next to all that is too small to move, in descending
        order.
    small_parameter_bytes: of the parameters that are too small to move; their states will be, too.
    names: of the blocks that the graphs take and make. in_pieces: the stages that a loss in pieces would make smaller.
    """

    largest: tuple[tuple[str, int], ...]
    small_parameter_bytes: int
    names: frozenset[str]
    in_pieces: frozenset[str] = frozenset()

    @property
    def size_bytes(self) -> int:
        """Bytes that the largest stage needs."""
        return self.largest[0][1]


def need_of(programs: Sequence[Program]) -> Need | None:
    """Return what a forward graph and its backward graph need; None if they have no stages."""
    stages = [stage for program in programs for stage in program.stages]
    if not stages:
        return None
    small_bytes = sum(program.small_bytes for program in programs)
    needs = [(stage.name, stage.need_bytes + small_bytes) for stage in stages]
    small_parameter_bytes = sum(program.small_parameter_bytes for program in programs)
    names = frozenset(name for program in programs for name in program.slot_names)
    losses = frozenset(stage.name for stage in stages if stage.has_class_loss)
    return Need(largest=_largest_of(needs), small_parameter_bytes=small_parameter_bytes, names=names, in_pieces=losses)


def _largest_of(needs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return the three that need the most, in descending order."""
    return tuple(sorted(needs, key=lambda need: -need[1])[:3])


class GraphNeeds:
    """What all graphs compiled so far need. Keeps `findings.floor`: the smallest budget, and the stage that sets it."""

    def __init__(
        self, pager: Pager, machine: Machine, findings: Findings, *, has_in_graph: Callable[[torch.Tensor], bool]
    ) -> None:
        """has_in_graph: returns whether a compiled graph has this parameter."""
        self._has_in_graph = has_in_graph
        self._pager = pager
        self._machine = machine
        self._findings = findings
        self._needs: list[Need] = []
        self._resizable: list[Sequence[Program]] = []
        self._kept_bytes = 0
        self._bounded: set[tuple[frozenset[str], bool]] = set()  # see `outgrown`

    def check(self, programs: Sequence[Program], *, for_larger: bool = False, may_be_cut_again: bool = True) -> None:
        """Check that the budget suffices for each stage, and reserve room in the spill files for what the programs keep.

        for_larger: inputs have outgrown graphs that were cut for smaller ones. Then nothing is refused: what a stage needs is an
        estimate, and training has worked so far. may_be_cut_again: PyTorch may compile them anew once inputs outgrow them.
        Raises BudgetError with the smallest budget and the stage that needs it, StorageFullError.
        """
        need = need_of(programs)
        if need is None:
            return
        budget = self._machine.budgets.device
        unmoved_bytes = self._pager.account.unmoved_bytes
        if not for_larger or budget is None or need.size_bytes + unmoved_bytes <= budget:
            self._count(need, programs)
        if any(program.resize is not None for program in programs):
            self._resizable.append(tuple(programs))
        self._kept_bytes = max(self._kept_bytes, sum(program.kept_bytes for program in programs))
        self.ensure_room(0)
        if budget is None:
            return
        if sizes_are_promised():
            self._warn_of_the_largest(programs, budget - unmoved_bytes)
        elif may_be_cut_again:
            self._bound(programs, budget - unmoved_bytes)

    def _count(self, need: Need, programs: Sequence[Program]) -> None:
        """Take what graphs need into the smallest budget. Raises BudgetError if that is more than there is."""
        self._needs.append(need)
        unmoved_bytes, budget = self._pager.account.unmoved_bytes, self._machine.budgets.device
        largest = _largest_of((name, size + unmoved_bytes) for each in self._needs for name, size in each.largest)
        floor = (largest[0][1], largest[0][0])
        smallest, stage = self._findings.floor = max(floor, self._findings.floor or floor)
        if budget is not None and smallest > budget:
            raise BudgetError(
                smallest_bytes=max(smallest, self._with_all(self._needs)),
                budget_bytes=budget,
                stage=stage,
                largest=largest,
                in_pieces=any(stage in each.in_pieces for each in self._needs),
                not_counted=_not_counted(programs),
            )

    def _bound(self, programs: Sequence[Program], most_bytes: int) -> None:
        """Have PyTorch compile them anew, see `outgrown`, when inputs come with which they would not fit as they are cut."""
        small_bytes = sum(program.small_bytes for program in programs)
        for program in programs:
            if program.resize is not None:
                program.resize.bound(most_bytes - small_bytes)
                slots = (
                    slot for each in programs for slot in zip(each.slot_names[: each.input_count], each.slot_kinds, strict=False)
                )
                self._bounded.add(_key(name for name, kind in slots if kind == "parameter"))

    def outgrown(self, parameters: Iterable[str]) -> bool:
        """Return whether a graph of symbolic sizes that has these parameters was cut for inputs that are smaller.

        It is compiled again, since inputs came with which it would not fit as it was cut, or because something else has changed.
        """
        return _key(parameters) in self._bounded

    def _warn_of_the_largest(self, programs: Sequence[Program], most_bytes: int) -> None:
        need = need_of([program.resize.at(program, {}) for program in programs if program.resize is not None])
        if need is not None and need.size_bytes > most_bytes:
            logger.warning(
                "inputs as large as promised (torch._dynamo.mark_dynamic) would not fit: stage %r needs %s bytes then, and "
                "memory_budget leaves %s; give a larger one, or promise less",
                need.largest[0][0],
                f"{need.size_bytes:,}",
                f"{most_bytes:,}",
            )

    def with_all_that_is_known(self, error: BudgetError, program: Program | None = None) -> BudgetError:
        """Return the error of a stage with a budget that does for all graphs, next to what cannot leave the device by now.

        program: that the stage is of; None if it is of no graph.
        """
        programs = [] if program is None else [program]
        own = [need for each in programs if (need := need_of(self._at_its_sizes(each))) is not None]
        needed = self._with_all([*self._needs, *own])
        return error.asking_for(max(error.smallest_bytes + _SMALL_CHANGE_BYTES, needed), not_counted=_not_counted(programs))

    def _with_all(self, needs: Sequence[Need]) -> int:
        """Return what graphs with these needs, and one update of the largest parameter, need with all that has to stay."""
        stays = [self._what_stays(need) for need in needs]
        graphs = [need.size_bytes + more for need, more in zip(needs, stays, strict=True)]
        small = 2 * sum(need.small_parameter_bytes for need in needs)  # with their gradients
        return max([*graphs, self._largest_update_bytes() + small + max(stays)], default=0) if needs else 0

    def _largest_update_bytes(self) -> int:
        """Return what one update of the largest parameter takes, by the optimizers that there are. 0 if there is none yet."""
        updates = (
            facts.update_bytes(owned.tensor)
            for facts in map(OptimizerFacts.of, optimizers_alive())
            for owned in owned_parameters(facts.optimizer)
            if owned.tensor.requires_grad and self._has_in_graph(owned.tensor)
        )
        return max(updates, default=0)

    def _what_stays(self, need: Need) -> int:
        """Return the bytes of all that cannot leave the device: what `need` does not count, and states to come."""
        pager = self._pager
        kept = [block for block in pager.blocks if block.span is None]
        others = sum(b.size_bytes for b in kept if b.size_bytes >= MIN_MOVED_BYTES or b.name not in need.names)
        states = max(pager.account.fixed_bytes, USUAL_STATES * need.small_parameter_bytes)
        return others + pager.account.unmoved_bytes - pager.account.fixed_bytes + states + _SMALL_CHANGE_BYTES

    def _at_its_sizes(self, program: Program) -> list[Program]:
        """Return the forward and the backward graph that `program` is one of, for its sizes."""
        if program.resize is None:
            return [program]
        together = next((each for each in self._resizable if any(one.resize is program.resize for one in each)), [program])
        return [one if one.resize is None else one.resize.at(one, program.sizes) for one in together]

    def ensure_room(self, state_bytes: int) -> None:
        """Reserve room in the spill files for what programs keep and for `state_bytes` of states. Raises StorageFullError."""
        if self._pager.account.budget_bytes is not None:
            self._machine.ensure_room(self._kept_bytes + state_bytes - self._pager.account.budget_bytes)


def _key(parameters: Iterable[str]) -> tuple[frozenset[str], bool]:
    """Return by what graphs of one model are known as such. Inference makes others than training."""
    return frozenset(parameters), torch.is_grad_enabled()


def _not_counted(programs: Sequence[Program]) -> str:
    return _LARGER * any(program.resize is not None for program in programs) + _NOT_COUNTED
