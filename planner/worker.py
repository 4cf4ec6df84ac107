"""Make one plan in a process of its own.

`python -m planner.worker TRACE PLAN DEVICE_BYTES HOST_BYTES STORAGE_BYTES SECONDS`. The training process then neither pays for
the solver's memory nor shares the interpreter lock with it. HOST_BYTES and STORAGE_BYTES are "-" for no limit; SECONDS limits
the solver. If PLAN holds a plan already, only what is followed for shorter inputs is found out. Standard input is a pipe: the
process ends when nobody holds its other end any more. TRACE and PLAN may be files without a name (`/dev/fd/7`), so that nothing
is left if both processes are killed.

Exit status 0: the plan was written. 3: no plan can be made; one line on standard error says why.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from planner import Budgets, Plan, TeraioError, Trace, plan, with_shorter

NO_PLAN = 3  # the exit status when no plan can be made


def main(arguments: list[str]) -> int:
    """Make the plan and write it. Returns the exit status."""
    trace_path, plan_path, device_bytes, host_bytes, storage_bytes, seconds = arguments
    budgets = Budgets(
        device_bytes=int(device_bytes),
        host_bytes=None if host_bytes == "-" else int(host_bytes),
        storage_bytes=None if storage_bytes == "-" else int(storage_bytes),
    )
    try:
        trace = Trace.load(trace_path)
        known = Plan.load(plan_path) if os.stat(plan_path).st_size else None
        made = with_shorter(known or plan(trace, budgets, time_limit_seconds=float(seconds)), trace)
    except TeraioError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return NO_PLAN
    Path(plan_path).write_text(made.text())
    return 0


def end_with_starter() -> None:
    """End this process as soon as the one that started it has ended, however that ended."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_starter()
    sys.exit(main(sys.argv[1:]))
