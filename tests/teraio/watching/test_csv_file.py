"""Files of iterations that are made up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import teraio
from planner.errors import FileFormatError
from teraio.watching import CsvWriter, read_csv

FIRST = teraio.IterationStats(
    run=0,
    iteration=0,
    phase="profile",
    seconds=2.5,
    waited_seconds=0.125,
    recompute_seconds=0.0,
    predicted_seconds=None,
    tier_bytes={"device": 512 << 20, "storage": 3 << 30},
    moved_bytes={"device->storage": 10**9, "storage->device": 0},
    busy_seconds={"device->storage": 0.5, "storage->device": 0.0},
)
SECOND = dataclasses.replace(FIRST, iteration=1, phase="planned", predicted_seconds=0.1 + 0.2, recompute_seconds=0.25)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = CsvWriter(tmp_path / "run.csv")
    writer(FIRST)
    assert read_csv(tmp_path / "run.csv") == (FIRST,), "each line is there at once"
    writer(SECOND)
    writer.close()
    assert read_csv(tmp_path / "run.csv") == (FIRST, SECOND)
    text = (tmp_path / "run.csv").read_text()
    (tmp_path / "run.csv").write_text(text[:-40])
    assert read_csv(tmp_path / "run.csv") == (FIRST,), "the last line was cut short"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("waited_seconds", "idle_seconds", "line 1 has not the columns of measured iterations"),
        ("0,0,profile", "0,zero,profile", "line 2 is no measured iteration: invalid literal"),
        ("profile", "asleep", "line 2 is no measured iteration: no such phase"),
        ("2.5", "2.5,7", "line 2 is no measured iteration"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "run.csv"
    writer = CsvWriter(path)
    writer(FIRST)
    writer.close()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FileFormatError, match=message):
        read_csv(path)
    with pytest.raises(FileFormatError, match="cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")
