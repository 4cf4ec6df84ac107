"""Processes for the examples."""

from __future__ import annotations

from ..runtime.conftest import forking, forking_process

__all__ = ["forking", "forking_process"]
