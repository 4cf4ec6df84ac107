"""What this rank may use of each tier: the budgets that the options give, else its share of the machine.

One process alone is the one rank of its machine, and has all of it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch

from planner.errors import OptionsError
from planner.schema import FrozenModel
from runtime.system import host_limits
from teraio.options import Options, Share
from teraio.ranks import RankGroup

logger = logging.getLogger("teraio")

_RESERVE = 0.1  # share of the available memory of the device that is left free if the options give no budget
# Share of the available main memory that becomes the host tiers if the options give a budget for a GPU but no lower tier.
_HOST_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedBudgets:
    """Bytes of each tier that a rank may use.

    device: None: no limit, since there is no lower tier. host: None: there is no host tier. storage: largest size of the spill
    files; None: the space that is free.
    """

    device: int | None = None
    host: int | None = None
    storage: int | None = None


class SeenByRank(FrozenModel):
    """What one rank sees of the machine and asks of it. All sizes in bytes.

    `drives`: numbers of the devices under its storage directories. `free`: what is free on them. `available`: main memory that
    its control groups leave. `resident`: main memory that it has. `gpu`: memory of its GPU; None if it trains on CPU. `gpu_free`:
    what of it is free, or PyTorch's already. `memory_budget`, `host_budget`, `storage_budget`: as given in bytes; None if not.
    `outputs`: files that it writes.
    """

    drives: tuple[int, ...] = ()
    free: int = 0
    available: int = 0
    resident: int = 0
    gpu: int | None = None
    gpu_free: int = 0
    memory_budget: int | None = None
    host_budget: int | None = None
    storage_budget: int | None = None
    outputs: tuple[str, ...] = ()

    @classmethod
    def now(cls, options: Options, device: torch.device) -> SeenByRank:
        """Return what this rank sees now."""
        by_drive = {path.stat().st_dev: path for path in options.storage if path.is_dir()}  # of others, opening them tells
        gpu, gpu_free = None, 0
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device).total_memory
            gpu_free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return cls(
            drives=tuple(sorted(by_drive)),
            free=sum(shutil.disk_usage(path).free for path in by_drive.values()),
            available=min(limit.available_bytes for limit in host_limits()),
            resident=psutil.Process().memory_info().rss,
            gpu=gpu,
            gpu_free=gpu_free,
            memory_budget=options.memory_budget if isinstance(options.memory_budget, int) else None,
            host_budget=options.host_budget,
            storage_budget=options.storage_budget,
            outputs=tuple(str(path.absolute()) for path in (options.trace_out, options.plan_out) if path is not None),
        )


def seen_by_ranks(options: Options, device: torch.device, ranks: RankGroup | None) -> tuple[int, dict[int, SeenByRank]]:
    """Return the number of this rank, and what each rank of this machine sees. Waits until the others have told it.

    ranks: None: they cannot ask each other, and each takes the others for like itself. Raises OptionsError if several write the
    same file, and RankError as `RankGroup.gather` does.
    """
    mine = SeenByRank.now(options, device)
    if ranks is None:
        return 0, dict.fromkeys(range(options.local_ranks), mine)
    told = ranks.gather("dividing the machine", mine.model_dump_json())
    seen = {rank: SeenByRank.model_validate_json(text) for rank, text in told.items()}
    writers: dict[str, int] = {}
    for rank, each in seen.items():
        for path in each.outputs:
            other = writers.setdefault(path, rank)
            if other != rank:
                raise OptionsError(
                    f"options trace_out and plan_out: ranks {other} and {rank} of this machine both write {path}; put "
                    "{rank} or {local_rank} into the name"
                )
    return ranks.rank, seen


def resolve_budgets(options: Options, rank: int, seen: Mapping[int, SeenByRank]) -> ResolvedBudgets:
    """Return the budgets of a rank. Those that are given are those of each rank; others are shares of what the ranks see.

    seen: what each rank of the machine sees, this one among them.
    Raises OptionsError where the budgets of all ranks together are more than the machine has, and for a budget on CPU without a
    lower tier.
    """
    mine, every = seen[rank], list(seen.values())
    available = min(each.available for each in every)
    beside = [each for each in every if set(each.drives) & set(mine.drives)]
    # Each has looked at another moment. Ranks that share all drives get equal shares, so that they can follow one plan.
    free = min((each.free for each in beside if each.drives == mine.drives), default=0)
    if len(every) > 1:
        _check_sum("host_budget", [each.host_budget for each in every], available, "of main memory are available")
        _check_sum("storage_budget", [each.storage_budget for each in beside], free, "are free on their drives")
        if mine.gpu is None and rank == min(seen):
            _warn_of_memory(every, available)

    asked, host, storage = options.memory_budget, options.host_budget, options.storage_budget
    if asked is not None and host is None and not options.storage:
        if mine.gpu is None:
            raise OptionsError(
                "option memory_budget: there is no lower tier, so nothing can move to keep this budget; give storage "
                "(directories on drives), host_budget (a pool of main memory) or both"
            )
        host = int(available * _HOST_SHARE) // len(every)
    if options.storage and storage is None and len(beside) > 1:
        taken = sum(each.storage_budget or 0 for each in beside)
        storage = max((free - taken) // sum(each.storage_budget is None for each in beside), 1)
    if host is None and not options.storage:
        return ResolvedBudgets()
    device = asked if isinstance(asked, int) else _share_of_memory(asked, host or 0, mine, every, available)
    return ResolvedBudgets(device=device, host=host, storage=storage)


def _share_of_memory(asked: Share | None, host_bytes: int, mine: SeenByRank, every: Sequence[SeenByRank], available: int) -> int:
    """Return what a share of the device's memory is in bytes; None: of what is available, less a reserve and the host tier."""
    if mine.gpu is not None:
        return int(mine.gpu_free * (1 - _RESERVE)) if asked is None else int(mine.gpu * asked.fraction)
    if asked is not None:
        return int((available + sum(each.resident for each in every)) * asked.fraction) // len(every)
    share = int(available * (1 - _RESERVE)) // len(every)
    if share <= host_bytes:
        raise OptionsError(
            f"option host_budget: {host_bytes:,} bytes leave nothing of the {share:,} bytes of main memory that this process may "
            "take; lower it, or give a memory_budget"
        )
    return share - host_bytes


def _warn_of_memory(every: Sequence[SeenByRank], available: int) -> None:
    """Warn if the ranks may fill more main memory than there is."""
    # It is no error: what trains may need less than its budget.
    asked = sum((each.memory_budget or 0) + (each.host_budget or 0) for each in every)
    everything = available + sum(each.resident for each in every)
    if any(each.memory_budget is not None for each in every) and asked > everything:
        logger.warning(
            "option memory_budget: with host_budget, %d ranks of this machine may fill %s bytes of main memory together, but "
            "have %s; lower it (it is that of each rank)",
            len(every),
            f"{asked:,}",
            f"{everything:,}",
        )


def _check_sum(name: str, given: Sequence[int | None], limit: int, what: str) -> None:
    total = sum(size for size in given if size is not None)
    if total > limit:
        ranks = sum(size is not None for size in given)
        raise OptionsError(
            f"option {name}: {ranks} ranks of this machine ask for {total:,} bytes together, but {limit:,} {what}; lower it "
            "(it is that of each rank), or leave it out"
        )
