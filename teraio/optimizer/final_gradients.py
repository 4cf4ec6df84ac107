"""Learns from ordinary iterations which parameters may be updated inside the backward pass, and after which stage.

[Note: When a gradient is final]
A parameter qualifies if the following was true in several iterations in a row. The first step of its optimizer does not count.
* Exactly one compiled backward graph gave it a gradient, once, and `.grad` was None before.
* At the step, `.grad` was the same tensor that the graph had made. It had the same version, since clipping writes even where it
  changes nothing. It had the same content, since writes through `.data` and by GradScaler do not change the version.
* No compiled graph read the parameter in between, and the optimizer's settings did not change.
* Exactly one optimizer updates it, and its step is cut into subgroups.
Its update may run after the last stage of the graph that makes or reads the gradient, or reads the parameter's block (also
through views, or parameters that share its storage). A parameter that fails once is refused for good; the log gives the reason.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from runtime.execution import Program
from runtime.paging import Block, Pager
from teraio.optimizer.facts import owned_parameters

logger = logging.getLogger("teraio")

STEPS_TO_WATCH = 2

Settings = list[dict[str, Any]]

# Which memory a tensor shows, and how. Holds no tensor, since `.grad` takes over only a tensor that nobody else holds.
TensorView = tuple[Block | None, torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype]

# A tensor's version, and small tensors that change with its content. They are raw bytes, so that NaN is equal to itself.
Digest = tuple[int, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalGradient:
    """A gradient of a backward graph: its slot, and the stage after which nothing needs the gradient or the parameter."""

    slot: int
    after: int


@dataclass(slots=True, kw_only=True, eq=False)
class WatchedRun:
    """One run of a graph that is watched.

    layout: where to record final gradients. members: the parameters that take part, until the run has ended. last_read: the
    number of the last stage that read a block. results: what the graph returns to user code, by position. digests: of the content
    of results, by slot. settings: of the optimizers, by their id, at the end of the run.
    """

    number: int
    program: Program
    layout: dict[int, FinalGradient]
    members: list[tuple[Tensor, UpdateEligibility]]
    last_read: dict[Block, int] = field(default_factory=dict)
    results: list[TensorView | None] = field(default_factory=list)
    digests: dict[int, Digest] = field(default_factory=dict)
    settings: dict[int, Settings] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class UpdateEligibility:
    """Whether a parameter may be updated inside the backward pass, and what was seen of it.

    group, number: of the optimizer's group, and among all its parameters. good_steps: in a row. refused: for good.
    updated: inside a backward pass since the last step.
    forwards, passes: graphs that used the parameter, and that gave it a gradient, since the last step. run: the last watched run
    that gave it a gradient. edge: over which it did so. problem: why that gradient may not be final.
    """

    optimizer: weakref.ref[Optimizer]
    group: int
    number: int
    good_steps: int = 0
    refused: bool = False
    updated: bool = False
    forwards: int = 0
    passes: int = 0
    run: WatchedRun | None = None
    edge: int = -1
    block: Block | None = None
    problem: str | None = None

    @property
    def qualified(self) -> bool:
        """Whether the parameter may be updated inside the backward pass."""
        return self.good_steps >= STEPS_TO_WATCH and not self.refused

    def forget_passes(self) -> None:
        """Forget what was seen since the last step."""
        self.updated, self.forwards, self.passes = False, 0, 0
        self.run = self.block = self.problem = None


def view_of(pager: Pager, tensor: Tensor) -> TensorView:
    """Return which memory the tensor shows, and how."""
    return pager.known_block(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the settings of all groups, to be compared with later ones."""
    return [
        {n: (id(v), v._version) if isinstance(v, Tensor) else v for n, v in group.items() if n != "params"}
        for group in optimizer.param_groups
    ]


def digest(tensor: Tensor) -> Digest:
    """Return the digest of a tensor whose memory is on the device. Does not wait for the device."""
    # On the device, so that nobody waits: two numbers change with nearly every write, a scale and a clip among them.
    values = (torch.linalg.vector_norm(tensor), tensor.sum())
    return tensor._version, tuple(value.reshape(1).view(torch.uint8) for value in values)


def equal(first: Digest, second: Digest) -> bool:
    """Return whether two digests are the same. Waits until the device has computed both."""
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


# -- what autograd tells of the backward pass that runs now


class Leaf(NamedTuple):
    """A leaf tensor that gets a gradient from the running node, and the node `AccumulateGrad` that puts it into `.grad`."""

    parameter: Tensor
    accumulate: Any


def leaves() -> dict[int, Leaf]:
    """Return the leaves by the number of their edge. Empty outside of a backward pass, and for a node without leaves."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return {}
    return {
        edge: Leaf(function.variable, function)
        for edge, (function, _) in enumerate(node.next_functions)
        if type(function).__name__ == "AccumulateGrad"
    }


def leaf_problem(parameter: Tensor) -> str | None:
    """Return why others than this backward pass add to the parameter's gradient or use it; None if nobody does."""
    if parameter.grad is not None:
        return (
            "its `.grad` is not None when backward begins (several backward passes before a step, or "
            "zero_grad(set_to_none=False))"
        )
    return "it has gradient hooks" if has_hooks(parameter) else None


def has_hooks(parameter: Tensor) -> bool:
    """Return whether user code gets hold of the parameter's gradient in a backward pass."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def pass_problem(found: list[Leaf]) -> str | None:
    """Return why this backward pass does not put a final gradient into `.grad` of all these leaves; None if it does."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return "backward keeps its graph (retain_graph or create_graph)"
    try:
        executed = all(torch._C._will_engine_execute_node(leaf.accumulate) for leaf in found)
    except RuntimeError:  # PyTorch raises it for leaves under autograd.grad
        executed = False
    return None if executed else "the pass does not fill its `.grad` (torch.autograd.grad, or backward with inputs)"


# -- what is learnt


class Watch:
    """Keeps the `UpdateEligibility` of all parameters. Keeps no parameter and no optimizer alive."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._eligibilities: Any = WeakTensorKeyDictionary()
        self._layouts: dict[Hashable, dict[int, FinalGradient]] = {}
        self._last_reader: dict[Block, int] = {}
        self._runs = 0
        self._said: set[str] = set()

    def eligibility(self, parameter: Tensor) -> UpdateEligibility | None:
        """Return what is known of the parameter; None before the first step of an optimizer that has it."""
        found: UpdateEligibility | None = self._eligibilities.get(parameter)
        return found

    @property
    def settled(self) -> bool:
        """False while more steps must be seen before parameters qualify."""
        found: list[UpdateEligibility] = [each for each in self._eligibilities.values() if each.optimizer() is not None]
        return all(each.refused or each.qualified or each.good_steps == 0 for each in found)

    def refuse(self, parameter: Tensor, reason: str, *, topic: str | None = None) -> None:
        """Leave the parameter to the optimizer step from now on."""
        eligibility = self.eligibility(parameter)
        if eligibility is not None:
            eligibility.refused = True
        self.say(parameter, reason, topic=topic)

    def say(self, parameter: Tensor, reason: str, *, topic: str | None = None) -> None:
        """Log why the optimizer step updates the parameter: once for each topic, or for each reason without a topic."""
        if (topic or reason) not in self._said:
            self._said.add(topic or reason)
            block = self._pager.known_block(parameter)
            name = block.name if block is not None else "a parameter"
            logger.warning("overlap_step: optimizer.step() updates %r, not the backward pass: %s", name, reason)

    # -- graphs

    def layout(self, program: Program, arguments: Sequence[Any], leaves: dict[int, Leaf]) -> dict[int, FinalGradient]:
        """Return the final gradients known so far, by edge: of this graph, with the same inputs sharing storages."""
        edges = {leaf.parameter.untyped_storage()._cdata: edge for edge, leaf in leaves.items()}
        strided = (
            (place, value) for place, value in enumerate(arguments) if isinstance(value, Tensor) and value.layout is torch.strided
        )
        shared = ((place, edges.get(value.untyped_storage()._cdata)) for place, value in strided)
        alike = tuple(edges[leaf.parameter.untyped_storage()._cdata] for leaf in leaves.values())
        key = (program.identity, alike, tuple(pair for pair in shared if pair[1] is not None))
        return self._layouts.setdefault(key, {})

    def begin(self, program: Program, layout: dict[int, FinalGradient], leaves: dict[int, Leaf]) -> WatchedRun | None:
        """Begin to watch a run of a graph. Return None if there is nothing to learn from it."""
        new: list[tuple[int, Leaf, UpdateEligibility]] = []
        for edge, leaf in leaves.items():
            eligibility = self.eligibility(leaf.parameter)
            if eligibility is not None and not eligibility.refused and not (eligibility.qualified and edge in layout):
                new.append((edge, leaf, eligibility))
        if not new and not self._last_reader:
            return None
        self._runs += 1
        members = [(leaf.parameter, eligibility) for _, leaf, eligibility in new]
        run = WatchedRun(number=self._runs, program=program, layout=layout, members=members)
        problem = pass_problem([leaf for _, leaf, _ in new]) if new else None
        for edge, leaf, eligibility in new:
            eligibility.passes += 1
            eligibility.run, eligibility.edge, eligibility.block = run, edge, self._pager.known_block(leaf.parameter)
            eligibility.problem = eligibility.problem or problem or leaf_problem(leaf.parameter)
        return run

    def stage_ended(self, run: WatchedRun, number: int, read: Sequence[Block], slots: Sequence[Any]) -> None:
        """Record what a stage has read and made. Waits while a block that is leaving already is brought back."""
        for block in read:
            run.last_read[block] = number
            self._last_reader[block] = run.number
        if run.members:
            returned = {result for result in run.program.results if isinstance(result, int)}
            for slot in returned.intersection(run.program.stages[number].outputs):
                value = slots[slot]
                made = self._pager.known_block(value) if isinstance(value, Tensor) and value.is_floating_point() else None
                if made is not None:
                    run.digests[slot] = self._digest(value, made)

    def _digest(self, tensor: Tensor, block: Block) -> Digest:
        self._pager.acquire([block], 0, f"looking at {block.name}")
        try:
            return digest(tensor)
        finally:
            self._pager.retire([block], [])

    def run_ended(self, run: WatchedRun, results: Sequence[Any]) -> None:
        """Record what the run returns to user code."""
        for parameter, eligibility in run.members:
            if self._pager.known_block(parameter) is not eligibility.block:
                eligibility.block = None
        for optimizer in [found for r in dict.fromkeys(s.optimizer for _, s in run.members) if (found := r()) is not None]:
            run.settings[id(optimizer)] = settings_of(optimizer)
        run.members.clear()
        for value in results:
            run.results.append(view_of(self._pager, value) if isinstance(value, Tensor) else None)

    # -- steps

    def step_begins(self, optimizer: Optimizer, reason: str | None) -> None:
        """Decide about the optimizer's parameters. reason: why none of them may be updated inside the backward pass.

        Waits while gradients are brought in for a comparison.
        """
        found = [(owned, self.eligibility(owned.tensor)) for owned in owned_parameters(optimizer)]
        watched = any(each is not None and each.run is not None for _, each in found)
        with self._pager.region() if watched else contextlib.nullcontext():  # gradients are read
            for (number, group, parameter), each in found:
                if each is None or each.optimizer() is None:
                    known = UpdateEligibility(optimizer=weakref.ref(optimizer), group=group, number=number)
                    self._eligibilities[parameter] = known
                    continue
                each.group, each.number = group, number
                problem = "several optimizers have it" if each.optimizer() is not optimizer else reason
                if not each.refused and problem is not None:
                    self.refuse(parameter, problem)
                elif not each.refused and not each.updated:
                    self._conclude(optimizer, parameter, each)
                each.forget_passes()
        if not any(each.passes for each in list(self._eligibilities.values())):
            self._last_reader.clear()

    def _conclude(self, optimizer: Optimizer, parameter: Tensor, eligibility: UpdateEligibility) -> None:
        if parameter.grad is None and not eligibility.qualified:
            eligibility.good_steps = 0  # steps in a row count
        if parameter.grad is None or (eligibility.run is None and eligibility.qualified):
            return  # nothing was learnt
        problem = self._problem(optimizer, parameter, eligibility)
        if problem is not None:
            self.refuse(parameter, problem)
        else:
            eligibility.good_steps += 1

    def _problem(self, optimizer: Optimizer, parameter: Tensor, eligibility: UpdateEligibility) -> str | None:
        """Return why the parameter may not be updated inside the backward pass; if it may, record after which stage."""
        run, gradient = eligibility.run, parameter.grad
        if eligibility.passes > 1:
            return "several backward passes, or several graphs, contribute to its gradient before a step"
        if run is None or gradient is None:
            return "its gradient does not come from a compiled graph that it is an input of"
        if gradient.layout is not torch.strided:
            return "its gradient is sparse"
        if eligibility.problem is not None:
            return eligibility.problem
        view = view_of(self._pager, gradient)
        found = [position for position, result in enumerate(run.results) if result == view]
        slots = [slot for position in found if isinstance(slot := run.program.results[position], int)]
        if len(slots) != 1 or slots[0] < run.program.input_count:
            return "others contribute to its gradient, or get hold of it, or put another one in its place"
        before = run.digests.get(slots[0])
        if before is None or view[0] is None or not equal(before, self._digest(gradient, view[0])):
            return "gradients are changed between backward and step (clipping, or a GradScaler)"
        if run.settings.get(id(optimizer)) != settings_of(optimizer):
            return "the optimizer's settings are changed between backward and step"
        if eligibility.block is None or self._pager.known_block(parameter) is not eligibility.block:
            return "its memory was replaced between backward and step"
        if any(result is not None and result[0] is eligibility.block for result in run.results):
            return "the backward graph returns a view of it"
        if self._last_reader.get(eligibility.block, 0) > run.number:
            return "another compiled graph reads it between its update and the step"
        stages = enumerate(run.program.stages)
        uses = [number for number, stage in stages if slots[0] in (*stage.inputs, *stage.outputs)]
        after = max((*uses, run.last_read.get(eligibility.block, -1)))
        run.layout[eligibility.edge] = FinalGradient(slot=slots[0], after=after)
        return None
