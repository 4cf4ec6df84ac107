"""Turn a captured graph into a program of stages."""

from teraio.stages.compile import Codegen, StageCompiler, eager_codegen
from teraio.stages.cut import CutPolicy
from teraio.stages.floor import Need, largest_of, need_of
from teraio.stages.kernels import Kernel, kernels_of, operator_kernel
from teraio.stages.speed import Speed, SpeedOf, gpu_speed, reduces_products, speed_of
from teraio.stages.temporaries import peak_bytes, temporaries_of

__all__ = [
    "Codegen",
    "CutPolicy",
    "Kernel",
    "Need",
    "Speed",
    "SpeedOf",
    "StageCompiler",
    "eager_codegen",
    "gpu_speed",
    "kernels_of",
    "largest_of",
    "need_of",
    "operator_kernel",
    "peak_bytes",
    "reduces_products",
    "speed_of",
    "temporaries_of",
]
