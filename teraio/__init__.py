"""teraio: train models that do not fit, with `torch.compile(model, backend="teraio")` and the loop as it was.

Only what this module exports is public; `planner` and `runtime` are parts of teraio.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

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
    "reset",
    "status",
    "wait_for_plan",
]


# The three functions import what they call when they are called: the command line must start without torch.


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


def reset() -> None:
    """End all runtimes: bring every block back to the device, remove spill files. Blocks until that is done.

    Compiled models must be compiled again (`torch._dynamo.reset()`) before they train on.
    """
    from teraio import registry

    registry.reset()
