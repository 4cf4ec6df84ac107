"""The command `teraio capture`. The only one that needs torch, which is imported when it runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planner


def captured(
    target: str,
    hardware: str,
    name: str | None,
    subgroup_bytes: int | None,
    calibrate: Path | None,
    smaller: str | None,
) -> planner.Trace:
    """Return the trace of the training that `MODULE:FUNCTION` names. Raises OptionsError and what `teraio.capture` raises."""
    training = function_of(target)
    from teraio.capturing import capture

    return capture(
        training,
        hardware=hardware,
        name=name,
        subgroup_bytes=subgroup_bytes,
        calibrate=calibrate,
        smaller=None if smaller is None else function_of(smaller),
    )


def function_of(target: str) -> Callable[[], Any]:
    """Import the function that a text such as "examples.captures:llama" names; modules of the current directory are found."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise planner.OptionsError(f"capture: found {target!r}, wanted MODULE:FUNCTION, such as examples.captures:llama_3_8b")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise planner.OptionsError(f"capture: {error}; run the command in the directory that has the module") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise planner.OptionsError(
            f"capture: module {module_name} ({getattr(module, '__file__', None)}) has no function {function_name!r}"
        )
    return function  # type: ignore[no-any-return]
