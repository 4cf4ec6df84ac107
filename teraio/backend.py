"""The two entrances: `teraio.compile`, which compiles in place, and the backend that `torch.compile` finds by its name."""

from __future__ import annotations

import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch.fx import GraphModule

from planner.errors import BudgetError, TeraioError
from runtime.device import MIN_MOVED_BYTES
from runtime.execution import Kind, Phase, Program
from runtime.paging import holder_of
from runtime.torch_names import require_compiler
from teraio import registry
from teraio.options import Options, parse_options
from teraio.stages import device_of, inductor_decompositions
from teraio.training_run import TrainingRun, one_thread

logger = logging.getLogger("teraio")

_Compiled = TypeVar("_Compiled", bound=Callable[..., Any])
_CONFIG: dict[str, Any] = {
    # The backward graph is compiled with the forward one: a budget that is too small is found before training starts.
    "force_non_lazy_backward_lowering": True,
    # A cache of whole graphs would return functions that are not cut into stages.
    "enable_autograd_cache": False,
}
# What the compilers of stages are told of what PyTorch says of a graph.
_TOLD = ("is_backward", "is_inference", "graph_id", "boxed_forward_device_index", "cudagraphs")


def teraio(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a captured graph so that it trains within a memory budget. Called by torch.compile.

    gm, example_inputs: from Dynamo. mode: the option of that name; PyTorch takes either this or `options`.
    options: see `teraio.options.Options`.
    Waits until the forward and the backward graph are compiled. The first call of the result raises OptionsError, BudgetError (no
    schedule can satisfy the budget) or StorageFullError (the spill files would not fit). An error that the backend itself raised
    would reach the user inside an error of Dynamo, or not at all.
    """
    try:
        parsed = parse_options({"mode": mode} if options is None else options)
    except TeraioError as error:
        return _refused(error, gm, _describe_inputs(gm, example_inputs))
    return Backend(parsed)(gm, example_inputs)


@dataclass(frozen=True, slots=True)
class Backend:
    """The backend with options that are parsed already. Equal ones are one backend for Dynamo, which compares them."""

    options: Options

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a captured graph, as `teraio` does."""
        inputs = _describe_inputs(gm, example_inputs)
        named = ((name, value) for (name, _), value in zip(inputs, example_inputs, strict=False))
        parameters = {n: v for n, v in named if type(v) is torch.nn.Parameter and v.layout is torch.strided}
        try:
            registry.REGISTRY.refuse_again()
            require_compiler()
            with one_thread():
                # These tell whether a run manages the model. Where it was made under a budget, small ones are no blocks yet.
                large = [each for each in parameters.values() if each.untyped_storage().nbytes() >= MIN_MOVED_BYTES]
                telling = large or list(parameters.values())
                device = device_of(value for value in example_inputs if isinstance(value, torch.Tensor))
                run = registry.REGISTRY.run_for(self.options, device, telling)
                with run.agreeing():
                    return _compile_for(run, self.options, gm, example_inputs, inputs, parameters)
        except TeraioError as error:
            return _refused(error, gm, inputs)


def compile_in_place(model: _Compiled, options: Options, *, dynamic: bool | None, fullgraph: bool) -> _Compiled:
    """Compile a module in place and return it; return the compiled function if it is no module.

    `torch.nn.Module.compile` would compile nothing of a module whose `forward` is PyTorch's own, such as `torch.nn.Sequential`:
    Dynamo skips such a frame, unless a frame of another file calls it.
    """
    given: dict[str, Any] = {"backend": Backend(options), "dynamic": dynamic, "fullgraph": fullgraph}
    if not isinstance(model, torch.nn.Module):
        return cast(_Compiled, torch.compile(model, **given))

    if _show_in_main_memory not in model._state_dict_hooks.values():
        model.register_state_dict_post_hook(_show_in_main_memory)  # type: ignore[no-untyped-call]
    model._compiled_call_impl = torch.compile(_with_code_of_its_own(_caller(model)), **given)
    return model


def _show_in_main_memory(model: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Put tensors in main memory in the place of those that are away from a GPU, for whoever saves them."""
    for name, value in state.items():
        if name.startswith(prefix) and type(value) is torch.Tensor:  # with keep_vars, the parameters themselves are wanted
            state[name] = registry.REGISTRY.in_main_memory(value)


def _caller(self: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that runs the module. The name `self` is left out of the names of stages and blocks."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # Dynamo leaves this out of what it compiles
            # Of `torch.func.grad`, `vmap` and the like Dynamo says nothing.
            if torch._C._functorch.peek_interpreter_stack() is not None:
                _tell_once()
        return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call


@functools.cache
def _tell_once() -> None:
    logger.warning(
        "torch.func.grad, vmap and the like around a compiled model run it uncompiled: nothing of it moves, and no budget "
        "holds. Call backward() on its loss, or torch.autograd.grad"
    )


def _with_code_of_its_own(function: Callable[..., Any]) -> FunctionType:
    """Return an equal function that Dynamo knows nothing of: it keeps what it compiled, and counts it, by code object.

    So a model that is compiled again really is, and models do not use up each other's limit of recompilations. What Dynamo has
    compiled goes with the function: the code object and it hold each other, which Python's garbage collector does not see.
    """
    known = cast(FunctionType, function)
    fresh = FunctionType(known.__code__.replace(), known.__globals__, known.__name__, known.__defaults__, known.__closure__)
    fresh.__kwdefaults__ = known.__kwdefaults__
    weakref.finalize(fresh, torch._C._dynamo.eval_frame.reset_code, fresh.__code__).atexit = False
    return fresh


def _refused(error: TeraioError, gm: GraphModule, inputs: Sequence[tuple[str, Kind]]) -> Callable[..., Any]:
    """Return what stands for a graph that was not compiled. Dynamo may call it while it compiles, to learn its outputs.

    Dynamo keeps it for as long as the user's module, so it keeps no traceback: in that are frames, and in those the model.
    """
    registry.REGISTRY.forget_unused()
    kept, kinds = error.without_traceback(), [kind for _, kind in inputs]
    registry.REGISTRY.note_refusal(kept)

    def refuse(*arguments: Any) -> Any:
        if torch._guards.TracingContext.try_get() is not None:
            return gm(*arguments)
        raise _with_immovable(kept, arguments, kinds) if isinstance(kept, BudgetError) else kept.without_traceback()

    return refuse


def _with_immovable(error: BudgetError, arguments: Sequence[Any], kinds: Sequence[Kind]) -> BudgetError:
    """Return the error with a budget that also holds those large inputs of the graph that cannot leave memory."""
    inputs = zip(arguments, kinds, strict=True)
    tensors = [(v, kind) for v, kind in inputs if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    storages = {
        storage._cdata: storage.nbytes()
        for value, kind in tensors
        if value.device.type == "cpu" and (storage := holder_of(value).untyped_storage()).nbytes() >= MIN_MOVED_BYTES
        # Other tensors were made before teraio's allocator; parameters and buffers get memory of it.
        if storage.is_shared()
        or not storage.resizable()
        or kind == "activation"
        or registry.REGISTRY.shared.ownership.stays(storage)
    }
    return error.asking_for(error.smallest_bytes + sum(storages.values()), not_counted=error.not_counted)


def _compile_for(
    run: TrainingRun,
    options: Options,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[tuple[str, Kind]],
    parameters: Mapping[str, torch.Tensor],
) -> Callable[..., Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    registry.REGISTRY.leave_given_away(parameters)
    run.note_parameters(parameters.values())
    parts = [part for each, value in zip(inputs, example_inputs, strict=False) for part in _parts(each, value)]
    programs: list[Program] = []
    symbolic = any(isinstance(each, torch.SymInt) for each in example_inputs)
    larger = symbolic and run.needs.outgrown(name for name, kind in inputs if kind == "parameter")
    if larger:
        logger.info("a graph is compiled again, in smaller stages: with inputs as large as these it might not fit otherwise")

    def compile_graph(graph: GraphModule, fake_inputs: Sequence[Any], **settings: Any) -> Callable[[list[Any]], Any]:
        # So that stages never reuse saved tensors in place, and `retain_graph` can work. They are freed at their last use anyway.
        # PyTorch's option against donated buffers is not enough: PyTorch reads it again when backward runs.
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []
        phase: Phase = "backward" if settings.get("is_backward") else "forward"
        known = parts if phase == "forward" and len(graph.graph.find_nodes(op="placeholder")) == len(parts) else []
        told = {name: settings[name] for name in _TOLD if name in settings}
        program = run.stage_compiler.compile(graph, phase=phase, options=told, inputs=known)
        programs.append(replace(program, is_inference=bool(settings.get("is_inference"))))
        return run.callable(programs[-1])

    # Taken apart, an operator is many kernels, each with a result in memory. Inductor fuses them again; without it, nothing does.
    decompositions = {} if options.codegen == "eager" else inductor_decompositions()
    with functorch_config.patch(**_CONFIG), run.stage_compiler.cutting(for_larger=larger):
        compiled = compile_fx(gm, example_inputs, inner_compile=cast(Any, compile_graph), decompositions=decompositions)
    run.check(programs, for_larger=larger)
    return cast(Callable[..., Any], compiled)


def _describe_inputs(gm: GraphModule, example_inputs: Sequence[Any]) -> list[tuple[str, Kind]]:
    """Return names (`layers.0.attn.weight`) and kinds of the graph's inputs, from the names that Dynamo gave them."""
    described: list[tuple[str, Kind]] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            example = example_inputs[len(described)] if len(described) < len(example_inputs) else None
            kind: Kind = "activation"
            if isinstance(example, torch.nn.Parameter):
                kind = "parameter"
            elif "_buffers_" in node.name:
                kind = "buffer"
            described.append((_readable(node.name), kind))
    return described


def _parts(described: tuple[str, Kind], value: Any) -> Iterator[tuple[str, Kind]]:
    """Yield names and kinds of what AOTAutograd gives to a graph for an input: for a DTensor its local tensor and its mesh."""
    name, kind = described
    if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(value):
        yield (name, kind) if isinstance(value, torch.Tensor) else (name, "activation")
        return
    attributes, _ = value.__tensor_flatten__()
    for attribute in attributes:
        yield from _parts(described, getattr(value, attribute))


def _readable(name: str) -> str:
    """Turn `l_self_modules_layers_modules_0_parameters_weight_` into `layers.0.weight`; leave other names as they are."""
    if "_parameters_" not in name and "_buffers_" not in name:
        return name.strip("_")
    path = re.sub(r"^[Ll]_\w+?_(?=modules_|parameters_|buffers_)", "", name).strip("_")
    return re.sub(r"_?(?:modules|parameters|buffers)_", ".", path).strip(".")
