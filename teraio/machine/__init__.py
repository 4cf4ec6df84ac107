"""The machine that a training run uses: its device, its lower tiers, the links between them, and its share of all of it."""

from teraio.machine.budgets import ResolvedBudgets
from teraio.machine.machine import Machine, Shared, open_machine
