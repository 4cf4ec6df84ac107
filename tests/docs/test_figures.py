"""Figures in the documentation are those of the files that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .pages import DOCS, README, ROOT, Page

RESULTS = ROOT / "benchmarks" / "results"
POLICIES = RESULTS / "2026-11-23T090652-amd_epycx2-planner_policies.json"
OPTIMIZER = RESULTS / "2026-11-22T030900-intel_r__xeon_r__processorx2-optimizer.json"
SWEEP = RESULTS / "2026-11-21T135641-amd_epycx2-stage_overhead-budget_sweep-rss-prediction-compile_time-engine.json"
RECOMPUTE = RESULTS / "2026-11-23T062436-amd_epycx2-planner_recompute.json"
BOUNDS = [RESULTS / f"2026-11-23T{time}-amd_epycx2-planner_bound.json" for time in ("092605", "095404")]


def test_pages_tell_no_more_tests_than_there_are(request: pytest.FixtureRequest) -> None:
    """Counted are those that pytest has collected, if it has collected all of a folder or file."""
    collected = [item.nodeid for item in request.session.items]
    told = re.findall(r"`(tests/[\w./]+)` \(over (\d+) tests\b", "".join(page.text for page in DOCS.values()))
    assert len(told) > 5
    for path, count in told:
        files = [ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py")
        names = {str(file.relative_to(ROOT)) for file in files}
        if names <= {item.partition("::")[0] for item in collected} and not request.config.getoption("keyword"):
            found = sum(item.partition("::")[0] in names for item in collected)
            assert found > int(count), f"{path} has {found}"


def test_the_page_of_trust_tells_no_more_rows_than_there_are() -> None:
    rows = {
        "[real models]": len(json.loads((ROOT / "docs" / "models.json").read_text())["results"]),
        "and a test for each": len(re.findall(r"^\|.*`tests/.*\|$", DOCS["faults"].text, re.MULTILINE)),
    }
    for what, count in rows.items():
        (line,) = (line for line in DOCS["trust"].text.splitlines() if what in line)
        (told,) = re.findall(r"over (\d+) rows", line)
        assert count > int(told), f"{what}: {count}"


def figures(path: Path, page: Page) -> dict[str, dict[str, Any]]:
    """The figures of all parts by name, of a file that the page names."""
    assert path.name in page.text
    return {figure["name"]: figure for part in json.loads(path.read_text())["results"] for figure in part["figures"]}


@pytest.mark.parametrize(("page", "heading"), [(README, "generated trace"), (DOCS["policies"], "trace")])
def test_what_the_planner_is_worth(page: Page, heading: str) -> None:
    found = figures(POLICIES, page)
    samples = json.loads(POLICIES.read_text())["results"][0]["samples"]
    rows = page.table(heading)
    assert len(rows) >= 4
    for trace, *cells in rows:
        for policy, cell in zip(("ilp", "teraio", "g10", "zero-infinity", "belady"), cells, strict=True):
            mean = found[f"{trace}: {policy}, time / bound"]["value"]
            worst = max(s[1] for name, s in samples.items() if name.startswith(f"{trace} | ") and name.endswith(f"| {policy}"))
            assert cell == f"{mean:.2f} ({worst:.2f})", f"{trace}, {policy}"


def test_the_optimizer_s_step() -> None:
    page = DOCS["benchmarks"]
    found = figures(OPTIMIZER, page)
    for row in [line for line in page.text.splitlines() if line.startswith("| ") and re.search(r"\| \**\d\.\d\d s", line)]:
        name, iteration, step, *_ = [cell.strip(" *") for cell in row.strip("|").split("|")]
        name = name.replace("`", "").replace("Inductor, no budget", "Inductor")
        assert iteration == f"{found[f'{name}: iteration']['value']:.2f} s"
        assert step == f"{found[f'{name}: optimizer step']['value']:.2f} s"


def test_training_under_a_budget() -> None:
    page = DOCS["benchmarks"]
    found = figures(SWEEP, page)
    rows = page.table("budget, of the peak")
    assert len(rows) == 3
    for budget, teraio, spread, checkpointing in rows:
        assert teraio == f"{found[f'teraio {budget}']['value']:.2f}"
        assert found[f"teraio {budget}"]["note"].endswith(f"rounds from {spread}")
        assert checkpointing.startswith(f"{found[f'checkpoint {budget}']['value']:.2f} ")


def test_what_recomputation_is_worth() -> None:
    page = DOCS["policies"]
    found = figures(RECOMPUTE, page)
    rows = page.table("tokens, GB/s")
    assert len(rows) == 6
    for name, *cells in rows:
        expected = []
        for policy in ("offload-only", "checkpoint", "ilp"):
            times, _, over = found[f"{name}: {policy}, planning at most"]["note"].partition("; over bound ")
            expected.append(times)
        assert cells == [*expected, over, f"{found[f'{name}: ilp, planning at most']['value']:.1f}"]


def test_how_far_plans_are_above_the_bound() -> None:
    page = DOCS["policies"]
    assert all(path.name in page.text for path in BOUNDS)
    samples = {}
    for path in (POLICIES, *BOUNDS):  # what is in several was planned again
        samples |= json.loads(path.read_text())["results"][0]["samples"]
    rows = page.table("`ilp`, links' own rates")
    assert len(rows) == 5
    for trace, *cells in rows:
        for budget, cell in zip(("90%", "70%", "50%", "30%", "floor + 5 %"), cells, strict=True):
            assert cell == f"{samples[f'{trace} | {budget} | x1 | ilp'][1]:.3f}", f"{trace}, {budget}"
