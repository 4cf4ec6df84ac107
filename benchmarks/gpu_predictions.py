"""What the planner expects of an H200, before anything has run there: iteration times of Llamas under budgets, with host memory.

Traces are generated (`benchmarks.transformer_trace`): bf16, roofline times at the data sheet's rates times the efficiencies of
`benchmarks.machines`, the bus at 55 GB/s each way. Budgets are shares of the trace's peak, less what teraio leaves free of them.
Times hold for perfect copies and no cost of the host. Plans are those of the default policy, replayed exactly.
"""

from collections.abc import Iterator

from benchmarks.alone import LlamaScale
from benchmarks.machines import H200_BF16
from benchmarks.results import Figure
from benchmarks.transformer_trace import Model, Workload
from benchmarks.variants import peak_bytes, with_one_tier
from examples.llama import SIZES
from planner import Budgets, TeraioError, Trace, plan

PERCENTS = (70, 50, 30)
DEFAULT_SIZES = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b")
BATCH, CONTEXT, ELEMENT_BYTES = 4, 2048, 2
HOST_BYTES = 96 << 30
GIB = 2**30


def measure(scale: LlamaScale) -> tuple[Figure, ...]:
    """Return the predictions for the sizes of the scale, by default DEFAULT_SIZES. Takes minutes."""
    return tuple(figure for size in scale.sizes or DEFAULT_SIZES for figure in _of_size(size))


def trace_of(size: str) -> Trace:
    """Return the trace of the Llama of that name on an H200 with host memory as the only lower tier."""
    config = SIZES[size]
    model = Model(
        name=size,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        key_value_heads=config.key_value_heads,
        feed_forward=config.feed_forward,
        vocabulary=config.vocabulary,
        tied=config.tied,
        loss_tokens=config.loss_tokens,
    )
    work = Workload(model=model, batch=BATCH, sequence=CONTEXT, element_bytes=ELEMENT_BYTES)
    return with_one_tier(work.trace(H200_BF16), "host", H200_BF16.host_bytes_per_second)


def planned_bytes(budget_bytes: int) -> int:
    """Return what plans may use of a budget on a GPU: the limit is a page lower, and a spare part stays free."""
    return budget_bytes - (20 << 20) - max(budget_bytes // 32, 64 << 20)


def _of_size(size: str) -> Iterator[Figure]:
    trace = trace_of(size)
    tokens, peak = BATCH * CONTEXT, peak_bytes(trace)
    ideal = trace.ideal_seconds
    yield Figure(name=f"{size}: unconstrained peak", value=peak / GIB, unit="GiB")
    yield Figure(name=f"{size}: iteration", value=1e3 * ideal, unit="ms", note=f"{tokens / ideal:,.0f} tokens/s")
    for percent in PERCENTS:
        budget = peak * percent // 100
        name = f"{size}, {percent} %, host: iteration"
        try:
            made = plan(trace, Budgets(device_bytes=planned_bytes(budget), host_bytes=HOST_BYTES))
        except TeraioError as error:
            yield Figure(name=name, value=None, unit="", note=f"{type(error).__name__}: {error}")
            continue
        assert made.predicted is not None  # every policy's plan is replayed
        seconds = made.predicted.iteration_seconds
        on_host = sum(update.where == "host" for update in made.updates)
        notes = (
            f"{ideal / seconds:.3f} x unconstrained",
            f"{tokens / seconds:,.0f} tokens/s",
            f"bound {1e3 * made.predicted.lower_bound_seconds:.4g} ms",
            f"budget {budget / GIB:.2f} GiB",
            f"{len(made.recompute)} stages run again",
            f"{on_host} of {len(trace.subgroups)} subgroups update on the host",
        )
        yield Figure(name=name, value=1e3 * seconds, unit="ms", note="; ".join(notes))
