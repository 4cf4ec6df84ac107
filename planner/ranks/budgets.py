"""How the memory and the drives of a machine are divided among its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import OptionsError
from planner.problem import max_min_rates
from planner.schema import Budgets, Node

__all__ = ["divided_budgets"]


def divided_budgets(node: Node, budgets: Sequence[Budgets], wants: Sequence[dict[str, int]] = ()) -> tuple[Budgets, ...]:
    """Return the budgets with a share of what the node has, for each tier and rank whose budget is None.

    wants: by rank, the bytes that each would like to have in each tier. A rank that wants less than an equal share leaves the
    rest to the others (max-min fair), and what nobody wants is divided equally. Without `wants`, all shares are equal.

    Raises OptionsError where the budgets that are given are more than the node has.
    """
    host = _divided("host", node.host_memory_bytes, [each.host_bytes for each in budgets], [want["host"] for want in wants])
    storage = _divided(
        "storage", node.storage_bytes, [each.storage_bytes for each in budgets], [want["storage"] for want in wants]
    )
    return tuple(
        each.model_copy(update={"host_bytes": host[rank], "storage_bytes": storage[rank]}) for rank, each in enumerate(budgets)
    )


def _divided(tier: str, capacity: int | None, given: Sequence[int | None], wants: Sequence[int]) -> list[int | None]:
    if capacity is None:
        return list(given)
    left = capacity - sum(size for size in given if size is not None)
    if left < 0:
        raise OptionsError(
            f"the {tier} budgets of the {len(given)} ranks are {capacity - left:,} bytes together; the machine has {capacity:,}: "
            "lower them, or leave them out to have it divided"
        )
    open_ranks = [rank for rank, size in enumerate(given) if size is None]
    if not open_ranks:
        return list(given)
    limits = [float(wants[rank]) if wants else float(left) for rank in open_ranks]
    shares = max_min_rates(limits, [(float(left), range(len(open_ranks)))])
    rest = max(left - sum(shares), 0.0) / len(open_ranks)
    found = dict(zip(open_ranks, (int(share + rest) for share in shares), strict=True))
    return [found.get(rank, size) for rank, size in enumerate(given)]
