"""One thread trains at a time: another one is told so in a sentence."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

import teraio
from teraio.training_run import one_thread

from ..training import weights_of_1_mib


def test_what_another_thread_compiles_or_runs_meanwhile_is_refused(tmp_path: Path) -> None:
    compiled = weights_of_1_mib({"memory_budget": 8 << 20, "storage": tmp_path}, count=2)
    compiled.model(torch.randn(16, 512))
    fresh = weights_of_1_mib({"memory_budget": 8 << 20, "storage": tmp_path}, count=3)
    told: list[str] = []

    def call() -> None:
        for training in (compiled, fresh):
            try:
                training.model(torch.randn(16, 512))
            except teraio.UnsupportedError as error:
                told.append(str(error))

    def in_a_thread() -> None:
        thread = threading.Thread(target=call, name="other")
        thread.start()
        thread.join()

    with one_thread(), one_thread():
        in_a_thread()
    assert [text.split(":")[0] for text in told] == ["thread 'other' compiles or runs a model while another thread does"] * 2
    told.clear()
    torch._dynamo.reset()
    in_a_thread()
    assert not told
    fresh.finish()
