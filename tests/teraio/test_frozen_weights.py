"""A training whose frozen weights stay in their file: the bits of a plain one, under a budget of less than the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import teraio
from teraio import registry
from teraio.options import parse_options

WIDTH, LAYERS, STEPS = 768, 16, 6


class Adapted(nn.Module):
    """Frozen linear layers, each with a small trained part, as LoRA has it."""

    def __init__(self, weight: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.base = nn.ParameterList([nn.Parameter(weight(layer), requires_grad=False) for layer in range(LAYERS)])
        draw = torch.Generator().manual_seed(1)
        self.down = nn.ParameterList([nn.Parameter(torch.randn(8, WIDTH, generator=draw) / 30) for _ in range(LAYERS)])
        self.up = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 8, generator=draw) / 30) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(x @ base + x @ down.t() @ up.t())
        return x.square().mean()


def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    draw = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(STEPS):
        loss = call(torch.randn(16, WIDTH, generator=draw))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        teraio.wait_for_plan()
    return losses


def test_frozen_weights_in_their_file(tmp_path: Path) -> None:
    size_bytes = WIDTH * WIDTH * 4
    content = torch.randn(LAYERS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    path = tmp_path / "base.safetensors"
    path.write_bytes(b"h" * 808 + content.numpy().tobytes())
    before = path.read_bytes()
    options = {"memory_budget": LAYERS * size_bytes // 2, "storage": tmp_path, "codegen": "eager"}
    plain = Adapted(lambda layer: content[layer].clone())
    expected = train(plain, torch.compile(plain, backend="aot_eager"))
    try:
        run = registry.REGISTRY.run_for(parse_options(options), torch.device("cpu"))

        def weight(layer: int) -> torch.Tensor:
            offset = 808 + layer * size_bytes
            storage = run._pager.block_in_file(
                f"base.{layer}", "parameter", path=path, offset_bytes=offset, size_bytes=size_bytes
            )
            return torch.empty(0).set_(storage, 0, (WIDTH, WIDTH))  # type: ignore[call-overload,no-any-return]

        model = Adapted(weight)
        found = train(model, torch.compile(model, backend="teraio", options=options))
        (status,) = teraio.status()
        assert [a.equal(b) for a, b in zip(found, expected, strict=True)] == [True] * STEPS
        assert all(a.equal(b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        assert status.phase == "planned" and status.device_peak_bytes <= options["memory_budget"]  # type: ignore[operator]
        assert status.moved_bytes["storage->device"] > LAYERS * size_bytes
        in_files = [
            block.slot is not None and block.slot.file is not None
            for block in run._pager.blocks
            if block.name.startswith("base.")
        ]
        assert in_files == [True] * LAYERS and path.read_bytes() == before
        assert status.moved_bytes["device->storage"] < size_bytes, "no frozen weight was written"
    finally:
        teraio.reset()
