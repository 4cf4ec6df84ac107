"""Plans in files: those of earlier starts, in a folder, and those that the user gives or asks for.

A second start of the same training finds its plan in that folder and solves nothing.

[Note: Warm starts]
A plan is kept with its trace in a file of its own. The file's name is a key: a hash of the graph that begins the iteration (its
stages, blocks and sizes), of the options that plans depend on, of versions and of the planner's sources. So it is known before
the first graph runs which plan may fit. Whether it does is decided when the first iteration has ended: all its stages and blocks
must be those of the kept trace, see `recognise`. Budgets are part of the key as the user gave them. A share of
the memory is a little different in each start; so the plan is replayed with the budgets of this start, and refused if it does
not come to an end.

Rates are measured anew at each start, and measurements vary. A plan is refused if a rate differs by more than `_RATES_DIFFER`
from that of the start that made the plan. Smaller differences are noticed by [Note: Planning again], which replaces the plan.

Nothing depends on a kept plan but time: the pager is right with any plan. A file that is damaged, or of another program, is
ignored. Files are replaced as a whole, so that several processes can share the folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Literal

import torch

import planner
from planner.errors import FileFormatError, InfeasiblePlanError, PlanError, TeraioError
from planner.schema import FrozenModel, read_model, write_atomic
from runtime.device import MIN_MOVED_BYTES
from runtime.execution import Program, Stage
from runtime.paging import Block
from teraio.options import Options, cache_folder
from teraio.planning.background import BackgroundPlanner
from teraio.profiling import FIXED_NAME, Iteration, Profile
from teraio.version import __version__

logger = logging.getLogger("teraio")

_RATES_DIFFER = 4.0  # a plan is refused if a link is faster or slower by this factor than when the plan was made
_LARGER = 1.1  # a plan is refused if the device budget has grown by more than this factor: a new one may use it
_MOST_FILES = 500  # the oldest files beyond this number are removed
# The options that plans depend on.
_OPTIONS = (
    "memory_budget",
    "host_budget",
    "storage_budget",
    "checksums",
    "debug",
    "codegen",
    "mode",
    "optimizer",
    "overlap_step",
    "host_updates",
    "recompute",
    "solver_time_limit",
)


class KeptPlan(FrozenModel):
    """What is in a file: a plan and the trace that it was made for.

    key: hash of `made_for`. hardware: as measured when the run began that made the plan; the trace has what was measured since.
    """

    format: Literal["teraio.kept_plan"] = "teraio.kept_plan"
    version: Literal[1] = 1
    key: str
    made_for: dict[str, str]
    hardware: planner.Hardware
    trace: planner.Trace
    plan: planner.Plan


class PlanCache:
    """The plans of one training run. All calls wait for the file system; a failure is a warning and ends nothing.

    device: where stages run.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self._folder = cache_folder() / "plans"
        self._reads, self._writes = options.plan_cache != "off", options.plan_cache == "read-write"
        self._made_for = {
            "teraio": __version__,
            "torch": torch.__version__,
            "planner": planner_digest(),
            "device": device.type,
            **{name: str(getattr(options, name)) for name in _OPTIONS},
        }
        self._unusable: set[Path] = set()

    def find(self, program: Program) -> KeptPlan | None:
        """Return the plan for iterations that begin with `program`, if there is one. Warns of a file that is no such plan."""
        if not self._reads:
            return None
        key = self._key(program)
        path = self._path(key)
        if not path.exists() or path in self._unusable:
            return None
        try:
            found = read_model(path, KeptPlan, PlanError)
            _check(path, found, key)
        except FileFormatError as error:
            self._unusable.add(path)
            logger.warning("a kept plan is ignored, and replaced by the next plan: %s", error)
            return None
        return found

    def keep(self, program: Program, hardware: planner.Hardware, trace: planner.Trace, plan: planner.Plan) -> None:
        """Write the plan for later starts. If that fails, a warning says why."""
        if not self._writes:
            return
        made_for, key = self._described(program), self._key(program)
        kept = KeptPlan(key=key, made_for=made_for, hardware=hardware, trace=trace, plan=plan)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path(key), json.dumps(kept.model_dump(mode="json", by_alias=True)) + "\n")
            for oldest in sorted(self._folder.glob("*.json.gz"), key=lambda path: path.stat().st_mtime)[:-_MOST_FILES]:
                oldest.unlink(missing_ok=True)
        except OSError as error:
            self._writes = False
            logger.warning("the plan could not be kept in %s: %s; the next start has to make it again", self._folder, error)

    def _described(self, program: Program) -> dict[str, str]:
        return {"first graph": _digest(program), **self._made_for}

    def _key(self, program: Program) -> str:
        return _hash(json.dumps(self._described(program), sort_keys=True))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key[:32]}.json.gz"


def refit(kept: KeptPlan, hardware: planner.Hardware, budgets: planner.Budgets) -> planner.Plan | str:
    """Return the plan for the budgets of this start, or why it cannot be used, in plain words.

    hardware: as measured at this start. Waits for a replay of the plan.
    """
    before = {link.name: link.bytes_per_second for link in kept.hardware.links}
    now = {link.name: link.bytes_per_second for link in hardware.links}
    if before.keys() != now.keys():
        return f"it is for the links {', '.join(before)}, and this machine has {', '.join(now)}"
    for link, rate in now.items():
        if not 1 / _RATES_DIFFER <= rate / before[link] <= _RATES_DIFFER:
            return f"{link} carries {rate / 1e9:.2f} GB/s, and carried {before[link] / 1e9:.2f} GB/s when it was made"
    if budgets.device_bytes > _LARGER * kept.plan.budgets.device_bytes:
        return f"it is for {kept.plan.budgets.device_bytes:,} bytes on the device, and there are {budgets.device_bytes:,} now"
    plan = kept.plan.model_copy(update={"budgets": budgets})
    try:
        planner.simulate(kept.trace, plan)
    except TeraioError as error:
        return str(error)
    return plan


def _check(path: Path, kept: KeptPlan, key: str) -> None:
    """Raise PlanError unless the file is what its name says."""
    if kept.key != key or _hash(json.dumps(kept.made_for, sort_keys=True)) != key:
        raise PlanError(
            f"{path}: it was made for another training, machine or version; leave the names of these files as they are"
        )
    if kept.plan.trace_fingerprint != kept.trace.fingerprint:
        raise PlanError(f"{path}: its plan was made for another trace; it was changed after it was written: remove it")


@functools.cache
def planner_digest(folder: Path = Path(planner.__file__).parent) -> str:
    """Return a hash of the planner's sources: other sources make other plans. Reads half a megabyte, once in a process."""
    files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py"))
    return _hash("".join(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for name, path in files))


def _digest(program: Program) -> str:
    """Return a hash of the stages of a graph, its blocks and, unless inputs vary in size, of their sizes. The same in every
    process."""
    sized = program.resize is None
    stages = [_values(stage, without=("run", "code", "never_again"), sized=sized) for stage in program.stages]
    return _hash(repr((_values(program, without=("identity", "stages", "resize", "sizes"), sized=sized), stages)))


def _values(of: Program | Stage, *, without: tuple[str, ...], sized: bool) -> list[tuple[str, object]]:
    names = [field.name for field in fields(of) if field.name not in without and (sized or not field.name.endswith("_bytes"))]
    return [(name, getattr(of, name)) for name in names]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# Name, kind, bytes and whether it can move (False where sizes do not count), and the stages that use it.
_Signature = tuple[str, str, tuple[int, bool] | Literal[False], tuple[int, ...]]


class WarmStart:
    """Knows which kept plan may fit, from the graph that begins an iteration, see [Note: Warm starts].

    All calls are for the training thread. They wait for the file system and for the replay of a plan.
    """

    def __init__(self, cache: PlanCache, background: BackgroundPlanner) -> None:
        self._cache = cache
        self._background = background
        self._first: Program | None = None
        self._kept: KeptPlan | None = None
        self._refused: set[str] = set()

    def iteration_begins(self, program: Program) -> int | None:
        """A graph that begins an iteration is about to run: look for a plan that was kept for it.

        Return the size in bytes of the subgroups that optimizers have to be cut into for that plan, from the first step on.
        """
        if program is not self._first:
            self._first = program
            self._kept = self._cache.find(program)
            if self._kept is not None and self._kept.key in self._refused:
                self._kept = None
        return self._kept.trace.subgroup_bytes if self._kept is not None else None

    def plan_for(self, iteration: Iteration) -> tuple[Profile, planner.Plan] | None:
        """Return the kept plan with its profile, if the iteration that has ended is the one that it is for."""
        kept = self._kept
        if kept is None or not iteration.regions or not iteration.complete:
            return None
        profile = recognise(kept.trace, iteration, fixed_bytes=self._background.pager.account.unmoved_bytes)
        if profile is None:
            return None
        self._kept = None
        plan = refit(kept, self._background.machine.hardware(), self._background.budgets(profile))
        if isinstance(plan, str):
            self._refused.add(kept.key)
            logger.info("the plan of an earlier start is not used: %s", plan)
            return None
        logger.info("the plan of an earlier start fits: nothing is profiled and nothing is solved")
        return profile, plan

    def keep(self, trace: planner.Trace, plan: planner.Plan) -> None:
        """Keep a plan of this run for later starts."""
        if self._first is not None:
            self._cache.keep(self._first, self._background.machine.hardware(), trace, plan)


def recognise(trace: planner.Trace, iteration: Iteration, *, fixed_bytes: int) -> Profile | None:
    """Return `trace` as the profile of `iteration`; None unless this ran the same stages over the same blocks.

    Stages are the same by position, name and phase, blocks by name, kind, size and the stages that use them. Times do not count,
    nor do sizes where inputs vary in size: a plan is followed for all. In its first iteration an optimizer makes the states
    that it reads later on: it uses them all the same. fixed_bytes: what stays on the device without being a block; may differ
    by less than the smallest block that moves.
    """
    if [(s.name, s.phase) for s in iteration.stages] != [(s.name, s.phase) for s in trace.stages]:
        return None
    sized = not iteration.sizes_vary
    wanted: dict[_Signature, list[int]] = defaultdict(list)
    fixed = 0
    for each in trace.blocks:
        if each.name == FIXED_NAME:
            fixed += each.size_bytes
            continue
        # A trace adds the user code that makes inputs and reads outputs, which nobody records.
        used = tuple(use for use in each.uses if trace.stages[use].phase != "user")
        wanted[each.name, each.kind, sized and (each.size_bytes, each.movable), used].append(each.id)
    if abs(fixed - fixed_bytes) >= MIN_MOVED_BYTES:
        return None
    ids: dict[Block, int] = {}
    for block, uses in iteration.uses().items():
        same = wanted.get((block.name, block.kind, sized and (block.size_bytes, block.span is not None), uses))
        if not same:
            return None
        ids[block] = same.pop(0)
    return None if any(wanted.values()) else Profile(trace=trace, iteration=iteration, ids=ids)


# -- files that the user gives or asks for


def fit_given_plan(plan: planner.Plan, trace: planner.Trace, budgets: planner.Budgets, path: Path | None) -> planner.Plan:
    """Return the plan as a plan for `trace` and `budgets`. path: where it was read from, for the message.

    Raises PlanError if the plan cannot be carried out on this trace within these budgets.
    """
    plan = plan.model_copy(update={"trace_fingerprint": trace.fingerprint, "budgets": budgets})
    if len(trace.recompute) <= max((each.group for each in plan.recompute), default=-1):
        reasons = sorted({each.reason for each in trace.not_recomputed})
        raise PlanError(
            f"{path}: this plan recomputes stages that cannot run again in this run: {'; '.join(reasons) or 'it has others'}; "
            "make a new one from a trace of this run (option trace_out), or leave out the option plan"
        )
    try:
        planner.simulate(trace, plan)
    except InfeasiblePlanError as error:
        raise PlanError(
            f"{path}: this plan was made for another program, shape or budget: {error}; make a new one from a "
            "trace of this run (option trace_out), or leave out the option plan"
        ) from error
    return plan


def save(file: planner.Trace | planner.Plan, path: Path | None) -> Path | None:
    """Write the file if a path is given. Return the path, or None if nothing was written; a warning then says why."""
    if path is None:
        return None
    try:
        file.save(path)
    except OSError as error:
        what = "trace" if isinstance(file, planner.Trace) else "plan"
        logger.warning("the %s could not be written to %s: %s; training goes on without", what, path, error)
        return None
    return path
