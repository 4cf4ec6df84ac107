"""The names of PyTorch's parallel libraries that teraio reads although they are private, and a check that this torch has them.

No public name tells which memory is FSDP2's own and when it communicates, or what `ZeroRedundancyOptimizer` sends. All names of
theirs that code of this room uses are here; a test compares. Without the check, a name that is gone would mean that something is
silently left out.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner.errors import UnsupportedError
from runtime.torch_names import KNOWN

_STATES = "torch.distributed._composable_state"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateNames:
    """What objects of one class have. library: as users call it. names: separated by spaces."""

    library: str
    names: str

    def require(self, thing: object) -> None:
        """Raise UnsupportedError unless `thing` has all names, or its class declares them. Runs no property."""
        missing = [name for name in self.names.split() if not _has(thing, name)]
        if missing:
            raise _unknown(self.library, f"its {type(thing).__name__} has no {', '.join(missing)}")


# torch 2.13 also has `_fsdp_param_groups`, since a state may have several.
FSDP_STATE = PrivateNames(library="fully_shard", names="_fsdp_param_group")
FSDP_GROUP = PrivateNames(
    library="fully_shard",
    names="_all_gather_result _module_fqn _training_state fsdp_params is_sharded post_backward unshard unshard_in_backward",
)
FSDP_PARAMETER = PrivateNames(
    library="fully_shard",
    names="_param_fqn _sharded_param_data _unsharded_param offload_to_cpu sharded_param unsharded_accumulated_grad",
)
ZERO = PrivateNames(
    library="ZeroRedundancyOptimizer",
    names="_overlap_with_ddp _partition_parameters _sync_params optim parameters_as_bucket_view process_group rank",
)
DDP = PrivateNames(library="DistributedDataParallel", names="gradient_as_bucket_view")


def module_states() -> Mapping[Any, Any]:
    """Return PyTorch's states of modules, by module: of FSDP2 and others, each behind a weak reference; empty if none has any."""
    found: Mapping[Any, Any] = getattr(sys.modules.get(_STATES), "_module_state_mapping", {})
    return found


def fsdp_states() -> list[Any]:
    """Return FSDP2's states of all modules of this process that `fully_shard` was called for; none if this torch hides them."""
    known = _fsdp_state()
    found = {id(state): state for reference in list(module_states().values()) if (state := reference()) is not None}
    return [state for state in found.values() if known is not None and isinstance(state, known)]


def refuse_hidden_states(objects: Iterable[object]) -> None:
    """Raise UnsupportedError if one of these objects was given to `fully_shard`, and this torch hides FSDP2's states."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or (_fsdp_state() is not None and hasattr(sys.modules.get(_STATES), "_module_state_mapping")):
        return
    if any(issubclass(type(each), fsdp.FSDPModule) for each in objects):
        raise _unknown("fully_shard", f"there is no {_STATES}._module_state_mapping, or no {_FSDP}.FSDPState")


def _fsdp_state() -> type | None:
    found: type | None = getattr(sys.modules.get(_FSDP), "FSDPState", None)
    return found


def _has(thing: object, name: str) -> bool:
    absent = object()
    if inspect.getattr_static(thing, name, absent) is not absent:
        return True
    return any(name in inspect.get_annotations(each) for each in type(thing).__mro__)


def _unknown(library: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"teraio does not know {library} of torch {torch.__version__}: {what}, by which it would tell what may move; use "
        f"{KNOWN}, or train without {library}"
    )
