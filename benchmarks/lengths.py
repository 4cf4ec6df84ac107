"""Batches of varying length: on demand, by the plan for the longest, by this thinned, and by a plan for one length alone.

Lengths are drawn from two distributions that are made up after what is published of such data: dialogues are mostly short, with a
long tail (log-normal, median an eighth of the context); of documents, two of five fill the context. Each batch has one length.
Drives are held to a rate, so that copies cost what they cost there and not what this machine's cache makes of them. A plan for
one length trains with no other length in between, where memory is used again as it is: how long all lengths take in turns without
a budget tells how much that is. Replays have none of this: they compare the plans at equal lengths, and the time to make them.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

import planner
import teraio
from benchmarks.results import Figure
from benchmarks.slow_drive import hold_drives_to
from benchmarks.turns import Scale, first_in_line, waited_seconds
from examples.gpt import GPT, GPTConfig
from runtime.storage import PosixStore

CONFIG = GPTConfig(layers=4, width=256, heads=4, context=256)
BATCH = 8
STEPS = 36
"""Iterations with a budget, of which the second half counts."""
RATES = {"0.3 GB/s": 3e8, "1 GB/s": 1e9}
SHARES = {"50 %": 0.5, "70 %": 0.7}
"""Budgets, of the peak of the longest batch without one."""
OWN = (0.5, 0.75, 0.95)
"""Quantiles of the lengths that also train by a plan of their own."""
AIM = "<= 1.05"


class Ran(NamedTuple):
    """What the second half of a training came to: by iteration its length, seconds, and seconds that it waited for copies."""

    lengths: list[int]
    seconds: list[float]
    waited: list[float]
    moved_mib: float
    peak_bytes: int
    replans: int
    recompiled: int


def dialogues(draw: random.Random) -> int:
    """Return the length of a batch of short dialogues."""
    return min(max(int(draw.lognormvariate(0, 0.8) * CONFIG.context / 8), 4), CONFIG.context)


def documents(draw: random.Random) -> int:
    """Return the length of a batch of documents, cut to the context."""
    length = CONFIG.context if draw.random() < 0.4 else int(draw.lognormvariate(0, 0.6) * CONFIG.context / 2)
    return min(max(length, 4), CONFIG.context)


KINDS: dict[str, Callable[[random.Random], int]] = {"dialogues": dialogues, "documents": documents}


def measure(scale: Scale) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return waits, bytes and times of the three ways, for both kinds of data, at both rates and both budgets."""
    torch.set_num_threads(1)
    peak_bytes = _train([CONFIG.context] * 8, {}, 4).peak_bytes
    figures: list[Figure] = []
    samples: dict[str, list[float]] = {}
    for kind, length in KINDS.items():
        draw = random.Random(0)
        lengths = [length(draw) for _ in range(STEPS)]
        lengths[STEPS // 2 :: 6] = [max(lengths)] * len(lengths[STEPS // 2 :: 6])  # long ones in both halves
        lengths[2] = max(lengths)
        chosen = [sorted(lengths)[int(len(lengths) * share)] for share in OWN]
        lengths[STEPS // 2 + 1 :: 2] = (chosen * STEPS)[: len(lengths[STEPS // 2 + 1 :: 2])]
        with first_in_line():
            unlimited = _train(lengths, {}, STEPS // 2)
        for rate, bytes_per_second in RATES.items():
            with first_in_line(), _drives_held_to(bytes_per_second), TemporaryDirectory(dir=scale.output) as folder:
                for share, part in SHARES.items():
                    budget_bytes = int(part * peak_bytes)
                    options = {"memory_budget": budget_bytes, "storage": folder}
                    on_demand = _train(lengths, {**options, "profile_iterations": 1000}, STEPS // 2)
                    files = {out: Path(folder) / f"{kind} {share} {out}" for out in ("trace_out", "plan_out")}
                    one = _train(lengths, {**options, **files}, STEPS // 2)
                    longest = _train(lengths, {**options, **_whole(files["plan_out"])}, STEPS // 2)
                    own = {each: _train([each] * STEPS, options, STEPS // 2) for each in dict.fromkeys(chosen)}
                    name = f"{kind}, {share}, {rate}"
                    figures += _figures(name, {"on demand": on_demand, "the plan for the longest": longest, "one plan": one})
                    figures += _compared(name, on_demand, one, unlimited, own, budget_bytes)
                    trace = planner.Trace.load(files["trace_out"])
                    figures += _replayed(name, trace, planner.Budgets(device_bytes=budget_bytes), list(own))
                    samples |= {f"{name}: on demand": on_demand.seconds, f"{name}: one plan": one.seconds}
                    samples |= {f"{name}: own plan for {each}": ran.seconds for each, ran in own.items()}
    return tuple(figures), samples


def _whole(plan_file: Path) -> dict[str, Path]:
    """Return the option by which that plan is followed at all lengths as it is for the longest; none where nothing moved."""
    if not plan_file.exists():
        return {}
    whole = plan_file.with_name(f"{plan_file.name} whole")
    planner.Plan.load(plan_file).model_copy(update={"shorter": ()}).save(whole)
    return {"plan": whole}


def _figures(name: str, ways: dict[str, Ran]) -> Iterator[Figure]:
    for way, ran in ways.items():
        yield Figure(
            name=f"{name}: waits, {way}", value=1e3 * fmean(ran.waited), unit="ms", note=f"{ran.moved_mib:.0f} MiB moved"
        )


def _compared(name: str, on_demand: Ran, one: Ran, unlimited: Ran, own: dict[int, Ran], budget_bytes: int) -> Iterator[Figure]:
    times = [planned / before for planned, before in zip(one.seconds, on_demand.seconds, strict=True)]
    yield Figure(name=f"{name}: time, one plan / on demand", value=median(times), unit="")
    for other, usual in {
        "a plan for the length": {length: median(ran.seconds) for length, ran in own.items()},
        "without a budget": {length: _usual(unlimited, length) for length in own},
    }.items():
        ratios = {length: _usual(one, length) / seconds for length, seconds in usual.items()}
        note = ", ".join(f"{length}: {ratio:.2f}" for length, ratio in ratios.items())
        yield Figure(name=f"{name}: time, one plan / {other}", value=max(ratios.values()), unit="", aim=AIM, note=note)
    over = max(one.peak_bytes, on_demand.peak_bytes) / budget_bytes
    yield Figure(name=f"{name}: peak / budget", value=over, unit="", aim="<= 1")
    yield Figure(
        name=f"{name}: plans made again, and graphs compiled late", value=one.replans + one.recompiled, unit="", aim="<= 0"
    )


def _replayed(name: str, trace: planner.Trace, budgets: planner.Budgets, chosen: Sequence[int]) -> Iterator[Figure]:
    """Return times of the plan for the longest, and of it thinned, over those of a plan for the length alone; all replayed."""
    began = time.perf_counter()
    made = planner.plan(trace, budgets)
    planned = time.perf_counter()
    family = planner.with_shorter(made, trace)
    for_all = time.perf_counter() - began
    if trace.lengths is None:
        return
    (least,), (most,) = trace.lengths.lowest, trace.lengths.highest
    found: dict[int, tuple[float, float]] = {}
    for length in (min(max(each, least), most) for each in chosen):
        there = trace.at(length)
        alone = planner.plan(there, budgets).replayed.iteration_seconds
        followed = (made.followed(each, there) for each in (None, family.shorter_for([length])))
        whole, thinned = (planner.simulate(there, each).iteration_seconds / alone for each in followed)
        found[length] = whole, thinned
    for number, way in enumerate(("the plan for the longest", "one plan")):
        note = ", ".join(f"{length}: {ratios[number]:.3f}" for length, ratios in found.items())
        most_of = max(ratios[number] for ratios in found.values())
        yield Figure(name=f"{name}: replayed, {way} / a plan for the length", value=most_of, unit="", aim=AIM, note=note)
    yield Figure(name=f"{name}: planning for all lengths / for one", value=for_all / (planned - began), unit="", aim="<= 2")


def _usual(ran: Ran, length: int) -> float:
    return median(seconds for seconds, each in zip(ran.seconds, ran.lengths, strict=True) if each == length)


def _train(lengths: Sequence[int], options: dict[str, Any], counted: int) -> Ran:
    """Train with batches of these lengths. counted: from the end, so many iterations count."""
    teraio.reset()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(CONFIG)
    teraio.compile(model, dynamic=True, codegen="eager", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds, waited, compiled, moved = [], [], [], []
    for length in lengths:
        tokens = torch.randint(CONFIG.vocabulary, (BATCH, length + 1))
        before, began = waited_seconds(), time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        waited.append(waited_seconds() - before)
        teraio.wait_for_plan()
        moved.append(sum(teraio.status()[0].moved_bytes.values()))
        compiled.append(counters["stats"]["unique_graphs"])
    (after,) = teraio.status()
    return Ran(
        lengths=list(lengths[-counted:]),
        seconds=seconds[-counted:],
        waited=waited[-counted:],
        moved_mib=(moved[-1] - moved[-counted - 1]) / counted / (1 << 20),
        peak_bytes=after.device_peak_bytes,
        replans=after.replans,
        recompiled=compiled[-1] - compiled[-counted - 1],
    )


@contextmanager
def _drives_held_to(bytes_per_second: float) -> Iterator[None]:
    plain = PosixStore.write_chunk, PosixStore.read_chunk
    hold_drives_to(bytes_per_second)
    try:
        yield
    finally:
        teraio.reset()
        PosixStore.write_chunk, PosixStore.read_chunk = plain  # type: ignore[method-assign]
