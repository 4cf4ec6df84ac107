"""The command line, run in the process of the tests."""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from teraio import cli


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process as the console script would."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer replaces it

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["teraio", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return call
