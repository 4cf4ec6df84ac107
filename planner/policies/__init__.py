"""The ways of making a plan: the integer program and what it is compared with."""

from planner.policies.registry import POLICIES, plan

__all__ = [
    "POLICIES",
    "plan",
]
