"""Options that are not given in code: from environment variables and a TOML file; the user's cache folder.

Nothing else in teraio reads environment variables.
"""

from __future__ import annotations

import errno
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.errors import OptionsError
from planner.schema import printable

_PREFIX = "TERAIO_"
CONFIG_VARIABLE = f"{_PREFIX}CONFIG"
"""The environment variable that names the file."""


def variable_of(option: str) -> str:
    """Return the name of the environment variable of an option."""
    return f"{_PREFIX}{option.upper()}"


def cache_folder() -> Path:
    """Return the folder in which teraio may keep files for later runs of this user. It need not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "teraio"


def settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what the file and then each environment variable gives: where that was found, and values by option, not checked.

    An empty variable gives nothing. Raises OptionsError if the file cannot be read or is no TOML.
    """
    file = os.environ.get(CONFIG_VARIABLE)
    if file:
        yield printable(file, most=100), _read(file)
    for variable, text in sorted(os.environ.items()):
        if variable.startswith(_PREFIX) and variable != CONFIG_VARIABLE and text:
            yield f"environment variable {printable(variable, most=100)}", {variable.removeprefix(_PREFIX).lower(): _value(text)}


def _read(name: str) -> dict[str, Any]:
    shown = printable(name, most=100)
    try:
        path = Path(name).expanduser()
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        content = path.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no such user
        why = getattr(error, "strerror", None) or error
        raise OptionsError(f"environment variable {CONFIG_VARIABLE}: cannot read {shown}: {why}") from error
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise OptionsError(f"{shown} is no TOML: {printable(str(error), most=100)}") from error


def _value(text: str) -> Any:
    """Return the value that TOML writes as `text`; the text itself if that is no value: text needs no quotes."""
    if text in ("True", "False"):
        return text == "True"
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text
