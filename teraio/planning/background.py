"""The owner of planning jobs: starts them, gives their plans to the phase that waits for one, ends them.

In each job, the solver runs in a process of its own while training goes on.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

import planner
from planner.errors import InfeasiblePlanError, PlanError, RankError, SolverError
from planner.worker import NO_PLAN
from runtime.paging import Pager
from teraio.machine import Machine
from teraio.options import Options
from teraio.profiling import Profile
from teraio.ranks import RankGroup

_GRACE_SECONDS = 120.0  # for all but the solver, such as reading, building the model and checking


class PlanningJob:
    """One run of the solver. It starts when the object is made; nobody has to wait for it.

    known: a plan for this trace, for which only what is followed for shorter inputs is to be found out.
    time_limit_seconds: for the solver. When that and _GRACE_SECONDS are over, the job ends with SolverError.
    """

    def __init__(
        self,
        trace: planner.Trace,
        budgets: planner.Budgets,
        *,
        time_limit_seconds: float,
        known: planner.Plan | None = None,
    ) -> None:
        self._known = known
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
                self._result = self._solve(trace_path, plan_path, stdin, trace, budgets, seconds)
        except planner.TeraioError as error:
            self._result = error
        except OSError as error:
            self._result = planner.SolverError(f"planning could not be started: {error}")
        finally:
            self._done.set()

    def _solve(
        self, trace_path: str, plan_path: str, stdin: int, trace: planner.Trace, budgets: planner.Budgets, seconds: float
    ) -> planner.Plan:
        Path(trace_path).write_text(trace.text())
        if self._known is not None:
            Path(plan_path).write_text(self._known.text())
        lower = ["-" if size is None else str(size) for size in (budgets.host_bytes, budgets.storage_bytes)]
        command = [sys.executable, "-m", "planner.worker", trace_path, plan_path]
        command += [str(budgets.device_bytes), *lower, str(seconds)]
        home = Path(planner.__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            command,
            cwd=home,  # nothing in the user's folder may stand in for a module
            env=environment,
            pass_fds=[int(Path(path).name) for path in (trace_path, plan_path)],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._cancelled:
            self._process.kill()
        try:
            _, errors = self._process.communicate(timeout=seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise planner.SolverError(
                f"planning took longer than {seconds + _GRACE_SECONDS:.0f} s; raise solver_time_limit"
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


logger = logging.getLogger("teraio")

# -- one plan for all ranks of a machine that run the same iteration: one makes it, all follow it from the same iteration on

# The rank with the slowest stages plans, with what it has measured itself, since it waits least for others. These get its plan if
# their iterations have the same stages and blocks and nearly the same budgets; a rank with other ones plans for itself. All is
# told through the store, at the ends of iterations, so no rank waits for another one.

_LOOKS = 3  # ends of iterations at which a rank looks for others that want the same plan. Later ones get it all the same.
_AHEAD = 2  # iterations from the end of planning until all ranks follow the plan, so that each has heard of it


class RankPlan:
    """A plan in the making for this rank and all equal ones.

    name: the same on all of them, and never used before. start, take: start to plan on this rank, and return the plan once there
    is one, as `BackgroundPlanner` does. timeout_seconds: after which this rank plans for itself.
    """

    def __init__(
        self,
        ranks: RankGroup,
        trace: planner.Trace,
        budgets: planner.Budgets,
        *,
        name: str,
        start: Callable[[], None],
        take: Callable[[], planner.Plan | None],
        timeout_seconds: float,
    ) -> None:
        self._ranks, self._trace, self._budgets, self._name = ranks, trace, budgets, name
        self._start, self._take = start, take
        self._ends = time.monotonic() + timeout_seconds
        self._state: Literal["asking", "leading", "following", "alone"] = "asking"
        self._looks = 0
        self._made: planner.Plan | None = None
        self._from = 0
        # Without user code and collectives, in which ranks wait for slower ones.
        stages = [stage for stage in trace.stages if stage.phase != "user"]
        seconds = sum(stage.duration_seconds - stage.collective_seconds for stage in stages)
        with self._safely():
            ranks.tell(f"asks for {name}", repr(seconds))
            ranks.call(name)

    def plan(self, iteration: int) -> planner.Plan | None:
        """Return the plan if it is to be followed after this iteration, which has ended. Never waits.

        Raises the TeraioError that planning ended with, here or on the rank that plans for all.
        """
        if self._made is None:
            with self._safely():
                if self._state == "asking":
                    self._look()
                if self._state == "leading":
                    self._lead(iteration)
                elif self._state == "following":
                    self._follow()
                elif self._state == "alone":
                    self._made, self._from = self._take(), iteration
        return self._made if self._made is not None and iteration >= self._from else None

    def cancel(self) -> None:
        """Give up. If others wait for this rank's plan, they plan for themselves."""
        if self._state == "leading" and self._made is None:
            with self._safely():
                self._give(None, 0)

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        """Plan alone from now on if the others can no longer be talked to within the block."""
        try:
            yield
        except RankError as error:
            self._alone(str(error))

    def _alone(self, reason: str) -> None:
        logger.warning("this rank plans for itself: %s", reason)
        if self._state not in ("leading", "alone"):
            self._start()
        self._state = "alone"

    def _look(self) -> None:
        """Find out who wants the same plan; the slowest makes it."""
        self._looks += 1
        told = {rank: self._ranks.told(f"asks for {self._name}", rank) for rank in self._ranks.ranks}
        seconds = {rank: float(text) for rank, text in told.items() if text is not None}
        if len(seconds) < len(told) and self._looks < _LOOKS:
            return
        # What the slowest has measured holds for all: it waits least for others.
        slowest = max(seconds, key=lambda rank: (seconds[rank], -rank))
        if slowest == self._ranks.rank and self._ranks.first(self._name):
            self._state = "leading"
            self._start()
            logger.info("rank %d plans for ranks %s", slowest, ", ".join(map(str, seconds)))
            if len(seconds) < len(told):
                others = ", ".join(str(rank) for rank in told if rank not in seconds)
                logger.warning(
                    "of this machine, ranks %s have not asked for the same plan: they run other iterations, have other budgets, "
                    "or are late",
                    others,
                )
        else:
            self._state = "following"

    def _lead(self, iteration: int) -> None:
        try:
            made = self._take()
        except planner.TeraioError as error:
            self._ranks.tell(f"makes {self._name}", json.dumps({"problem": str(error)}))
            raise
        if made is not None:
            self._made, self._from = made, iteration + _AHEAD
            self._give(made, self._from)

    def _give(self, made: planner.Plan | None, first: int) -> None:
        plan = None if made is None else base64.b64encode(zlib.compress(made.model_dump_json().encode())).decode()
        self._ranks.tell(f"makes {self._name}", json.dumps({"plan": plan, "from": first}))

    def _follow(self) -> None:
        for rank in self._ranks.ranks:
            text = self._ranks.told(f"makes {self._name}", rank)
            if text is None:
                continue
            found = json.loads(text)
            if "problem" in found:
                raise SolverError(f"rank {rank} planned for all: {found['problem']}")
            if found["plan"] is None:
                self._alone(f"rank {rank} gave up planning")
                return
            self._adopt(rank, zlib.decompress(base64.b64decode(found["plan"])).decode(), found["from"])
            return
        if time.monotonic() > self._ends:
            self._alone("no other rank has made the plan in time")

    def _adopt(self, rank: int, text: str, first: int) -> None:
        made = planner.Plan.model_validate_json(text, strict=True)
        made = made.model_copy(update={"trace_fingerprint": self._trace.fingerprint, "budgets": self._budgets})
        try:
            planner.simulate(self._trace, made)
        except (InfeasiblePlanError, PlanError) as error:
            self._alone(f"the plan of rank {rank} cannot be carried out here: {error}")
            return
        self._made, self._from = made, first


def signature_of(trace: planner.Trace, budgets: planner.Budgets) -> str:
    """Return a text that is the same for ranks that can follow one plan: no times, no rates, budgets to two digits."""
    content = {
        "stages": [(stage.name, stage.phase) for stage in trace.stages],
        "blocks": [block.model_dump(mode="json") for block in trace.blocks],
        "subgroups": [(each.stage, each.blocks, each.elements, each.host_seconds is None) for each in trace.subgroups],
        "recompute": [(each.stage, each.blocks, each.reads) for each in trace.recompute],
        "links": sorted(link.name for link in trace.hardware.links),
        "budgets": [None if size is None else f"{size:.1e}" for size in budgets.model_dump().values()],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# -- the owner of planning jobs

StartJob = Callable[..., PlanningJob]  # with its arguments; never waits for the plan

# Takes a plan that was made, and returns the one to follow. May raise a TeraioError.
Choose = Callable[[planner.Plan], planner.Plan]


@dataclass(eq=False)
class BackgroundPlanner:
    """Makes plans while training goes on, at most one at a time.

    start_job: starts a job; tests give one that plans at once. ranks: of this machine; equal ones get one plan, which one of them
    makes. All calls are for the training thread, but `wait` is for any.
    """

    options: Options
    machine: Machine
    pager: Pager
    _: KW_ONLY
    start_job: StartJob = PlanningJob
    ranks: RankGroup | None = None
    _job: PlanningJob | None = field(init=False, default=None)
    _trace: planner.Trace | None = field(init=False, default=None)
    _shared: RankPlan | None = field(init=False, default=None)
    _asked: dict[str, int] = field(init=False, default_factory=dict)
    _signed: tuple[planner.Trace, str] | None = field(init=False, default=None)
    _choose: Choose | None = field(init=False, default=None)

    def budgets(self, profile: Profile) -> planner.Budgets:
        """Return what a plan for this profile may use of each tier."""
        # Optimizer states that always stay in a lower tier, see [Note: Updates by slices], are in no trace: their slots are
        # not free.
        taken = {"host": 0, "storage": 0}
        for block in self.pager.blocks:
            if block.kind == "optimizer_state" and block not in profile.ids and block.slot is not None and block.tier is not None:
                taken[block.tier] += block.slot.size_bytes
        host, storage = self.machine.host_bytes, self.machine.budgets.storage
        return planner.Budgets(
            device_bytes=self.pager.account.budget_bytes or 0,
            host_bytes=None if host is None else max(host - taken["host"], 0),
            storage_bytes=None if storage is None else max(storage - taken["storage"], 0),
        )

    @property
    def busy(self) -> bool:
        """True from `start` until the plan is taken or the job is cancelled."""
        return self._job is not None or self._shared is not None

    def start(
        self,
        trace: planner.Trace,
        budgets: planner.Budgets,
        choose: Choose | None = None,
        *,
        known: planner.Plan | None = None,
    ) -> None:
        """Start to plan for `trace`, once for all equal ranks of this machine. Cancels a job that has not been taken.

        Never waits for the plan. `take` has to be called at the end of each iteration then: it tells and asks the other ranks.
        choose: decides on the rank that plans, for all of them; None: what was made is followed. known: as for `PlanningJob`.
        """
        self.cancel()
        self._trace, self._choose = trace, choose
        if self.ranks is None:
            self._start_job_for(trace, budgets, known)
            return
        name, signature = self._next_name(trace, budgets)
        self._asked[signature] = self._asked.get(signature, 0) + 1
        self._shared = RankPlan(
            self.ranks,
            trace,
            budgets,
            name=name,
            start=lambda: self._start_job_for(trace, budgets, known),
            take=self._take_job,
            timeout_seconds=self.options.rank_timeout,
        )

    def wanted(self, trace: planner.Trace, budgets: planner.Budgets) -> bool:
        """Return whether another rank that runs the same iteration has started to plan, and this one has not. Never waits."""
        if self.ranks is None or self.busy:
            return False
        try:
            return self.ranks.called(self._next_name(trace, budgets)[0])
        except RankError as error:
            self.ranks = None
            logger.warning("this rank plans for itself from now on: %s", error)
            return False

    def _next_name(self, trace: planner.Trace, budgets: planner.Budgets) -> tuple[str, str]:
        """Return the name of the next plan for such iterations, the same on all ranks that run them, and their signature."""
        if self._signed is None or self._signed[0] is not trace:
            self._signed = (trace, signature_of(trace, budgets))
        signature = self._signed[1]
        return f"plan {self._asked.get(signature, 0) + 1} of {signature}", signature

    def _start_job_for(self, trace: planner.Trace, budgets: planner.Budgets, known: planner.Plan | None) -> None:
        self._job = self.start_job(trace, budgets, time_limit_seconds=self.options.solver_time_limit, known=known)

    def take(self) -> tuple[planner.Trace, planner.Plan] | None:
        """Return the plan with the trace that it was made for if it is ready, else None. Afterwards there is no job. Never waits.

        Raises the TeraioError that planning ended with.
        """
        trace = self._trace
        try:
            plan = self._take_job() if self._shared is None else self._shared.plan(self.pager.iteration)
        except planner.TeraioError:
            self._shared = self._trace = None
            raise
        if plan is None or trace is None:
            return None
        self._shared = self._trace = None
        return trace, plan

    def _take_job(self) -> planner.Plan | None:
        """Return the plan of this rank's job if it is ready; there is no job then. Raises as `take` does."""
        job = self._job
        if job is None or not job.done:
            return None
        self._job = None
        return job.result() if self._choose is None else self._choose(job.result())

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until no plan is being made on this rank, or until the time is over. Return whether none is. For any thread."""
        job = self._job
        return True if job is None else job.wait(timeout_seconds)

    def cancel(self) -> None:
        """End the job, if there is one. Waits until its solver has ended."""
        if self._shared is not None:
            self._shared.cancel()
        if self._job is not None:
            self._job.cancel()
        self._job = self._trace = self._shared = None
