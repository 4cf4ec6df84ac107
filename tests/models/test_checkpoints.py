"""Checkpoints of a model of transformers: written under a budget and read without one, and the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

pytest.importorskip("transformers", reason="needs the extra models")

from safetensors.torch import load_file  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

import teraio  # noqa: E402

from ..training import MIB, Training, begin  # noqa: E402
from . import text  # noqa: E402
from .others import own_loss  # noqa: E402
from .parity import adamw  # noqa: E402

HALF = 44 * MIB
"""About half of what these trainings take at their peak."""
STEPS = 3
UNLIMITED: Mapping[str, Any] = {}
BUDGETED: Mapping[str, Any] = {"memory_budget": HALF}

one_process = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
pytestmark = pytest.mark.usefixtures("fine_and_quick")


def begun(options: Mapping[str, Any], tmp_path: Path) -> Training:
    return begin(text.llama, lambda module: [adamw(module)], {**options, "storage": str(tmp_path)})


def steps(training: Training, first: int, last: int) -> None:
    """Train on the batches from number `first` to `last`, which does not belong to them."""

    def step(batch: text.Batch, index: int) -> None:
        own_loss(training.model, batch).backward()
        training.optimizers[0].step()
        training.optimizers[0].zero_grad()

    training.run(text.sentences(last)[first:], step)


def check_moved() -> None:
    (status,) = teraio.status()
    assert status.moved_bytes["device->storage"], "nothing moved"


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ in a bit."""
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


class Pretrained:
    """`save_pretrained` in safetensors, and the optimizer by `torch.save`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, training: Training) -> None:
        training.module.save_pretrained(self._path)
        torch.save(training.optimizers[0].state_dict(), self._path / "optimizer.pt")
        written = load_file(self._path / "model.safetensors")
        values = training.module.state_dict()
        assert written.keys() == values.keys()
        assert all(torch.equal(value, values[name]) for name, value in written.items())

    def load(self, training: Training) -> None:
        read = LlamaForCausalLM.from_pretrained(self._path)
        training.module.load_state_dict(read.state_dict())
        training.optimizers[0].load_state_dict(torch.load(self._path / "optimizer.pt"))


class Distributed:
    """`torch.distributed.checkpoint`, in one process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _state(self, training: Training) -> dict[str, Any]:
        model, optimizer = get_state_dict(training.module, training.optimizers)
        return {"model": model, "optimizer": optimizer}

    def save(self, training: Training) -> None:
        dcp.save(self._state(training), checkpoint_id=self._path)

    def load(self, training: Training) -> None:
        state = self._state(training)
        dcp.load(state, checkpoint_id=self._path)
        set_state_dict(training.module, training.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, torch.Tensor]:
    """Filled by the first test: the parameters after all steps, without a budget and without a checkpoint."""
    return {}


@one_process
@pytest.mark.parametrize("kind", [Pretrained, Distributed])
@pytest.mark.parametrize(
    ("first", "second"), [(BUDGETED, UNLIMITED), (UNLIMITED, BUDGETED)], ids=["out-of-budget", "into-budget"]
)
def test_resuming_is_training_on(
    kind: type[Pretrained] | type[Distributed],
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    tmp_path: Path,
    uninterrupted: dict[str, torch.Tensor],
) -> None:
    if not uninterrupted:
        training = begun(UNLIMITED, tmp_path)
        steps(training, 0, 2 * STEPS)
        uninterrupted |= training.finish()
    checkpoint = kind(tmp_path / "checkpoint")
    training = begun(first, tmp_path)
    steps(training, 0, STEPS)
    checkpoint.save(training)
    training.finish()
    training = begun(second, tmp_path)
    checkpoint.load(training)
    steps(training, STEPS, 2 * STEPS)
    check_moved() if second is BUDGETED else None
    assert differing(training.finish(), uninterrupted) == []


def test_going_back_to_a_checkpoint_while_blocks_are_away(tmp_path: Path) -> None:
    """The same steps from the same checkpoint give the same parameters."""
    checkpoint = Pretrained(tmp_path / "checkpoint")
    training = begun(BUDGETED, tmp_path)
    steps(training, 0, STEPS)
    checkpoint.save(training)
    steps(training, STEPS, 2 * STEPS)
    once = {name: value.clone() for name, value in training.module.state_dict().items()}
    check_moved()
    checkpoint.load(training)
    steps(training, STEPS, 2 * STEPS)
    assert differing(training.finish(), once) == []
