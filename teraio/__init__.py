"""teraio: train models that do not fit, with `torch.compile(model, backend="teraio")` and an unchanged training loop.

Only what this module exports is public; `planner` and `runtime` are parts of teraio.
"""

from __future__ import annotations

from pathlib import Path

import planner
import runtime
from planner.errors import (
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

_home = Path(__file__).resolve().parents[1]
for _part in (planner, runtime):
    if _part.__file__ is None or Path(_part.__file__).resolve().parents[1] != _home:
        raise ImportError(
            f"teraio needs its own package {_part.__name__!r}, but found {_part.__file__ or list(_part.__path__)}; "
            f"rename that folder, or start your script from another directory"
        )

from teraio.registry import reset, status, wait_for_plan  # noqa: E402
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
