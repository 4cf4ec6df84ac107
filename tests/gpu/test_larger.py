"""A model whose weights exceed the GPU's budget is made there, and one that exceeds main memory's too is trained."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

import teraio

from ..training import MIB

DEVICE = torch.device("cuda", 0)
WIDTH, LAYERS = 2048, 24
"""384 MiB of weights, 1.5 GiB with gradients and two states."""
pytestmark = pytest.mark.usefixtures("planning_in_process")


def model(count: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    return nn.Sequential(*layers)


def losses_of(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    found = []
    for number in steps:
        rows = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(number), device="cpu").to(DEVICE)
        loss = (module(rows) - 0.1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        teraio.wait_for_plan(60)
    return found


def contents(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states, by name, wherever `state_dict` finds them."""
    states = optimizer.state_dict()["state"]
    return {
        **module.state_dict(),
        **{f"{name}.{number}": value for number, state in states.items() for name, value in state.items() if name != "step"},
    }


@pytest.mark.timeout(900)
def test_a_model_beyond_the_device_and_main_memory_lives_as_under_eager_code(tmp_path: Path) -> None:
    """It is made, trained, saved, left behind where no room is for it, taken over, and trained on."""
    options = {
        "memory_budget": 320 * MIB,
        "host_budget": 256 * MIB,
        "storage": tmp_path,
        "codegen": "eager",
        "host_updates": False,
        "profile_iterations": 1,
        "solver_time_limit": 5,
    }
    with torch.device(DEVICE):
        with teraio.under_budget(**options):
            made = model()
        assert torch.cuda.memory_reserved() <= 320 * MIB
        teraio.compile(made, **options)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        found = losses_of(made, optimizer, range(4))
        (status,) = teraio.status()
        assert status.device_peak_bytes <= 320 * MIB and (status.reserved_bytes or 0) <= 320 * MIB
        assert status.moved_bytes["device->host"] and status.moved_bytes["device->storage"]
        before = dict(status.moved_bytes)
        torch.save(contents(made, optimizer), tmp_path / "saved")
        (status,) = teraio.status()
        assert dict(status.moved_bytes) == before, "nothing was brought to the GPU to be saved"

        filler = torch.empty(torch.cuda.mem_get_info()[0] - 64 * MIB, dtype=torch.uint8)
        teraio.reset()
        with pytest.raises(RuntimeError, match="when teraio's run ended, neither the device nor the host tier had room"):
            for parameter in made.parameters():
                parameter.sum()
        torch.save(contents(made, optimizer), tmp_path / "saved after the end")
        del filler
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        teraio.compile(made, **options)
        found += losses_of(made, optimizer, range(4, 6))
        (status,) = teraio.status()
        assert (status.reserved_bytes or 0) <= 320 * MIB
        torch.save(contents(made, optimizer), tmp_path / "saved again")
        del made, optimizer
        teraio.reset()

        eager = model()
        optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3)
        losses = losses_of(eager, optimizer, range(4))
        for name in ("saved", "saved after the end", "saved again"):
            if name == "saved again":
                losses += losses_of(eager, optimizer, range(4, 6))
            saved = torch.load(tmp_path / name, map_location="cpu")
            wanted = contents(eager, optimizer)
            assert saved.keys() == wanted.keys()
            assert all(torch.equal(value, wanted[key].cpu()) for key, value in saved.items()), name
    assert found == losses


def frozen(module: nn.Module) -> nn.Module:
    """All but the first layer is frozen, as a base model under a small trained part is."""
    for number, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(number == 0)
    return module


def write_safetensors(module: nn.Module, path: Path) -> None:
    """By hand: a machine with a GPU need not have the package."""
    header, data = {}, b""
    for name, tensor in module.state_dict().items():
        begin, data = len(data), data + tensor.cpu().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.timeout(600)
def test_frozen_weights_stay_in_their_file_and_train_as_eager_code_does(tmp_path: Path) -> None:
    count, file = 14, tmp_path / "model.safetensors"
    options = {
        "memory_budget": 208 * MIB,
        "storage": tmp_path,
        "codegen": "eager",
        "profile_iterations": 1,
        "solver_time_limit": 5,
    }
    with torch.device(DEVICE):
        eager = frozen(model(count))
        write_safetensors(eager, file)
        before = file.read_bytes()
        expected = losses_of(eager, torch.optim.SGD(list(eager.parameters())[:1], lr=1e-2), range(4))
        trained = next(eager.parameters()).detach().cpu()
        del eager
        torch.cuda.empty_cache()
        with teraio.under_budget(**options) as taking:
            with torch.device("meta"):
                made = model(count)
            taking.load(made, file)
        teraio.compile(frozen(made), **options)
        assert losses_of(made, torch.optim.SGD(list(made.parameters())[:1], lr=1e-2), range(4)) == expected
        (status,) = teraio.status()
        assert status.device_peak_bytes <= 208 * MIB and (status.reserved_bytes or 0) <= 208 * MIB
        with teraio.on_device([parameter := next(made.parameters())]):
            assert torch.equal(parameter.detach().cpu(), trained)
    assert status.moved_bytes["storage->device"] > (count - 1) * 4 * WIDTH**2
    assert file.read_bytes() == before
    assert status.moved_bytes["device->storage"] <= 5 * 8 * WIDTH**2, "of the trained layer and its gradient only"
    teraio.reset()
