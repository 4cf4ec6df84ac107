"""`torch.compile(optimizer.step)`: Dynamo compiles none of teraio's functions, and the bits are those of the plain step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ...training import random_rows, unequal, weights_of_1_mib

PACKAGES = tuple(str(Path(__file__).parents[3] / name) for name in ("teraio", "runtime", "planner"))
STEPS = 10
"""More than Dynamo compiles one function for."""


def train(options: dict[str, Any] | None, optimizer: type[torch.optim.Optimizer], compiled: bool, closure: bool) -> list[Tensor]:
    training = weights_of_1_mib(options, count=3, kind=optimizer, lr=0.01)
    (stepping,) = training.optimizers
    step: Callable[..., Any] = torch.compile(stepping.step, backend="eager") if compiled else stepping.step

    def one(batch: Tensor, index: int) -> None:
        def passes() -> Tensor:
            stepping.zero_grad()
            loss = training.model(batch).square().mean()
            loss.backward()
            return loss.detach()

        if closure:
            step(passes)
        else:
            passes()
            step()

    training.run(random_rows(STEPS), one)
    assert options is None or training.states_moved or optimizer is torch.optim.SGD, "the model is compiled by teraio"
    return list(training.finish().values())


def code_that_dynamo_saw() -> set[tuple[str, str]]:
    codes = [code for seen in torch._dynamo.convert_frame.input_codes.seen if (code := seen()) is not None]
    return {(code.co_filename, code.co_name) for code in codes}


@pytest.mark.parametrize(("optimizer", "closure"), [(torch.optim.AdamW, True), (torch.optim.SGD, False)])
def test_dynamo_sees_none_of_teraio_s_functions(
    optimizer: type[torch.optim.Optimizer], closure: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = train({"memory_budget": "9MiB", "storage": tmp_path}, optimizer, compiled=True, closure=closure)
    assert code_that_dynamo_saw(), "the step is compiled"
    assert not [each for each in code_that_dynamo_saw() if each[0].startswith(PACKAGES)]
    assert "recompile_limit" not in caplog.text
    assert not unequal(found, train(None, optimizer, compiled=False, closure=closure))
