"""Updates inside the backward pass (option `overlap_step`): as soon as a gradient is final, so that its memory is freed at once.

[Note: Updates inside the backward pass]
Parameters that qualify (see [Note: When a gradient is final]) are updated by stages that run between those of the compiled
backward graph. The graph then returns None in place of their gradients. `step` updates only the other parameters, since
PyTorch's optimizers leave out parameters without `.grad`. If something forbids the updates in one pass, the graph returns all its
gradients, and the step updates all parameters. An update cannot be undone: another backward pass before the step is refused by an
error.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from planner.errors import BudgetError, UnsupportedError
from runtime.execution import InterleavedStages, Program
from runtime.paging import Block
from teraio.distributed import rank_count
from teraio.optimizer.arithmetic import run_step
from teraio.optimizer.facts import OptimizerFacts, OwnedParameter, owned_parameters
from teraio.optimizer.final_gradients import (
    FinalGradient,
    Leaf,
    Settings,
    UpdateEligibility,
    Watch,
    WatchedRun,
    leaf_problem,
    leaves,
    pass_problem,
    settings_of,
)
from teraio.optimizer.managed import ManagedOptimizer, ManagedOptimizers

_REMEDY = "leave out the option overlap_step, and restart from the last checkpoint"


class OverlappedSteps:
    """Decides for every run of a graph which parameters are updated in it, and which are left for the steps.

    watch: finds out which gradients are final.
    """

    def __init__(self, optimizers: ManagedOptimizers) -> None:
        self.pager, self.observer = optimizers.pager, optimizers.observer
        self._optimizers = optimizers
        self.watch = Watch(self.pager)
        self._finest = False
        # As they were when a backward pass updated its parameters.
        self._settings: weakref.WeakKeyDictionary[Optimizer, Settings] = weakref.WeakKeyDictionary()

    # -- graphs

    def interleaved(self, program: Program, arguments: Sequence[Any]) -> InterleavedStages | None:
        """Return what takes part in a run of `program` that is about to begin; None if there is nothing to watch or update.

        Waits while states that user code has replaced are copied to memory that can leave. Raises UnsupportedError, before
        anything is changed, if a parameter would get a gradient that was updated already.
        """
        found = leaves() if program.phase == "backward" else {}
        if program.phase == "forward" and not program.is_inference:
            self._note_use(arguments)
        self._refuse_second_pass(found)
        layout = self.watch.layout(program, arguments, found) if found else {}
        members = self._members(layout, found)
        run = self.watch.begin(program, layout, found)
        if run is None and not members:
            return None
        return _GraphUpdates(self, run, program.name, self._cut(members))

    def _note_use(self, arguments: Sequence[Any]) -> None:
        for value in arguments:
            eligibility = self.watch.eligibility(value) if isinstance(value, Tensor) and value.requires_grad else None
            if eligibility is not None:
                eligibility.forwards += 1

    def _refuse_second_pass(self, found: dict[int, Leaf]) -> None:
        for parameter in (leaf.parameter for leaf in found.values()):
            eligibility = self.watch.eligibility(parameter)
            if eligibility is not None and eligibility.updated:
                raise UnsupportedError(
                    f"{self._name(parameter)} was updated inside the backward pass, and a second backward pass wants to add to "
                    f"its gradient before optimizer.step(), which overlap_step cannot do; if the iteration was "
                    f"interrupted, end it by optimizer.step(); otherwise {_REMEDY}"
                )

    def _name(self, parameter: Tensor) -> str:
        block = self.pager.known_block(parameter)
        return f"parameter {block.name!r}" if block is not None else "a parameter"

    def _members(self, layout: dict[int, FinalGradient], found: dict[int, Leaf]) -> list[Member]:
        """Return the parameters that this run updates: all that qualify, or none."""
        chosen = [each for edge, final in layout.items() if edge in found and (each := self._qualified(found[edge], final))]
        for managed in dict.fromkeys(each.managed for each in chosen):
            managed.renew()
        for each in chosen:
            if (problem := self._problem(each)) is not None:
                self.watch.say(each.parameter, problem)
                return []
        reasons = [_in_words(each.managed, each.facts.whole_because) for each in chosen]
        if chosen and (problem := next(filter(None, (pass_problem([each.leaf for each in chosen]), *reasons)), None)) is not None:
            self.watch.say(chosen[0].parameter, problem)
            return []
        return [each._replace(blocks=(each.own_block(), *each.managed.state_blocks(each.owned))) for each in chosen]

    def _qualified(self, leaf: Leaf, final: FinalGradient) -> Member | None:
        eligibility = self.watch.eligibility(leaf.parameter)
        optimizer = eligibility.optimizer() if eligibility is not None else None
        if eligibility is None or optimizer is None or not eligibility.qualified:
            return None
        return Member(leaf, final, eligibility, self._optimizers.of(optimizer))

    def _problem(self, chosen: Member) -> str | None:
        parameter, facts = chosen.parameter, chosen.facts
        if rank_count() > 1 or self._optimizers.buckets.have(parameter):  # see [Note: Several ranks]
            return "its gradient is final only when the ranks have reduced it, after backward"
        if chosen.eligibility.forwards > 1:
            return "several forward passes used it before a step"
        if facts.sizes_made(parameter):
            return "the optimizer has to make its states first"
        return leaf_problem(parameter)

    def _cut(self, members: Sequence[Member]) -> list[UpdateStage]:
        """Return the update stages of a run, the same in every run, and note the settings that they update with."""
        for optimizer in dict.fromkeys(member.facts.optimizer for member in members):
            self._settings[optimizer] = settings_of(optimizer)
        return cut_updates(members, 0 if self._finest else self._optimizers.sizes.subgroup_bytes)

    def no_room(self, members: Sequence[Member], error: BudgetError) -> None:
        """These members of one stage do not fit in the budget. They keep their gradients, and the optimizer step updates them."""
        if len(members) > 1:
            self._finest = True
            return
        remedy = f"give a memory_budget of at least {error.smallest_bytes} bytes"
        self.watch.refuse(members[0].parameter, f"activations leave too little room for its update; {remedy}", topic="room")

    # -- steps

    def step_begins(self, managed: ManagedOptimizer, whole_because: str | None, *, included: bool) -> frozenset[int]:
        """Return the numbers of the parameters that the backward pass has updated. To be called before each step.

        whole_because: why it is not cut. included: whether teraio manages the optimizer. Waits while gradients are brought in,
        which are compared with those that the graph has made. Raises UnsupportedError if a parameter that the backward pass has
        updated should have waited for this step.
        """
        optimizer = managed.facts.optimizer
        done = []
        for number, _, parameter in owned_parameters(optimizer):
            eligibility = self.watch.eligibility(parameter)
            if eligibility is None or not eligibility.updated:
                continue
            problem = None
            if eligibility.optimizer() is not optimizer:
                problem = "another optimizer has it as well"
            elif parameter.grad is not None:
                problem = "got another gradient after that, from outside of the compiled graph"
            elif hasattr(optimizer, "found_inf"):
                problem = "its gradient was scaled by a GradScaler"
            if problem is not None:
                raise UnsupportedError(f"{self._name(parameter)} was updated inside the backward pass, but {problem}; {_REMEDY}")
            done.append((number, parameter))
        if done and self._settings.get(optimizer) != settings_of(optimizer):
            for _, parameter in done:
                self.watch.refuse(parameter, "the optimizer's settings are changed between backward and step")
        reason = _in_words(managed, whole_because)
        if not included:
            reason = "the option optimizer is 'off'; give the optimizer to teraio.manage_optimizer before its first step"
        if hasattr(optimizer, "found_inf") or hasattr(optimizer, "grad_scale"):
            reason = "a GradScaler drives the optimizer"
        self.watch.step_begins(optimizer, reason)
        return frozenset(number for number, _ in done)


def _in_words(managed: ManagedOptimizer, whole_because: str | None) -> str | None:
    return None if whole_because is None else f"{managed.facts.name} is updated as a whole: {whole_because}"


# Parameters, gradients and states of an update stage. Smaller updates wait for those of later stages.
_MIN_STAGE_BYTES = 4 << 20


class Member(NamedTuple):
    """A parameter that is updated: by which optimizer, and after which stage.

    blocks: its own and those of its states; none until it is certain that it is updated.
    """

    leaf: Leaf
    final: FinalGradient
    eligibility: UpdateEligibility
    managed: ManagedOptimizer
    blocks: tuple[Block, ...] = ()

    @property
    def parameter(self) -> Tensor:
        return self.leaf.parameter

    @property
    def facts(self) -> OptimizerFacts:
        return self.managed.facts

    @property
    def size_bytes(self) -> int:
        """Bytes of parameter, gradient and states, estimated from what is the same in every iteration."""
        return self.facts.trained_bytes(self.parameter)

    @property
    def owned(self) -> OwnedParameter:
        return OwnedParameter(self.eligibility.number, self.eligibility.group, self.parameter)

    def own_block(self) -> Block:
        """Return the parameter's block. What is none becomes one."""
        return self.managed.block(self.parameter, self.eligibility.number, "parameter")


# Members that are updated together, and the stage of the graph after which.
UpdateStage = tuple[int, list[Member]]


def cut_updates(members: Sequence[Member], largest_bytes: int) -> list[UpdateStage]:
    """Return update stages of one optimizer each, in the order in which gradients become final.

    largest_bytes: of a stage; a larger one has one large parameter, and small ones before it. 0: one parameter each.
    """
    stages: list[UpdateStage] = []
    for facts in dict.fromkeys(member.facts for member in members):
        gathered: list[Member] = []
        size = after = 0
        for member in sorted((each for each in members if each.facts is facts), key=lambda each: each.final.after):
            later = member.final.after > after and size >= _MIN_STAGE_BYTES
            own_bytes = member.size_bytes
            full = size + own_bytes > largest_bytes and 2 * size >= largest_bytes
            if gathered and (later or full):
                stages.append((after, gathered))
                gathered, size = [], 0
            gathered.append(member)
            size += own_bytes
            after = member.final.after
        stages.append((after, gathered))
    return sorted(stages, key=lambda stage: stage[0])


class _GraphUpdates:
    """Takes part in one run of a graph: watches it, if `run` is given, and runs update stages in it."""

    def __init__(self, by: OverlappedSteps, run: WatchedRun | None, name: str, stages: Sequence[UpdateStage]) -> None:
        self._by, self._run = by, run
        self._stages: dict[int, list[tuple[str, list[Member]]]] = defaultdict(list)
        for number, (after, members) in enumerate(stages):
            self._stages[after].append((f"{name}/update.{number}", members))
        self.stage_count = len(stages)

    def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
        """Update the parameters whose gradients are final now, and take these out of `slots`. Waits for states."""
        if self._run is not None:
            self._by.watch.stage_ended(self._run, number, read, slots)
        for name, members in self._stages.pop(number, ()):
            self._update(name, members, slots)

    def region_done(self, results: Sequence[Any]) -> None:
        if self._run is not None:
            self._by.watch.run_ended(self._run, results)

    def _update(self, name: str, members: Sequence[Member], slots: list[Any]) -> None:
        pager, facts = self._by.pager, members[0].facts
        known = [pager.known_block(slots[member.final.slot]) for member in members]
        # Now, since memory may run out below: what lets go of the gradients must not need any.
        gradients, again = [block for block in known if block is not None], iter(members)
        changed = tuple(dict.fromkeys(block for member in members for block in member.blocks))
        parameters = [member.parameter for member in members]

        def update() -> Sequence[Block]:
            try:
                for member in members:
                    member.eligibility.updated = True  # also if the update fails half-way
                    member.parameter.grad = slots[member.final.slot]
                run_step(facts, [member.owned for member in members])
            finally:
                for member in again:
                    member.parameter.grad = slots[member.final.slot] = None
            return ()

        try:
            self._by.observer.run_stage(
                name,
                update,
                phase="optimizer",
                read=tuple(dict.fromkeys((*changed, *gradients))),
                written=changed,
                freed=gradients,
                workspace_bytes=facts.temporary_bytes(parameters),
                elements=sum(parameter.numel() for parameter in parameters),
            )
        except BudgetError as error:
            self._by.no_room(members, error)
