"""Sticky errors of CUDA: after one, every later call of the process fails with it."""

from __future__ import annotations

import torch


def sticky_error() -> str | None:
    """Return the first line of the error that has spoiled this process; None if CUDA still works. Waits for the GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
