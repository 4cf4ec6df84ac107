"""Plans for a machine with several ranks: what each may use of what they share, and plans that are judged together."""

from planner.ranks.budgets import divided_budgets
from planner.ranks.collectives import waited_for_ranks
from planner.ranks.node import node_of
from planner.ranks.planning import NodePlans, plan_node

__all__ = ["NodePlans", "divided_budgets", "node_of", "plan_node", "waited_for_ranks"]
