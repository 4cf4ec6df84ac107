"""Makes one plan in a process of its own.

`python -m planner.worker TRACE PLAN DEVICE_BYTES HOST_BYTES STORAGE_BYTES SECONDS`: the solver's memory and its time on
the interpreter lock stay out of the training process. HOST_BYTES and STORAGE_BYTES are "-" for no limit. Exit status 0 if the
plan was written; 3 with one line on standard error if no plan can be made.
"""

from __future__ import annotations

import sys

from planner import Budgets, TeraioError, Trace, plan

NO_PLAN = 3


def main(arguments: list[str]) -> int:
    trace_path, plan_path, device_bytes, host_bytes, storage_bytes, seconds = arguments
    budgets = Budgets(
        device_bytes=int(device_bytes),
        host_bytes=None if host_bytes == "-" else int(host_bytes),
        storage_bytes=None if storage_bytes == "-" else int(storage_bytes),
    )
    try:
        plan(Trace.load(trace_path), budgets, time_limit_seconds=float(seconds)).save(plan_path)
    except TeraioError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return NO_PLAN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
