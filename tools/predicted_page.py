"""Predicts trainings whose time and memory others have published, and writes the tables of the page `docs/predicted.md`.

python -m tools.predicted_page [NAME ...]     captures and plans these anew; without names, only the tables are written

A test compares them with what this program would write. `examples/published.py` has the trainings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import planner
from examples import published
from planner.problem import live_bytes
from teraio.capturing import MachineDescription, capture
from teraio.options import parse_bytes
from tools import captured_page
from tools.captured_traces import CAPTURES, PAPER

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "predicted.md"
RESULTS = ROOT / "docs" / "predicted.json"
_DIGITS = {"GiB": 1, "GB": 2, "tokens/s": 0, "s": 2}
_DATA_SHEET = "by data sheet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published figure. what: "memory", "rate" or "time". plan: the policy of the plan whose time it is beside, "" for none."""

    what: str
    published: float
    unit: str
    plan: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training: a function of `examples/published.py`, the machine, and what was published of it. budgets: of its plans.

    assumed: the machine's efficiencies are, so that times are also told as the data sheet alone would have them.
    """

    name: str
    title: str
    machine: str
    hardware: str
    figures: Sequence[Figure]
    budgets: Mapping[str, str] = field(default_factory=dict)
    tokens: int | None = None
    samples: int | None = None
    assumed: bool = False

    @property
    def policies(self) -> list[str]:
        """Which plans are made."""
        return [figure.plan for figure in self.figures if figure.plan]

    def commands(self) -> Iterator[str]:
        """Yield what anyone can type to see the figures."""
        work = f"--tokens {self.tokens}" if self.tokens else f"--samples {self.samples}"
        yield f"teraio capture examples.published:{self.name} --hardware {self.hardware} {work} -o {self.name}.json"
        budgets = " ".join(f"--{tier} {size}" for tier, size in self.budgets.items())
        for policy in self.policies:
            yield f"teraio plan {self.name}.json {budgets}" + ("" if policy == "ilp" else f" --policy {policy}")


def _torchtune(name: str, title: str, gib: float, tokens_per_second: float) -> Case:
    figures = (
        Figure(what="memory", published=gib, unit="GiB"),
        Figure(what="rate", published=tokens_per_second, unit="tokens/s"),
    )
    return Case(name=name, title=title, machine="A100", hardware="a100", figures=figures, tokens=8192, assumed=True)


CASES = (
    _torchtune("llama_3b", "torchtune, Llama-3.2-3B, 2 x 4,096 tokens", 51.0, 8998),
    _torchtune("llama_3b_chunked", "the same, loss in parts", 42.9, 9174),
    _torchtune("llama_3b_checkpointed", "the same, checkpointing", 24.9, 7210),
    Case(
        name="vit_g",
        title="torchao, ViT-g, 32 images",
        machine="RTX 4070 Ti SUPER",
        hardware="traces/captured/rtx-4070-ti-super.json",
        figures=(Figure(what="memory", published=9.90, unit="GB"), Figure(what="time", published=1.18, unit="s")),
        samples=32,
        assumed=True,
    ),
    Case(
        name="llama_8b",
        title="shadowspill, Llama-3-8B, 65,536 tokens",
        machine="RTX 5090, 16 GiB",
        hardware="traces/captured/rtx-5090-shadowspill.json",
        figures=(
            Figure(what="time", published=18.43, unit="s", plan="ilp"),
            Figure(what="time, nothing recomputed", published=22.22, unit="s", plan="offload-only"),
        ),
        budgets={"device": "16GiB", "host": "112GiB"},
        tokens=65536,
    ),
    Case(
        name="llama_8b_lora",
        title="the same, LoRA of rank 32",
        machine="RTX 5090, 16 GiB",
        hardware="traces/captured/rtx-5090-shadowspill.json",
        figures=(Figure(what="time", published=13.49, unit="s", plan="ilp"),),
        budgets={"device": "16GiB", "host": "112GiB"},
        tokens=65536,
    ),
    Case(
        name="olmoe_7b",
        title="shadowspill, OLMoE-7B, 65,536 tokens",
        machine="RTX 5090, 16 GiB",
        hardware="traces/captured/rtx-5090-shadowspill.json",
        figures=(Figure(what="time", published=4.76, unit="s", plan="ilp"),),
        budgets={"device": "16GiB", "host": "112GiB"},
        tokens=65536,
    ),
    Case(
        name="qwen_7b",
        title="MegaTrain, Qwen2.5-7B, 158 x 1,024 tokens",
        machine="H100",
        hardware="h100",
        figures=(Figure(what="time", published=27.2, unit="s", plan="ilp"),),
        budgets={"device": "80GB", "host": "512GB", "storage": "0"},
        tokens=158 * 1024,
        assumed=True,
    ),
)


def found(case: Case) -> dict[str, Any]:
    """Capture and plan a training, and return what the page tells of it."""
    machine = MachineDescription.load(case.hardware if "/" not in case.hardware else ROOT / case.hardware)
    result = _found(case, machine)
    return result | {_DATA_SHEET: _found(case, _at_its_peaks(machine))} if case.assumed else result


def _at_its_peaks(machine: MachineDescription) -> MachineDescription:
    """Return the machine as its data sheet has it: the whole clock, every peak reached, kernels launched in no time."""
    efficiencies = ("matmul_efficiency", "attention_efficiency", "attention_backward_efficiency", "memory_efficiency")
    update = dict.fromkeys(("clock_share", *efficiencies), 1.0) | dict.fromkeys(("launch_seconds", "operator_seconds"), 0.0)
    return machine.model_copy(update=update)


def _found(case: Case, machine: MachineDescription) -> dict[str, Any]:
    trace = capture(getattr(published, case.name), hardware=machine, tokens=case.tokens, samples=case.samples)
    plans = {}
    for policy in case.policies:
        budgets = {f"{tier}_bytes": 0 if size == "0" else parse_bytes(tier, size) for tier, size in case.budgets.items()}
        plan = planner.plan(trace, planner.Budgets(**budgets), policy=policy)
        assert plan.predicted is not None
        plans[policy] = plan.predicted.model_dump(mode="json")
        print(f"{case.name}, {policy}: {plan.predicted.iteration_seconds:.3f} s", flush=True)
    assert trace.work is not None
    return {
        "created_by": trace.created_by,
        "stages": len(trace.stages),
        "peak_bytes": max(live_bytes(trace)),
        "ideal_seconds": trace.ideal_seconds,
        "work": trace.work.model_dump(mode="json"),
        "plans": plans,
    }


def page(text: str, results: Mapping[str, Any]) -> str:
    """Return the content of `docs/predicted.md` with the present tables and commands between their marks."""
    commands = "\n".join(["```", *(line for case in CASES for line in case.commands()), "```"])
    for name, part in (("predicted", _table(results)), ("commands", commands), ("TERAIO", _teraio_table(results))):
        begin, end = f"<!-- begin {name}: written by python -m tools.predicted_page -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{part}\n\n{end}{rest.partition(end)[2]}"
    return text


def _teraio_table(results: Mapping[str, Any]) -> str:
    planned = json.loads(captured_page.RESULTS.read_text())
    lines = ["| training | of the ideal, published | predicted | in use, published | predicted |", "|---|---|---|---|---|"]
    plans = {name: planned[name]["plans"]["teraio, drives"] for name in results["in use"]}
    shares = {name: plan["ideal_seconds"] / plan["iteration_seconds"] for name, plan in plans.items()}
    for name, used in results["in use"].items():
        published = captured_page.PUBLISHED[name][1]
        lines.append(f"| {planned[name]['title']} | {published} | {_percent(shares[name])} | | {_percent(used)} |")
    average, used = (_percent(sum(each.values()) / len(each)) for each in (shares, results["in use"]))
    return "\n".join([*lines, f"| average | 80.7 % | {average} | 1.7 % | {used} |"])


def in_use() -> dict[str, float]:
    """Return for TERAIO's trainings the share of the allocated bytes that a stage uses, on average over time."""
    shares = {}
    for each in CAPTURES:
        if each.hardware == PAPER:
            trace = planner.Trace.load(each.path)
            used = [0] * len(trace.stages)
            for block in trace.blocks:
                for stage in {*block.reads, *block.writes}:
                    used[stage] += block.size_bytes
            seconds = [stage.duration_seconds for stage in trace.stages]
            weighted = sum(time * size / live for time, size, live in zip(seconds, used, live_bytes(trace), strict=True))
            shares[each.name] = weighted / sum(seconds)
    return shares


def _table(results: Mapping[str, Any]) -> str:
    heads = ("training", "machine", "figure", "published", "predicted", "difference", _DATA_SHEET)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in CASES:
        for figure in case.figures if case.name in results else ():
            result = results[case.name]
            value = _value(figure, result)
            sheet = _text(_value(figure, result[_DATA_SHEET]), figure.unit) if case.assumed and figure.what != "memory" else ""
            cells = [case.title, case.machine, figure.what, _text(figure.published, figure.unit), _text(value, figure.unit)]
            off = value / figure.published - 1
            lines.append(f"| {' | '.join(cells)} | {'+' if off >= 0 else '−'} {_percent(abs(off))} | {sheet} |")
    return "\n".join(lines)


def _value(figure: Figure, result: Mapping[str, Any]) -> float:
    """Return what was predicted, in the unit of the figure."""
    seconds = result["plans"][figure.plan]["iteration_seconds"] if figure.plan else result["ideal_seconds"]
    of_unit = {
        "GiB": result["peak_bytes"] / 2**30,
        "GB": result["peak_bytes"] / 1e9,
        "tokens/s": (result["work"]["tokens"] or 0) / seconds,
        "s": seconds,
    }
    return float(of_unit[figure.unit])


def _text(value: float, unit: str) -> str:
    return f"{value:,.{_DIGITS[unit]}f} {unit}"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def main(names: Sequence[str]) -> None:
    """Capture and plan the trainings with these names ("in use": TERAIO's), and write the tables. Results are kept after each."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    makers = {case.name: partial(found, case) for case in CASES} | {"in use": in_use}
    for name in names:
        results[name] = makers[name]()
        ordered = {each: results[each] for each in makers if each in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), results))


if __name__ == "__main__":
    main(sys.argv[1:])
