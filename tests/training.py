"""One training under teraio's backend, from a fresh process state: what all tests that train a model share.

`begin` makes and compiles a model, `Training.run` takes the steps and notes teraio's status after each, `Training.finish` ends
teraio's part and checks that it leaves nothing behind. What is trained, recorded and compared is up to the test.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio
from runtime.paging import Block, Pager, State
from teraio.registry import REGISTRY

MIB = 1 << 20
PLAN_SECONDS = 60.0
"""A plan that takes longer is a failure."""

Batch = TypeVar("Batch")

# PyTorch would time the guards of each graph, with cold caches, for a line in its log.
torch._dynamo.guards.profile_guard_manager = lambda *given: 0.0
# Else pytest gives this logger its handlers, and PyTorch prints every graph for them.
logging.getLogger("torch.__trace").propagate = True


@dataclass(slots=True, kw_only=True)
class Training:
    """A model and its optimizers. model: what is called, compiled or not. progress: teraio's status after each step.

    states_moved: names of the optimizer states that were in a lower tier after some step.
    """

    module: nn.Module
    model: nn.Module
    optimizers: list[Optimizer]
    progress: list[tuple[teraio.Status, ...]] = field(default_factory=list)
    states_moved: set[str] = field(default_factory=set)

    def run(self, batches: Iterable[Batch], step: Callable[[Batch, int], None] | None = None, *, planned: bool = False) -> None:
        """Call `step(batch, index)` for each batch, by default `mean_square_step`.

        planned: wait after each step for the plan that is being made, if any.
        """
        for index, batch in enumerate(batches):
            (step or self.mean_square_step)(batch, index)
            if planned:
                require(teraio.wait_for_plan(PLAN_SECONDS), f"no plan within {PLAN_SECONDS} s")
            self.progress.append(teraio.status())
            self.states_moved |= states_away()

    def mean_square_step(self, batch: Tensor, index: int = 0) -> None:
        """Bring the output towards zero."""
        self.model(batch).square().mean().backward()
        self.update()

    def update(self) -> None:
        """Step with every optimizer, and zero the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def finish(self) -> dict[str, Tensor]:
        """End all training runs of teraio. Return copies of the parameters and buffers, by name.

        Raises AssertionError if ending the runs changed a value.
        """
        values = {name: value.detach().clone() for name, value in named_values(self.module)}
        teraio.reset()
        changed = [name for name, value in named_values(self.module) if not torch.equal(value, values[name])]
        require(not changed, f"teraio.reset() changed {changed}")
        return values


def spill_files(folder: Path) -> list[Path]:
    """Paths to the spill files of this process in a folder, where they have no names."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    found = [link for link in links if os.readlink(link).startswith(str(folder)) and ".spill" in os.readlink(link)]
    return list({link.stat().st_ino: link for link in found}.values())


def begin(
    make_model: Callable[[], nn.Module],
    make_optimizers: Callable[[nn.Module], list[Optimizer]],
    options: Mapping[str, Any] | None,
    *,
    backend: str = "teraio",
    seed: int = 0,
    parts: Sequence[str] = (),
    **compile_options: Any,
) -> Training:
    """Forget all that ran before in this process, then make the model, compile it and make its optimizers.

    options: of the backend; None leaves the model as it is. codegen is "eager" unless they say otherwise. seed: of the model.
    parts: names of children to compile one by one instead of the whole. compile_options: further ones of `torch.compile`.
    """
    forget()
    torch.manual_seed(seed)
    module = make_model()
    model = module if options is None else compiled(module, options, backend=backend, parts=parts, **compile_options)
    return Training(module=module, model=model, optimizers=make_optimizers(module))


def compiled(what: Any, options: Mapping[str, Any], *, backend: str = "teraio", parts: Sequence[str] = (), **further: Any) -> Any:
    """Compile a module or function, or those children of a module, which is returned then. See `begin`."""
    arguments: dict[str, Any] = {"backend": backend, "options": {"codegen": "eager", **options}, **further}
    for name in parts:
        what.get_submodule(name).compile(**arguments)
    return what if parts else torch.compile(what, **arguments)


class Chain(nn.Module):
    """Six weights of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def weights_of_1_mib(
    options: Mapping[str, Any] | None, *, count: int = 24, kind: Callable[..., Optimizer] = torch.optim.SGD, **settings: Any
) -> Training:
    """Begin to train so many weights of 1 MiB by an optimizer with those settings, on `random_rows`, by `mean_square_step`."""
    return begin(
        lambda: nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(count)]),
        lambda module: [kind(module.parameters(), **{"lr": 0.1, **settings})],
        options,
    )


def random_rows(steps: int) -> Iterable[Tensor]:
    """For each step a batch [16, 512]."""
    return (torch.randn(16, 512) for _ in range(steps))


def forget() -> None:
    """End all training runs of teraio and drop all compiled code."""
    teraio.reset()
    torch._dynamo.reset()


def named_values(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """All parameters and buffers."""
    return chain(module.named_parameters(), module.named_buffers())


def pagers() -> list[Pager]:
    """The pagers of all training runs."""
    return [run._pager for run in REGISTRY.runs()]


def blocks() -> list[Block]:
    """All blocks of all training runs."""
    return [block for pager in pagers() for block in pager.blocks]


def known_blocks(tensors: Iterable[Tensor]) -> list[Block]:
    """The blocks of those tensors that are blocks of some training run."""
    found = [pager.known_block(tensor) for tensor in tensors for pager in pagers()]
    return [block for block in found if block is not None]


def states_away() -> set[str]:
    """Names of the optimizer states that are in a lower tier now."""
    return {b.name for b in blocks() if b.kind == "optimizer_state" and b.state is State.OFFLOADED}


def unequal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[int]:
    """Positions at which the tensors differ in a bit. Raises AssertionError if one sequence is longer."""
    require(len(found) == len(expected), f"{len(found)} tensors, {len(expected)} expected")
    return [i for i, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)]


def require(holds: bool, message: str) -> None:
    """Raise AssertionError unless `holds`: for helpers, whose `assert` pytest does not explain."""
    if not holds:
        raise AssertionError(message)
