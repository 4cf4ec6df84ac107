"""Keep, offload or recompute: Llama-3-8B with one lower tier, planned with and without recomputation, and with checkpoints."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.machines import H100_BF16, H100_NVL, H100_NVL_TF32, RTX_4090_BF16, Machine
from benchmarks.results import Figure
from benchmarks.transformer_trace import LLAMA_3_8B, Model, Workload
from benchmarks.turns import Scale
from benchmarks.variants import peak_bytes, with_device_updates, with_one_tier
from planner import Budgets, TeraioError, Trace, floor, plan, recomputed, simulate
from planner.problem import RerunPlaces, live_bytes
from planner.schema import WaitingTier

SHARES = (0.7, 0.5, 0.3, 0.15)
POLICIES = ("offload-only", "checkpoint", "ilp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A machine with one lower tier at a rate, and sequences of 2,048 tokens. `element_bytes`: of everything."""

    name: str
    machine: Machine
    batch: int
    element_bytes: int
    tier: WaitingTier
    bytes_per_second: float
    model: Model = LLAMA_3_8B

    def trace(self) -> Trace:
        """Return the iteration; all updates run on the device."""
        workload = Workload(model=self.model, batch=self.batch, sequence=2048, element_bytes=self.element_bytes)
        return with_device_updates(with_one_tier(workload.trace(self.machine), self.tier, self.bytes_per_second))


ROWS = (
    Row(name="H100 bf16, 16k, 55", machine=H100_BF16, batch=8, element_bytes=2, tier="host", bytes_per_second=55e9),
    Row(name="H100 bf16, 64k, NVMe 12", machine=H100_BF16, batch=32, element_bytes=2, tier="storage", bytes_per_second=12e9),
    Row(name="H100 TF32, 16k, 55", machine=H100_NVL_TF32, batch=8, element_bytes=4, tier="host", bytes_per_second=55e9),
    Row(name="4090 bf16, 16k, NVMe 3", machine=RTX_4090_BF16, batch=8, element_bytes=2, tier="storage", bytes_per_second=3e9),
    Row(name="H100 fp32, 16k, 55", machine=H100_NVL, batch=8, element_bytes=4, tier="host", bytes_per_second=55e9),
    Row(name="4090 bf16, 16k, 25", machine=RTX_4090_BF16, batch=8, element_bytes=2, tier="host", bytes_per_second=25e9),
)
"""Numbers in the names: tokens, and GB/s in each direction."""


def measure(scale: Scale) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return, by row and policy, the iteration time over the ideal time at SHARES of the peak; and how far the floor falls.

    Takes about half an hour. The results so far are in `planner_recompute.tsv` in the output folder.
    """
    samples: dict[str, list[float]] = {}
    figures: list[Figure] = []
    with (scale.output / "planner_recompute.tsv").open("w") as log:
        for row in ROWS:
            trace = row.trace()
            figures.append(floor_figure(row, trace))
            for share in SHARES:
                for policy in POLICIES:
                    found = outcome(trace, share, policy)
                    samples[f"{row.name} | {share:.0%} | {policy}"] = found
                    print(row.name, share, policy, *found, sep="\t", file=log, flush=True)
                    print(f"  {row.name}, {share:.0%}, {policy}: {found}", file=sys.stderr, flush=True)
    return (*figures, *table_figures(samples)), samples


def outcome(trace: Trace, share: float, policy: str) -> list[float]:
    """Return time over ideal, time over the bound, time of re-runs over ideal, planning seconds (CPU); empty if refused."""
    budgets = Budgets(device_bytes=int(peak_bytes(trace) * share))
    began = time.process_time()
    try:
        made = plan(trace, budgets, policy=policy)
    except TeraioError:
        return []
    seconds = time.process_time() - began
    assert made.predicted is not None  # every policy's plan is replayed
    taken = simulate(trace, made).iteration_seconds
    again = made.predicted.recompute_seconds / trace.ideal_seconds
    return [taken / trace.ideal_seconds, taken / made.predicted.lower_bound_seconds, again, seconds]


def floor_figure(row: Row, trace: Trace) -> Figure:
    """Return the floor if nothing can leave, with recomputation, over the peak."""
    alone = trace.model_copy(update={"hardware": trace.hardware.model_copy(update={"links": ()})})
    places = RerunPlaces(trace)
    everything = recomputed(trace, places.of(places.usable))
    note = f"peak {peak_bytes(trace) / 1e9:.1f} GB; all groups at once {max(live_bytes(everything)) / 1e9:.1f} GB"
    return Figure(name=f"{row.name}: floor without a tier / peak", value=floor(alone)[0] / peak_bytes(trace), unit="", note=note)


def table_figures(samples: dict[str, list[float]]) -> Iterator[Figure]:
    """Return, by row and policy, the longest planning time with the times over ideal and over the bound; and the cases lost."""
    for row in ROWS:
        for policy in POLICIES:
            found = [samples[f"{row.name} | {share:.0%} | {policy}"] for share in SHARES]
            times = " ".join(f"{one[0]:.2f}" if one else "–" for one in found)
            over = " ".join(f"{one[1]:.2f}" if one else "–" for one in found)
            longest = max((one[3] for one in found if one), default=None)
            yield Figure(
                name=f"{row.name}: {policy}, planning at most", value=longest, unit="s", note=f"{times}; over bound {over}"
            )
    lost = sum(
        1
        for row in ROWS
        for share in SHARES
        for policy in POLICIES[:-1]
        if _slower(samples, f"{row.name} | {share:.0%} | ", policy)
    )
    yield Figure(name="cases in which ilp is slower than another", value=lost, unit="", aim="<= 0", note=f"of {len(ROWS) * 4}")


def _slower(samples: dict[str, list[float]], case: str, policy: str) -> bool:
    own, other = samples[f"{case}{POLICIES[-1]}"], samples[f"{case}{policy}"]
    return bool(other) and (not own or own[0] > other[0] * (1 + 1e-6))
