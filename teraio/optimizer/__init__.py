"""The optimizer step under the budget."""

from teraio.optimizer.capabilities import USUAL_STATES, reason_against_host, update_bytes
from teraio.optimizer.host_rates import HostRates
from teraio.optimizer.host_threads import host_threads
from teraio.optimizer.master_hooks import keep_masters
from teraio.optimizer.parameters import optimizers_alive, owned_parameters
from teraio.optimizer.process import ProcessSteps
from teraio.optimizer.steps import OptimizerSteps
from teraio.optimizer.subgroup_sizes import SubgroupSizes

__all__ = [
    "USUAL_STATES",
    "HostRates",
    "OptimizerSteps",
    "ProcessSteps",
    "SubgroupSizes",
    "host_threads",
    "keep_masters",
    "optimizers_alive",
    "owned_parameters",
    "reason_against_host",
    "update_bytes",
]
