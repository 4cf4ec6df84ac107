"""What torch.profiler shows of a training run; nothing of it is made where no profiler runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import teraio

from ..training import MIB, Training, mean_square_step, weights_of_1_mib


def training(folder: Path, **options: object) -> Callable[[], None]:
    """One step of a training whose 24 weights of 1 MiB, and as many momenta, do not fit 16 MiB."""
    return stepping(weights_of_1_mib({"memory_budget": 16 * MIB, "storage": folder, **options}, momentum=0.9))


def stepping(training: Training) -> Callable[[], None]:
    return lambda: mean_square_step(training, torch.randn(16, 512))


def profiled(step: Callable[[], None]) -> list[str]:
    """The names that teraio gives to what runs in one step, in any thread."""
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as found:
        step()
    return [event.name for event in found.events() if event.name.startswith("teraio::")]


def test_stages_updates_waits_and_copies_have_names(tmp_path: Path) -> None:
    step = training(tmp_path)
    for _ in range(2):
        step()
    names = profiled(step)
    for pattern in (
        r"teraio::stage forward/\S+",
        r"teraio::stage backward/\S+",
        r"teraio::update optimizer/subgroup\.\d+",
        r"teraio::wait \S+ (and \d+ more )?from storage",
        r"teraio::copy \d+\.weight device->storage",
        r"teraio::copy \d+\.weight storage->device",
    ):
        assert any(re.fullmatch(pattern, name) for name in names), (pattern, sorted(set(names)))
    assert sum(name.startswith("teraio::stage") for name in names) == teraio.status()[0].stages


def test_updates_inside_the_backward_pass_have_names(tmp_path: Path) -> None:
    step = training(tmp_path, overlap_step=True)
    for _ in range(5):
        step()
    assert any(re.fullmatch(r"teraio::update backward\S*/update\.\d+", name) for name in profiled(step))


def test_a_step_that_is_not_cut_has_a_name(tmp_path: Path) -> None:
    training = weights_of_1_mib({"memory_budget": 64 * MIB, "storage": tmp_path}, count=1)
    training.optimizers[0].register_step_post_hook(lambda *_: None)  # it has to see all parameters
    step = stepping(training)
    step()
    assert "teraio::update optimizer/whole" in profiled(step)


def test_stages_have_names_where_everything_fits(tmp_path: Path) -> None:
    step = training(tmp_path, memory_budget=512 * MIB, profile_iterations=1)
    for _ in range(4):
        step()
    assert teraio.status()[0].phase == "fits"
    assert {name.partition("/")[0] for name in profiled(step)} == {"teraio::stage forward", "teraio::stage backward"}


def test_without_a_profiler_no_name_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Noted(torch.profiler.record_function):
        def __init__(self, name: str, args: str | None = None) -> None:
            made.append(name)
            super().__init__(name, args)

    monkeypatch.setattr(torch.profiler, "record_function", Noted)
    step = training(tmp_path)
    for _ in range(2):
        step()
    assert made == []
    profiled(step)
    assert any(name.startswith("teraio::wait") for name in made)
