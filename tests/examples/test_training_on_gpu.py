"""What trainings and benchmarks do on a GPU only, with main memory and a made-up driver in its place: all of it is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks import gpu_links
from benchmarks.rival_training import RivalSetting, RivalTraining
from examples.llama import SIZES
from examples.training import Setting, Training

from ..teraio.fake_cuda import TOTAL_BYTES, FakeCuda

MIB = 1 << 20


class InMainMemory(TorchFunctionMode):
    """Makes tensors for "cuda" in main memory, and none of it pinned. pinned: how many were to be pinned."""

    pinned = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        InMainMemory.pinned += bool(given.pop("pin_memory", False))
        return function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in given.items()})


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Main memory as a GPU. Gives the shares of its memory that the allocator was limited to, and "emptied" for its cache."""
    FakeCuda(monkeypatch)
    made: list[Any] = []
    for name, value in {
        "max_memory_allocated": lambda: 7 * MIB,
        "max_memory_reserved": lambda: 8 * MIB,
        "reset_peak_memory_stats": lambda: None,
        "set_per_process_memory_fraction": made.append,
        "empty_cache": lambda: made.append("emptied"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(InMainMemory, "pinned", 0)
    with InMainMemory():
        yield made


def setting(**fields: Any) -> dict[str, Any]:
    small = replace(SIZES["tiny"], layers=2, width=64, feed_forward=96, context=16)
    tiny = {"backend": "eager", "model": small, "batch": 1, "text_bytes": 100_000, "device": "cuda"}
    return {**tiny, **fields}


def test_a_training_measures_by_the_gpus_events_and_its_allocator(calls: list[Any]) -> None:
    training = Training(Setting.model_validate(setting(dtype="bfloat16")))
    assert calls == ["emptied"], "a peak begins without a cache"
    assert training._optimizer.defaults["fused"], "the default optimizer would need memory for copies of all parameters"
    step = training.steps(2)
    assert 0 < step.optimizer_seconds < step.seconds and step.iterations == 2
    report = training.finish()
    assert (report.peak_bytes, report.peak_reserved_bytes, report.rest_bytes) == (7 * MIB, 8 * MIB, 0)


def test_a_rivals_allocator_is_limited_to_the_budget(calls: list[Any]) -> None:
    fields = setting(way="plain", budget_bytes=TOTAL_BYTES // 4)
    training = RivalTraining(RivalSetting.model_validate(fields))
    assert calls == [0.25, "emptied"] and training.step().loss > 0


def test_raw_copies_use_pinned_memory(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_links.COPY_BYTES, "cuda", MIB)
    found = gpu_links.raw_copies("cuda")
    assert {link: len(rates) for link, rates in found.items()} == {"device->host": 7, "host->device": 7}
    assert InMainMemory.pinned == 1 and calls == ["emptied"], "trainings may follow"
