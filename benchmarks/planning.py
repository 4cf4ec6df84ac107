"""Make one plan in a process of its own and measure it: `python -m benchmarks.planning TRACE PLAN DEVICE_BYTES`.

That process imports the planner only, so its peak memory is that of planning.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.variants import budgets_for
from examples.memory import resident_bytes
from planner import Trace, plan, simulate

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The cost and the result. `plan_seconds`: from the trace in memory to the plan. `process_bytes`: the peak resident set of
    the process, with interpreter and libraries."""

    plan_seconds: float
    simulate_seconds: float
    build_seconds: float
    solve_seconds: float
    status: str
    process_bytes: int
    iteration_seconds: float
    ideal_seconds: float
    lower_bound_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of planning and of one more replay of the plan."""
        return self.plan_seconds + self.simulate_seconds

    @property
    def over_bound(self) -> float:
        """Simulated time over the lower bound."""
        return self.iteration_seconds / self.lower_bound_seconds


class PlanningFailed(Exception):
    """The process made no plan. The message is the end of its output."""


def planned_apart(trace: Trace, device_bytes: float, folder: Path) -> Planned:
    """Plan `trace` with the default policy in a new process.

    Waits for PATIENCE_SECONDS at most. Raises PlanningFailed if the process fails or takes longer.
    """
    path = folder / "trace.json"
    trace.save(path)
    command = [sys.executable, "-m", "benchmarks.planning", str(path), str(folder / "plan.json"), str(int(device_bytes))]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired as expired:
        raise PlanningFailed(f"no plan for {trace.name} after {PATIENCE_SECONDS} s") from expired
    if ended.returncode:
        raise PlanningFailed("\n".join(ended.stderr.strip().splitlines()[-12:]))
    return Planned(**json.loads(ended.stdout.splitlines()[-1]))


def planned_here(trace: Trace, device_bytes: int, plan_path: Path) -> Planned:
    """Plan `trace` in this process and write the plan."""
    began = time.perf_counter()
    made = plan(trace, budgets_for(trace, device_bytes))
    finished = time.perf_counter()
    timeline = simulate(trace, made)
    replayed = time.perf_counter()
    made.save(plan_path)
    assert made.predicted is not None  # every policy's plan is replayed
    return Planned(
        plan_seconds=finished - began,
        simulate_seconds=replayed - finished,
        build_seconds=made.solver.build_seconds,
        solve_seconds=made.solver.solve_seconds,
        status=made.solver.status,
        process_bytes=resident_bytes()["VmHWM"],
        iteration_seconds=timeline.iteration_seconds,
        ideal_seconds=trace.ideal_seconds,
        lower_bound_seconds=made.predicted.lower_bound_seconds,
    )


if __name__ == "__main__":
    given, written, size = sys.argv[1:]
    print(json.dumps(asdict(planned_here(Trace.load(given), int(size), Path(written)))))
