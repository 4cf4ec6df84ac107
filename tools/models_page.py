"""Writes the page of real models, `docs/models.md`, from what `make test-models` found: `docs/models.json`.

python -m tools.models_page

A test compares the page with what this program would write.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "docs" / "models.json"
MIB = 1 << 20

INTRODUCTION = """\
# Real models

<!-- written by python -m tools.models_page -->

`make test-models` trains these models twice: without a budget, and with about half of the memory that tensors took then.
Nothing is downloaded: each model is made from a small configuration, with random weights and random data. Graphs are cut
as finely as they can be (in scripts that start new processes, as usual). All run on one thread of a CPU, with AdamW unless the
row names another optimizer.

* **code**: how the stages of both runs were compiled, see [`codegen`](options.md#codegen). `eager` runs operator by operator;
  `inductor` is the default.
* **equal bits**: all losses, gradients, parameters and buffers of all steps are the same with and without the budget. The
  number is that of the tensors compared.
* **budget**: half of the peak, or the smallest budget that works and up to a sixteenth on top where that is more. In models as
  small as these many tensors have less than 1 MiB. Those never move, so budgets below the half are rarer than for models
  of real size.
* **moved**: bytes that left the device in the last iteration. Nearly as many came back.
* **planned**: a plan was in force at the end; *on demand*: too few steps for a plan.
"""

EAGER = """\
## Beside PyTorch without a compiler

torch.compile computes some operators by others, so losses agree with those of plain PyTorch to rounding. With AdamW, the
biases of attention's keys still differ widely. Their gradient is zero in theory, because softmax does not see what is added
to all scores of a row; what is computed is rounding noise, and Adam divides it by its own size. In a CLIP of three layers
each for text and images, after four steps, these six differ by 1.05 to 1.8 times their norm, at gradients of 2e-9 to 6e-9,
and all other parameters by 8e-4 at the most.
"""

CHECKPOINTS = """\
## Checkpoints

Training stops after three steps and goes on in another run: under the budget first and without it then, and the other way
round. Parameters and states travel by `save_pretrained` (safetensors), `from_pretrained` and `torch.save`, or by
`torch.distributed.checkpoint`. After three more steps the parameters have the bits of a training that never stopped. Going
back to a checkpoint while blocks are away is tested too (`tests/models/test_checkpoints.py`).
"""

PACKAGES = """\
## Packages

The extra `models` holds the packages but timm: `pip install -c constraints.txt -e '.[dev,models]'`. timm needs torchvision,
which has to be of the same build as torch. The wheels on PyPI are built for CUDA. Beside a CPU build of torch the import of
such a torchvision fails, and that of transformers and timm with it. So `make test-models` installs timm and torchvision
into a folder of their own, `build/timm`, and the tests declare the two operators of torchvision that the import asks for.
No model here uses them. In your own environment, install the torchvision that was built for your torch.
"""


def page(found: Mapping[str, Any]) -> str:
    """Return the content of `docs/models.md`."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    results = found["results"]
    parts = [
        INTRODUCTION,
        f"Versions: {versions}.\n",
        "## Models\n",
        _table("model", results, "model"),
        "\n## Loops and settings\n\nOver the Llama of the first table, or over a model of the package that the row names.\n",
        _table("what the script does", results, "loop"),
        "",
        EAGER,
        CHECKPOINTS,
        PACKAGES,
    ]
    return "\n".join(parts)


def _table(heading: str, results: list[Mapping[str, Any]], kind: str) -> str:
    rows = [
        f"| {heading} | package | code | parameters | peak | budget | moved | stages | moves | equal bits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    found = [result for result in results if result["kind"] == kind]
    rows += [_row(result) for result in sorted(found, key=_place)]
    return "\n".join(rows)


def _place(result: Mapping[str, Any]) -> tuple[str, ...]:
    return result["package"], result["model"].lower(), result["codegen"]


def _row(result: Mapping[str, Any]) -> str:
    peak, budget = result["peak_bytes"], result["budget_bytes"]
    cells = [
        result["model"],
        result["package"],
        result["codegen"],
        _mib(result["parameter_bytes"]),
        _mib(peak),
        f"{_mib(budget)} ({budget / peak:.0%})",
        _mib(result["moved_bytes"]),
        str(result["stages"]),
        "planned" if result["phase"] == "planned" else "on demand",
        f"yes, {result['tensors']}",
    ]
    return f"| {' | '.join(cells)} |"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
