"""The node: one machine on which several ranks train, and what they share. Schema, validation and file."""

from __future__ import annotations

import json
import os
from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from planner.errors import TraceError
from planner.schema.json_file import read_model, write_atomic
from planner.schema.models import Bytes, FrozenModel, Id
from planner.schema.trace import Rate

FORMAT = "teraio.node"
VERSION = 1
MAX_RANKS = 1024
LinkName = Literal["device->host", "host->device", "device->storage", "storage->device"]


class NodeRate(FrozenModel):
    """The rate that links of several ranks reach together, where the ranks share a drive, a bus or host memory.

    While more than one of these links is busy, the rate is divided max-min fairly. `links`: of each rank in `ranks`; None: of all
    ranks. A rank without such a link has no part in it.
    """

    name: str
    links: Annotated[tuple[LinkName, ...], FailFast()] = Field(min_length=1)
    bytes_per_second: Rate
    ranks: tuple[Id, ...] | None = None

    def members(self, ranks: int) -> tuple[int, ...]:
        """Return the ranks that share the rate, of a machine with so many."""
        return tuple(range(ranks)) if self.ranks is None else self.ranks


class Node(FrozenModel):
    """A machine. `ranks`: how many processes train on it, each with a device and a trace of its own.

    `shared`: rates, beyond those that each rank's links have alone and that its trace says. `host_memory_bytes`, `storage_bytes`:
    what the lower tiers of all ranks may hold together; None: teraio sets no limit.
    """

    format: Literal["teraio.node"] = "teraio.node"
    version: Literal[1] = 1
    name: str
    ranks: int = Field(ge=1, le=MAX_RANKS)
    shared: Annotated[tuple[NodeRate, ...], FailFast()] = ()
    host_memory_bytes: Bytes | None = None
    storage_bytes: Bytes | None = None

    @model_validator(mode="after")
    def _ranks_exist(self) -> Self:
        for rate in self.shared:
            members = rate.members(self.ranks)
            if not members or len(set(members)) != len(members) or max(members) >= self.ranks:
                raise ValueError(
                    f"shared rate {rate.name!r} is for ranks {list(members)}; give each once, from 0 to {self.ranks - 1}"
                )
            if len(set(rate.links)) != len(rate.links):
                raise ValueError(f"shared rate {rate.name!r} names a link twice: {', '.join(rate.links)}")
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Node:
        """Read the file of a node. Raises TraceError with the file, the place in it and what is wrong."""
        return read_model(path, cls, format_name=FORMAT, version=VERSION, error=TraceError)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file. A reader sees the whole old file or the whole new one. Raises OSError."""
        write_atomic(path, json.dumps(self.model_dump(mode="json"), indent=1) + "\n")
