"""Makes `strategies.py` importable as `planner_strategies` (tests are no package)."""

import importlib.util
import sys
from pathlib import Path

if "planner_strategies" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "planner_strategies", Path(__file__).with_name("strategies.py")
    )
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["planner_strategies"] = _module
    _spec.loader.exec_module(_module)
