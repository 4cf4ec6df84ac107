"""File systems without direct I/O."""

from __future__ import annotations

import os

import pytest


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operating system refuse O_DIRECT, as file systems without direct I/O do."""
    real = os.open

    def open_(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", path)
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_)
