"""Kernels are tuned without the buffer that empties the GPU's cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.runtime.benchmarking import InductorBenchmarker, benchmarker
from torch.fx import GraphModule

from teraio.stages.codegen import cache_stays, inductor_codegen, tuned_within_budget


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

    stage = tuned_within_budget(run)
    with pytest.raises(RuntimeError, match="no room"):
        stage([1])
    for _ in range(2):
        assert stage([1]) == [1]
    assert seen == [4096, 4096, 60 << 20] and emptied == [2]
    assert "L2_cache_size" not in vars(benchmarker)


def test_inductors_own_function_reads_the_size_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with cache_stays():
        assert benchmarker.L2_cache_size == 4096  # type: ignore[attr-defined]
    monkeypatch.setitem(vars(benchmarker), "L2_cache_size", 123)
    with cache_stays():
        assert benchmarker.L2_cache_size == 4096  # type: ignore[attr-defined]
    assert benchmarker.L2_cache_size == 123, "what was known before is known again"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("device", "wrapped"), [("cpu", False), ("cuda", True)])
def test_stages_on_a_gpu_are_tuned_that_way(device: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(values: list[Any]) -> list[Any]:
        return [cache_bytes()]

    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)  # builds for CPUs have none
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda *_, **__: compiled)
    with torch._subclasses.FakeTensorMode():
        inputs = [torch.empty(4, device=device)]
    stage = inductor_codegen(GraphModule({}, torch.fx.Graph()), inputs, {})
    assert stage([]) == [4096 if wrapped else 60 << 20]
