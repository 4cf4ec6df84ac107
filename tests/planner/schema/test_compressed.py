"""Files whose name ends in .gz, and JSON that only a hostile or broken writer makes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from planner import Trace, TraceError

HAND = Path(__file__).parents[3] / "traces" / "hand"


def test_a_trace_survives_compression(tmp_path: Path) -> None:
    trace = Trace.load(next(HAND.glob("*.json")))
    trace.save(tmp_path / "trace.json.gz")
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).startswith(b"{")
    assert Trace.load(tmp_path / "trace.json.gz").fingerprint == trace.fingerprint


def test_a_truncated_compressed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"{" * 1000)[:-9])
    with pytest.raises(TraceError, match=r"trace\.json\.gz: not a whole gzip file"):
        Trace.load(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' + "9" * 5000 + "}"])
def test_json_beyond_the_parser_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"trace\.json: "):
        Trace.load(path)
