"""Turn a captured graph into a program of stages."""

from teraio.stages.codegen import Codegen, eager_codegen, inductor_decompositions
from teraio.stages.compile import StageCompiler
from teraio.stages.cost import Kernel, Speed, SpeedOf, gpu_speed, kernels_of, operator_kernel, reduces_products, speed_of
from teraio.stages.cut import CutPolicy
from teraio.stages.operators import base_name, by_name, device_of, sizes_are_promised, written_names
from teraio.stages.split import workspace_bytes
from teraio.stages.under_budget import OperatorsUnderBudget, clip_under_budget
