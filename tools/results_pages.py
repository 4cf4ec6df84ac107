"""Writes what is made of the files in benchmarks/results: the README's first table, and the page of trends, `docs/trends.md`.

python -m tools.results_pages

A test compares both with what this program would write, and wants every result file to be named by some page.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "trends.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- begin: written by python -m tools.results_pages -->", "<!-- end of results -->"

# What GPUs are emulated with, as it is named in the figures.
_H100 = "emulated H100 SXM 80 GB, PCIe 5, one NVMe drive"
_CPU = "2026-11-21T135641-amd_epycx2-stage_overhead-budget_sweep-rss-prediction-compile_time-engine.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """A training of the README's table on an H100. session, training: in the file. part: of the benchmarks, that trains it."""

    file: str
    session: int
    training: str
    model: str
    told: str
    part: str


_PLANNED, _RIVALS = "2026-11-27T014800-h100-planned.json", "2026-11-28T031500-h100-rivals.json"
_8B_H100, _OF_8B = "Llama-3-8B, H100", "gpu_headline --size llama-3-8b --each 5 --minutes 15"
_1B_H100, _RIVALS_OF_8B = "Llama-3.2-1B, H100", "rivals --size llama-3-8b --each 5 --minutes 30"
MEASURED = (
    Measured(_RIVALS, 1, "8b-50", _8B_H100, "**teraio**; all that it takes: 92 GiB", _OF_8B),
    Measured(_RIVALS, 2, "8b-fsdp2-ckpt", _8B_H100, "FSDP2's `CPUOffloadPolicy`, checkpointing", _RIVALS_OF_8B),
    Measured(_RIVALS, 1, "1b-inductor", _1B_H100, "Inductor, all the memory that it takes", "gpu_headline"),
    Measured(_PLANNED, 1, "1b-ckpt", _1B_H100, "Inductor, checkpointing", "gpu_budgets"),
    Measured(_PLANNED, 1, "1b-70", _1B_H100, "**teraio**", "gpu_budgets"),
    Measured(_RIVALS, 1, "1b-50", _1B_H100, "**teraio**", "gpu_headline"),
    Measured(_RIVALS, 2, "1b-zero-offload-ckpt", _1B_H100, "DeepSpeed's ZeRO-Offload, checkpointing", "rivals"),
    Measured(_RIVALS, 2, "1b-fsdp2-ckpt", _1B_H100, "FSDP2's `CPUOffloadPolicy`, checkpointing", "rivals"),
    Measured(_RIVALS, 1, "1b-30", _1B_H100, "**teraio**", "gpu_headline"),
)


@dataclass(frozen=True, slots=True)
class Emulated:
    """A training of the README's table on the emulated H100. percent: of the memory that it takes by itself, 100 for all of it.
    way: as the benchmark names it."""

    percent: int
    way: str
    told: str


_8B = ("2026-11-24T233809-amd_epycx2-emulated.json", "2026-11-27T083037-intel_r__xeon_r__processorx2-emulated.json")
"""What the later file has counts. The other ways have run with the earlier description of the machine only."""
EMULATED = (
    Emulated(100, "", "all the memory that it takes, more than the GPU has"),
    Emulated(50, "teraio, host", "**teraio**"),
    Emulated(30, "teraio, host", "**teraio**"),
    Emulated(30, "torchao, CPUOffloadOptimizer, checkpointing", "torchao's `CPUOffloadOptimizer`, checkpointing"),
    Emulated(30, "FSDP2, CPUOffloadPolicy, checkpointing", "FSDP2's `CPUOffloadPolicy`, checkpointing"),
    Emulated(50, "checkpointing", "checkpointing"),
)


def results_table() -> str:
    """Return the README's table: what memory each technique takes, and how fast it is."""
    lines = ["| training | technique | GiB | tokens/s | command: `python -m benchmarks` … |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *_on_h100(), *(_emulated(row) for row in EMULATED), *_on_cpu()])


def _on_h100() -> Iterator[str]:
    """Yield the rows of the trainings on a real H100."""
    for row in MEASURED:
        trainings = json.loads((RESULTS / row.file).read_text())["trainings"]
        training = next(each for each in trainings if (each["session"], each["training"]) == (row.session, row.training))
        speed = training["groups"][0]["tokens"] / median(group["seconds"] for group in training["groups"])
        gib = _gib(training["report"]["peak_reserved_bytes"] / 1e9)
        yield f"| {row.model} | {row.told} | {gib} | {speed:,.0f} | `--device cuda {row.part}` |"


def _emulated(row: Emulated) -> str:
    """Return the row of a training on the emulated H100."""
    gib, speed = _emulated_figures(row)
    return f"| Llama-3-8B, emulated H100 | {row.told} | {gib} | {speed} | `{_command(row)}` |"


def _emulated_figures(row: Emulated) -> tuple[str, str]:
    """Return GiB and tokens per second of an emulated training."""
    figures, tokens = _figures(*_8B)
    name = f"{_H100}, llama-3-8b, "
    if row.percent == 100:
        half = _gigabytes(figures[f"{name}50 %, teraio, host: reserved / budget"])[1]
        return _gib(2 * half), f"{tokens / figures[f'{name}eager without a budget']['value']:,.0f}"
    name += f"{row.percent} %, {row.way}"
    if figures[name]["value"] is None:
        assert "OutOfMemory" in figures[name]["note"]
        budget = _gigabytes(next(figure for name, figure in figures.items() if f" {row.percent} %, teraio, host: res" in name))[1]
        return _gib(budget), "out of memory"
    return _gib(_gigabytes(figures[f"{name}: reserved / budget"])[0]), f"{tokens / figures[name]['value']:,.0f}"


def _command(row: Emulated) -> str:
    way = f'--percent {row.percent} --way "{row.way}"' if row.way else '--percent 50 --way "teraio, host"'
    return f"emulated --machine h100 --size llama-3-8b {way}"


def _on_cpu() -> Iterator[str]:
    """Yield the rows of the training on the CPU."""
    figures, tokens = _figures(_CPU)
    peak = figures["tensors' peak, unconstrained"]["value"] / 1024
    seconds = figures["unconstrained"]["value"]
    for share, name, told in (
        (1.0, "", "all the memory that it takes"),
        (0.5, "50 %", "**teraio**"),
        (0.3, "30 %", "**teraio**"),
    ):
        speed = tokens / seconds * (figures[f"teraio {name}"]["value"] if name else 1)
        yield f"| GPT of 6 layers, two cores of a CPU | {told} | {share * peak:.2f} | {speed:,.0f} | `budget_sweep` |"


def _figures(*files: str) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the figures of files by name, of equal ones that of the last file, and the tokens of an iteration."""
    results = [part for file in files for part in json.loads((RESULTS / file).read_text())["results"]]
    scale = results[-1]["settings"]["scale"]
    return {figure["name"]: figure for part in results for figure in part["figures"]}, int(scale["batch"]) * int(scale["context"])


def _gigabytes(figure: Mapping[str, Any]) -> tuple[float, float]:
    """Return what was reserved, and the budget, in GB, from the note of a figure."""
    found = re.fullmatch(r"([\d.]+) of ([\d.]+) GB", figure["note"])
    assert found is not None, figure
    return float(found[1]), float(found[2])


def _gib(gigabytes: float) -> str:
    return f"{gigabytes * 1e9 / 2**30:.1f}"


INTRODUCTION = """\
# Trends

<!-- written by python -m tools.results_pages -->

What the files in `benchmarks/results` say of the same figure at different times. Machines were shared: a jump may be the
machine's. What was expected, and what was concluded, is on the page [Benchmarks](benchmarks.md); a file that no page names is
removed.
"""


@dataclass(frozen=True, slots=True)
class Trend:
    """Figures of one part of the benchmarks. columns: by heading the name of a figure; one without a name of its own in the file,
    such as "a move", has that of the figure before it with ": " in it in front."""

    title: str
    part: str
    columns: Mapping[str, str]
    options: str = ""


TRENDS = (
    Trend(
        "Python's time, with 2,000 blocks and a full device",
        "host_cost",
        {what: f"whole path, 2,000 blocks: {what}" for what in ("a stage", "a move", "an iteration")},
    ),
    Trend("Without a budget, over plain Inductor", "stage_overhead", {"time": "teraio / Inductor"}),
    Trend(
        "The migration engine, over direct I/O without it",
        "engine",
        {"writing": "engine / raw, device->storage", "reading": "engine / raw, storage->device"},
    ),
    Trend(
        "Llama-3.2-1B on an emulated H100, an iteration; since 2026-11-26 16:41 with the driver's time to map memory",
        "emulated",
        {
            "no budget": f"{_H100}, llama-3.2-1b, eager without a budget",
            **{f"{share} %": f"{_H100}, llama-3.2-1b, {share} %, teraio, host" for share in (70, 50, 30)},
        },
        ' --machine h100 --size llama-3.2-1b --way "teraio, host"',
    ),
)


def trends_page(contents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the content of `docs/trends.md`. contents: of the result files by name, in the order of their dates."""
    return INTRODUCTION + "".join(
        f"\n## {trend.title}\n\nOnce more: `python -m benchmarks {trend.part}{trend.options}`\n\n{_table(trend, contents)}\n"
        for trend in TRENDS
    )


def _table(trend: Trend, contents: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"| measured at | {' | '.join(trend.columns)} | file |", "|---|" + "---|" * (len(trend.columns) + 1)]
    for file, content in contents.items():
        found = {
            name: figure for part in content.get("results", ()) if part["part"] == trend.part for name, figure in _named(part)
        }
        cells = [_cell(found.get(name)) for name in trend.columns.values()]
        if any(cells):
            lines.append(
                f"| {content['measured_at'][:16].replace('T', ' ')} | {' | '.join(cells)} | `benchmarks/results/{file}` |"
            )
    return "\n".join(lines)


def _named(part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    before = ""
    for figure in part["figures"]:
        name = figure["name"]
        before = name.partition(": ")[0] if ": " in name else before
        yield name, figure
        yield f"{before}: {name}", figure


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure["value"] is None:
        return ""
    return f"{figure['value']:.3g} {figure['unit']}".strip()


def result_files() -> dict[str, Mapping[str, Any]]:
    """Return the contents of all result files by name, in the order of their dates."""
    return {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def with_table(readme: str) -> str:
    """Return the README with the present table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n{results_table()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Rewrite both."""
    README.write_text(with_table(README.read_text()))
    PAGE.write_text(trends_page(result_files()))


if __name__ == "__main__":
    main()
