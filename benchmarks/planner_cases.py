"""What policies make of traces: each trace under several budgets at several link rates, planned and replayed."""

import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.machines import H100_NVL, H100_NVL_TF32
from benchmarks.transformer_trace import WORKLOADS
from benchmarks.variants import budgets_for, device_budgets, with_device_updates, with_rates
from planner import Budgets, TeraioError, Trace, plan, simulate
from planner.bound import lower_bound_seconds
from planner.errors import OptionsError
from planner.problem import Problem

TRACES = Path(__file__).resolve().parent.parent / "traces"
RATES = (0.5, 1.0, 2.0)
LARGE = 800
"""Traces with more stages are planned only at their own rates, since a case takes minutes."""
BEST = "ilp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to plan: traces and policies by name (empty: all). `processes`: cases planned at the same time; planning times are
    processor time, so that this changes them little.
    """

    output: Path
    traces: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trace at one rate under one budget."""

    trace_name: str
    budget_name: str
    rate: float
    trace: Trace
    budgets: Budgets

    @property
    def name(self) -> str:
        """A name that no other case has."""
        return f"{self.trace_name} | {self.budget_name} | x{self.rate:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one policy in one case. If it refused, `refusal` is the name of the error, and both ratios are infinite.

    `plan_seconds`: of processor time. For BEST, the lower bound is worked out in this time as well.
    """

    case_name: str
    trace_name: str
    policy: str
    plan_seconds: float
    over_ideal: float = float("inf")
    over_bound: float = float("inf")
    refusal: str = ""


def traces(names: Collection[str] = ()) -> dict[str, Trace]:
    """Return the traces of the folder `traces/hand`, then the generated ones; only those of `names` if any are given."""
    found: dict[str, Callable[[], Trace]] = {
        path.stem: partial(Trace.load, path) for path in sorted((TRACES / "hand").glob("*.json"))
    }
    tf32 = partial(WORKLOADS["Llama-3-8B"].trace, H100_NVL_TF32)
    found["Llama-3-8B"] = partial(WORKLOADS["Llama-3-8B"].trace, H100_NVL)
    found["Llama-3-8B, TF32"] = tf32
    found["Llama-3-8B, TF32, device updates"] = lambda: with_device_updates(tf32())
    found["Granite-8B"] = partial(WORKLOADS["Granite-8B"].trace, H100_NVL)
    found["Llama-3-70B"] = partial(WORKLOADS["Llama-3-70B"].trace, H100_NVL)
    if unknown := set(names) - set(found):
        raise OptionsError(f"no trace {', '.join(sorted(unknown))}; there are: {'; '.join(found)}")
    return {name: make() for name, make in found.items() if not names or name in names}


def cases(given: Mapping[str, Trace], rates: Sequence[float] = RATES) -> Iterator[Case]:
    """Yield each trace at each rate (at its own if it is larger than LARGE), under each budget that is not below its floor."""
    for trace_name, original in given.items():
        for rate in rates if len(original.stages) <= LARGE else (1.0,):
            trace = with_rates(original, rate)
            for budget_name, size in device_budgets(trace).items():
                yield Case(
                    trace_name=trace_name,
                    budget_name=budget_name,
                    rate=rate,
                    trace=trace,
                    budgets=budgets_for(trace, size),
                )


def outcomes_of(case: Case, policies: Sequence[str]) -> list[Outcome]:
    """Plan with each policy, and replay each plan in the simulator. The prediction in the plan is not used.

    The lower bound holds for all policies, so it is worked out once: with the plan of BEST, or alone.
    """
    found, bound = [], 0.0
    for policy in sorted(policies, key=lambda policy: policy != BEST):
        if policy != BEST and not bound:
            bound = lower_bound_seconds(Problem.of(case.trace, case.budgets))
        one, bound = _outcome(case, policy, bound)
        found.append(one)
    return sorted(found, key=lambda one: policies.index(one.policy))


def _outcome(case: Case, policy: str, bound_seconds: float) -> tuple[Outcome, float]:
    """What a policy makes of a case, and the lower bound. bound_seconds: the bound if it is known, otherwise 0."""
    began = time.process_time()
    try:
        made = plan(case.trace, case.budgets, policy=policy, lower_bound=not bound_seconds)
    except TeraioError as error:
        seconds = time.process_time() - began
        refused = Outcome(
            case_name=case.name,
            trace_name=case.trace_name,
            policy=policy,
            plan_seconds=seconds,
            refusal=type(error).__name__,
        )
        return refused, bound_seconds
    seconds = time.process_time() - began
    assert made.predicted is not None  # every policy's plan is replayed
    taken = simulate(case.trace, made).iteration_seconds
    bound = bound_seconds or made.predicted.lower_bound_seconds
    planned = Outcome(
        case_name=case.name,
        trace_name=case.trace_name,
        policy=policy,
        plan_seconds=seconds,
        over_ideal=taken / case.trace.ideal_seconds,
        over_bound=taken / bound,
    )
    return planned, bound


def outcomes(path: Path, listed: Sequence[Case], policies: Sequence[str], *, processes: int = 1) -> list[Outcome]:
    """Plan each case with each policy, and write the results of a case to the file as soon as they are known."""
    found: dict[str, list[Outcome]] = {}
    with path.open("w") as log, _planned(listed, policies, processes) as planned:
        for made in track(planned, description="cases", console=Console(stderr=True), total=len(listed)):
            found[made[0].case_name] = made
            for one in made:
                cells = (one.case_name, one.policy, one.over_ideal, one.over_bound, one.plan_seconds, one.refusal)
                print(*cells, sep="\t", file=log, flush=True)
    return [one for case in listed for one in found[case.name]]


@contextmanager
def _planned(listed: Sequence[Case], policies: Sequence[str], processes: int) -> Iterator[Iterable[list[Outcome]]]:
    """Yield the outcomes of each case: in the order given, or with several processes as soon as they are known."""
    if processes == 1:
        yield (outcomes_of(case, policies) for case in listed)
        return
    # Largest first: none is left for the end. Spawned, since a solver's threads do not survive a fork.
    by_size = sorted(listed, key=lambda case: -len(case.trace.stages))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield (done.result() for done in as_completed([pool.submit(outcomes_of, case, policies) for case in by_size]))
