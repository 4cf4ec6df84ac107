"""Plans the traces of `traces/captured` and writes the page about them, `docs/captured.md`.

python -m tools.captured_page [NAME ...]     all traces by default; what `docs/captured.json` has already is not planned again

A test compares the page with what this program would write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import planner
from planner.problem import live_bytes
from tools.captured_traces import CAPTURES, PAPER, Capture

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "captured.md"
RESULTS = ROOT / "docs" / "captured.json"
_TIME_LIMIT_SECONDS = 300.0

PUBLISHED: Mapping[str, tuple[str, str]] = {
    "llama-3-8b": ("188 to 191 %", "near 100 %"),
    "granite-8b-code": ("379 to 387 %", "near 100 %"),
    "llama-3-70b": ("940 to 1243 %", "59.7 %"),
}
"""TERAIO (Yuan et al., 2025): the peak of memory as a share of the GPU's, and the speed as a share of the ideal."""

INTRODUCTION = """\
# Captured traces

<!-- written by python -m tools.captured_page -->

`traces/captured` has traces of trainings at full size, captured without their memory and without a GPU, with the stages and the
attention of one (see [Capture](capture.md)).
`python -m tools.captured_traces` makes them anew, `python -m tools.captured_page` plans them and writes this page. Nothing
here was measured: times are estimates for the machine, and plans are replayed by the simulator.
"""

PAPER_TABLE = """\
## Beside TERAIO's published figures

The machine: one H100 NVL (94 GB) with four drives of 6.7 GB/s (reads) and 6.5 GB/s (writes), described in
`traces/captured/h100-nvl-four-drives.json`. The device budget is the GPU's memory. *Of the ideal*: the time of an iteration
that never waits, over the time of the plan.
"""

DIFFERENCES = """\
What differs, so that the columns are no race:

* TERAIO's figures are measured, on two GPUs with eight drives. These are predictions, for one GPU with its four drives.
* The batches are ours, chosen so that generated traces have a peak in the published range; captured ones need more. With
  more tokens an iteration computes for longer, and the same copies hide behind it more easily.
* The ideal here is estimated: plain fp32 at 80 % of the data sheet's peak. If a GPU computes faster than that, more of the
  copies show.
* TERAIO may use host memory once the drives are busy. The columns say what each plan may use. `teraio` is its greedy policy,
  written anew in this project. `offload-only` is the integer program, `ilp` may also recompute and update on the host.
* A real run loses memory in gaps of the allocator, which no trace has.
"""

OTHERS = """\
## Other models

An RTX 4090 (24 GB, PCIe 4, one drive, 64 GB of host memory), as `teraio capture --hardware rtx4090` describes it. The device
budget is half of what the training needs if nothing moves, or the smallest budget that works where that is more.
"""


def settings(capture: Capture, trace: planner.Trace) -> Iterator[tuple[str, str, planner.Budgets]]:
    """Yield a name, a policy and budgets for each plan of a trace."""
    if capture.hardware != PAPER:
        device = max(max(live_bytes(trace)) // 2, planner.floor(trace)[0])
        host = trace.hardware.host_memory_bytes
        yield "ilp", "ilp", planner.Budgets(device_bytes=device, host_bytes=host)
        yield "teraio", "teraio", planner.Budgets(device_bytes=device, host_bytes=host)
        return
    device = trace.hardware.device_memory_bytes
    yield "teraio, drives", "teraio", planner.Budgets(device_bytes=device, host_bytes=0)
    yield "offload-only, drives", "offload-only", planner.Budgets(device_bytes=device, host_bytes=0)
    yield "ilp, host", "ilp", planner.Budgets(device_bytes=device, host_bytes=trace.hardware.host_memory_bytes)


def found(capture: Capture, known: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield what the page tells of a trace, after each plan. known: what was found before, kept if the trace is the same."""
    trace = planner.Trace.load(capture.path)
    plans = dict(known["plans"]) if known is not None and known["fingerprint"] == trace.fingerprint else {}
    for name, policy, budgets in settings(capture, trace):
        if name in plans:
            continue
        made = planner.plan(trace, budgets, policy=policy, time_limit_seconds=_TIME_LIMIT_SECONDS)
        assert made.predicted is not None
        plans[name] = {**made.predicted.model_dump(mode="json"), "device_bytes": budgets.device_bytes}
        print(f"{capture.name}, {name}: {made.predicted.iteration_seconds:.3f} s, ideal {trace.ideal_seconds:.3f} s", flush=True)
        yield _told(trace, plans)
    yield _told(trace, plans)


def _told(trace: planner.Trace, plans: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "fingerprint": trace.fingerprint,
        "title": trace.name,
        "created_by": trace.created_by,
        "stages": len(trace.stages),
        "blocks": len(trace.blocks),
        "peak_bytes": max(live_bytes(trace)),
        "floor_bytes": planner.floor(trace)[0],
        "plans": dict(plans),
    }


def page(results: Mapping[str, Any]) -> str:
    """Return the content of `docs/captured.md`."""
    paper = [each.name for each in CAPTURES if each.hardware == PAPER and each.name in results]
    others = [each.name for each in CAPTURES if each.hardware != PAPER and each.name in results]
    parts = [INTRODUCTION, PAPER_TABLE, _paper_table(paper, results), "", DIFFERENCES, OTHERS, _other_table(others, results)]
    return "\n".join(parts) + "\n"


def _paper_table(names: list[str], results: Mapping[str, Any]) -> str:
    rows = [
        "| trace | stages | peak | of 94 GB (published) | without waiting | `teraio`, drives only | `offload-only`, drives only "
        "| `ilp`, with 128 GB of host memory | TERAIO, published |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        result = results[name]
        plans = result["plans"]
        memory, speed = PUBLISHED[name]
        first = plans["teraio, drives"]
        device = first["device_bytes"]
        cells = [
            result["title"],
            str(result["stages"]),
            _gb(result["peak_bytes"]),
            f"{result['peak_bytes'] / device:.0%} ({memory})",
            f"{first['ideal_seconds']:.2f} s",
            *(_of_ideal(plans.get(plan)) for plan in ("teraio, drives", "offload-only, drives", "ilp, host")),
            f"{speed} of the ideal",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _other_table(names: list[str], results: Mapping[str, Any]) -> str:
    rows = [
        "| trace | stages | peak | smallest budget | budget | without waiting | `ilp` | `teraio` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        result = results[name]
        plan = result["plans"]["ilp"]
        cells = [
            result["title"],
            str(result["stages"]),
            _gb(result["peak_bytes"]),
            _gb(result["floor_bytes"]),
            _gb(plan["device_bytes"]),
            f"{plan['ideal_seconds']:.3f} s",
            _of_ideal(plan),
            _of_ideal(result["plans"]["teraio"]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _of_ideal(plan: Mapping[str, Any] | None) -> str:
    if plan is None:
        return "not planned"
    seconds = plan["iteration_seconds"]
    return f"{seconds:.2f} s, {plan['ideal_seconds'] / seconds:.1%} of the ideal"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def main(names: list[str]) -> None:
    """Plan what is new of these traces, and rewrite the page. Results are kept after each plan."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for capture in CAPTURES:
        if not names or capture.name in names:
            for told in found(capture, results.get(capture.name)):
                results[capture.name] = told
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main(sys.argv[1:])
