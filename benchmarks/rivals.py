"""Other ways to train with less device memory, under the budget that teraio gets: tokens per second and peaks, side by side.

All train the same Llama on the same tokens, in the same types and with AdamW, each in a process of its own. Groups of iterations
are timed alike. On a GPU the budget limits PyTorch's allocator in each of these processes. What cannot run says why.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from benchmarks.alone import LlamaScale, Missing, Outcome, Runner, speed
from benchmarks.gpu_budgets import budgeted, peak_figure, sizes, unconstrained
from benchmarks.results import Figure
from benchmarks.rival_training import RivalSetting
from examples.llama import SIZES

PERCENTS = (50, 30)
PROGRAM = "benchmarks.rival_training"
RIVALS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "FSDP2, CPUOffloadPolicy, checkpointing": {"way": "fsdp2", "backend": "inductor", "checkpointed": True},
        "activation checkpointing": {"way": "plain", "backend": "inductor", "checkpointed": True},
        "save_on_cpu": {"way": "plain", "backend": "eager", "save_on_cpu": True},
        "the compiler's activation offloading": {"way": "compiler_offloading", "backend": "inductor"},
        "torchao, CPUOffloadOptimizer, checkpointing": {"way": "torchao", "backend": "inductor", "checkpointed": True},
        "DeepSpeed, ZeRO-Offload, checkpointing": {"way": "zero_offload", "backend": "eager", "checkpointed": True},
        "DeepSpeed, ZeRO-Infinity, checkpointing": {"way": "zero_infinity", "backend": "eager", "checkpointed": True},
    }
)
"""By name; in the order of the runs. What moves no activations recomputes them: without, it ran out of memory on an H100."""


def measure(runner: Runner) -> tuple[Figure, ...]:
    """Return all figures of all sizes."""
    return tuple(figure for size in sizes(runner.scale) for figure in _of_size(runner, size))


def _of_size(runner: Runner, size: str) -> Iterator[Figure]:
    base, peak, figures = unconstrained(runner, size)
    yield from figures
    if isinstance(peak, Missing):
        return
    for percent in PERCENTS:
        limit = peak * percent // 100
        own = budgeted(runner, size, peak, percent, "host")
        yield from _figures(f"{size}, {percent} %, teraio", own, base, limit)
        for name, what in RIVALS.items():
            outcome = runner.run(f"{size}, {percent} %, {name}", rival_setting(runner.scale, size, limit, what), PROGRAM)
            yield from _figures(f"{size}, {percent} %, {name}", outcome, base, limit)


def rival_setting(scale: LlamaScale, size: str, budget_bytes: int, what: Mapping[str, Any]) -> RivalSetting:
    """Return the training of the Llama of that name by another way. what: a value of RIVALS."""
    fields = {name: value for name, value in what.items() if name != "checkpointed"}
    layers = SIZES[size].layers if what.get("checkpointed") else 0
    plain = scale.setting(size, fields.pop("backend"), checkpointed_layers=layers)
    limits = {"budget_bytes": budget_bytes, "folder": str(scale.output)}
    return RivalSetting.model_validate({**plain.model_dump(), **fields, **limits})


def _figures(name: str, outcome: Outcome, base: Outcome, limit: int) -> Iterator[Figure]:
    yield speed(name, outcome, base)
    if not isinstance(outcome, Missing):
        yield peak_figure(name, outcome, limit)
