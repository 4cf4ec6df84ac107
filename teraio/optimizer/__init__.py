"""The optimizer step under the budget."""

from teraio.optimizer.host_rates import HostRates
from teraio.optimizer.master_hooks import keep_masters
from teraio.optimizer.process import ProcessSteps, graph_break_reasons
from teraio.optimizer.steps import OptimizerSteps
from teraio.optimizer.subgroup_sizes import SubgroupSizes

__all__ = [
    "HostRates",
    "OptimizerSteps",
    "ProcessSteps",
    "SubgroupSizes",
    "graph_break_reasons",
    "keep_masters",
]
