"""The ways to make a plan: the integer program, and the policies that it is compared with."""

from planner.policies.registry import HEURISTICS, POLICIES, plan
from planner.policies.shorter import with_shorter
