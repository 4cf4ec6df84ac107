"""Fine-tune a GPT whose weights are larger than the device, by LoRA: the frozen weights stay in their checkpoint.

    python -m examples.lora

A frozen weight comes in from its safetensors file when a layer needs it, and leaves without a write. It takes no room in spill
files. The adapters are small and stay on the device. `docs/frameworks/peft.md` has the same with PEFT.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

import teraio
from examples.gpt import GPT, GPTConfig
from examples.text import batches, standard_library_text

CONFIG = GPTConfig(layers=12, context=128)


class Adapted(nn.Module):
    """A linear layer that is frozen, and beside it one of low rank that is trained. It begins as the layer alone."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.frozen(hidden) + self.up(self.down(hidden))  # type: ignore[no-any-return]


def adapt(model: GPT, rank: int) -> list[nn.Parameter]:
    """Freeze the model, adapt the projections of its attention, and return what is trained."""
    model.requires_grad_(False)
    for layer in model.layers:
        attention: Any = layer.attention
        attention.query_key_value = Adapted(attention.query_key_value, rank)
        attention.projection = Adapted(attention.projection, rank)
    return [each for each in model.parameters() if each.requires_grad]


def checkpointed(config: GPTConfig, folder: Path) -> Path:
    """Write the weights of a GPT, which stand for those of a model that was trained before."""
    torch.manual_seed(0)
    save_file(GPT(config).state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def main(
    memory_budget: Annotated[str, typer.Option(help="Of the device, which is main memory here.")] = "64MiB",
    checkpoint: Annotated[Path | None, typer.Option(help="A safetensors file of this GPT; default: a new one.")] = None,
    layers: Annotated[int, typer.Option(help="Of the GPT, 12 MiB each.", min=1)] = CONFIG.layers,
    batch: Annotated[int, typer.Option(help="Rows of text in each iteration.", min=1)] = 4,
    rank: Annotated[int, typer.Option(help="Of the adapters.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Iterations.", min=1)] = 20,
    codegen: Annotated[str, typer.Option(help="inductor, or eager to compile nothing.")] = "inductor",
) -> None:
    """Fine-tune a GPT of 145 MiB on a device of 64 MiB."""
    config = replace(CONFIG, layers=layers)
    with TemporaryDirectory() as folder:
        options = {"memory_budget": memory_budget, "storage": folder, "codegen": codegen}
        with teraio.under_budget(**options) as tiers:  # type: ignore[arg-type]
            with torch.device("meta"):
                model = GPT(config)
            tiers.load(model, checkpoint or checkpointed(config, Path(folder)))
        trained = adapt(model, rank)
        teraio.compile(model, **options)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        rows = batches(standard_library_text(1 << 20), batch=batch, context=config.context, seed=1)
        for step in range(1, steps + 1):
            loss = model(*next(rows))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            (status,) = teraio.status()
            print(f"{step:4}  loss {loss.item():.4f}  {status.phase}")
        weights, adapters = (sum(each.nbytes for each in group) >> 10 for group in (model.parameters(), trained))
        read = status.moved_bytes["storage->device"] >> 20
        print(
            f"weights of {weights >> 10} MiB, of it {adapters} KiB trained; at most {status.device_peak_bytes >> 20} MiB on the "
            f"device; {read} MiB read from drives"
        )
        teraio.reset()


if __name__ == "__main__":
    typer.run(main)
