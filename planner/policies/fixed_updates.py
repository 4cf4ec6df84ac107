"""Fixed rules for where optimizer subgroups update. They show what it is worth to decide that for each subgroup."""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import InfeasiblePlanError, UnsupportedError
from planner.problem import Problem, host_bytes, host_updatable

__all__ = ["all_on_host", "every_second_on_device"]


def all_on_host(policy: str, problem: Problem) -> Sequence[int]:
    """Return the ids of all subgroups that can update on the host. ZeRO-Offload updates everything there.

    Raises UnsupportedError if there are none, and InfeasiblePlanError if the host tier has no room for them all. `policy` is the
    name that the message begins with.

    Source: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training (USENIX ATC 2021).
    """
    subgroups = host_updatable(problem.source)
    if not subgroups:
        raise UnsupportedError(
            f"policy {policy!r}: none of the {len(problem.source.subgroups)} optimizer subgroups of this trace can update on "
            "the host (the trace needs their host_seconds and links to and from the host tier); use 'device-updates' or 'ilp'"
        )
    return _with_room(policy, problem, [subgroup.id for subgroup in subgroups])


def every_second_on_device(policy: str, problem: Problem) -> Sequence[int]:
    """Return all but every second of the subgroups that can update on the host, in the order of their stages.

    While the host updates one of them, the device updates the next, whose states come in and go out meanwhile. Raises the same
    errors as `all_on_host`.

    Source: Maurya et al., Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved Offloading
    (Middleware 2024), on the scheduling of subgroups.
    """
    subgroups = sorted(host_updatable(problem.source), key=lambda subgroup: (subgroup.stage, subgroup.id))
    if not subgroups:
        return all_on_host(policy, problem)  # raises the error that says why
    kept = {subgroup.id for subgroup in subgroups[1::2]}
    return _with_room(policy, problem, [subgroup.id for subgroup in subgroups if subgroup.id not in kept])


def _with_room(policy: str, problem: Problem, on_host: list[int]) -> list[int]:
    source, budget = problem.source, problem.budgets.host_bytes
    size = sum(host_bytes(source, source.subgroups[number]) for number in on_host)
    if budget is not None and size > budget:
        raise InfeasiblePlanError(
            f"policy {policy!r}: the blocks of the {len(on_host)} optimizer subgroups that would update on the host take "
            f"{size:,} bytes there; the host tier's budget is {budget:,} bytes: raise host_budget, or use policy 'ilp'"
        )
    return on_host
