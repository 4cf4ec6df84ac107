"""Where the optimizer of a sharded training updates: AdamW over two ranks, with states that do not fit the device.

Two ways to shard: ZeRO-1 (`ZeroRedundancyOptimizer` with DistributedDataParallel) and FSDP2. Each rank has a budget of PERCENT of
its peak without one, and host memory for the rest. A first training writes a trace for each rank. From it each policy makes a
plan, which another training follows (option `plan`): "ilp" is teraio's own; "stride-2" is the fixed stride of Deep Optimizer
States (Maurya et al., Middleware 2024). The trainings take turns. Their times are those of the slower rank.

On "cuda", each rank has a GPU, and NCCL connects them. There FSDP2's shards stay on the device: none is updated on the host.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.optimizer import LossesDiffer
from benchmarks.ranks import RANKS, Ranks
from benchmarks.results import Figure
from benchmarks.turns import Scale, ratios, spread, take_turns, warm_up
from benchmarks.variants import budgets_for
from examples.llama import LlamaConfig, llama
from examples.training import Report, Setting, Step
from planner import Plan, TeraioError, Trace, plan

MODEL = LlamaConfig(layers=4, width=768, heads=12, key_value_heads=12, feed_forward=2048, vocabulary=256, tied=True, context=32)
"""29 million parameters, and so few tokens that the update takes much of an iteration. Half of the smallest matrix has 1.1 MiB:
all shards but those of norms move."""
BATCH = 1
PERCENT = 60
"""Of what a rank holds."""
BYTES_EACH = {"zero": 12 + 8 // RANKS, "fsdp": 16 // RANKS + 4}
"""What a rank holds for each parameter, in fp32. ZeRO-1: parameter, gradient and DDP's bucket, and its share of AdamW's two
states. FSDP2: its share of all, and what is gathered."""
OURS, *OTHERS = POLICIES = ("ilp", "stride-2", "host-updates", "device-updates")
TOLERANCE = 1e-4
"""Relative tolerance of losses: updates on the host round differently."""
OPTIONS = {"codegen": "eager", "profile_iterations": 2, "replan": False}
"""The optimizer's step is not compiled, so stages need not be. Plans are not corrected, because the pauses between turns would
count as waiting."""
WARM_STEPS = 9
MIB = 2**20


def measure(
    scale: Scale, way: str, model: LlamaConfig = MODEL, options: Mapping[str, Any] | None = None
) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return all figures, and the seconds of iterations and steps by policy. options: of teraio, but no budgets or files.

    way: a name in BYTES_EACH. Raises LossesDiffer, WorkerFailed, TeraioError.
    """
    given = {**OPTIONS, **(options or {})}
    setting = Setting(model=model, batch=BATCH, device=scale.device, fused=True, options=given, **{way: True})
    trained = _Way(way, model, setting, scale)
    return tuple(trained.figures()), trained.samples


class _Way:
    """All trainings of one way to shard. samples: seconds, once `figures` has run."""

    def __init__(self, way: str, model: LlamaConfig, setting: Setting, scale: Scale) -> None:
        self._way = way
        self._setting = setting
        self._model = model
        self._scale = scale
        self.samples: dict[str, list[float]] = {}

    def figures(self) -> Iterator[Figure]:
        """Train by each policy in turns, and yield what was measured."""
        held = sum(each.numel() for each in llama(self._model, device="meta").parameters()) * BYTES_EACH[self._way]
        budget = held * PERCENT // 100
        tiers = {"memory_budget": budget, "host_budget": 2 * held}
        traces = self._traces(tiers)
        yield Figure(name="a rank holds", value=held / MIB, unit="MiB")
        yield Figure(name="budget of a rank", value=budget / MIB, unit="MiB")
        plans, refused = self._plans(traces, budget)
        yield from refused
        taken, reports = self._train({name: {**tiers, "plan": str(self._path(name))} for name in plans})
        same_losses(taken)
        for name, steps in taken.items():
            yield from self._policy(name, steps, plans[name], reports[name], budget)
        for name in OTHERS if OURS in taken else ():
            if name in taken:
                yield from self._ratio(name, taken[OURS], taken[name])

    def _path(self, name: str) -> Path:
        """The file of the plan, or trace, of this name, with `{rank}`."""
        return self._scale.output / f"rank_optimizer-{self._way}-{name}-{{rank}}.json"

    def _ranks(self, name: str, options: Mapping[str, Any]) -> Ranks:
        setting = self._setting.model_copy(update={"options": {**self._setting.options, **options}})
        return Ranks(setting, self._scale.output / f"rank_optimizer-{self._way}-{name}-{{rank}}.log")

    def _traces(self, tiers: Mapping[str, Any]) -> list[Trace]:
        """Train until there is a trace of each rank, and return these."""
        files = [Path(str(self._path("trace")).format(rank=rank)) for rank in range(RANKS)]
        for file in files:
            file.unlink(missing_ok=True)
        with self._ranks("trace", {**tiers, "trace_out": str(self._path("trace"))}) as ranks:
            warm_up(ranks, WARM_STEPS)
        return [Trace.load(file) for file in files]

    def _plans(self, traces: list[Trace], budget: int) -> tuple[dict[str, list[Plan]], list[Figure]]:
        """Return the plans of all ranks by policy, and a figure for each policy that refuses."""
        plans, refused = {}, []
        for policy in POLICIES:
            try:
                made = [plan(trace, budgets_for(trace, budget), policy=policy) for trace in traces]
            except TeraioError as error:
                reason = f"no plan: {type(error).__name__}: {error}"
                refused.append(Figure(name=f"{policy}: iteration", value=None, unit="s", note=reason))
                continue
            for rank, each in enumerate(made):
                each.save(Path(str(self._path(policy)).format(rank=rank)))
            plans[policy] = made
        return plans, refused

    def _train(self, variants: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, list[Step]], dict[str, list[Report]]]:
        with ExitStack() as stack:
            running = {name: stack.enter_context(self._ranks(name, options)) for name, options in variants.items()}
            for ranks in running.values():
                warm_up(ranks, WARM_STEPS)
            taken = take_turns(running, self._scale.rounds)
            return taken, {name: ranks.finish() for name, ranks in running.items()}

    def _policy(self, name: str, steps: list[Step], plans: list[Plan], reports: list[Report], budget: int) -> Iterator[Figure]:
        self.samples[f"{name}, iteration"] = seconds = [step.seconds for step in steps]
        self.samples[f"{name}, optimizer step"] = updating = [step.optimizer_seconds for step in steps]
        on_host = " and ".join(str(sum(update.where == "host" for update in each.updates)) for each in plans)
        predicted = max(each.predicted.iteration_seconds for each in plans if each.predicted is not None)
        yield Figure(
            name=f"{name}: iteration",
            value=median(seconds),
            unit="s",
            note=f"{steps[-1].phase}, {len(steps)} iterations; predicted {predicted:.3g} s",
        )
        yield Figure(
            name=f"{name}: optimizer step",
            value=median(updating),
            unit="s",
            note=f"subgroups updated on the host, by rank: {on_host}",
        )
        peak = max((report.status or {})["device_peak_bytes"] for report in reports)
        yield Figure(name=f"{name}: peak / budget", value=peak / budget, unit="", aim="<= 1")

    def _ratio(self, name: str, ours: list[Step], others: list[Step]) -> Iterator[Figure]:
        for what, part in (("iteration", "seconds"), ("optimizer step", "optimizer_seconds")):
            over, under = ([getattr(step, part) for step in steps] for steps in (ours, others))
            by_round = ratios(over, under)
            note = spread(by_round)
            yield Figure(name=f"{OURS} / {name}: {what}", value=median(by_round), unit="", aim="<= 1", note=note)


def same_losses(taken: Mapping[str, list[Step]]) -> None:
    """Raise LossesDiffer unless all policies have the same losses within TOLERANCE."""
    base, *others = taken
    for name in others:
        for number, (one, other) in enumerate(zip(taken[base], taken[name], strict=True), start=1):
            if not abs(one.loss - other.loss) <= TOLERANCE * abs(one.loss):
                raise LossesDiffer(f"counted iteration {number}: {base} has loss {one.loss!r}, {name} {other.loss!r}")
