"""Writes what follows from the options: `docs/options.md`, the short table in `README.md`, and `teraio/given_options.py`.

python -m tools.options_page

All names, kinds, defaults and descriptions come from `teraio.options.Options`. Run this after a change of the options; a test
compares the files with what this program would write.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from teraio.options import ExpertOptions, Options, kinds, variable_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "options.md"
README = ROOT / "README.md"
GIVEN = ROOT / "teraio" / "given_options.py"
IMPORTANT = ("memory_budget", "host_budget", "storage", "host_updates", "overlap_step", "plan")
WRITTEN = "<!-- written by python -m tools.options_page -->"
BEGIN, END = "<!-- begin: written by python -m tools.options_page -->", "<!-- end -->"

INTRODUCTION = f"""\
# Options

{WRITTEN}

Options are given to `teraio.compile`, or to `torch.compile`:

```python
# not run by the tests: model stands for yours
model = teraio.compile(model, memory_budget="24GiB", storage="/mnt/nvme")  # in place: it keeps its class
compiled = torch.compile(model, backend="teraio", options={{"memory_budget": "24GiB", "storage": "/mnt/nvme"}})
```

* A size is a number of bytes, or text such as `"24GiB"`, `"500MB"` or `"1.5 TB"`.
* `None` has the same meaning as leaving the option out.
* An option that is not given in code is taken from its environment variable, such as `TERAIO_MEMORY_BUDGET`. Its value is
  written as in a TOML file, but text needs no quotes: `TERAIO_STORAGE=/mnt/nvme`, `TERAIO_CHECKSUMS=true`,
  `TERAIO_STORAGE='["/mnt/nvme0", "/mnt/nvme1"]'`. An empty variable counts as not set.
* Options from a file: `teraio.compile(model, **tomllib.loads(Path("teraio.toml").read_text()))`.
* Models that are compiled with equal options share one budget.
* An unknown option or a wrong value raises `OptionsError`, which says what was found and what is allowed.
"""

GIVEN_HEAD = '''\
"""The keywords of `teraio.compile`, for editors and type checkers. Written by python -m tools.options_page."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict


class GivenOptions(TypedDict, total=False):
    """What users give. `teraio.options.Options` explains each."""

'''

EXPERT = """\
## Options for experts

These are for unusual machines, for tests and for finding faults. Their defaults are right for nearly all trainings.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option as the docs show it. summary: one sentence. details: may be empty."""

    name: str
    values: str
    default: str
    summary: str
    description: str
    details: str


def options(declared: type) -> tuple[Option, ...]:
    """Return the options that a class declares, in the order of its fields. Raises ValueError if a field has no description."""
    body = ast.parse(textwrap.dedent(inspect.getsource(declared))).body[0]
    assert isinstance(body, ast.ClassDef)
    defaults = {field.name: field.default for field in fields(declared)}
    found = []
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if not isinstance(after, ast.Expr) or not isinstance(after.value, ast.Constant):
            raise ValueError(f"option {node.target.id} has no description; write one below its field")
        name = node.target.id
        found.append(_option(name, defaults[name], inspect.cleandoc(str(after.value.value))))
    return tuple(found)


def _option(name: str, default: object, text: str) -> Option:
    first, *rest = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    description, _, said = first.partition(" Default: ")
    if default in (None, (), MISSING):
        shown = said.rstrip(".") or "none"
    else:
        shown = f"`{_quoted(default)}`"
    return Option(
        name=name,
        values=kinds()[name].shown,
        default=shown,
        summary=re.split(r"(?<=\.)\s", description)[0],
        description=description,
        details="\n\n".join(rest),
    )


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else repr(value)


def page() -> str:
    """Return the content of `docs/options.md`: first the options that users give, then those for experts."""
    front, expert = options(Options), options(ExpertOptions)
    return "\n".join([INTRODUCTION, table(front), "", *_sections(front), EXPERT, table(expert), "", *_sections(expert)])


def _sections(shown: Sequence[Option]) -> Iterator[str]:
    for option in shown:
        yield f"## `{option.name}`\n\n*Values:* {option.values}. *Default:* {option.default}."
        yield f"*Variable:* `{variable_of(option.name)}`.\n"
        for text in (option.description, *option.details.split("\n\n")):
            if text:
                yield f"{textwrap.fill(text, 120, break_on_hyphens=False)}\n"


def table(shown: Sequence[Option], page: str = "") -> str:
    """Return a table of options, with links to their sections on `page`."""
    rows = ["| option | meaning | default |", "|---|---|---|"]
    rows += [f"| [`{each.name}`]({page}#{each.name}) | {each.summary.rstrip('.')} | {each.default} |" for each in shown]
    return "\n".join(rows)


def important() -> list[Option]:
    """Return the options that matter most, for `README.md`."""
    known = {option.name: option for option in options(Options)}
    return [known[name] for name in IMPORTANT]


def with_table(readme: str) -> str:
    """Return the README with the present table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(important(), 'docs/options.md')}\n{END}{after}"


def given() -> str:
    """Return the content of `teraio/given_options.py`."""
    names = (option.name for declared in (Options, ExpertOptions) for option in options(declared))
    return GIVEN_HEAD + "".join(f"    {name}: {kinds()[name].given} | None\n" for name in names)


def main() -> None:
    """Rewrite all three files."""
    GIVEN.write_text(given())
    PAGE.write_text(page())
    README.write_text(with_table(README.read_text()))


if __name__ == "__main__":
    main()
