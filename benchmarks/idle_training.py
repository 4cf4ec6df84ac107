"""An iteration that computes and copies nothing, and follows a plan on a full device: what managing it costs the host.

Each of LAYERS forward stages reads PARAMETERS parameters and the result of the stage before, and makes a result and SAVED
activations for its backward stage. That reads the same parameters, and makes a gradient that is too small to move. The budget is
exactly what the plan has on the device at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.idle_device import IdleDevice
from benchmarks.idle_plan import Life, host_tier, idle_pager, moves_of, need_bytes, size_bytes
from runtime.execution import Kind, Phase, Program, Stage, WorkspaceMeter, run_managed, run_plain
from runtime.system import uninterrupted
from teraio.following import IterationObserver, RerunsByStage, StageSchedule
from teraio.profiling import Iteration

LAYERS = 200
PARAMETERS = 4
SAVED = 2
STAGES = 2 * LAYERS
_BACKWARD = LAYERS + 2
"""Position of the first backward stage. Before it come user code, the forward stages, and user code."""
_POSITIONS = STAGES + 2
_SMALL_BYTES = 512


class IdleTraining:
    """Iterations over `blocks` blocks. Those that no stage uses wait in the host tier. moving: whether anything else moves.

    moves: of the plan, in an iteration.
    """

    def __init__(self, blocks: int, *, moving: bool = True) -> None:
        saved = LAYERS * SAVED
        self._parameters = min(LAYERS * PARAMETERS, blocks - saved)
        self._lives = [Life(size_bytes(number), lasts=number < self._parameters) for number in range(self._parameters + saved)]
        for layer in (*range(LAYERS), *range(LAYERS)):
            backward = len(self._lives[self._saved_by(layer)[0]].uses)
            position = _BACKWARD + LAYERS - 1 - layer if backward else 1 + layer
            for block in (*self._of_layer(layer), *self._saved_by(layer)):
                self._lives[block].uses.append(position)
        for life in self._lives:
            life.uses.sort()
        self.moves = moves_of(self._lives, _POSITIONS) if moving else []
        self._store = host_tier(blocks)
        self.pager, self._device = idle_pager(self._store)
        self._observer = IterationObserver(self.pager)
        self._meter = WorkspaceMeter(None)
        self._forward, self._backward = self._programs()
        self._tensors = [_tensor(life.size_bytes) for life in self._lives[: self._parameters]]
        self._idle = [_tensor(size_bytes(number)) for number in range(blocks - len(self._lives))]
        self._before: Iteration | None = None
        self._send_idle_away()
        self.iterate()
        self._follow()
        self.iterate()

    def close(self) -> None:
        """Free the host tier."""
        self._store.close()

    def iterate(self) -> None:
        """Run one iteration, as calls of compiled graphs do."""
        with uninterrupted():
            saved = run_managed(self._forward, [*self._tensors], self.pager, self._observer, self._meter)
        arguments = [*self._tensors, *saved]
        del saved
        with uninterrupted():
            run_managed(self._backward, arguments, self.pager, self._observer, self._meter)
        with uninterrupted():
            done, self._before = self._before, self._observer.iteration_ends()
            if done is not None:
                done.read_times()

    def iterate_plainly(self) -> None:
        """Run the same stages without management. They only make their results."""
        saved = run_plain(self._forward, [*self._tensors])
        run_plain(self._backward, [*self._tensors, *saved])

    # -- what it computes

    def _of_layer(self, layer: int) -> list[int]:
        return [(layer * PARAMETERS + number) % self._parameters for number in range(PARAMETERS)]

    def _saved_by(self, layer: int) -> list[int]:
        return [self._parameters + layer * SAVED + number for number in range(SAVED)]

    def _programs(self) -> tuple[Program, Program]:
        """Return the two graphs. Their first slots are the parameters, then, in the backward graph, what was saved."""
        forward = _Graph("forward", self._parameters, self._parameters, self._device)
        for layer in range(LAYERS):
            sizes = [_SMALL_BYTES, *(self._lives[block].size_bytes for block in self._saved_by(layer))]
            forward.add([*self._of_layer(layer), *forward.last], sizes)
        backward = _Graph("backward", self._parameters, len(self._lives), self._device)
        for layer in reversed(range(LAYERS)):
            reads = [*self._of_layer(layer), *self._saved_by(layer), *backward.last]
            backward.add(reads, [_SMALL_BYTES, _SMALL_BYTES])
        return forward.program(), backward.program()

    # -- where its blocks are

    def _send_idle_away(self) -> None:
        self.pager.enter_region()
        for number, tensor in enumerate(self._idle):
            self.pager.offload(self.pager.block_of(tensor, name=f"idle.{number}", kind="optimizer_state", user_visible=True))
        self.pager.leave_region()

    def _follow(self) -> None:
        """Follow the plan from now on, under the budget that it needs."""
        leave: list[list[Any]] = [[] for _ in range(_POSITIONS)]
        fetch: list[list[int]] = [[] for _ in range(_POSITIONS)]
        for move in self.moves:
            leave[move.after].append((move.block, "host"))
            fetch[move.fetch % _POSITIONS].append(move.block)
        saved = [[-1, *self._saved_by(layer)] for layer in range(LAYERS)]
        schedule = StageSchedule(
            regions=(("forward", 0), ("backward", LAYERS + 1)),
            counts=(LAYERS + 1, LAYERS + 1),
            made_ids=(tuple(number for made in saved for number in made), (-1,) * STAGES),
            leave_after=tuple(map(tuple, leave)),
            fetch_at=tuple(map(tuple, fetch)),
            kept=(frozenset(), frozenset()),
            reruns=RerunsByStage(numbers=range(_POSITIONS), count=_POSITIONS),
        )
        blocks = [self.pager.known_block(tensor) for tensor in self._tensors]
        self._observer.plan.follow(schedule, {number: block for number, block in enumerate(blocks) if block is not None})
        self._observer.recorder.sampled = True  # as in the long run: the stages of one iteration in eight are timed
        self.pager.account.budget_bytes = need_bytes(self._lives, self.moves, _POSITIONS) + (LAYERS + 4) * _SMALL_BYTES


class _Graph:
    """Collects the stages of a program for `device`. parameters: its first slots. inputs: number of its inputs.

    last: the slot of the first result of the stage before, in a list.
    """

    def __init__(self, phase: Phase, parameters: int, inputs: int, device: IdleDevice) -> None:
        self.last: list[int] = []
        self._phase: Phase = phase
        self._device = device
        self._parameters = parameters
        self._inputs = inputs
        self._slots = inputs
        self._stages: list[tuple[list[int], range, list[int]]] = []
        self._readers: dict[int, list[int]] = {}

    def add(self, reads: list[int], made_bytes: list[int]) -> None:
        """Add a stage that reads slots and fills new ones with tensors of these sizes."""
        for slot in reads:
            self._readers.setdefault(slot, []).append(len(self._stages))
        made = range(self._slots, self._slots + len(made_bytes))
        self._slots, self.last = made.stop, [made.start]
        self._stages.append((reads, made, made_bytes))

    def program(self) -> Program:
        """Return the program. Its results are all that stages make for other graphs and for the user."""
        results = tuple(slot for _, made, _ in self._stages for slot in made[1:])
        kinds: list[Kind] = ["parameter" if slot < self._parameters else "activation" for slot in range(self._slots)]
        return Program(
            identity=self._phase,
            name=self._phase,
            phase=self._phase,
            stages=tuple(self._stage(number, *each) for number, each in enumerate(self._stages)),
            input_count=self._inputs,
            slot_names=tuple(f"{self._phase}.{slot}" for slot in range(self._slots)),
            slot_kinds=tuple(kinds),
            results=results,
            user_results=tuple(range(len(results))) if self._phase == "backward" else (),
            kept_bytes=0,
            small_bytes=0,
        )

    def _stage(self, number: int, reads: list[int], made: range, made_bytes: Sequence[int]) -> Stage:
        device = self._device

        def run(values: list[Any]) -> list[Any]:
            values.clear()
            device.stages += 1
            return [_tensor(size) for size in made_bytes]

        following = {
            slot: next((reader for reader in self._readers.get(slot, ()) if reader > number), -1) for slot in (*reads, *made)
        }
        return Stage(
            name=f"{self._phase}/{number}",
            phase=self._phase,
            run=run,
            inputs=tuple(reads),
            outputs=tuple(made),
            frees=tuple(slot for slot in reads if slot >= self._parameters and following[slot] < 0),
            next_uses=tuple(following.values()),
            input_bytes=0,
            output_bytes=sum(made_bytes),
            workspace_bytes=0,
        )


def _tensor(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)
