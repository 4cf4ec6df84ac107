"""Which PyTorch teraio works with: its version, and its private names that `runtime` and `teraio` use; a test compares.

If a newer one has renamed some, an error at the start says which. Parallel libraries: `teraio/distributed/private_names.py`.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Mapping

import torch

from planner.errors import UnsupportedError

KNOWN = "torch 2.11 to 2.15"
_NAMES = {  # public names of private modules are here, too
    "torch": "_dynamo.disable _dynamo.reset _foreach_add_ _foreach_zero_"
    " _ops.HigherOrderOperator _ops.OpOverload _prims.rng_prims",
    "torch._C": "_DisableAutocast _accelerator_setAllocatorSettings _current_autograd_node _current_graph_task_id"
    " _disabled_torch_function_impl _storage_Use_Count _will_engine_execute_node",
    "torch._C._autograd": "_get_current_graph_task_keep_graph _top_saved_tensors_default_hooks",
    "torch._C._dynamo.eval_frame": "reset_code",
    "torch._C._functorch": "is_functorch_wrapped_tensor peek_interpreter_stack",
    "torch._guards": "TracingContext detect_fake_mode tracing",
    "torch._prims_common": "is_contiguous_or_false",
    "torch._subclasses": "FakeTensor FakeTensorMode",
    "torch._subclasses.fake_tensor": "DataDependentOutputException DynamicOutputShapeException is_fake unset_fake_temporarily",
    "torch.amp": "GradScaler._unscale_grads_",
    "torch.cuda.memory": "_record_memory_history _snapshot",
    "torch.fx.graph": "_BoxedCodeGen",
    "torch.nn.utils.clip_grad": "_clip_grads_with_norm_ _get_total_norm",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes is_traceable_wrapper_subclass",
    "torch.utils._pytree": "tree_iter tree_leaves tree_map tree_map_only",
    "torch.utils._sympy": "functions.FloorDiv interp.sympy_interp reference.PythonReferenceAnalysis",
}
_OF_CUDA = {"torch._C": "_cuda_clearCublasWorkspaces _cuda_getCurrentRawStream _cuda_isHistoryEnabled _host_emptyCache"}
_OF_COMPILER = {  # these take seconds to import
    "torch._dynamo.exc": "RestartAnalysis",
    "torch._functorch": "config",
    "torch._inductor": "config list_mode_options",
    "torch._inductor.compile_fx": "compile_fx compile_fx_inner",
    "torch._inductor.custom_graph_pass": "CustomGraphPass",
    "torch._inductor.decomposition": "select_decomp_table",
    "torch._inductor.lowering": "lowerings make_fallback",
    "torch._inductor.runtime.benchmarking": "benchmarker",
    "torch._inductor.runtime.cache_dir_utils": "cache_dir",
}


def require_known() -> None:
    """Raise UnsupportedError unless this system and this PyTorch are ones that teraio works with. Imports no compiler."""
    if sys.platform != "linux":
        raise UnsupportedError(f"teraio trains on Linux, and this system is {sys.platform}; only plans can be made on others")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
        raise UnsupportedError(f"teraio works with {KNOWN}, and this is torch {torch.__version__}: pip install 'torch>=2.11'")
    _require(_NAMES)
    _require(_OF_CUDA if torch.version.cuda else {})


@functools.cache
def require_compiler() -> None:
    """Raise UnsupportedError unless PyTorch's compiler, which this imports, has what teraio uses of it."""
    _require(_OF_COMPILER)


def _require(names: Mapping[str, str]) -> None:
    for name in (f"{module}.{each}" for module, listed in names.items() for each in listed.split()):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError) as error:
            raise UnsupportedError(
                f"teraio uses {name}, and torch {torch.__version__} has no such name: use {KNOWN}, or a newer teraio"
            ) from error
