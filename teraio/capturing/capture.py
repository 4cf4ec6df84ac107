"""Captures a training step without its memory: under fake tensors, whose shapes are known and whose values are not.

The step runs under teraio's own backend and optimizer hooks, on a modelled device (`teraio.capturing.hardware`). So a
captured trace has the stages, blocks and groups of a real run. Times and workspaces are estimates, see `MachineDescription`.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.optim import Optimizer

import planner
from planner.errors import OptionsError, UnsupportedError
from planner.schema import MAX_TEXT_CHARACTERS
from runtime.execution import StageFunction
from teraio.capturing.hardware import (
    DescribedHostRates,
    EagerWork,
    KnownValues,
    MachineDescription,
    ModelledDevice,
    modelled_machine,
)
from teraio.capturing.pretended_gpu import answering, pretended_gpu
from teraio.machine import Shared
from teraio.options import Options
from teraio.phases import Phase, ProfilePhase, RunContext
from teraio.profiling import Profile, with_lengths
from teraio.ranks import RankGroup
from teraio.registry import REGISTRY
from teraio.stages import Kernel, eager_codegen, kernels_of, workspace_bytes
from teraio.training_run import RunParts, TrainingRun

Step = Callable[..., object]  # takes a length where a range of lengths is captured
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Inputs = Sequence[Any] | Mapping[str, Any]
_MOST_STEPS = 12
_LENGTHS = 5  # at which a range of lengths is captured


class _CapturePhase(ProfilePhase):
    """Profiles, and adds each profile to `profiles`."""

    def __init__(self, profiles: list[Profile], context: RunContext) -> None:
        super().__init__(context)
        self._profiles = profiles

    def _decide(self, profile: Profile) -> Phase:
        self._profiles.append(profile)
        return self


class _Capture:
    """One capture: the device, the machine, and the run that `torch.compile` starts.

    profiles: what was captured; empty before enough steps have run.
    """

    def __init__(self, description: MachineDescription, subgroup_bytes: int | None, device_bytes: int | None) -> None:
        self._description = description
        self._subgroup_bytes = subgroup_bytes
        self._device_bytes = device_bytes
        self._device = ModelledDevice()
        self.work = EagerWork(self._eager)
        self._flops: dict[torch.dtype, float] = defaultdict(float)  # of the model, in the step that runs
        self._has_run = False
        self.profiles: list[Profile] = []

    def _eager(self, kernel: Kernel) -> None:
        self._device.advance(self._description.stage_seconds([kernel]))
        if not (_in_backward() and torch.is_grad_enabled()):  # or a checkpointed part of the forward pass runs again
            self._flops[kernel.dtype] += kernel.model_flops

    def run(self, training: Callable[[], Step], lengths: Sequence[int] = ()) -> None:
        """Run the training until it is profiled, at each length if there are some."""
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        fake.allow_scalar_outputs = True
        with _runs_of(self), _explained(), pretended_gpu(self._description.gpu), fake:
            with _convertible(fake), answering(self._description.gpu, self._description.hardware.name), KnownValues():
                step = training()
            if not callable(step):
                raise OptionsError(f"capture: the function returns {type(step).__name__}, wanted a function that does one step")
            given: list[tuple[int, ...]] = [(length,) for length in lengths] or [()]
            step(*given[-1])  # graphs are cut for the longest
            with self.work:
                for count, arguments in enumerate(given, 1):
                    for _ in range(_MOST_STEPS):
                        if len(self.profiles) == count:
                            break
                        self._flops.clear()  # what is counted is of this step
                        step(*arguments)
                    else:
                        raise UnsupportedError(f"after {_MOST_STEPS} steps there is no trace yet: {self.waiting_for}")

    def work_of_step(self, tokens: int | None, samples: int | None) -> planner.Work:
        """Return what the last step got done."""
        flops = sum(self._flops.values())
        at_peak = sum(count / self._description.peak(dtype) for dtype, count in self._flops.items())
        return planner.Work(
            tokens=tokens, samples=samples, flops=flops or None, peak_flops_per_second=flops / at_peak if at_peak else None
        )

    def new_run(
        self, options: Options, device: torch.device, parts: RunParts, shared: Shared, ranks: RankGroup | None
    ) -> TrainingRun:
        """Return a run without a budget, whatever the options say, on the modelled machine."""
        if self._has_run:
            raise UnsupportedError("the step compiles models with different options; a capture has one run: give all the same")
        self._has_run = True
        return TrainingRun(
            Options(
                codegen=options.codegen,
                recompute=options.recompute,
                tiles=options.tiles,
                optimizer=options.optimizer,
                profile_iterations=1,
            ),
            device,
            RunParts(
                open_machine=lambda *_: modelled_machine(self._device, self._description.hardware),
                speed_of=self._description.speed_of,
                codegen=partial(self._codegen, fuses=options.codegen != "eager"),
                host_rates=DescribedHostRates(self._description.hardware.host_update_elements_per_second),
                subgroup_bytes=self._subgroup_bytes,
                graphs_for_bytes=self._device_bytes,
                first_phase=partial(_CapturePhase, self.profiles),
            ),
            shared,
        )

    def _codegen(self, module: GraphModule, inputs: Sequence[Any], options: dict[str, Any], *, fuses: bool) -> StageFunction:
        run = eager_codegen(module, inputs, options)
        is_backward = bool(options.get("is_backward"))
        symbolic = any(isinstance(value, torch.SymInt) for value in inputs)

        def work_of(graph: Graph) -> tuple[list[Kernel], int]:
            return kernels_of(graph), workspace_bytes(graph, fuses=fuses)

        known: dict[tuple[Any, ...], tuple[list[Kernel], int]] = {}
        as_compiled = work_of(module.graph)

        def stage(values: list[Any]) -> Sequence[Any]:
            kernels, workspace = as_compiled
            if symbolic:
                sizes = tuple(value.shape if isinstance(value, Tensor) else value for value in values)
                if sizes not in known:
                    with self.work.paused():
                        known[sizes] = work_of(_sized(module, values).graph)
                kernels, workspace = known[sizes]
            before = {tensor.untyped_storage()._cdata for tensor in values if isinstance(tensor, Tensor)}
            with self.work.paused():
                made = run(values)
            storages = [tensor.untyped_storage() for tensor in made if isinstance(tensor, Tensor)]
            new = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in before}
            self._device.allocate(sum(new.values()) + workspace)
            self._device.advance(self._description.stage_seconds(kernels))
            if is_backward or not _in_backward():
                for kernel in kernels:
                    self._flops[kernel.dtype] += 0.0 if is_backward and kernel.of_forward else kernel.model_flops
            return made

        return stage

    @property
    def waiting_for(self) -> str:
        """Why there is no profile yet."""
        if not self._has_run:
            return 'nothing was compiled with backend="teraio"'
        return f"it waits for {REGISTRY.runs()[0].status().waiting_for}"


def _sized(module: GraphModule, values: Sequence[Any]) -> GraphModule:
    """Return a copy of a graph with symbolic sizes, for the sizes of these values."""
    sized = copy.copy(module)
    sized.graph = copy.copy(module.graph)
    mode = detect_fake_mode(values)
    FakeTensorProp(sized, mode).propagate_dont_convert_inputs(*values)
    return sized


def capture(
    model_or_training: nn.Module | Callable[[], Step],
    inputs: Inputs | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    hardware: str | os.PathLike[str] | MachineDescription = "h100",
    name: str | None = None,
    subgroup_bytes: int | None = None,
    tokens: int | None = None,
    samples: int | None = None,
    lengths: tuple[int, int] | None = None,
    device_bytes: int | None = None,
) -> planner.Trace:
    """See `teraio.capture`. hardware: may be a description, too."""
    if REGISTRY.runs():
        raise UnsupportedError("teraio is training in this process; capture in another process, or call teraio.reset() first")
    if name is not None and len(name) > MAX_TEXT_CHARACTERS:
        raise OptionsError(f"capture: a name of {len(name):,} characters; at most {MAX_TEXT_CHARACTERS:,} can be read again")
    wanted = "how many a step processes"
    for what, count, of in (("tokens", tokens, wanted), ("samples", samples, wanted), ("device_bytes", device_bytes, "a budget")):
        if count is not None and count < 1:
            raise OptionsError(f"capture: found {what}={count}, wanted {of}: 1 or more, or leave it out")
    if lengths is not None and not 1 < lengths[0] < lengths[1]:
        raise OptionsError(
            f"capture: found lengths={lengths}, wanted the shortest, 2 or more, and a longer one, such as (128, 2048)"
        )
    if lengths is not None and isinstance(model_or_training, nn.Module):
        raise OptionsError("capture: lengths need a function that makes the training and returns a step that takes a length")
    description = hardware if isinstance(hardware, MachineDescription) else MachineDescription.load(hardware)
    device = torch.device("cpu" if description.gpu is None else "cuda")
    if isinstance(model_or_training, nn.Module):
        if inputs is None:
            raise OptionsError("capture: a model was given without inputs; give inputs=, such as a tuple of tensors")
        training = training_of(model_or_training, inputs, optimizer or torch.optim.AdamW, loss, device)
    elif inputs is not None:
        raise OptionsError("capture: inputs belong to a model; a function makes its inputs itself")
    else:
        training = model_or_training
    told = () if lengths is None else _between(*lengths)
    captured = _Capture(description, subgroup_bytes, device_bytes)
    captured.run(training, told)
    trace = (with_lengths(captured.profiles, told) if told else captured.profiles[0]).trace
    if lengths is not None and trace.lengths is None:
        raise UnsupportedError(
            f"capture: from length {lengths[0]} to {lengths[1]} the step does not run one graph with one symbolic size; compile "
            "with dynamic=True, and take a range in which the step does the same"
        )
    return trace.rebuilt(
        name=name or getattr(training, "__name__", "capture"),
        created_by=f"teraio, torch {torch.__version__}, captured for {description.hardware.name}",
        work=captured.work_of_step(tokens, samples),
    )


def _between(shortest: int, longest: int) -> tuple[int, ...]:
    """Return lengths at equal distances that tell how sizes and times depend on the length; the longest comes last."""
    return tuple(sorted({shortest + (longest - shortest) * number // (_LENGTHS - 1) for number in range(_LENGTHS)}))


def _in_backward() -> bool:
    """Return whether autograd runs a backward pass, in which a forward pass can only run again."""
    return torch._C._current_graph_task_id() != -1


def training_of(
    model: nn.Module, inputs: Inputs, make_optimizer: MakeOptimizer, loss_of: Callable[[Any], Tensor] | None, device: torch.device
) -> Callable[[], Callable[[], object]]:
    """Return what makes the step of a model: forward pass, loss, backward pass, update, gradients set to None.

    device: where it runs.
    """

    def training() -> Callable[[], object]:
        tensors = chain(model.parameters(), model.buffers())  # shared ones come once; they may be on the device "meta"
        copied = copy.deepcopy(model, {id(tensor): _fake(tensor, device) for tensor in tensors})
        optimizer = make_optimizer(copied.parameters())
        compiled = torch.compile(copied, backend="teraio")
        named = {name: _fake(value, device) for name, value in inputs.items()} if isinstance(inputs, Mapping) else {}
        given = [] if isinstance(inputs, Mapping) else [_fake(value, device) for value in inputs]

        def step() -> None:
            output = compiled(*given, **named)
            (loss_of or _loss)(output).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        return step

    training.__name__ = type(model).__name__
    return training


def _fake(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made


def _loss(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise OptionsError(
            f"capture: the model returns {type(output).__name__}, neither a loss nor something with a loss; give loss=, a "
            "function from what the model returns to the loss"
        )
    return loss


@contextlib.contextmanager
def _runs_of(captured: _Capture) -> Iterator[None]:
    before, REGISTRY.new_run = REGISTRY.new_run, captured.new_run
    try:
        yield
    finally:
        REGISTRY.new_run = before
        REGISTRY.reset()
        torch._dynamo.reset()


def _convertible(fake: FakeTensorMode) -> AbstractContextManager[object]:
    """Let `Module.to` convert fake parameters. It exchanges tensors without weak references only, and the mode keeps some."""
    swap = torch.utils.swap_tensors

    def without_memo(one: Tensor, other: Tensor) -> None:
        fake.fake_tensor_converter.tensor_memo.clear()
        swap(one, other)  # type: ignore[no-untyped-call]

    return mock.patch.object(torch.utils, "swap_tensors", without_memo)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what to do if the step needs a value."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise UnsupportedError(
            f"the step depends on the values of tensors, and a capture has none ({error}); leave out of the captured step what "
            "reads them, such as printing the loss, `if loss > ...` or a gradient scaler"
        ) from error
