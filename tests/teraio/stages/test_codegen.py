"""Stages of Inductor: from its cache when a training starts again, without a C++ compiler; tuned without a buffer for caches."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.benchmarking import InductorBenchmarker, benchmarker
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule

from teraio.stages import codegen

from ...training import begin, mean_square_step, unequal


def start(backend: str = "teraio") -> tuple[Counter[str], list[torch.Tensor]]:
    """Train two products with a view between them for a step. Returns what Inductor counted, and the weights afterwards."""
    counters.clear()
    training = begin(
        lambda: nn.Sequential(nn.Linear(16, 32, bias=False), nn.Unflatten(1, (2, 16)), nn.Linear(16, 8, bias=False)),
        lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)],
        {"codegen": "inductor"} if backend == "teraio" else {},
    )
    if backend != "teraio":
        training.model = torch.compile(training.module, backend=backend)
    mean_square_step(training, torch.ones(4, 16))
    values = list(training.finish().values())
    return Counter(counters["inductor"]), values


def test_a_second_start_compiles_no_stage_also_on_another_machine() -> None:
    with fresh_cache():
        cold, wanted = start()
        assert cold["fxgraph_cache_miss"] >= 2 and cold["fxgraph_cache_bypass"] == 0
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        warm, found = start()
        assert warm["fxgraph_cache_miss"] == 0
        assert warm["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"] + cold["fxgraph_cache_hit"]
        assert not unequal(found, wanted)
    with fresh_cache():
        torch.compiler.load_cache_artifacts(saved[0])
        warm, found = start()
        assert warm["fxgraph_cache_miss"] == 0 and warm["fxgraph_cache_hit"] >= 2
        assert not unequal(found, wanted)


# -- tuned without the buffer that empties the GPU's cache


def cache_bytes() -> int:
    """Return what Inductor's benchmarker takes for its buffer, on a GPU with a cache of 60 MiB."""
    assert isinstance(benchmarker, InductorBenchmarker)
    return benchmarker.__dict__.get("L2_cache_size", 60 << 20)


def test_only_the_first_run_that_succeeds_tunes_without_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards, copies of arguments that Inductor has kept in pinned memory meanwhile are given back."""
    seen: list[int] = []
    emptied: list[int] = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(len(seen)), raising=False)

    def run(values: list[Any]) -> list[Any]:
        seen.append(cache_bytes())
        if len(seen) == 1:
            raise RuntimeError("no room")
        return values

    stage = codegen.tuned_within_budget(run)
    with pytest.raises(RuntimeError, match="no room"):
        stage([1])
    for _ in range(2):
        assert stage([1]) == [1]
    assert seen == [4096, 4096, 60 << 20] and emptied == [2]
    assert "L2_cache_size" not in vars(benchmarker)


def test_inductors_own_function_reads_the_size_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with codegen.cache_stays():
        assert benchmarker.L2_cache_size == 4096  # type: ignore[attr-defined]
    monkeypatch.setitem(vars(benchmarker), "L2_cache_size", 123)
    with codegen.cache_stays():
        assert benchmarker.L2_cache_size == 4096  # type: ignore[attr-defined]
    assert benchmarker.L2_cache_size == 123, "what was known before is known again"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("device", "buffer_bytes"), [("cpu", 60 << 20), ("cuda", 4096)])
def test_stages_on_a_gpu_are_tuned_that_way(device: str, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)  # builds for CPUs have none
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda *_, **__: lambda values: [cache_bytes()])
    with torch._subclasses.FakeTensorMode():
        inputs = [torch.empty(4, device=device)]
    assert codegen.inductor_codegen(GraphModule({}, torch.fx.Graph()), inputs, {})([]) == [buffer_bytes]


# -- operator by operator


def test_a_run_that_fails_keeps_nothing_of_what_it_has_made() -> None:
    """A stage that finds no memory runs again once all has left: what it had made must be gone, too."""
    made: list[weakref.ref[torch.Tensor]] = []

    def fails(value: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(value))
        raise torch.OutOfMemoryError

    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    graph.output((graph.call_function(fails, (graph.call_function(torch.neg, (given,)),)),))
    run = codegen.eager_codegen(GraphModule({}, graph), [torch.ones(2)], {})
    with pytest.raises(torch.OutOfMemoryError):
        run([torch.ones(2)])
    assert len(made) == 1 and made[0]() is None
