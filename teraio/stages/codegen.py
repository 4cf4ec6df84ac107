"""Compilers of one stage: Inductor, which fuses operators, and none, for debugging.

[Note: Tuning within a budget]
Inductor chooses the blocks of a GPU's kernels by trying them when a stage runs for the first time. Before each trial it empties
the GPU's cache with a buffer of the cache's size, some 60 MiB. No estimate of a stage contains this buffer, and a small budget
has no room for it. It is left out for teraio's stages: counted, it would raise the smallest budget that works for a whole
training, for the sake of one iteration. Beyond the budget, it would break the promise on a GPU that has no more memory. What is
lost: trials find their inputs in the cache as far as they fit. In training they often are there too, since the kernel before
has just made them, and kernels over more bytes than the cache holds are measured as before.

[Note: Gradients of embeddings]
Inductor adds the gradient of an embedding of 16 bits up by atomic operations in 32 bits, in one piece of twice the size of the
embedding: for a vocabulary of 128k, 1 to 2 GB that a small budget has to keep free together, with bits that differ from run to
run. PyTorch's own operator on a GPU sorts the indices and adds row by row: it writes 16 bits only, always in the same order.
Beside its result it takes a row in 32 bits for each index at most. So it is used where there are fewer indices than rows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule
from torch.fx.graph import _BoxedCodeGen

from runtime.execution import StageFunction

# Compiles one subgraph: takes its module, fake inputs and compile options, returns a boxed function.
Codegen = Callable[[GraphModule, Sequence[Any], dict[str, Any]], StageFunction]

# Part of the keys of Inductor's cache. A stage keeps the strides of all its outputs; the keys do not say which a graph keeps.
_CACHE_TAG = "teraio stage 1"


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions, but for [Note: Gradients of embeddings]."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    table = select_decomp_table()
    operator = torch.ops.aten.embedding_dense_backward.default
    in_parts = table[operator]
    if operator not in lowerings:  # Inductor has none, since its own decomposition leaves none
        make_fallback(operator, warn=False, override_decomp=True)  # type: ignore[no-untyped-call]

    def gradient(grad_output: torch.Tensor, indices: torch.Tensor, num_weights: Any, *settings: Any) -> Any:
        few = statically_known_true(indices.numel() < num_weights)
        if grad_output.is_cuda and grad_output.dtype.itemsize == 2 and few:
            return NotImplemented
        return in_parts(grad_output, indices, num_weights, *settings)

    return {**table, operator: gradient}


def inductor_codegen(
    module: GraphModule, inputs: Sequence[Any], options: dict[str, Any], *, mode: str = "default"
) -> StageFunction:
    """Compile a subgraph with Inductor, by `torch._inductor.compile_fx.compile_fx_inner`. Takes seconds.

    What was compiled before comes from Inductor's cache, also in another process.
    mode: the mode of `torch.compile` whose settings of Inductor hold. On a GPU see [Note: Tuning within a budget].
    """
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx_inner
    from torch.compiler import config as compiler_config

    tagged: Any = compiler_config
    tag = f"{tagged.cache_key_tag} {_CACHE_TAG}".strip()
    outer = TracingContext.try_get()
    # Hides metadata of the whole graph (donated buffers, strides): the inputs of a subgraph are others.
    inner = TracingContext(outer.fake_mode if outer is not None else None)
    inner.output_strides = []
    with tracing(inner), config.patch(list_mode_options(mode)), tagged.patch(cache_key_tag=tag):
        compiled = cast(StageFunction, compile_fx_inner(module, inputs, **options))
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs)
    return tuned_within_budget(compiled) if on_gpu else compiled


def eager_codegen(module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> StageFunction:
    """Return a function that runs the subgraph operator by operator. Compiles nothing; for debugging and quick tests."""
    boxed = GraphModule(module, copy.copy(module.graph))
    boxed.graph.set_codegen(_BoxedCodeGen())
    boxed.recompile()
    call = boxed.forward

    def run(values: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            return cast(Sequence[Any], call(values))

    return run


_CACHE_SIZE = "L2_cache_size"  # the attribute in which Inductor's benchmarker remembers the size of the cache that it empties
_SMALLEST_BYTES = 4096


def tuned_within_budget(run: StageFunction) -> StageFunction:
    """Return a function that does the same as `run`, and whose first run that succeeds tunes without that buffer."""
    tuned = False

    def first_tunes(values: list[Any]) -> Sequence[Any]:
        nonlocal tuned
        if tuned:
            return run(values)
        with cache_stays():
            made = run(values)
        torch._C._host_emptyCache()  # copies of arguments that kernels write: pinned memory, which no budget knows
        tuned = True
        return made

    return first_tunes


@contextlib.contextmanager
def cache_stays() -> Iterator[None]:
    """Let Inductor measure kernels without emptying the GPU's cache."""
    from torch._inductor.runtime.benchmarking import benchmarker

    known = vars(benchmarker)
    before = known.get(_CACHE_SIZE)
    known[_CACHE_SIZE] = _SMALLEST_BYTES
    try:
        yield
    finally:
        del known[_CACHE_SIZE]
        if before is not None:
            known[_CACHE_SIZE] = before
