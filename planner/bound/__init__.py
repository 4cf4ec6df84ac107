"""A lower bound on the iteration time that holds for every plan."""

from planner.bound.lower_bound import lower_bound_seconds, more_instants
