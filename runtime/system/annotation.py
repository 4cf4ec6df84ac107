"""Names for what teraio does, in the timelines of torch.profiler and of NVTX.

[Note: Annotations]
Stages, copies, waits and updates run inside a `torch.profiler.record_function`, while a profiler runs:

    teraio::stage forward/layers.3.attn
    teraio::update optimizer/adamw.4
    teraio::wait layers.3.attn.weight from storage
    teraio::copy layers.3.attn.weight device->storage

`torch.profiler.profile`, `torch.autograd.profiler.emit_nvtx` (Nsight Systems) and `emit_itt` (VTune) all show them. On a GPU, a
stage also shows up beside the kernels that it launched.

Profilers record the thread that started them, and autograd's. Copies between the device and the drives run on I/O threads,
updates on the host in a thread of their own. To see these as well, let torch.profiler record all threads:

    from torch._C._profiler import _ExperimentalConfig
    torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))

`emit_nvtx` has no such setting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

Name = str | Callable[[], str]  # a text, or a function that makes it. The function is called only while a profiler runs.

_NOTHING = nullcontext()


def annotate(kind: Literal["stage", "copy", "wait", "update"], name: Name, *more: str) -> AbstractContextManager[object]:
    """Return a context manager that names what runs in it in the profiler's timeline, see [Note: Annotations].

    more: follows the name, each after a space.
    Without a profiler this costs a look at a flag, about 0.1 µs, and returns the same empty context manager each time. Safe from
    any thread. Never waits.
    """
    profiler = sys.modules.get("torch.autograd.profiler")  # no profiler runs where torch is not loaded
    # One flag for all threads. `torch._C._autograd._profiler_enabled` is false in threads that `profile_all_threads` records.
    if profiler is None or not profiler._is_profiler_enabled:
        return _NOTHING
    from torch.profiler import record_function

    return record_function(" ".join((f"teraio::{kind}", name if isinstance(name, str) else name(), *more)))


def first_of(names: Sequence[str]) -> str:
    """Return the first name, and how many more there are: "weight", "weight and 2 more"."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)
