"""How the ranks of one machine divide its memory and its drives."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import psutil
import torch

from planner.errors import OptionsError
from runtime.system import host_limits
from teraio.options import Options, Share
from teraio.ranks import RankGroup

__all__ = ["DrivesAndMemory", "divided", "divided_alone", "divided_among", "drives_and_memory"]

logger = logging.getLogger("teraio")

_RESERVE = 0.1
"""Share of the available memory that is left free if the options give no budget."""
_HOST_SHARE = 0.5
"""Share of the available main memory that becomes the host tiers if the options give a budget for a GPU but no lower tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivesAndMemory:
    """What one rank sees of the machine and asks of it. All sizes in bytes.

    `drives`: numbers of the devices under its storage directories. `free`: what is free on them. `available`: main memory that
    its control groups leave. `resident`: main memory that it has. `memory_budget`, `host_budget`, `storage_budget`: as given in
    bytes; None if not. `outputs`: files that it writes.
    """

    drives: tuple[int, ...] = ()
    free: int = 0
    available: int = 0
    resident: int = 0
    memory_budget: int | None = None
    host_budget: int | None = None
    storage_budget: int | None = None
    outputs: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Return it as text for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> DrivesAndMemory:
        """Return what `as_text` wrote."""
        content = json.loads(text)
        return cls(**{**content, "drives": tuple(content["drives"]), "outputs": tuple(content["outputs"])})


def drives_and_memory(options: Options) -> DrivesAndMemory:
    """Return what this rank sees now."""
    by_drive = {path.stat().st_dev: path for path in options.storage if path.is_dir()}
    return DrivesAndMemory(
        drives=tuple(sorted(by_drive)),
        free=sum(shutil.disk_usage(path).free for path in by_drive.values()),
        available=min(limit.available_bytes for limit in host_limits()),
        resident=psutil.Process().memory_info().rss,
        memory_budget=options.memory_budget if isinstance(options.memory_budget, int) else None,
        host_budget=options.host_budget,
        storage_budget=options.storage_budget,
        outputs=tuple(str(path.absolute()) for path in (options.trace_out, options.plan_out) if path is not None),
    )


def divided_alone(options: Options, device: torch.device) -> Options:
    """Return the options with the share that they say, where the ranks cannot ask each other. Raises OptionsError."""
    if options.local_ranks == 1:
        return options
    mine = drives_and_memory(options)
    return divided(options, 0, dict.fromkeys(range(options.local_ranks), mine), on_cpu=device.type == "cpu")


def divided_among(options: Options, device: torch.device, ranks: RankGroup) -> Options:
    """Return the options with this rank's share, after all have told what they see and ask for. Waits for the others.

    Raises OptionsError, and RankError as `RankGroup.gather` does.
    """
    told = ranks.gather("dividing the machine", drives_and_memory(options).as_text())
    seen = {rank: DrivesAndMemory.of_text(text) for rank, text in told.items()}
    _check_outputs(seen)
    return divided(options, ranks.rank, seen, on_cpu=device.type == "cpu")


def _check_outputs(seen: Mapping[int, DrivesAndMemory]) -> None:
    """Raise OptionsError if several ranks write the same file."""
    writers: dict[str, int] = {}
    for rank, each in seen.items():
        for path in each.outputs:
            other = writers.setdefault(path, rank)
            if other != rank:
                raise OptionsError(
                    f"options trace_out and plan_out: ranks {other} and {rank} of this machine both write {path}; put "
                    "{rank} or {local_rank} into the name"
                )


def divided(options: Options, rank: int, seen: Mapping[int, DrivesAndMemory], *, on_cpu: bool) -> Options:
    """Return the options of a rank with its share of the machine where they give no budget.

    seen: what each rank of the machine sees, this one's among them. Budgets that are given are those of each rank.
    on_cpu: the device is main memory, which the ranks share as well.
    Raises OptionsError where the budgets of all ranks together are more than the machine has.
    """
    mine, count = seen[rank], len(seen)
    available = min(each.available for each in seen.values())
    _check_sum("host_budget", [each.host_budget for each in seen.values()], available, "of main memory are available")
    changed: dict[str, object] = {}
    beside = [each for each in seen.values() if set(each.drives) & set(mine.drives)]
    if options.storage:
        # Each has looked at another moment. Ranks that share all drives get equal shares, so that they can follow one plan.
        free = min(each.free for each in beside if each.drives == mine.drives)
        _check_sum("storage_budget", [each.storage_budget for each in beside], free, "are free on their drives")
        if options.storage_budget is None and len(beside) > 1:
            taken = sum(each.storage_budget or 0 for each in beside)
            changed["storage_budget"] = max((free - taken) // sum(each.storage_budget is None for each in beside), 1)
    if on_cpu:
        if rank == min(seen):
            _warn_of_memory(list(seen.values()), available)
        changed |= _memory_on_cpu(options, seen, available)
    elif options.memory_budget is not None and options.host_budget is None and not options.storage:
        changed["host_budget"] = int(available * _HOST_SHARE) // count
    return replace(options, **changed)  # type: ignore[arg-type]


def _memory_on_cpu(options: Options, seen: Mapping[int, DrivesAndMemory], available: int) -> dict[str, object]:
    """The device is main memory: a share of it, and the default, are divided."""
    if isinstance(options.memory_budget, Share):
        everything = available + sum(each.resident for each in seen.values())
        return {"memory_budget": int(everything * options.memory_budget.fraction) // len(seen)}
    if options.memory_budget is not None or (options.host_budget is None and not options.storage):
        return {}
    budget = int(available * (1 - _RESERVE)) // len(seen) - (options.host_budget or 0)
    if budget <= 0:
        raise OptionsError(
            f"option host_budget: {options.host_budget:,} bytes leave nothing of the share of main memory that each of "
            f"{len(seen)} ranks has; lower it, or give a memory_budget"
        )
    return {"memory_budget": budget}


def _warn_of_memory(seen: list[DrivesAndMemory], available: int) -> None:
    """Warn if the ranks may fill more main memory than there is. A budget is no error: what trains may need less."""
    asked = sum((each.memory_budget or 0) + (each.host_budget or 0) for each in seen)
    everything = available + sum(each.resident for each in seen)
    if any(each.memory_budget is not None for each in seen) and asked > everything:
        logger.warning(
            "option memory_budget: with host_budget, %d ranks of this machine may fill %s bytes of main memory together, but "
            "have %s; lower it (it is that of each rank)",
            len(seen),
            f"{asked:,}",
            f"{everything:,}",
        )


def _check_sum(name: str, given: list[int | None], limit: int, what: str) -> None:
    total = sum(size for size in given if size is not None)
    if total > limit:
        ranks = sum(size is not None for size in given)
        raise OptionsError(
            f"option {name}: {ranks} ranks of this machine ask for {total:,} bytes together, but {limit:,} {what}; lower it "
            "(it is that of each rank), or leave it out"
        )
