"""A managed model and its twin, which teraio never sees: what is done to one is done to the other, and gives the same bits."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ..training import MIB

WIDTH, ROWS = 512, 16


class Model(nn.Module):
    """Six residual layers, with weights of 1 MiB and dropout: [rows, 512] to [rows, 512]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.relu(layer(x)), 0.1, self.training)
        return x


@dataclass(slots=True, kw_only=True)
class Twin:
    """One of the two. model: what is called, compiled or not. saved: the latest checkpoint, as bytes."""

    module: nn.Module
    model: Callable[[Tensor], Tensor] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    saved: bytes = b""

    def __post_init__(self) -> None:
        self.model = self.module
        self.new_optimizer(torch.optim.AdamW, lr=1e-3)

    def new_optimizer(self, kind: type[torch.optim.Optimizer], **settings: Any) -> list[Tensor]:
        """Train on with another optimizer, whose states are new."""
        self.optimizer = kind(self.module.parameters(), **settings)
        self.optimizer.zero_grad()
        return []

    def iterate(self, seed: int, *, passes: int = 1, closure: bool = False, clip: bool = False) -> list[Tensor]:
        """Accumulate the gradients of so many passes and step. Return the losses and the norm that was clipped."""
        found: list[Tensor] = []

        def backward() -> Tensor:
            self.optimizer.zero_grad()
            found.extend(self._loss(seed + number) for number in range(passes))
            if clip:
                found.append(nn.utils.clip_grad_norm_(self.module.parameters(), 0.05))
            return found[0]

        if closure:
            found.append(self.optimizer.step(backward))  # type: ignore[arg-type]
        else:
            backward()
            self.optimizer.step()
        return [value.detach().clone() for value in found]

    def update_by_hand(self, seed: int) -> list[Tensor]:
        """An update that is no optimizer's step."""
        self.optimizer.zero_grad()
        loss = self._loss(seed)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
        self.optimizer.zero_grad()
        return [loss.detach().clone()]

    def evaluate(self, seed: int, *, passes: int) -> list[Tensor]:
        """The outputs in evaluation mode, without gradients."""
        self.module.eval()
        with torch.no_grad():
            outputs = [self.model(rows(seed + number)).clone() for number in range(passes)]
        self.module.train()
        return outputs

    def save(self) -> list[Tensor]:
        """Make a checkpoint. Return all tensors in it."""
        buffer = io.BytesIO()
        torch.save({"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        self.saved = buffer.getvalue()
        return tensors(self._checkpoint())

    def resume(self) -> list[Tensor]:
        """Go back to the latest checkpoint. Return all tensors of the model and the optimizer."""
        checkpoint = self._checkpoint()
        self.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.optimizer.zero_grad()
        return tensors([self.module.state_dict(), self.optimizer.state_dict()])

    def _checkpoint(self) -> Any:
        return torch.load(io.BytesIO(self.saved))

    def _loss(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        loss = self.model(rows(seed)).square().mean()
        loss.backward()
        return loss


def rows(seed: int) -> Tensor:
    """A batch [16, 512]."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def tensors(found: Any) -> list[Tensor]:
    """All tensors in nested dictionaries and lists, in order, as copies."""
    if isinstance(found, Tensor):
        return [found.detach().clone()]
    entries = found.values() if isinstance(found, dict) else found if isinstance(found, list) else []
    return [tensor for entry in entries for tensor in tensors(entry)]


# -- what this process holds of the system


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """resident_bytes: of this process. disk_bytes: of the files under the directory that was given. children: processes."""

    resident_bytes: int
    descriptors: int
    threads: int
    children: int
    disk_bytes: int

    @classmethod
    def now(cls, folder: Path) -> Holdings:
        """Collect garbage first."""
        gc.collect()
        process = psutil.Process()
        return cls(
            resident_bytes=process.memory_info().rss,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            children=len(process.children(recursive=True)),
            disk_bytes=sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file()),
        )

    def __str__(self) -> str:
        parts = {**asdict(self), "resident_bytes": f"{self.resident_bytes / MIB:.0f} MiB"}
        return ", ".join(f"{name.removesuffix('_bytes')} {part}" for name, part in parts.items())
