"""The optimizer step under the budget."""

from teraio.optimizer.added_gradients import AddedGradients, AutogradReads
from teraio.optimizer.arithmetic import keep_masters, promise
from teraio.optimizer.facts import USUAL_STATES, OptimizerFacts, optimizers_alive, owned_parameters
from teraio.optimizer.host import HostRates, host_threads
from teraio.optimizer.steps import OptimizerSteps, ProcessSteps, graph_break_reasons
from teraio.optimizer.subgroups import SubgroupSizes
