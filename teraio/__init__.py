"""teraio: train models that do not fit, with `torch.compile(model, backend="teraio")` and the loop as it was.

Only what this module exports is public; `planner` and `runtime` are parts of teraio.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

for _part in ("planner", "runtime"):
    _spec = find_spec(_part)  # looks without running it: what is found may be somebody else's
    _found = None if _spec is None else _spec.origin or list(_spec.submodule_search_locations or ())
    _wanted = Path(__file__).resolve().parents[1] / _part / "__init__.py"
    if not isinstance(_found, str) or Path(_found).resolve() != _wanted:
        raise ImportError(
            f"teraio needs its own package {_part!r}, but found {_found or 'nothing'}; "
            f"rename that file or folder, or start your script from another directory"
        )

from planner.errors import (  # noqa: E402
    BudgetError,
    ChecksumError,
    OptionsError,
    PlanError,
    StorageError,
    StorageFullError,
    StorageIOError,
    TeraioError,
    TraceError,
    UnsupportedError,
)
from teraio.status import Status  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ChecksumError",
    "OptionsError",
    "PlanError",
    "Status",
    "StorageError",
    "StorageFullError",
    "StorageIOError",
    "TeraioError",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "manage_optimizer",
    "on_device",
    "reset",
    "status",
    "wait_for_plan",
]


# The functions import what they call when they are called: the command line must start without torch.


def status() -> tuple[Status, ...]:
    """What every runtime of this process is doing, in order of creation. Never blocks."""
    from teraio import registry

    return registry.status()


def wait_for_plan(timeout_seconds: float | None = None) -> bool:
    """Block until no planning is under way, or the time is over; True if none is.

    The plan takes over when the iteration ends.
    """
    from teraio import registry

    return registry.wait_for_plan(timeout_seconds)


def on_device(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Within, these tensors (parameters, gradients, outputs of compiled models) are in the memory of their device.

    Between compiled regions a tensor may wait elsewhere. On CPU it can be used all the same, slower; on a GPU what waits
    on a drive raises an error when it is used. Give few at once: all must fit the budget together, or BudgetError is
    raised. Blocks until they are there.
    """
    from teraio import registry

    return registry.on_device(tensors)


def manage_optimizer(optimizer: torch.optim.Optimizer, *, master_weights: bool = False) -> None:
    """Bring an optimizer's steps and states under the budget: only needed in three cases.

    With the option `optimizer: "off"`, for those that are to be managed all the same; for an optimizer that has states
    before its first step (loaded from a checkpoint), which count only then otherwise; and for `master_weights`. Never moves
    anything by itself; on CPU it blocks while states that were made before are copied to memory that can leave. The optimizer
    stays the user's.

    master_weights: bf16 and fp16 parameters are updated over copies in fp32, the states "master_param", with all other states
    in fp32 too, from now on and also where teraio does not manage the steps. Call it before `load_state_dict`, which keeps
    these states in fp32 then. Where a parameter is not what its master rounds to, because other weights were loaded, it
    counts, and the master takes its value. It cannot be undone by another call.

    Raises UnsupportedError if it is no `torch.optim.Optimizer`, and with `master_weights` if it cannot be updated by parts
    (also later, where a step has a closure, or hooks besides teraio's).
    """
    from teraio import registry

    registry.manage_optimizer(optimizer, master_weights=master_weights)


def reset() -> None:
    """End all runtimes: bring every block back to the device, remove spill files. Blocks until that is done.

    Compiled models must be compiled again (`torch._dynamo.reset()`) before they train on.
    """
    from teraio import registry

    registry.reset()
