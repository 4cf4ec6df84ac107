"""What the command line prints, taken apart; and files that are changed a little."""

from __future__ import annotations

import json
import re
from pathlib import Path


def fact(output: str, name: str) -> str:
    """The value that stands beside `name`."""
    found = re.findall(rf"^{re.escape(name)} +(.*)$", output, re.MULTILINE)
    assert len(found) == 1, f"{name!r} occurs {len(found)} times in:\n{output}"
    return str(found[0])


def has_line(output: str, pattern: str) -> bool:
    """Whether a whole line is so."""
    return re.search(f"^{pattern}$", output, re.MULTILINE) is not None


def edited(path: Path, **changes: object) -> Path:
    """The JSON file again beside it, with some fields replaced."""
    copy = path.parent / f"edited.{path.name}"
    copy.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy
