"""Real text that every machine with Python has: the sources of the standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def standard_library_text(limit_bytes: int) -> Tensor:
    """The first `limit_bytes` bytes of the standard library's own sources, in the order of their paths.

    A uint8 tensor. Installed packages and the library's tests are left out. Raises FileNotFoundError if none.
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
    """Endless (tokens, targets), int64 of shape (batch, context), from random places that `seed` sets."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        window = text[starts + offsets].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
