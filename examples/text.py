"""Training text that every machine with Python has: the sources of the standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def standard_library_text(limit_bytes: int) -> Tensor:
    """Return the first `limit_bytes` bytes of the standard library's sources, sorted by path, as a uint8 tensor.

    Installed packages and tests are left out. Raises FileNotFoundError if there are no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources under {root}: this Python came without them")
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def batches(text: Tensor, *, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets) without end, int64 of shape (batch, context), from random positions. `seed` determines these."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        window = text[starts + offsets].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
