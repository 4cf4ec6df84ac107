"""The keywords of `teraio.compile`, for editors and type checkers. Written by python -m tools.options_page."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict


class GivenOptions(TypedDict, total=False):
    """What users give. `teraio.options.Options` explains each."""

    memory_budget: int | str | None
    host_budget: int | str | None
    storage: str | PathLike[str] | Sequence[str | PathLike[str]] | None
    storage_budget: int | str | None
    host_updates: bool | None
    overlap_step: bool | None
    recompute: Literal["auto", "off"] | None
    tiles: int | str | None
    optimizer: Literal["auto", "off"] | None
    plan: str | PathLike[str] | None
    plan_cache: Literal["read-write", "read", "off"] | None
    plan_out: str | PathLike[str] | None
    trace_out: str | PathLike[str] | None
    mode: Literal["default", "max-autotune-no-cudagraphs"] | None
    storage_timeout: float | None
    storage_path: Literal["auto", "posix", "buffered", "kvikio", "staged"] | None
    checksums: bool | None
    debug: bool | None
    profile_iterations: int | None
    replan: bool | None
    codegen: Literal["inductor", "eager"] | None
    local_ranks: int | None
    rank_timeout: float | None
    solver_time_limit: float | None
