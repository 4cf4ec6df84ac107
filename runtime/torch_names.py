"""Which PyTorch teraio works with: its version, and the private names of it that `runtime` and `teraio` use, all in one place.

A newer PyTorch may rename any of them. Then an error at the start says which one, instead of one in the middle of a training.
A test compares the lists with the code. Those of PyTorch's parallel libraries are in `teraio/distributed/private_names.py`.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping

import torch

from planner.errors import UnsupportedError

KNOWN = "torch 2.11 to 2.15"
"""The versions that were tried: docs/versions.md."""
_OLDEST = (2, 11)

# By module. Public names of private modules are here, too.
_NAMES = {
    "torch._C": "_DisableAutocast _accelerator_setAllocatorSettings _current_autograd_node _current_graph_task_id"
    " _disabled_torch_function_impl _storage_Use_Count _will_engine_execute_node",
    "torch._C._autograd": "_get_current_graph_task_keep_graph _top_saved_tensors_default_hooks",
    "torch._C._dynamo.eval_frame": "reset_code",
    "torch._C._functorch": "is_functorch_wrapped_tensor peek_interpreter_stack",
    "torch._dynamo": "disable reset",
    "torch": "_foreach_add_ _foreach_zero_",
    "torch._guards": "TracingContext detect_fake_mode tracing",
    "torch._logging._internal": "trace_structured",
    "torch._ops": "HigherOrderOperator OpOverload",
    "torch._prims": "rng_prims",
    "torch._subclasses": "FakeTensor FakeTensorMode",
    "torch._subclasses.fake_tensor": "DataDependentOutputException DynamicOutputShapeException is_fake unset_fake_temporarily",
    "torch.cuda.memory": "_record_memory_history _snapshot",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes is_traceable_wrapper_subclass",
    "torch.utils._pytree": "tree_iter tree_leaves tree_map tree_map_only",
    "torch.utils._sympy.interp": "sympy_interp",
    "torch.utils._sympy.reference": "PythonReferenceAnalysis",
}
_OF_CUDA = {"torch._C": "_cuda_clearCublasWorkspaces _cuda_isHistoryEnabled _host_emptyCache"}
_OF_COMPILER = {
    "torch._functorch": "config",
    "torch._inductor": "config list_mode_options",
    "torch._inductor.compile_fx": "compile_fx compile_fx_inner",
    "torch._inductor.runtime.benchmarking": "benchmarker",
    "torch._inductor.runtime.cache_dir_utils": "cache_dir",
}
"""Those that take seconds to import."""


def require_known() -> None:
    """Raise UnsupportedError unless this system and this PyTorch are ones that teraio works with. Imports no compiler."""
    if sys.platform != "linux":
        raise UnsupportedError(f"teraio trains on Linux, and this system is {sys.platform}; only plans can be made on others")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        raise UnsupportedError(f"teraio works with {KNOWN}, and this is torch {torch.__version__}: pip install 'torch>=2.11'")
    _require(_NAMES)
    if torch.version.cuda is not None:
        _require(_OF_CUDA)


def require_compiler() -> None:
    """Raise UnsupportedError unless PyTorch's compiler has what teraio uses of it. Imports it, which takes seconds."""
    _require(_OF_COMPILER)


def _require(names: Mapping[str, str]) -> None:
    for name in (f"{module}.{each}" for module, listed in names.items() for each in listed.split()):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError) as error:
            raise UnsupportedError(
                f"teraio uses {name}, and torch {torch.__version__} has no such name: use {KNOWN}, or a newer teraio"
            ) from error
