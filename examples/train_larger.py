"""Train a GPT that is larger than main memory's budget, from a safetensors file, and print what the process held at each step.

    python -m examples.train_larger

The checkpoint is made first, under the budget too, unless `--checkpoint` names one. Then the life of the model: loaded, trained,
saved, parked, trained on, closed. What a process holds is its anonymous and shared memory, see `examples.memory`.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import teraio
from examples.gpt import GPT, GPTConfig
from examples.memory import give_free_memory_back, held_bytes, watched
from examples.report import mebibytes
from examples.text import batches, standard_library_text

CONFIG = GPTConfig(layers=12, width=640, heads=10, context=64)
"""237 MB of weights, 950 MB with gradients and AdamW's states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOfLife:
    """What happened, for how long, what the process held at most, and what crossed the links. Sizes in bytes."""

    name: str
    seconds: float
    held_bytes: int
    moved_bytes: dict[str, int]


@dataclass(slots=True)
class Life:
    """The steps so far. before_bytes: what the process held before there was a model or a run."""

    before_bytes: int
    steps: list[StepOfLife] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure what happens within the block."""
        before, began = _moved(), time.perf_counter()
        with watched() as held:
            yield
        seconds = time.perf_counter() - began
        moved = {link: size - before.get(link, 0) for link, size in _moved().items()}
        self.steps.append(StepOfLife(name=name, seconds=seconds, held_bytes=held.highest, moved_bytes=moved))


def _moved() -> dict[str, int]:
    return next((dict(status.moved_bytes) for status in teraio.status()), {})


def live(config: GPTConfig, options: dict[str, Any], checkpoint: Path | None, folder: Path, steps: int) -> Life:
    """Let a model live under the budgets of `options`. folder: for checkpoints. Raises what teraio raises."""
    text = standard_library_text(1 << 20)
    with teraio.under_budget(**options):  # opens the tiers and measures them: what stays of that is teraio's own
        pass
    give_free_memory_back()
    life = Life(held_bytes())
    if checkpoint is None:
        checkpoint = folder / "model.safetensors"
        with life.step("born"), teraio.under_budget(**options):
            first = GPT(config)
        with life.step("saved as safetensors"):
            save_file(first.state_dict(), checkpoint)
        del first
    with life.step("loaded"), teraio.under_budget(**options) as tiers:
        with torch.device("meta"):
            model = GPT(config)
        tiers.load(model, checkpoint)
    teraio.compile(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    taken = batches(text, batch=2, context=config.context, seed=1)

    def train() -> None:
        for _ in range(steps):
            model(*next(taken)).backward()
            optimizer.step()
            optimizer.zero_grad()
            teraio.wait_for_plan()

    with life.step("trained"):
        train()
    with life.step("saved"):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "training.pt")
    with life.step("looked at"), teraio.under_budget(**options):
        torch.nn.utils.get_total_norm(model.parameters())
    with life.step("parked"):
        teraio.park()
    with life.step("trained on"):
        train()
    with life.step("closed"):
        teraio.reset()
    return life


def table(life: Life, budgets_bytes: int) -> Table:
    """Return the steps as a table."""
    shown = Table("step", "seconds", "held at most", "over the budgets", "read from drives", "written to drives")
    for step in life.steps:
        over = max(step.held_bytes - life.before_bytes - budgets_bytes, 0)
        read, written = (step.moved_bytes.get(link, 0) for link in ("storage->device", "device->storage"))
        sizes = (mebibytes(size) for size in (step.held_bytes - life.before_bytes, over, read, written))
        shown.add_row(step.name, f"{step.seconds:.1f}", *sizes)
    return shown


def main(
    memory_budget: Annotated[int, typer.Option(help="MiB of main memory as the device.")] = 128,
    host_budget: Annotated[int, typer.Option(help="MiB of main memory as the host tier.")] = 48,
    storage: Annotated[Path | None, typer.Option(help="Folder for spill files; default: a temporary one.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A safetensors file of this GPT; default: a new one.")] = None,
    steps: Annotated[int, typer.Option(help="Iterations before and after parking.", min=1)] = 8,
    layers: Annotated[int, typer.Option(help="Of the GPT; the budgets are for 12.", min=1)] = CONFIG.layers,
    figures: Annotated[Path | None, typer.Option(help="Write the figures to this file as JSON.")] = None,
) -> None:
    """Train a GPT of 237 MB that main memory's budget of 176 MiB does not hold."""
    torch.set_num_threads(2)
    budgets_bytes = (memory_budget + host_budget) << 20
    with TemporaryDirectory() as folder:
        options = {"memory_budget": memory_budget << 20, "host_budget": host_budget << 20, "storage": storage or folder}
        life = live(replace(CONFIG, layers=layers), {**options, "codegen": "eager"}, checkpoint, Path(folder), steps)
    Console().print(table(life, budgets_bytes))
    print(f"before there was a model, the process held {mebibytes(life.before_bytes)}; budgets {mebibytes(budgets_bytes)}")
    if figures is not None:
        figures.write_text(json.dumps(asdict(life)))


if __name__ == "__main__":
    typer.run(main)
