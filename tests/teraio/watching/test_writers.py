"""Files and the line on the terminal, from iterations that are made up."""

from __future__ import annotations

import dataclasses
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import teraio
from planner.errors import FileFormatError
from teraio.watching import CsvWriter, LiveLine, TensorBoardWriter, read_csv
from teraio.watching.live import line

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


def test_the_line() -> None:
    assert line(SECOND) == (
        "teraio: iteration 1, planned: 2.5 s (predicted 0.3 s), waited 0.125 s | recomputed 0.25 s | device 512 MiB, "
        "storage 3.00 GiB | device->storage 954 MiB at 2.00 GB/s"
    )


def test_the_line_is_shown_on_a_terminal_only() -> None:
    for terminal in (True, False):
        shown = io.StringIO()
        live = LiveLine(Console(file=shown, force_terminal=terminal, width=250))
        live(FIRST)
        live(SECOND)  # too soon to be shown
        live.close()
        live.close()
        assert ("GB/s" in shown.getvalue()) == terminal and "planned" not in shown.getvalue()


def test_tensorboard_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(teraio.UnsupportedError, match="pip install tensorboard, or use teraio.CsvWriter"):
        TensorBoardWriter(tmp_path)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'teraio[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own
        writer = TensorBoardWriter(tmp_path)
        writer(FIRST)
        writer(SECOND)
        writer(dataclasses.replace(SECOND, run=1))
        writer.close()
        read = EventAccumulator(str(tmp_path))
        read.Reload()
    curves = {name: [(point.step, point.value) for point in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert curves["teraio/seconds"] == [(0, 2.5), (1, 2.5)]
    assert curves["teraio/predicted seconds"] == [(1, pytest.approx(0.3))]
    assert curves["teraio/device bytes"] == [(0, 512 << 20), (1, 512 << 20)]
    assert curves["teraio/device to storage bytes per second"] == [(0, 2e9), (1, 2e9)]
    assert curves["teraio/run 1/recompute seconds"] == [(1, 0.25)]
    assert len(curves) == 2 * len([name for name in curves if "run 1" in name])


def test_curves_in_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a writer in place of TensorBoard's."""
    curves: dict[str, float] = {}

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            curves[f"{name} {step}"] = value

        def close(self) -> None:
            curves.clear()

    module: Any = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    writer = TensorBoardWriter(tmp_path)
    writer(FIRST)
    assert "teraio/predicted seconds 0" not in curves and curves["teraio/seconds 0"] == 2.5
    writer(dataclasses.replace(SECOND, run=1))
    assert curves["teraio/run 1/predicted seconds 1"] == SECOND.predicted_seconds
    assert curves["teraio/device to storage bytes per second 0"] == 2e9 and curves["teraio/storage bytes 0"] == 3 << 30
    writer.close()
    assert not curves
