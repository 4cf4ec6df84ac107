"""Train a diffusion transformer (DiT) with half of the memory that it takes, on pictures that this file draws.

    python -m examples.diffusion

A rectified flow: the model learns the velocity from noise to a picture, given the time. Each layer takes six vectors from the
time, as published ("Scalable Diffusion Models with Transformers"). What makes it train under a budget is the line with
`teraio.compile`.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

import teraio

SIDE, PATCH = 32, 4


class Layer(nn.Module):
    """(batch, patches, width) and a condition of (batch, width) to (batch, patches, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)  # each layer begins as the identity
        nn.init.zeros_(self.modulation.bias)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(functional.silu(condition))[:, None].chunk(6, -1)
        split = self.query_key_value(self.norms[0](hidden) * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + gate * self.projection(mixed)
        return hidden + gate_mlp * self.mlp(self.norms[1](hidden) * (1 + scale_mlp) + shift_mlp)  # type: ignore[no-any-return]


class DiT(nn.Module):
    """Pictures and noise of (batch, 1, side, side), and times of (batch,), to the mean squared error of the velocity."""

    frequencies: Tensor

    def __init__(self, layers: int, width: int, heads: int = 8) -> None:
        super().__init__()
        patches = (SIDE // PATCH) ** 2
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(patches, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, 7, width // 2)))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, PATCH * PATCH)

    def forward(self, pictures: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        at = times[:, None, None, None]
        angles = times[:, None] * self.frequencies
        condition = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        hidden = self.patches(at * pictures + (1 - at) * noise).flatten(2).mT + self.positions
        for layer in self.layers:
            hidden = layer(hidden, condition)
        velocity = functional.fold(self.head(hidden).mT, (SIDE, SIDE), PATCH, stride=PATCH)
        return functional.mse_loss(velocity, pictures - noise)


def discs(count: int, generator: torch.Generator) -> Tensor:
    """Draw pictures of one disc each, of (count, 1, side, side), from -1 to 1."""
    x, y, radius = (torch.rand(3, count, 1, 1, generator=generator) * torch.tensor([1, 1, 0.3])[:, None, None, None]).unbind(0)
    places = torch.linspace(0, 1, SIDE)
    inside = (places[None, None, :] - x) ** 2 + (places[None, :, None] - y) ** 2 < (0.1 + radius) ** 2
    return inside[:, None].float() * 2 - 1


def main(
    memory_budget: Annotated[str, typer.Option(help="Of the device, which is main memory here.")] = "224MiB",
    storage: Annotated[Path, typer.Option(help="Folder for spill files, on a fast drive.")] = Path("/tmp"),
    layers: Annotated[int, typer.Option(help="Of the transformer; the budget is for 6.", min=1)] = 6,
    width: Annotated[int, typer.Option(help="A multiple of 16.", min=16)] = 512,
    batch: Annotated[int, typer.Option(help="Pictures in each iteration.", min=1)] = 16,
    steps: Annotated[int, typer.Option(help="Iterations.", min=1)] = 40,
    codegen: Annotated[str, typer.Option(help="inductor, or eager to compile nothing.")] = "inductor",
) -> None:
    """Train a DiT of 30 million parameters, which takes 450 MiB with gradients and AdamW's states, within half of that."""
    generator = torch.manual_seed(0)
    model = DiT(layers, width)
    teraio.compile(model, memory_budget=memory_budget, storage=storage, codegen=codegen)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(1, steps + 1):
        pictures = discs(batch, generator)
        loss = model(pictures, torch.randn(pictures.shape, generator=generator), torch.rand(batch, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (status,) = teraio.status()
        print(f"{step:4}  loss {loss.item():.4f}  {status.phase}")
    moved = sum(status.moved_bytes.values()) >> 20
    print(f"at most {status.device_peak_bytes >> 20} MiB on the device, {moved} MiB moved in {steps} iterations")


if __name__ == "__main__":
    typer.run(main)
