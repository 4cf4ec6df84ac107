"""One planning job: the solver runs in a process of its own while training goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import planner
from planner.worker import NO_PLAN

_GRACE_SECONDS = 120.0


class Job(Protocol):
    """A plan in the making, see `PlanningJob`."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout_seconds: float | None) -> bool: ...
    def result(self) -> planner.Plan: ...
    def cancel(self) -> None: ...


class StartJob(Protocol):
    """Starts a job and never waits for its plan."""

    def __call__(self, trace: planner.Trace, budgets: planner.Budgets, *, time_limit_seconds: float) -> Job: ...


class PlanningJob:
    """One run of the solver. It starts when the object is made; nobody has to wait for it.

    time_limit_seconds: for the solver. grace_seconds: for everything else, such as reading, building the model and checking; when
    both are over, the job ends with SolverError.
    """

    def __init__(
        self, trace: planner.Trace, budgets: planner.Budgets, *, time_limit_seconds: float, grace_seconds: float = _GRACE_SECONDS
    ) -> None:
        self._grace_seconds = grace_seconds
        self._done = threading.Event()
        self._result: planner.Plan | planner.TeraioError | None = None
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = False
        self._thread = threading.Thread(
            target=self._work, args=(trace, budgets, time_limit_seconds), name="teraio-planning", daemon=True
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the job has ended: `result` then returns or raises at once."""
        return self._done.is_set()

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until the job has ended or the time is over. Return whether it has ended. For any thread."""
        return self._done.wait(timeout_seconds)

    def result(self) -> planner.Plan:
        """Return the plan of a job that has ended. Raises the TeraioError that planning ended with."""
        if isinstance(self._result, planner.Plan):
            return self._result
        raise self._result or planner.SolverError("planning was cancelled")

    def cancel(self) -> None:
        """Stop the solver. Waits until its process has ended."""
        self._cancelled = True
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _work(self, trace: planner.Trace, budgets: planner.Budgets, seconds: float) -> None:
        try:
            with _nameless("trace") as trace_path, _nameless("plan") as plan_path, _lifeline() as stdin:
                self._result = self._solve((trace_path, plan_path), stdin, trace, budgets, seconds)
        except planner.TeraioError as error:
            self._result = error
        except OSError as error:
            self._result = planner.SolverError(f"planning could not be started: {error}")
        finally:
            self._done.set()

    def _solve(
        self, paths: tuple[str, str], stdin: int, trace: planner.Trace, budgets: planner.Budgets, seconds: float
    ) -> planner.Plan:
        """Return the plan. paths: of the files for the trace and for the plan."""
        trace_path, plan_path = paths
        Path(trace_path).write_text(trace.text())
        lower = ["-" if size is None else str(size) for size in (budgets.host_bytes, budgets.storage_bytes)]
        command = [sys.executable, "-m", "planner.worker", *paths]
        command += [str(budgets.device_bytes), *lower, str(seconds)]
        home = Path(planner.__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            command,
            cwd=home,  # nothing in the user's folder may stand in for a module
            env=environment,
            pass_fds=[int(Path(path).name) for path in paths],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._cancelled:
            self._process.kill()
        try:
            _, errors = self._process.communicate(timeout=seconds + self._grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise planner.SolverError(
                f"planning took longer than {seconds + self._grace_seconds:.0f} s; raise solver_time_limit"
            ) from None
        if self._process.returncode == NO_PLAN:
            raise planner.SolverError(errors.strip().splitlines()[-1] if errors.strip() else "no plan was found")
        if self._process.returncode != 0:
            status, message = self._process.returncode, errors[-400:].strip()
            raise planner.SolverError(f"the planning process ended with status {status}: {message}")
        return planner.Plan.load(plan_path)


@contextlib.contextmanager
def _nameless(name: str) -> Iterator[str]:
    """Give the path of a file in memory, which ends with the processes that have it open, also if they are killed."""
    descriptor = os.memfd_create(f"teraio-{name}")
    try:
        yield f"/dev/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """Give the end of a pipe that is closed at its other end when this block or this process ends, also if it is killed."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)
